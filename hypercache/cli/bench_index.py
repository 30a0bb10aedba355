"""What the disk tier costs before the first request, and for each block it knows: restarts, and the index."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from hypercache.checksum import checksum
from hypercache.cli.bench_live import NotMeasured
from hypercache.store import BlockStore, NamespaceInfo, hckv
from hypercache.store.disk import Disk, Write
from hypercache.store.hckv_file import LOCATOR_NBYTES, SEGMENT_HEADER_NBYTES, Contents, footer_nbytes

PER_BLOCKS = 100_000  # what a restart is reported for
BLOCK_NBYTES = 1024  # small: none of this depends on it
PROMPT = 64  # blocks that continue each other
SEGMENT = 1 << 16  # blocks
_MEMORY_PER_BLOCK = 8192  # capacity, a quarter of which the index may have: address space, never touched
_INFO = NamespaceInfo(b"benchmark of the index".ljust(32, b"\0"), (BLOCK_NBYTES,), 16, "raw", "benchmark")


def _names(blocks: int) -> Iterator[tuple[bytes, bytes, int, bytes]]:
    """Digest, parent, depth and mark of each block, prompt after prompt."""
    parent = b""
    for block in range(blocks):
        depth = block % PROMPT
        name = os.urandom(32)
        yield name, parent if depth else b"", depth, os.urandom(24)
        parent = name


# -- restart


def restart(scratch: Path, blocks: int = 20_000, rounds: int = 3) -> dict[str, float]:
    """Seconds until ``blocks`` small blocks can be served again, per 100,000: ``footer_s`` from footers,
    ``scan_s`` where all footers were cut off, writing new ones included. The index is rebuilt in both."""
    chunk = memoryview(os.urandom(BLOCK_NBYTES))
    crc = [checksum(chunk)]
    directory = scratch / "restart"
    shutil.rmtree(directory, ignore_errors=True)
    capacity = (1 << 30) + 4 * blocks * hckv.block_nbytes(_INFO)
    disk = Disk(directory, capacity=capacity)
    list(disk.restore())
    batch: list[Write] = []
    for name in _names(blocks):
        batch.append(Write(_INFO, *name, crc, [chunk]))
        if len(batch) == 1024:
            disk.write(batch)
            batch = []
    disk.write(batch)
    disk.close()
    found: dict[str, list[float]] = {"footer_s": [], "scan_s": []}
    for _ in range(rounds):
        for how, times in found.items():
            if how == "scan_s":
                _cut_footers(directory)
            store = BlockStore(blocks * _MEMORY_PER_BLOCK + (64 << 20), disk=capacity)
            began = time.perf_counter()
            disk = Disk(directory, capacity=capacity)
            for number, contents in disk.restore():
                _adopt(store, number, contents)
            assert store.below is not None
            store.below.adopted()
            times.append(time.perf_counter() - began)
            known = store.stats().blocks
            store.close()
            disk.close()
            if known != blocks:
                raise NotMeasured(f"{known} of {blocks} blocks were restored")
    per = PER_BLOCKS / blocks
    return {"blocks": blocks, **{how: median(times) * per for how, times in found.items()}}


def _adopt(store: BlockStore, number: int, contents: Contents) -> None:
    assert store.below is not None
    for _ in store.below.adopt(number, contents, 0.0):
        pass


def _cut_footers(directory: Path) -> None:
    for path in directory.glob("*.hckv"):
        with path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            if end > SEGMENT_HEADER_NBYTES:
                file.seek(end - LOCATOR_NBYTES)
                file.truncate(end - footer_nbytes(file.read(), end))


# -- index


def index(blocks: int = 200_000) -> dict[str, float]:
    """``bytes_per_block``: how much the resident memory of a process of its own grows by each of ``blocks``
    small blocks that only the disk has; ``charged``: what the store counts for one."""
    command = [sys.executable, "-c", f"from hypercache.cli import bench_index; bench_index.child({blocks})"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise NotMeasured(f"the index of {blocks} blocks: {words[0]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def child(blocks: int) -> None:
    """What :func:`index` runs."""
    store = BlockStore(blocks * _MEMORY_PER_BLOCK + (64 << 20), disk=1 << 50)
    nbytes = hckv.block_nbytes(_INFO)
    names = _names(blocks)
    before = _resident()
    for number, first in enumerate(range(0, blocks, SEGMENT)):
        contents = Contents()
        for at in range(min(SEGMENT, blocks - first)):
            digest, parent, depth, mark = next(names)
            where = SEGMENT_HEADER_NBYTES + at * nbytes
            contents.add_block(where, _INFO, first + at + 1, digest, parent, depth, mark)
        _adopt(store, number, contents)
        del contents
    grown = _resident() - before
    stats = store.stats()
    if stats.blocks != blocks:
        raise NotMeasured(f"{stats.blocks} of {blocks} are in the index")
    print(
        json.dumps(
            {"blocks": blocks, "bytes_per_block": grown / blocks, "charged": stats.bytes_index / blocks}
        )
    )


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")
