"""A disk that is full, read-only, gone, broken or silent, as a client and an operator see it."""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
import time
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import hypercache
from hypercache.errors import Unavailable
from hypercache.server.node import Node

from .conftest import make_spec, tokens_of
from .tiers_kit import (
    MIB,
    PROMPT,
    SPEC,
    Sick,
    client_of,
    get,
    l3,
    mount,
    mounted,
    nbytes_in,
    put,
    sick,
    tiered,
    until,
    written,
)

__all__ = ["sick"]

HIT = PROMPT - 1
SIZES = set(range(0, HIT + 1, 16))


def ballast(path: Path) -> None:
    """Somebody else's file takes what the file system has left."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(64 << 10)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC


async def paused(node: Node, words: str) -> None:
    await until(lambda: l3(node)["state"] == "paused")
    assert words in l3(node)["reason"], l3(node)["reason"]


async def resumed(node: Node) -> None:
    await until(lambda: l3(node)["state"] == "on" and l3(node)["blocks_waiting"] == 0, 30)
    assert l3(node)["reason"] == "" and l3(node)["removals_owed"] == 0


async def stored(client: hypercache.Client, node: Node, seeds: range) -> None:
    for seed in seeds:
        await put(client, seed)
        await written(node)


# -- full, read-only, gone


async def test_a_full_disk_pauses_the_tier_until_there_is_space(tmp_path: Path) -> None:
    """F09: serving goes on, what was written stays, nothing half-written does, and it resumes by itself."""
    with mounted(tmp_path / "disk", 24 * MIB) as disk:
        async with tiered(disk / "l3") as node, client_of(node) as client:
            await stored(client, node, range(4))
            ballast(disk / "ballast")
            for seed in range(4, 20):
                await put(client, seed)
            await paused(node, "No space left")
            assert str(disk) in l3(node)["reason"] and l3(node)["pauses_total"] == 1
            assert [await get(client, seed) for seed in (19, 18, 17, 0, 1, 2, 3)] == [HIT] * 7
            assert 0 not in [path.stat().st_size for path in (disk / "l3").glob("*.hckv")]
            (disk / "ballast").unlink()
            await resumed(node)
            await stored(client, node, range(30, 32))
            found = {seed: await get(client, seed) for seed in range(32)}
            assert found[31] == found[19] == found[0] == HIT
            assert nbytes_in(disk / "l3") <= l3(node)["disk"]["bytes_files"]
        async with tiered(disk / "l3") as node, client_of(node) as client:
            assert {seed: await get(client, seed) for seed in range(32)} == found
            assert l3(node)["disk"]["damaged"] == l3(node)["disk"]["quarantined"] == 0


async def test_a_removal_that_a_full_disk_does_not_take_is_made_up_for(tmp_path: Path) -> None:
    """Whoever asked is told; the blocks are gone at once, and after a restart too once there was space."""
    with mounted(tmp_path / "disk", 16 * MIB) as disk:
        async with tiered(disk / "l3") as node, client_of(node) as client:
            await stored(client, node, range(4))
            ballast(disk / "ballast")
            with pytest.raises(Unavailable, match=r"a restart may bring it back.*No space left"):
                await client.evict(tokens_of(2, PROMPT))
            assert await get(client, 2) == 0 and await get(client, 1) == HIT
            assert l3(node)["state"] == "paused" and l3(node)["removals_owed"] == 1
            (disk / "ballast").unlink()
            await resumed(node)
        async with tiered(disk / "l3") as node, client_of(node) as client:
            assert [await get(client, seed) for seed in range(4)] == [HIT, HIT, 0, HIT]


async def test_a_read_only_directory_is_served_and_written_once_that_is_allowed(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 32 * MIB) as disk:
        async with tiered(disk / "l3") as node, client_of(node) as client:
            await stored(client, node, range(3))
        mount("-o", "remount,ro", str(disk))
        async with tiered(disk / "l3") as node, client_of(node) as client:
            assert [await get(client, seed) for seed in range(3)] == [HIT] * 3
            await put(client, 3)
            await paused(node, "Read-only")
            with pytest.raises(Unavailable, match="Read-only"):
                await client.evict(tokens_of(0, PROMPT))
            assert [await get(client, seed) for seed in range(4)] == [0, HIT, HIT, HIT]
            mount("-o", "remount,rw", str(disk))
            await resumed(node)
        async with tiered(disk / "l3") as node, client_of(node) as client:
            assert [await get(client, seed) for seed in range(4)] == [0, HIT, HIT, HIT]


async def test_a_directory_that_is_deleted_under_the_server(tmp_path: Path) -> None:
    """It says so and serves from memory; the next start makes a new one."""
    path = tmp_path / "l3"
    async with tiered(path) as node, client_of(node) as client:
        await stored(client, node, range(20))
        shutil.rmtree(path)
        for seed in range(40, 46):  # more than what fits the segment that is open
            await put(client, seed)
        await paused(node, str(path))
        assert [await get(client, seed) for seed in range(42, 46)] == [HIT] * 4
        assert {await get(client, seed) for seed in range(20)} <= SIZES
        with pytest.raises(Unavailable, match="restart may bring it back"):
            await client.clear()
    async with tiered(path) as node, client_of(node) as client:
        assert node.status()["store"]["blocks"] == 0
        await put(client, 1)
        await written(node)
        assert nbytes_in(path) > MIB


async def test_a_file_that_is_deleted_under_the_server_is_misses(tmp_path: Path) -> None:
    """D10: what the index still has of it is never an error, and is stored and found again."""
    async with tiered(tmp_path) as node, client_of(node) as client:
        await stored(client, node, range(30))
        for number in numbers(tmp_path)[:3]:
            (tmp_path / f"{number:016x}.hckv").unlink()
        found = [await get(client, seed) for seed in range(30)]
        assert 0 in found[:12] and found[-8:] == [HIT] * 8
        assert l3(node)["loads_failed_total"] >= l3(node)["damaged_total"] > 0
        assert (await client.match(tokens_of(0, PROMPT))).hit_tokens == found[0]
        for seed in range(3):
            await put(client, seed)
            assert await get(client, seed) == HIT
        await written(node)
        assert l3(node)["state"] == "on"


async def test_what_is_not_ours_stays_as_it_is(tmp_path: Path) -> None:
    """Also where it has a name that we would use next."""
    path, outside = tmp_path / "l3", tmp_path / "outside"
    path.mkdir()
    outside.write_bytes(b"not yours")
    (path / "notes.txt").write_text("mine")
    (path / f"{0:016x}.hckv").symlink_to(outside)
    (path / f"{1:016x}.hckv").mkdir()
    (path / f"{2:016x}.hckv").symlink_to(path / f"{2:016x}.hckv")
    async with tiered(path) as node, client_of(node) as client:
        assert l3(node)["disk"]["foreign"] == 4
        await stored(client, node, range(5))
        (path / f"{max(numbers(path)) + 1:016x}.hckv").symlink_to(outside)
        await stored(client, node, range(5, 15))
        assert l3(node)["state"] == "on"
    async with tiered(path) as node, client_of(node) as client:
        assert [await get(client, seed) for seed in range(15)] == [HIT] * 15
    assert outside.read_bytes() == b"not yours" and (path / "notes.txt").read_text() == "mine"
    assert (path / f"{1:016x}.hckv").is_dir() and (path / f"{2:016x}.hckv").is_symlink()


def numbers(path: Path) -> list[int]:
    return sorted(int(one.stem, 16) for one in path.glob("*.hckv"))


# -- broken


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("pwritev", errno.EIO),
        ("pwritev", errno.EROFS),
        ("pwritev", errno.EDQUOT),
        ("fdatasync", errno.EIO),
        ("open", errno.EACCES),
        ("open", errno.EMFILE),
    ],
)
async def test_a_disk_that_does_not_write(tmp_path: Path, sick: Sick, call: str, code: int) -> None:
    """E01: nothing is claimed to be there; and it is there when the disk is well again."""
    async with tiered(tmp_path, l3_fsync="batch") as node, client_of(node) as client:
        await stored(client, node, range(3))
        sick.codes[call] = code
        for seed in range(3, 10):
            await put(client, seed)
        await until(lambda: l3(node)["state"] == "paused")
        assert "L3" in l3(node)["reason"] and l3(node)["blocks_waiting"] > 0
        assert [await get(client, seed) for seed in range(10)] == [HIT] * 10
        sick.heal()
        await resumed(node)
    async with tiered(tmp_path) as node, client_of(node) as client:
        assert [await get(client, seed) for seed in range(10)] == [HIT] * 10
        assert l3(node)["disk"]["damaged"] == 0


async def test_a_disk_that_does_not_read(tmp_path: Path, sick: Sick) -> None:
    """E07: a miss for what lies there alone, no wrong byte, and counted."""
    async with tiered(tmp_path) as node, client_of(node) as client:
        await stored(client, node, range(24))
        cold = node.status()["store"]["blocks_cold"]
        assert cold > 64
        sick.codes["preadv"] = errno.EIO
        found = [await get(client, seed) for seed in range(24)]
        assert set(found) <= SIZES and found[-1] == HIT and found[0] < HIT
        assert l3(node)["loads_failed_total"] > 0
        sick.heal()
        await put(client, 0)
        assert await get(client, 0) == HIT


async def test_a_disk_that_does_not_delete(tmp_path: Path, sick: Sick) -> None:
    small = {"l3_capacity": 16 * MIB, "l3_segment": 4 * MIB}
    async with tiered(tmp_path, **small) as node, client_of(node) as client:
        sick.codes["unlink"] = errno.EIO
        for seed in range(24):
            await put(client, seed)
            await asyncio.sleep(0.01)
        await paused(node, "Input/output error")
        assert nbytes_in(tmp_path) <= 16 * MIB
        assert await get(client, 23) == HIT
        sick.heal()
        await resumed(node)
        await stored(client, node, range(30, 40))
        assert l3(node)["reclaimed_total"] > 0 and nbytes_in(tmp_path) <= 16 * MIB


# -- silent


async def answers(client: hypercache.Client) -> None:
    """After a deadline, a client's calls miss at once until the server has been heard."""
    await until(lambda: client.state == "ready")


