"""The disk tier: its files beside plain file I/O, gets that come from it, restarts, and what it does to the
gets of others.

Servers are processes of their own, with a real client over TCP.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from hypercache.cli import bench_disk, bench_index
from hypercache.cli.bench_live import DEADLINE_S, NotMeasured, fill, kv_spec, seconds
from hypercache.cli.local_server import local_server
from hypercache.client import SyncClient, connect_sync
from hypercache.kv import KVBuffers
from hypercache.model import ModelSpec

BLOCK = 16  # tokens
BLOCKS = 200_000  # in the index, if nothing else is asked for
WRITTEN_S = 60.0  # for what was stored to be on the disk
READ_TARGET, GET_TARGET, TAIL_TARGET = 0.7, 1.5, 2.0  # what the figures are printed beside

Tokens = npt.NDArray[np.int64]


def measure(
    directory: Path | None = None, rounds: int = 5, blocks: int = BLOCKS, small: bool = False
) -> dict[str, Any]:
    """``files`` (:mod:`hypercache.cli.bench_disk`); ``restart`` and ``index``
    (:mod:`hypercache.cli.bench_index`); ``gets`` and ``tail``, from here.

    directory: on the disk to measure; its files are removed again. None: where temporary files go.
    blocks: in the index. small: sizes for a test, whose figures say little.
    """
    with tempfile.TemporaryDirectory(prefix="hypercache-benchmark-", dir=directory) as name:
        scratch = Path(name)
        return {
            "directory": str(directory or tempfile.gettempdir()),
            "files": bench_disk.files(scratch, rounds, *((1 << 20, 2) if small else ())),
            "restart": bench_index.restart(scratch, *((300, 1) if small else ())),
            "index": bench_index.index(blocks),
            "gets": gets(scratch, *((1, 2, "64MiB") if small else ())),
            "tail": tail(scratch, *((1, 20, "64MiB") if small else ())),
        }


# -- gets from the disk


PROMOTED_S = 2.5  # a second after the fetch, and what it takes


def gets(scratch: Path, rounds: int = 3, blocks: int = 64, memory: str = "1GiB") -> dict[str, Any]:
    """A prompt of ``blocks`` blocks that a server has on its disk alone, fetched by a client over TCP: read,
    verified, sent in int4 as it lies there, verified, decoded into the engine's buffers.

    Beside it pread of the same records and a decode from int4 into such buffers, in this process, without any
    check. ``cached``, ``cold``: see :mod:`hypercache.cli.bench_disk`; each has ``tier_ms``, ``plain_ms`` and
    ``time_to_plain``, and ``memory_ms``: the same get some seconds later, from memory, in int8. Medians over
    ``rounds`` of two prompts, each round with a server that has just been started and has served another one.
    """
    spec = kv_spec()
    length = blocks * BLOCK
    random = np.random.default_rng(9)
    prompts = [_prompt(random, length) for _ in range(3)]
    kv = KVBuffers.allocate(spec, length)
    fill(kv)
    l3 = scratch / "gets"
    plain = bench_disk.Plain(scratch / "plain", blocks, kv)
    flags = ["--l3-dir", str(l3), "--l3-capacity", "4GiB", "--l3-segment", "256MiB"]
    with local_server(memory, flags) as server, _client(server, spec) as client:
        for prompt in prompts:
            _put(client, prompt, kv)
        _await(l3, len(prompts) * plain.nbytes)
    found: dict[str, Any] = {"blocks": blocks, "record_bytes": plain.nbytes}
    for state in ("cached", "cold"):
        tier, again, side = [], [], []
        for _ in range(rounds):
            with local_server(memory, flags) as server, _client(server, spec) as client:
                _get(client, prompts[0], kv)  # starts threads and loads kernels
                for prompt in prompts[1:]:
                    if state == "cold":
                        bench_disk.drop(l3)
                        plain.drop()
                    tier.append(_get(client, prompt, kv))
                    side.append(seconds(plain.read))
                time.sleep(PROMOTED_S)  # there is room: they get their places in memory
                again += [_get(client, prompt, kv) for prompt in prompts[1:]]
        found[state] = {
            "tier_ms": median(tier) * 1e3,
            "memory_ms": median(again) * 1e3,
            "plain_ms": median(side) * 1e3,
            "time_to_plain": median(a / b for a, b in zip(tier, side, strict=True)),
        }
    return found


def _client(server: Mapping[str, Any], spec: ModelSpec) -> SyncClient:
    return connect_sync(server["uris"][0], model=spec, codec="int8", disk_codec="int4", deadline=DEADLINE_S)


def _await(directory: Path, nbytes: int) -> None:
    """Until the files there have so many bytes."""
    end = time.monotonic() + WRITTEN_S
    while _nbytes(directory) < nbytes:
        if time.monotonic() > end:
            raise NotMeasured(
                f"{directory} has {_nbytes(directory)} of {nbytes} bytes after {WRITTEN_S:.0f} s"
            )
        time.sleep(0.05)


# -- the tail


def tail(scratch: Path, rounds: int = 3, operations: int = 2000, memory: str = "128MiB") -> dict[str, float]:
    """Gets of stored prompts while new ones come: 9 gets of one of 16 prompts, all in memory, to 1 put.

    Two servers of ``memory``, full before it begins, so that each put costs old blocks their place: ``with``
    a disk tier they are written to it in the background, ``without`` they are dropped. In turn, ``rounds`` of
    ``operations`` each. p50_ms, p99_ms: of gets, medians over the rounds; to_without: median of the rounds'
    ratios of p99. demoted_bytes: what the disk tier's files grew by.
    """
    spec = kv_spec(8)
    hot, length = 16, 8 * BLOCK
    random = np.random.default_rng(8)
    l3 = scratch / "l3"
    flags = ["--l3-dir", str(l3), "--l3-capacity", "4GiB", "--l3-segment", "64MiB"]
    with ExitStack() as stack:
        sides = {}
        for name, extra in (("without", ()), ("with", flags)):
            server = stack.enter_context(local_server(memory, extra))
            sides[name] = stack.enter_context(_client(server, spec))
        kv = KVBuffers.allocate(spec, length)
        prompts = [_prompt(random, length) for _ in range(hot)]
        for client in sides.values():
            for prompt in prompts:
                _put(client, prompt, kv)
        for _ in range(3):  # a policy counts one use a second: make them the ones that stay
            time.sleep(1.0)
            for client in sides.values():
                for prompt in prompts:
                    _get(client, prompt, kv)
        for client in sides.values():  # until memory is full, and a little further
            _mix(client, prompts, kv, random, operations)
        before = _nbytes(l3)
        p50: dict[str, list[float]] = {name: [] for name in sides}
        p99: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, client in sides.items():
                spent = _mix(client, prompts, kv, random, operations)
                p50[name].append(float(np.percentile(spent, 50)) * 1e3)
                p99[name].append(float(np.percentile(spent, 99)) * 1e3)
        demoted = _nbytes(l3) - before
    if not demoted:
        raise NotMeasured(f"nothing was written to {l3} while gets were measured")
    return {
        **{f"p50_{name}_ms": median(times) for name, times in p50.items()},
        **{f"p99_{name}_ms": median(times) for name, times in p99.items()},
        "to_without": median(a / b for a, b in zip(p99["with"], p99["without"], strict=True)),
        "demoted_bytes": demoted,
    }


def _mix(
    client: SyncClient, prompts: Sequence[Tokens], kv: KVBuffers, random: np.random.Generator, operations: int
) -> list[float]:
    """Seconds of each get."""
    spent = []
    for step in range(operations):
        if step % 10 == 9:
            _put(client, _prompt(random, kv.tokens), kv)
            continue
        spent.append(_get(client, prompts[int(random.integers(len(prompts)))], kv))
    return spent


def _get(client: SyncClient, prompt: Tokens, kv: KVBuffers) -> float:
    """Seconds."""
    began = time.perf_counter()
    result = client.fetch(prompt, kv)
    spent = time.perf_counter() - began
    if result.hit_tokens != kv.tokens:
        raise NotMeasured(f"{result.hit_tokens} of {kv.tokens} tokens were found: {result.reason}")
    return spent


def _prompt(random: np.random.Generator, length: int) -> Tokens:
    """One token more than is stored: a hit leaves the last one to compute."""
    return random.integers(0, 128_000, length + 1)


def _put(client: SyncClient, prompt: Tokens, kv: KVBuffers) -> None:
    result = client.store(prompt, kv)
    if result.stored != result.blocks:
        raise NotMeasured(f"stored {dict(result.outcome)} of {result.blocks} blocks: {result.reason}")


def _nbytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.hckv"))


# -- for people


def show(found: Mapping[str, Any], console: Console) -> None:
    """Print what :func:`measure` found."""
    console.print(f"[bold]Disk tier[/bold] (files in {found['directory']}; GB/s of file bytes, one thread)")
    table = Table("on disk", box=None, pad_edge=False)
    for heading in ("what", "tier", "plain", "to plain", "of K/V", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for codec, rows in found["files"].items():
        for what, row in rows.items():
            if "plain_gbps" in row:
                speeds = f"{row['gbps']:.2f}", f"{row['plain_gbps']:.2f}", f"{row['to_plain']:.2f}x"
                time_ = f"{row['time_to_plain']:.2f}x" if "time_to_plain" in row else ""
                table.add_row(codec, what.replace("_", ", "), *speeds, f"{row['kv_to_plain']:.2f}x", time_)
    console.print(table)
    console.print("  write, end / batch: one fdatasync at the end / after each batch, on both sides")
    console.print(
        "  read, get, cached / cold: all / nothing in the page cache, on both sides; a get decodes, too"
    )
    console.print(f"  of K/V: beside plain files of the K/V as engines have them; target >= {READ_TARGET}x")
    for codec, rows in found["files"].items():
        if "encode" in rows:
            encode, decode = rows["encode"], rows["decode"]
            console.print(
                f"  {codec} encodes K/V at {encode['gbps']:.2f} GB/s, {encode['to_write']:.2f}x of a plain "
                f"write; decodes at {decode['gbps']:.2f}, {decode['to_read']:.2f}x of a cold plain read"
            )
    restart = found["restart"]
    console.print(
        f"  restart, per 100,000 blocks: {restart['footer_s']:.2f} s from footers, {restart['scan_s']:.2f} s "
        f"by a scan (measured with {restart['blocks']:,})"
    )
    index = found["index"]
    console.print(
        f"  index: {index['bytes_per_block']:.0f} bytes a block with {index['blocks']:,} small blocks "
        f"(counted as {index['charged']:.0f})"
    )
    for state in ("cached", "cold"):
        row = found["gets"][state]
        console.print(
            f"  a get of {found['gets']['blocks']} blocks, {state}: {row['tier_ms']:.1f} ms from the disk, "
            f"{row['memory_ms']:.1f} from memory; pread and decode {row['plain_ms']:.1f}: "
            f"{row['time_to_plain']:.2f}x (target <= {GET_TARGET}x)"
        )
    row = found["tail"]
    console.print(
        f"  gets while old blocks go to disk: p99 {row['p99_with_ms']:.2f} ms, "
        f"{row['p99_without_ms']:.2f} where they are dropped: {row['to_without']:.2f}x "
        f"(target <= {TAIL_TARGET}x; p50 {row['p50_with_ms']:.2f}, {row['p50_without_ms']:.2f} ms)"
    )
