"""The disk tier behind a real server: what memory cannot keep is found again, also after a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import hypercache
from hypercache.errors import ConfigError

from .conftest import Node, make_spec, tokens_of
from .tiers_kit import MIB, PROMPT, SPEC, client_of, get, l3, nbytes_in, put, tiered, until, written

HIT = PROMPT - 1


async def test_what_memory_cannot_keep_comes_back_from_the_disk(tmp_path: Path) -> None:
    async with tiered(tmp_path) as node, client_of(node) as client:
        for seed in range(30):  # 30 MiB through 16
            await put(client, seed)
            await written(node)
        store = node.status()["store"]
        assert store["blocks"] == 240 and store["blocks_cold"] > 100 and store["evicted_total"] == 0
        for seed in (0, 29, 1, 15, 0):
            assert await get(client, seed) == HIT
        numbers = l3(node)
        assert numbers["demoted_total"] == 240 and numbers["promoted_total"] >= 24
        assert numbers["damaged_total"] == numbers["loads_failed_total"] == 0
        assert nbytes_in(tmp_path) <= numbers["disk"]["bytes_files"] <= nbytes_in(tmp_path) + 4096


@pytest.mark.parametrize(
    ("codec", "below", "cosine"),
    [("int8", None, 0.99), ("int8", "raw", 0.9998), ("fp8", None, 0.99), ("fp8", "int8", 0.999)],
)
async def test_blocks_change_their_codec_on_the_way(
    tmp_path: Path, codec: str, below: str | None, cosine: float
) -> None:
    """Lossy ones lie on disk in int4 unless another codec is asked for; and what comes back is stored
    nowhere again."""
    async with tiered(tmp_path) as node, client_of(node, codec=codec, disk_codec=below) as client:
        for seed in range(3):
            await put(client, seed)
        await written(node)
    async with tiered(tmp_path) as node, client_of(node, codec=codec, disk_codec=below) as client:
        assert node.status()["store"]["blocks_cold"] == 24
        for _ in range(2):
            for seed in range(3):
                assert await get(client, seed, cosine=cosine) == HIT
        await written(node)
        assert l3(node)["demoted_total"] == 0 and node.status()["store"]["blocks_cold"] == 0


async def test_clients_that_want_another_codec_on_disk_share_nothing(tmp_path: Path) -> None:
    async with (
        tiered(tmp_path) as node,
        client_of(node, codec="int8") as one,
        client_of(node, codec="int8", disk_codec="fp8") as other,
    ):
        await put(one, 1)
        assert await get(other, 1) == 0
        await put(other, 1)
        assert node.status()["store"]["namespaces"] == 2


async def test_a_restart_keeps_everything(tmp_path: Path) -> None:
    async with tiered(tmp_path) as node, client_of(node) as client:
        for seed in range(20):
            await put(client, seed)
            await written(node)
    async with tiered(tmp_path) as node, client_of(node) as client:
        assert node.status()["store"]["blocks"] == 160
        assert (await client.match(tokens_of(3, PROMPT))).hit_tokens == HIT
        for seed in range(20):
            assert await get(client, seed) == HIT
        await put(client, 100)
        await written(node)
        assert l3(node)["demoted_total"] == 8  # what came from there is not written again


async def test_what_is_not_written_yet_is_written_at_the_end(tmp_path: Path) -> None:
    async with tiered(tmp_path, l3_segment=8 * MIB) as node, client_of(node) as client:
        for seed in range(10):
            await put(client, seed)
    async with tiered(tmp_path, l3_segment=8 * MIB) as node, client_of(node) as client:
        assert [await get(client, seed) for seed in range(10)] == [HIT] * 10


async def test_purge_leaves_nothing(tmp_path: Path) -> None:
    async with tiered(tmp_path, l3_on_exit="purge") as node, client_of(node) as client:
        await put(client, 1)
        await written(node)
        assert nbytes_in(tmp_path)
    assert nbytes_in(tmp_path) == 0


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("way", ["clear", "evict", "weights"])
async def test_what_is_removed_stays_away(tmp_path: Path, way: str, restart: bool) -> None:
    """A07, E10, F-class: memory and disk miss alike, at once and after a restart."""
    async with tiered(tmp_path) as node, client_of(node) as client:
        for seed in range(20):  # some of it is on disk alone
            await put(client, seed)
            await written(node)
        if way == "clear":
            assert await client.clear() == 160
        elif way == "evict":
            for seed in range(20):
                assert await client.evict(tokens_of(seed, PROMPT)) == 8
        if not restart:
            await check_removed(node, way)
    if restart:
        async with tiered(tmp_path) as node:
            await check_removed(node, way)


async def check_removed(node: Node, way: str) -> None:
    spec = make_spec(layers=4, heads=4, dim=128, weights=b"newer") if way == "weights" else SPEC
    async with client_of(node, spec) as client:
        assert [await get(client, seed) for seed in range(20)] == [0] * 20
        await put(client, 3)
        assert await get(client, 3) == HIT


async def test_the_oldest_go_when_the_disk_is_full_and_the_used_stay(tmp_path: Path) -> None:
    small = {"l3_capacity": 24 * MIB, "l3_segment": 4 * MIB}
    async with tiered(tmp_path, **small) as node, client_of(node) as client:
        for seed in range(60):
            await put(client, seed)
            await written(node)
            assert await get(client, 0) == HIT  # used all the time
            assert nbytes_in(tmp_path) <= 24 * MIB
        numbers = l3(node)
        assert numbers["reclaimed_total"] > 4 and numbers["state"] == "on"
        found = [await get(client, seed) for seed in range(60)]
        assert found[0] == HIT and found[-1] == HIT
        assert 0 in found and set(found) <= set(range(0, HIT + 1, 16))
        assert sum(found) >= HIT * 14
    async with tiered(tmp_path, **small) as node, client_of(node) as client:
        assert await get(client, 0) == HIT


async def test_one_directory_has_one_server(tmp_path: Path) -> None:
    async with tiered(tmp_path), asyncio.timeout(10):
        with pytest.raises(ConfigError, match=str(tmp_path)):
            async with tiered(tmp_path):
                pass


def spoil(directory: Path) -> None:
    """A bit of each file flips."""
    for path in sorted(directory.glob("*.hckv")):
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 1
        path.write_bytes(data)


async def test_damage_is_a_miss_and_no_more(tmp_path: Path) -> None:
    async with tiered(tmp_path) as node, client_of(node) as client:
        for seed in range(4):
            await put(client, seed)
        await written(node)
    spoil(tmp_path)
    async with tiered(tmp_path) as node, client_of(node) as client:
        found = [await get(client, seed) for seed in range(4)]
        assert sum(found) >= HIT and found != [HIT] * 4
        assert l3(node)["state"] == "on"
        for seed in range(4):
            await put(client, seed)
            assert await get(client, seed) == HIT


async def test_many_readers_and_writers_through_a_memory_that_is_too_small(tmp_path: Path) -> None:
    """L01 with a disk: whatever moves where meanwhile, each fetch gets its own bytes or fewer of them."""

    async def read(client: hypercache.Client, first: int) -> list[int]:
        return [await get(client, seed) for seed in (*range(first, 24), *range(first))]

    async with tiered(tmp_path, memory=12 * MIB) as node:
        async with asyncio.timeout(60), client_of(node) as a, client_of(node) as b:
            for seed in range(24):
                await put(a, seed)
                await written(node)
            found = await asyncio.gather(read(a, 0), read(b, 7), read(a, 15), read(b, 0))
            assert sum(map(sum, found)) > 0.9 * 4 * 24 * HIT
        await until(lambda: node.status()["store"]["leases"] == 0)
        assert l3(node)["blocks_loading"] == 0


async def test_a_client_that_leaves_while_the_disk_reads_leaves_nothing(tmp_path: Path) -> None:
    async with tiered(tmp_path) as node:
        async with client_of(node) as client:
            for seed in range(20):
                await put(client, seed)
                await written(node)
            tasks = [asyncio.create_task(get(client, seed)) for seed in range(10)]
            await asyncio.sleep(0.002)
            for task in tasks[::2]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            tasks = [asyncio.create_task(get(client, seed)) for seed in range(10)]
            await asyncio.sleep(0.002)
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: node.status()["store"]["leases"] == 0 and l3(node)["blocks_loading"] == 0)
        await until(lambda: node.status()["store"]["bytes_held"] == 0)
        async with client_of(node) as client:
            assert [await get(client, seed) for seed in range(20)] == [HIT] * 20