async def silent(node: Node, client: hypercache.Client, sick: Sick, *calls: str) -> None:
    """24 prompts are on the disk, the last ones in memory too; from now on these calls do not return."""
    await stored(client, node, range(24))
    sick.hangs |= set(calls)


async def test_a_disk_that_hangs_keeps_nobody_who_is_served_from_memory(tmp_path: Path, sick: Sick) -> None:
    """A fetch that needs it is a miss before its deadline, and the client goes on; a removal is answered for
    by its caller's."""
    async with tiered(tmp_path, memory=24 * MIB) as node, client_of(node) as client:
        await silent(node, client, sick, "preadv", "pwritev")
        began = time.monotonic()
        into = hypercache.KVBuffers.allocate(SPEC, PROMPT)
        result = await client.fetch(tokens_of(0, PROMPT), into, deadline=2.0)
        assert (result.hit_tokens, result.reason, client.state) == (0, "not stored", "ready")
        assert sick.hanging >= 1
        assert [await get(client, seed) for seed in (23, 22, 21)] == [HIT] * 3
        for removal in (client.evict(tokens_of(3, PROMPT), deadline=0.5), client.clear(deadline=0.5)):
            with pytest.raises(Unavailable):
                await removal
            await answers(client)
        assert time.monotonic() - began < 15  # three deadlines, and nothing that waits for the disk
        await put(client, 50)
        assert await get(client, 50) == HIT
        await until(lambda: node.status()["store"]["leases"] == 0)
        sick.heal()
        await until(lambda: l3(node)["blocks_loading"] == 0)
        await written(node)
        assert await get(client, 50) == HIT and await get(client, 3) == 0
    async with tiered(tmp_path) as node, client_of(node) as client:
        assert [await get(client, seed) for seed in (0, 3, 23, 50)] == [0, 0, 0, HIT]


