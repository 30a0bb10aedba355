"""A real server that ends in the middle of heavy work, by SIGKILL or SIGTERM, and starts again.

``HYPERCACHE_KILLS``: how often it is killed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import hypercache

from .conftest import poisoned, same, tokens_of
from .tiers_kit import PROMPT, SPEC, cheap_kv, client_of, serving

ROUNDS = int(os.environ.get("HYPERCACHE_KILLS", "8"))
HIT = PROMPT - 1


async def found(client: hypercache.Client, seed: int) -> int:
    """Tokens of a prompt: as many as a match promises, and each byte checked."""
    promised = (await client.match(tokens_of(seed, PROMPT))).hit_tokens
    into = poisoned(SPEC, PROMPT)
    result = await client.fetch(tokens_of(seed, PROMPT), into)
    assert result.hit_tokens == promised, (seed, promised, result)
    assert same(cheap_kv(seed), into, 0, result.hit_tokens), seed
    return promised


async def put(client: hypercache.Client, seed: int) -> bool:
    """Whether the server has confirmed all of it."""
    result = await client.store(tokens_of(seed, PROMPT), cheap_kv(seed))
    return result.stored == PROMPT // 16


async def write(client: hypercache.Client, seeds: Iterator[int], done: list[int]) -> None:
    """As fast as it goes, until the server is gone."""
    while client.state == "ready":
        seed = next(seeds)
        if await put(client, seed):
            done.append(seed)


async def read(client: hypercache.Client, seeds: list[int]) -> int:
    """The same with what was stored; what comes is right, whenever the server ends. Returns fetches."""
    count = 0
    for seed in itertools.cycle(seeds):
        into = poisoned(SPEC, PROMPT)
        result = await client.fetch(tokens_of(seed, PROMPT), into)
        assert same(cheap_kv(seed), into, 0, result.hit_tokens), seed
        if client.state != "ready":
            break
        count += 1
    return count


@pytest.mark.timeout(60 + 15 * ROUNDS)
async def test_killed_again_and_again(tmp_path: Path) -> None:
    """F01: the same directory all the time. What was said to be on the disk is there, what was removed is
    not, what a match claims is served, and no wrong byte is."""
    rng = random.Random(6)
    seeds = itertools.count()
    safe: list[int] = []  # reported as written before the last kill
    gone: list[int] = []
    known: list[int] = []
    torn = kept = 0
    for turn in range(ROUNDS + 1):
        with serving(tmp_path) as server:
            async with client_of(server) as client:
                disk = (await server.status())["l3"]["disk"]
                assert disk["damaged"] == disk["quarantined"] == 0
                torn += disk["torn_bytes"] > 0
                assert [await found(client, seed) for seed in safe] == [HIT] * len(safe)
                assert [await found(client, seed) for seed in gone] == [0] * len(gone)
                late = known[-40:] + rng.sample(known[:-40], min(20, len(known[:-40])))
                hits = [await found(client, seed) for seed in late]
                kept += sum(hits) // HIT
                if turn == ROUNDS:
                    break
                before = (await server.quiet())["demoted_total"]
                safe = [next(seeds) for _ in range(4)]
                assert all([await put(client, seed) for seed in safe])
                assert (await server.quiet())["demoted_total"] >= before + 8 * len(safe)
                gone = [safe.pop()]
                assert await client.evict(tokens_of(gone[0], PROMPT)) == 8
                writers = [asyncio.create_task(write(client, seeds, known)) for _ in range(3)]
                await asyncio.sleep(rng.uniform(0.02, 0.5))
                assert server.end(signal.SIGKILL) == -signal.SIGKILL
                await asyncio.gather(*writers)
    assert len(known) > 2 * ROUNDS and kept > 0
    print(f"{ROUNDS} kills, {len(known)} prompts confirmed, {torn} torn ends, {kept} of the late ones found")


async def test_sigterm_in_the_middle_of_writing_and_reading(tmp_path: Path) -> None:
    """What was confirmed is written before the process ends, with status 0; then all of it is found."""
    known: list[int] = []
    with serving(tmp_path, memory="256MiB") as server:
        async with client_of(server) as client, client_of(server) as other:
            seeds = itertools.count()
            known += [seed for seed in itertools.islice(seeds, 4) if await put(client, seed)]
            readers = [asyncio.create_task(read(other, known[:4])) for _ in range(2)]
            writers = [asyncio.create_task(write(client, seeds, known)) for _ in range(2)]
            await asyncio.sleep(0.4)
            code = await asyncio.to_thread(server.end, signal.SIGTERM)
            assert code == 0
            await asyncio.gather(*writers)
            assert all(await asyncio.gather(*readers))
    with serving(tmp_path, memory="256MiB") as server:
        async with client_of(server) as client:
            assert [await found(client, seed) for seed in known] == [HIT] * len(known)


@pytest.mark.parametrize("way", ["clear", "evict"])
async def test_removed_and_killed_at_once(tmp_path: Path, way: str) -> None:
    """What a client was told to be gone is gone, however soon the process ends; what it stored again
    afterwards is there if that was said to be written."""
    with serving(tmp_path) as server:
        async with client_of(server) as client:
            for seed in range(4):
                assert await put(client, seed)
            await server.quiet()
            writer = asyncio.create_task(write(client, itertools.count(10), []))
            await asyncio.sleep(0.05)
            if way == "clear":
                assert await client.clear() >= 32
            else:
                assert [await client.evict(tokens_of(seed, PROMPT)) for seed in range(4)] == [8] * 4
            server.end(signal.SIGKILL)
            await writer
    with serving(tmp_path) as server:
        async with client_of(server) as client:
            assert [await found(client, seed) for seed in range(3)] == [0] * 3
            assert await put(client, 0) and await found(client, 0) == HIT
            await server.quiet()
            server.end(signal.SIGKILL)
    with serving(tmp_path) as server:
        async with client_of(server) as client:
            assert [await found(client, seed) for seed in range(3)] == [HIT, 0, 0]
