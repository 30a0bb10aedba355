"""The policies at work in the real store: order of eviction, whole prefixes, room for whoever writes."""

from __future__ import annotations

import random

import pytest

from hypercache.store.policy import NAMES, Lrfu, get
from hypercache.store.s3_fifo import S3Fifo

from .conftest import Make
from .kit import MIB, chain, info, intact, put

NBYTES = 60_000
ROOM = 4 * MIB


@pytest.mark.parametrize("name", NAMES)
def test_prefixes_stay_whole_and_a_put_finds_room(make: Make, name: str) -> None:
    """Random prompts over shared prefixes, look-ups, leases and hints, in a store that is always full. Its
    structure is audited at the end; what a lease holds is intact all the time."""
    store = make(ROOM, policy=get(name))
    ns = store.open_namespace(info("a", (NBYTES // 2, NBYTES // 2)))
    rng = random.Random(8)
    prompts = [
        chain(f"d{d}", 4)[: rng.randint(1, 4)] + chain(f"d{d}/q{q}", 3) for d in range(20) for q in range(3)
    ]
    for step in range(600):
        now = step / 3
        digests = rng.choices(prompts, [1 / (1 + at) for at in range(len(prompts))])[0]
        hit = store.match(ns, digests, now)
        lease = store.lease(ns, digests, "reader", 5.0, now)
        assert len(lease.blocks) == hit and intact(store, lease.blocks)
        if rng.random() < 0.2:
            store.hint(ns, digests, rng.randint(-1, 50), rng.randint(-3, 3), now)
        stored = put(store, ns, digests[hit:], now, digests[hit - 1] if hit else None)
        assert set(stored) <= {"stored"}
        store.release(lease)
        store.sweep(now)
        for each in prompts:
            there = store.contains(ns, each)
            assert there == sorted(there, reverse=True)  # no byte in a block without its prefix
    assert store.stats().evicted_total > 100


@pytest.mark.parametrize("policy", [Lrfu(), S3Fifo()], ids=lambda policy: type(policy).__name__)
def test_one_scan_does_not_flush_what_is_used_often(make: Make, policy: Lrfu | S3Fifo) -> None:
    store = make(ROOM, policy=policy)
    ns = store.open_namespace(info("a", (NBYTES,)))
    hot = [chain(f"hot{index}", 3) for index in range(6)]
    for now in range(8):
        for digests in hot:
            put(store, ns, digests[store.match(ns, digests, now) :], now)
    for index in range(150):
        assert put(store, ns, chain(f"scan{index}", 2), 20.0 + index) == ["stored"] * 2
    assert store.stats().evicted_total > 200
    assert [store.match(ns, digests, 200.0) for digests in hot] == [3] * 6


@pytest.mark.parametrize("name", ["lrfu", "lru"])
def test_a_hint_decides_who_goes_first(make: Make, name: str) -> None:
    """Of prompts that were stored at the same time: those needed in an hour go, dear ones stay longest."""
    store = make(ROOM, policy=get(name))
    ns = store.open_namespace(info("a", (NBYTES,)))
    names = [f"p{index}" for index in range(20)]
    for at, one in enumerate(names):
        put(store, ns, chain(one, 2), 1000.0 + at)
    late, dear = names[12:], names[:3]
    for one in late:
        assert store.hint(ns, chain(one, 2), 120, 0, 1100.0) == 2
    for one in dear:
        assert store.hint(ns, chain(one, 2), -1, 2, 1100.0) == 2
    more = 0
    while any(store.contains(ns, chain(one, 1))[0] for one in late):
        assert put(store, ns, chain(f"more{more}", 1), 1110.0 + more) == ["stored"]
        more += 1
    assert all(store.contains(ns, chain(one, 2)) == [True, True] for one in names[:12])
    while sum(store.contains(ns, chain(one, 2)) == [True, True] for one in names[3:12]):
        put(store, ns, chain(f"more{more}", 1), 1110.0 + more)
        more += 1
    assert all(store.contains(ns, chain(one, 2)) == [True, True] for one in dear)
    for extra in range(100):  # two half-lives later they are as old as the rest
        put(store, ns, chain(f"new{extra}", 1), 4000.0 + extra)
    assert not any(store.contains(ns, chain(one, 2))[1] for one in dear)