async def test_fetches_that_hang_do_not_take_the_memory_of_the_others(tmp_path: Path, sick: Sick) -> None:
    """What waits for a silent disk is bounded: the prompts in memory stay, and new ones are taken."""
    async with tiered(tmp_path, memory=24 * MIB) as node, client_of(node) as client:
        await stored(client, node, range(60))
        sick.hangs.add("preadv")
        into = hypercache.KVBuffers.allocate(SPEC, PROMPT)
        for seed in range(24):
            assert (await client.fetch(tokens_of(seed, PROMPT), into, deadline=0.2)).hit_tokens < HIT
            await answers(client)
        found = [await get(client, seed) for seed in range(50, 60)]
        assert sum(found) >= HIT * 8, found
        await put(client, 70)
        assert await get(client, 70) == HIT
        sick.heal()
        await until(lambda: l3(node)["blocks_loading"] == 0 and node.status()["store"]["bytes_held"] == 0)
        assert await get(client, 23) == HIT


@pytest.mark.parametrize("what", ["reading", "writing", "removing"])
async def test_a_disk_that_hangs_does_not_keep_the_server_from_ending(
    tmp_path: Path, sick: Sick, what: str
) -> None:
    """SIGTERM's way: ``drain_s`` for clients, and once more for the disk, which is not waited for twice."""
    doing: dict[str, Callable[[hypercache.Client], Awaitable[object]]] = {
        "reading": lambda client: get(client, 0),
        "writing": lambda client: put(client, 50),
        "removing": lambda client: client.evict(tokens_of(0, PROMPT), deadline=20),
    }
    async with tiered(tmp_path, drain_s=2.0) as node, client_of(node) as client:
        await silent(node, client, sick, "preadv", "pwritev")
        task = asyncio.ensure_future(doing[what](client))
        await until(lambda: sick.hanging > 0)
        began = time.monotonic()
        await node.drain()
        assert time.monotonic() - began < 2 * 2.0 + 1.5
        await asyncio.gather(task, return_exceptions=True)
        sick.heal()
    await until(lambda: not sick.hanging)


