"""Known faults of other caches' disk tiers, looked for in this one."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import hypercache

from .conftest import make_spec, poisoned, same, tokens_of
from .tiers_kit import (
    MIB,
    PROMPT,
    SPEC,
    Sick,
    cheap_kv,
    client_of,
    get,
    l3,
    put,
    sick,
    tiered,
    until,
    written,
)

__all__ = ["sick"]

HIT = PROMPT - 1
ROOT = Path(__file__).parents[2]


async def test_a_read_that_is_late_writes_into_nobodys_memory(tmp_path: Path, sick: Sick) -> None:
    """E05: those who asked have left, all else of the memory has new owners, and then the disk answers."""
    async with tiered(tmp_path) as node, client_of(node) as client:
        for seed in range(24):
            await put(client, seed)
            await written(node)
        sick.hangs.add("preadv")
        async with client_of(node) as other:
            tasks = [asyncio.create_task(get(other, seed)) for seed in range(6)]
            await until(lambda: sick.hanging == 4)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for seed in range(100, 120):
            await put(client, seed)
        sick.heal()
        await until(lambda: l3(node)["blocks_loading"] == 0)
        found = [await get(client, seed) for seed in range(119, 99, -1)]  # those in memory first
        assert found == [HIT] * 20
        await until(lambda: node.status()["store"]["bytes_held"] == 0)


async def test_many_load_and_publish_one_prompt_at_once(tmp_path: Path) -> None:
    """E11, E04 with a disk: in memory, on its way, on disk alone or removed just now, nobody gets wrong bytes
    and nothing stays held."""
    async with tiered(tmp_path, memory=8 * MIB) as node, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(node)) for _ in range(8)]
        for turn in range(12):
            await put(clients[0], 0)
            await written(node)
            for seed in range(1 + 10 * turn, 9 + 10 * turn):  # the first one goes from memory
                await put(clients[1], seed)
                await written(node)
            assert node.status()["store"]["blocks_cold"] > 0
            some = [
                get(client, 0) if turn % 2 or n % 2 else put(client, 0) for n, client in enumerate(clients)
            ]
            found = await asyncio.gather(*some, *[get(client, 0) for client in clients])
            assert {hit for hit in found if hit is not None} <= {HIT}
            if turn % 4 == 3:
                await asyncio.gather(clients[2].evict(tokens_of(0, PROMPT)), *[get(c, 0) for c in clients])
        await until(lambda: node.status()["store"]["bytes_held"] == 0)
        assert l3(node)["blocks_loading"] == 0 and l3(node)["damaged_total"] == 0


async def test_blocks_larger_than_a_segment_stay_in_memory(tmp_path: Path) -> None:
    """F08: nothing is cut to size, and nothing waits for a disk that cannot take it."""
    spec = make_spec(layers=40, heads=8, dim=128)  # 16 tokens: 2.5 MiB
    async with (
        tiered(tmp_path, l3_segment=MIB, l3_capacity=8 * MIB, memory=32 * MIB) as node,
        client_of(node, spec) as large,
        client_of(node) as client,
    ):
        kv = cheap_kv(1, spec, 49)
        assert (await large.store(tokens_of(1, 49), kv)).stored == 3
        await put(client, 2, 33)
        await written(node)
        assert l3(node)["state"] == "on" and l3(node)["demoted_total"] == 2
        into = poisoned(spec, 49)
        assert (await large.fetch(tokens_of(1, 49), into)).hit_tokens == 48
        assert same(kv, into, 0, 48)


def open_in(directory: Path) -> list[Path]:
    names = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(fd.readlink())
    return [name for name in names if name.is_relative_to(directory)]


def suffixes(directory: Path) -> set[str]:
    return {path.suffix for path in directory.iterdir()}


async def test_nothing_is_left_at_the_end(tmp_path: Path) -> None:
    """I08: threads, open files, locks and half-made files, after an end in the middle of work."""
    async with tiered(tmp_path) as node, client_of(node) as client:
        for seed in range(24):
            await put(client, seed)
        task = asyncio.create_task(get(client, 0))
        await asyncio.sleep(0.001)
        assert open_in(tmp_path) and any(t.name.startswith("L3") for t in threading.enumerate())
        await node.stop()
        await asyncio.gather(task, return_exceptions=True)
    assert open_in(tmp_path) == []
    assert not [t.name for t in threading.enumerate() if t.name.startswith("L3")]
    assert suffixes(tmp_path) <= {".hckv", ""}
    async with tiered(tmp_path) as node, client_of(node) as client:
        assert l3(node)["disk"]["torn_bytes"] == 0 and await get(client, 23) == HIT


HUNG = """
import asyncio, sys, time
from pathlib import Path
import hypercache.store.disk
from tests.e2e.tiers_kit import Sick, client_of, put, tiered, until, written

