"""The policies on traces without prefixes, beside two cache libraries that know nothing of this one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from hypercache.audit.replay import Cache
from hypercache.audit.traces import Request
from hypercache.store.policy import Policy, get

ROOMS = (50, 100, 500)


def zipf_with_scans(seed: int, count: int = 20_000) -> list[int]:
    """Ids 1..2000 by Zipf's law (exponent 0.9), and every sixth one that never comes again."""
    rng = random.Random(seed)
    weights = [1 / (rank + 1) ** 0.9 for rank in range(2000)]
    drawn = iter(rng.choices(range(1, 2001), weights, k=count))
    return [10_000 + at if at % 6 == 5 else next(drawn) for at in range(count)]


def ours(ids: list[int], room: int, policy: Policy) -> list[bool]:
    kept = Cache(room, policy)
    return [bool(kept.serve(Request(float(at), (block,)))) for at, block in enumerate(ids)]


def cachetools_hits(ids: list[int], cache: Any) -> list[bool]:
    hits = []
    for block in ids:
        hits.append(cache.get(block) is not None)
        if not hits[-1]:
            cache[block] = True
    return hits


def libcachesim_hits(ids: list[int], cache: Any) -> list[bool]:
    sim = pytest.importorskip("libcachesim")
    hits = []
    for at, block in enumerate(ids):
        request = sim.Request()
        request.obj_id, request.obj_size, request.clock_time = block, 1, at
        hits.append(bool(cache.get(request)))
    return hits


def compare(ids: list[int], room: int, oracle: Callable[[], list[bool]], policy: Policy) -> float:
    """How many of ``ids`` hit in only one of the two, as a share of the oracle's hits."""
    theirs = oracle()
    differ = sum(a != b for a, b in zip(theirs, ours(ids, room, policy), strict=True))
    return differ / sum(theirs)


@pytest.mark.parametrize("room", ROOMS)
def test_lru_and_the_short_end_of_lrfu_hit_exactly_what_cachetools_hits(room: int) -> None:
    cachetools = pytest.importorskip("cachetools")
    ids = zipf_with_scans(room)
    theirs = cachetools_hits(ids, cachetools.LRUCache(room))
    assert ours(ids, room, get("lru")) == theirs
    assert ours(ids, room, get("lrfu", half_life_s=0.9)) == theirs


@pytest.mark.parametrize("room", ROOMS)
def test_lru_hits_exactly_what_libcachesim_hits(room: int) -> None:
    sim = pytest.importorskip("libcachesim")
    ids = zipf_with_scans(room + 1)
    assert ours(ids, room, get("lru")) == libcachesim_hits(ids, sim.LRU(room))


@pytest.mark.parametrize("room", ROOMS)
def test_the_long_end_of_lrfu_is_lfu(room: int) -> None:
    """Blocks of the same count are ordered by age here and otherwise there: a few may differ. The libraries
    forget the counts of what has gone, so no ghosts here."""
    cachetools = pytest.importorskip("cachetools")
    ids = zipf_with_scans(room + 2)
    lfu = get("lrfu", half_life_s=1e9, ghosts=0)
    assert compare(ids, room, lambda: cachetools_hits(ids, cachetools.LFUCache(room)), lfu) < 0.01


@pytest.mark.parametrize("room", ROOMS)
def test_s3_fifo_hits_what_libcachesim_hits(room: int) -> None:
    """That one fills its main queue while there is room, so they differ for a while. The first bound is on
    each single reference of the second half, not on their sum."""
    sim = pytest.importorskip("libcachesim")
    ids = zipf_with_scans(room + 3)
    theirs = libcachesim_hits(ids, sim.S3FIFO(room))
    mine = ours(ids, room, get("s3-fifo"))
    half = len(ids) // 2
    differ = sum(a != b for a, b in zip(theirs[half:], mine[half:], strict=True))
    assert differ < 0.04 * sum(theirs[half:])
    assert abs(sum(mine) - sum(theirs)) < 0.01 * sum(theirs)
    lru = ours(ids, room, get("lru"))
    assert sum(mine) > 1.1 * sum(lru)  # what the agreement would be worth nothing without