# -- another start


@pytest.mark.parametrize(
    "other",
    [
        {"l3_capacity": 24 * MIB},
        {"l3_capacity": 512 * MIB, "l3_segment": 16 * MIB},
        {"l3_segment": 2 * MIB},
        {"memory": 8 * MIB},
        {"policy": "lru"},
        {"policy": "s3-fifo"},
        {"l3_fsync": "never"},
    ],
    ids=str,
)
async def test_a_restart_with_other_settings(tmp_path: Path, other: dict[str, Any]) -> None:
    """F02: what the directory holds is taken over as far as it fits, and counts from the first moment."""
    async with tiered(tmp_path) as node, client_of(node) as client:
        await stored(client, node, range(30))
    used = nbytes_in(tmp_path)
    async with tiered(tmp_path, **other) as node, client_of(node) as client:
        assert l3(node)["disk"]["bytes_files"] >= used
        assert {await get(client, seed) for seed in range(30)} == {HIT}
        await stored(client, node, range(30, 45))
        assert nbytes_in(tmp_path) <= other.get("l3_capacity", 64 * MIB)
        assert l3(node)["state"] == "on"
        found = [await get(client, seed) for seed in range(45)]
        assert set(found) <= SIZES and sum(found) >= 10 * HIT
        assert other == {"l3_capacity": 24 * MIB} or found[-8:] == [HIT] * 8
    async with tiered(tmp_path) as node, client_of(node) as client:
        assert sum([await get(client, seed) for seed in range(45)]) >= 10 * HIT


