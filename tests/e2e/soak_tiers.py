"""Clients that do everything at random against a node whose memory and disk are both too small.

``python -m tests.e2e.soak_tiers [SECONDS]`` (``make soak``): prints what was done, as JSON. Each byte that is
fetched is checked; in the end all that was held has been returned, and memory and files are within bounds.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import json
import logging
import random
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import structlog

import hypercache
from hypercache.errors import Unavailable

from .conftest import make_spec, poisoned, same, tokens_of
from .tiers_kit import MIB, cheap_kv, client_of, l3, nbytes_in, tiered, until, written

SPEC = make_spec(layers=4, heads=4, dim=128)
LONGEST = 16 * 12 + 1
PROMPTS = 120  # 12 blocks each at most: about 120 MiB through a memory of 16 and a disk of 48
CLIENTS = 8
DISK = 48 * MIB

Counts = collections.Counter[str]


def length(seed: int) -> int:
    """Tokens of a prompt."""
    return 16 * (1 + seed % 12) + 1


async def put(client: hypercache.Client, seed: int, counts: Counts) -> None:
    tokens = length(seed)
    result = await client.store(tokens_of(seed, tokens), cheap_kv(seed, SPEC, tokens))
    counts["blocks stored"] += result.stored


async def get(client: hypercache.Client, seed: int, counts: Counts, deadline: float | None = None) -> None:
    tokens = length(seed)
    into = poisoned(SPEC, tokens)
    hit = (await client.fetch(tokens_of(seed, tokens), into, deadline=deadline)).hit_tokens
    assert same(cheap_kv(seed, SPEC, tokens), into, 0, hit), f"wrong bytes of prompt {seed}"
    counts["blocks fetched"] += hit // 16


async def step(client: hypercache.Client, rng: random.Random, counts: Counts) -> None:
    """One of the things that clients do."""
    seed = min(rng.randrange(PROMPTS), rng.randrange(PROMPTS))  # some are wanted more than others
    tokens = tokens_of(seed, length(seed))
    what = rng.choices(
        ["put", "get", "match", "hint", "pin", "unpin", "evict", "cancel", "late", "clear"],
        [30, 40, 6, 5, 4, 3, 3, 6, 3, 0.1],
    )[0]
    counts[what] += 1
    if what == "put":
        await put(client, seed, counts)
    elif what == "get":
        await get(client, seed, counts)
    elif what == "match":
        await client.match(tokens)
    elif what == "hint":
        await client.hint(tokens, steps=rng.randrange(4), priority=rng.randrange(-3, 4))
    elif what == "pin":
        await client.pin(tokens, seconds=rng.uniform(0.05, 1.0))
    elif what == "unpin":
        await client.unpin(tokens)
    elif what == "evict":
        await client.evict(tokens)
    elif what == "clear":
        await client.clear()
    elif what == "late":
        await get(client, seed, counts, deadline=rng.choice([0.0005, 0.002, 0.005]))
    else:
        doing = put if rng.random() < 0.5 else get
        task = asyncio.create_task(doing(client, seed, counts))
        await asyncio.sleep(rng.uniform(0, 0.004))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def one(node: Any, number: int, until_s: float, counts: Counts) -> None:
    """A client's life, with a new connection now and then."""
    rng = random.Random(number)
    loop = asyncio.get_running_loop()
    while loop.time() < until_s:
        async with client_of(node, SPEC) as client:
            for _ in range(rng.randrange(5, 200)):
                if loop.time() >= until_s:
                    break
                try:
                    await step(client, rng, counts)
                except Unavailable:
                    counts["no answer"] += 1
        counts["connections"] += 1


def rss() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


async def soak(directory: Path, seconds: float) -> dict[str, Any]:
    """Runs it; raises AssertionError for a wrong byte or for what is left. Returns numbers."""
    counts: Counts = collections.Counter()
    loop = asyncio.get_running_loop()
    async with tiered(directory, memory=16 * MIB, l3_capacity=DISK, l3_segment=4 * MIB) as node:
        threads, tasks = threading.active_count(), len(asyncio.all_tasks())
        samples: list[int] = []
        until_s = loop.time() + seconds
        clients = [asyncio.create_task(one(node, n, until_s, counts)) for n in range(CLIENTS)]
        while loop.time() < until_s and not any(task.done() for task in clients):
            await asyncio.sleep(min(1.0, seconds / 10))
            samples.append(rss())
            assert nbytes_in(directory) <= DISK, "more files than the capacity"
        await asyncio.gather(*clients)
        await until(lambda: not held(node), 30)
        await written(node)
        numbers, store = l3(node), node.status()["store"]
        assert numbers["state"] == "on" and numbers["faults_total"] == 0, numbers["reason"]
        assert numbers["damaged_total"] == 0 and numbers["disk"]["damaged"] == 0, numbers
        assert store["bytes_index"] <= store["bytes_index_limit"]
        async with client_of(node, SPEC) as client:
            await client.clear()
            await until(lambda: node.status()["store"]["bytes_index"] == 0, 30)
        assert node.status()["store"]["bytes_used"] == 0
        await until(lambda: node.status()["connections"] == 0)
        gc.collect()
        assert len(asyncio.all_tasks()) <= tasks and threading.active_count() <= threads + CLIENTS
    async with tiered(directory, memory=16 * MIB, l3_capacity=DISK, l3_segment=4 * MIB) as node:
        assert node.status()["store"]["blocks"] == 0, "back after a restart"
    half = len(samples) // 2
    growth = max(samples[half:]) - max(samples[:half])
    assert seconds < 30 or growth < 2 * 16 * MIB, f"{growth} bytes more in the second half of the time"
    return {
        **dict(sorted(counts.items())),
        "rss_growth_mib": round(growth / MIB, 1),
        "rss_mib": round(max(samples) / MIB),
        **{name: numbers[name] for name in ("demoted_total", "promoted_total", "reclaimed_total")},
        "cooled_total": store["cooled_total"],
        "evicted_total": store["evicted_total"],
    }


def held(node: Any) -> dict[str, int]:
    """What of a node is not back at zero though no client does anything."""
    store, disk = node.status()["store"], l3(node)
    all_of_it = {
        **{name: store[name] for name in ("leases", "reservations", "pins", "bytes_held", "bytes_pinned")},
        **{name: disk[name] for name in ("blocks_writing", "blocks_loading", "removals_owed")},
        "blocks_hidden": store["blocks_hidden"],
        "bytes_leases": store["bytes_leases"],
    }
    return {name: value for name, value in all_of_it.items() if value}


def main(seconds: float) -> None:
    logging.getLogger("hypercache.client").addHandler(logging.NullHandler())
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(asyncio.run(soak(Path(directory), seconds)), indent=2))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