sick = Sick()
hypercache.store.disk.System = lambda: sick

async def main():
    async with tiered(Path(sys.argv[1]), drain_s=0.5) as node, client_of(node) as client:
        await put(client, 1)
        await written(node)
        sick.hangs |= {"pwritev", "preadv"}
        await put(client, 2)
        await until(lambda: sick.hanging > 0)
        await node.drain()
    print("served", time.monotonic(), flush=True)

asyncio.run(main())
print("ended", time.monotonic(), flush=True)
"""


def test_a_thread_that_hangs_keeps_no_process_alive(tmp_path: Path) -> None:
    """L07: the call never returns, and the process ends all the same, with status 0."""
    done = subprocess.run(
        [sys.executable, "-c", HUNG, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "ended" in done.stdout


async def test_lookups_and_leases_of_the_dead_keep_nothing_from_the_disk(tmp_path: Path) -> None:
    """D04, D06: everything is looked up all the time, and clients that fetched are gone: a put finds room,
    and what it displaces goes down."""
    async with tiered(tmp_path, memory=12 * MIB) as node, client_of(node) as client:

        async def look() -> None:
            async with client_of(node) as other:
                while True:
                    for seed in range(24):
                        await other.match(tokens_of(seed, PROMPT))
                    await asyncio.sleep(0)

        looking = asyncio.create_task(look())
        for seed in range(24):
            await put(client, seed)
            await written(node)
            async with client_of(node) as dying:
                fetch = asyncio.create_task(get(dying, seed))
                await asyncio.sleep(0.0005)
                fetch.cancel()
                await asyncio.gather(fetch, return_exceptions=True)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        store = node.status()["store"]
        assert store["blocks"] == 24 * 8 and store["blocks_cold"] > 80
        await until(lambda: node.status()["store"]["bytes_held"] == 0)
        assert [await get(client, seed) for seed in range(24)] == [HIT] * 24


async def test_a_match_is_a_hint_while_blocks_go_up_and_down(tmp_path: Path) -> None:
    """D01: between match and fetch the disk's oldest segment goes; the hit gets shorter, and that is all."""
    small = {"memory": 8 * MIB, "l3_capacity": 16 * MIB, "l3_segment": 2 * MIB}
    async with tiered(tmp_path, **small) as node, client_of(node) as client, client_of(node) as writer:
        shorter = 0
        for seed in range(40):
            await put(writer, seed)
            await written(node)
            if seed < 8:
                continue
            match = await client.match(tokens_of(seed - 8, PROMPT))
            more = [asyncio.create_task(put(writer, 100 + 10 * seed + n)) for n in range(3)]
            into = hypercache.KVBuffers.allocate(SPEC, PROMPT)
            result = await client.fetch(match, into)
            assert result.hit_tokens <= match.hit_tokens or match.hit_tokens == 0
            assert result.hit_tokens % 16 == 0
            shorter += result.hit_tokens < HIT
            await asyncio.gather(*more)
        assert shorter > 0 and l3(node)["reclaimed_total"] > 0
        assert l3(node)["faults_total"] == 0