async def test_a_restart_with_an_index_that_is_smaller_than_the_disk(tmp_path: Path) -> None:
    """Blocks of 1 KiB: the disk has more of them than the memory may know. Some are known, all of those are
    served, and the index keeps to its limit."""
    spec = make_spec(layers=2, heads=1, dim=8)
    tokens = 16 * 400 + 1
    async with tiered(tmp_path, memory=288 * MIB) as node, client_of(node, spec) as client:
        for seed in range(20):
            await put(client, seed, tokens)
            await written(node)
        before = node.status()["store"]["blocks"]
        assert before == 8000
    async with tiered(tmp_path, memory=8 * MIB) as node, client_of(node, spec) as client:
        store = node.status()["store"]
        assert 0 < store["blocks"] < before
        assert store["bytes_index"] <= store["bytes_index_limit"]
        found = [await get(client, seed, tokens) for seed in range(20)]
        assert sum(found) > 0
        await put(client, 30, 161)
        assert await get(client, 30, 161) == 160


async def test_clients_with_another_codec_leave_the_blocks_of_others_alone(tmp_path: Path) -> None:
    async with tiered(tmp_path) as node, client_of(node) as client:
        await stored(client, node, range(3))
    async with (
        tiered(tmp_path) as node,
        client_of(node, codec="int8") as other,
        client_of(node) as client,
    ):
        assert [await get(other, seed) for seed in range(3)] == [0] * 3
        await put(other, 1)
        assert await other.clear() == 8
        assert [await get(client, seed) for seed in range(3)] == [HIT] * 3


async def test_files_of_a_newer_version_are_left_alone(tmp_path: Path) -> None:
    async with tiered(tmp_path) as node, client_of(node) as client:
        await stored(client, node, range(2))
    (number,) = numbers(tmp_path)
    path = tmp_path / f"{number:016x}.hckv"
    data = bytearray(path.read_bytes())
    data[8] = 2  # the version in its header, with the checksum that goes with it
    data[4092:4096] = zlib.crc32(data[:4092]).to_bytes(4, "little")
    path.write_bytes(data)
    async with tiered(tmp_path) as node, client_of(node) as client:
        assert await get(client, 0) == 0
        await stored(client, node, range(3))
        assert await get(client, 0) == HIT
    assert path.read_bytes() == data


# -- removals that race with what goes down


@pytest.mark.parametrize("way", ["clear", "evict", "weights"])
async def test_what_is_removed_while_it_is_written_stays_away(tmp_path: Path, way: str) -> None:
    """E05, F: many times over, at all moments of a demotion; what is stored again right after is there."""
    rng = random.Random(way)
    again: list[int] = []
    async with tiered(tmp_path, l3_segment=MIB) as node, client_of(node) as client:
        for turn in range(30):
            here = range(3 * turn, 3 * turn + 3)
            await asyncio.gather(*[put(client, seed) for seed in here])
            await asyncio.sleep(rng.choice([0, 0, 0.001, 0.003, 0.01, 0.03]))
            if way == "evict":
                for seed in here:
                    await client.evict(tokens_of(seed, PROMPT))
            elif way == "clear":
                await client.clear()
                again = []
            if way != "weights" and turn % 3 == 0:
                await put(client, here[0])
                again.append(here[0])
        await written(node)
        if way != "weights":
            assert [await get(client, seed) for seed in range(90)] == wanted(again)
    newer = make_spec(layers=4, heads=4, dim=128, weights=b"newer") if way == "weights" else SPEC
    async with tiered(tmp_path, l3_segment=MIB) as node, client_of(node, newer) as client:
        assert [await get(client, seed) for seed in range(90)] == wanted(again)


def wanted(seeds: list[int]) -> list[int]:
    return [HIT if seed in seeds else 0 for seed in range(90)]
