"""No request costs more than its own size: faults of class B (small requests, large work), and D06."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from hypercache.errors import StoreFull
from hypercache.store import Block, BlockStore, HoldEnded, Namespace, Reservation, Skip
from hypercache.store.policy import Lru

from .conftest import Make
from .kit import MIB, audit, chain, info, put


class CountingLru(Lru):
    """Counts the blocks that are raised: what a use costs beside the blocks that were named."""

    raised = 0

    def use(self, blocks, now):  # type: ignore[no-untyped-def]
        blocks = list(blocks)
        self.raised += len(blocks)
        super().use(blocks, now)


def test_b01_a_lookup_of_the_deepest_block_does_not_walk_the_chain_each_time(make: Make) -> None:
    policy = CountingLru()
    store = make(64 * MIB, policy=policy)  # type: ignore[arg-type]
    ns = store.open_namespace(info("a", (64,)))
    digests = chain("p", 2000)
    assert put(store, ns, digests, 0.0) == ["stored"] * 2000
    policy.raised = 0
    for call in range(300):
        assert store.match(ns, digests[-1:], 5.0 + call / 1000) == 1
        store.release(store.lease(ns, digests[-1:], "r", 1.0, 5.0 + call / 1000))
        store.reserve(ns, digests[-1], [], "w", 5.0 + call / 1000)
    assert policy.raised <= 900 + 2000  # each call its block, and the chain once in this second
    audit(store)
    policy.raised = 0
    store.match(ns, digests[-1:], 50.0)
    assert policy.raised < 500  # nor is it walked in one go
    for _ in range(10):
        store.sweep(50.0)
    (block,) = store.lease(ns, digests[-1:], "r", 1.0, 50.0).blocks
    node: Block | None = block
    while node is not None:
        assert node.rank == 50.0
        node = node.parent
    audit(store)


def test_a_prefix_inherits_uses_it_was_not_told_of(make: Make) -> None:
    """Within a second ancestors are not raised; when they become leaves, the order is exact all the same."""
    store = make(4 * MIB)
    ns = store.open_namespace(info("a", (300_000,)))
    p, q = chain("p", 2), chain("q", 1)
    put(store, ns, p, 10.1)
    put(store, ns, q, 10.2)
    store.match(ns, p[1:], 10.3)
    store.evict(ns, p[1:])
    while store.contains(ns, [p[0], q[0]]) == [True, True]:
        put(store, ns, chain(f"r{store.stats().blocks}{store.stats().evicted_total}", 1), 10.4)
    assert store.contains(ns, [p[0], q[0]]) == [True, False]


def test_d06_bytes_that_arrive_are_progress_though_no_chunk_is_whole(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", (100_000,)))
    one, _ = store.reserve(ns, None, chain("p", 2), "w", 0.0)
    assert isinstance(one, Reservation)
    for step in range(1, 6):
        store.progress(one, 4.0 * step)
        store.sweep(4.0 * step + 3.9)
        assert one.open
    store.progress(one, 1.0)  # never back
    store.sweep(24.9)
    assert one.open
    store.sweep(25.0)
    assert not one.open
    store.progress(one, 30.0)  # after its end it changes nothing
    assert store.stats().reservations == 0


def test_b03_promises_to_write_evict_nothing(make: Make) -> None:
    store = make(16 * MIB)
    small = store.open_namespace(info("small", (100_000,)))
    prompts = [chain(f"p{i}", 4) for i in range(36)]
    for prompt in prompts:
        assert put(store, small, prompt, 0.0) == ["stored"] * 4
    before = store.stats()
    for client in range(20):
        for size in (3 * MIB, 100_000, 64):
            ns = store.open_namespace(info(f"n{size}", (size,)))
            entries = store.reserve(ns, None, chain(f"{client}", 16), client, 1.0)
            assert isinstance(entries[0], Reservation)
    after = store.stats()
    assert (after.blocks, after.bytes_used, after.evicted_total) == (before.blocks, before.bytes_used, 0)
    assert after.bytes_held == 0
    assert all(store.match(small, prompt, 2.0) == 4 for prompt in prompts)
    first = next(iter(store.reserve(small, None, chain("new", 1), "w", 2.0)))
    assert isinstance(first, Reservation)
    audit(store)


def test_b03_memory_follows_the_first_bytes(make: Make) -> None:
    store = make(4 * MIB)
    ns = store.open_namespace(info("a", (MIB - 64,)))
    assert put(store, ns, chain("p", 3), 0.0) == ["stored"] * 3
    (one,) = store.reserve(ns, None, chain("q", 1), "w", 1.0)
    (two,) = store.reserve(ns, None, chain("r", 1), "x", 1.0)
    assert isinstance(one, Reservation) and isinstance(two, Reservation)
    assert store.match(ns, chain("p", 3), 1.0) == 3
    store.pin(one)
    assert store.match(ns, chain("p", 3), 1.0) == 2  # one block for one block
    lease = store.lease(ns, chain("p", 2), "r", 9.0, 1.0)
    (child,) = store.reserve(ns, two.digest, chain("s", 1), "y", 1.0)
    assert isinstance(child, Reservation)
    for _ in range(2):
        with pytest.raises((StoreFull, HoldEnded)):
            store.pin(two)
    assert two.ended == child.ended == "full"
    with pytest.raises(HoldEnded, match="full"):
        two.chunk(0)
    assert lease.open and store.stats().reservations == 1
    store.release(lease)
    audit(store)
    store.unpin(one)
    store.drop_owner("w")
    assert store.stats().bytes_held == 0


def test_b03_nothing_is_evicted_for_a_namespace_that_was_cleared(make: Make) -> None:
    store = make(4 * MIB)
    a, b = (store.open_namespace(info(name, (MIB - 64,))) for name in "ab")
    (late,) = store.reserve(b, None, chain("q", 1), "w", 0.0)
    assert isinstance(late, Reservation)
    put(store, a, chain("p", 3), 0.0)
    store.clear(b)
    with pytest.raises(HoldEnded, match="cleared"):
        store.pin(late)
    assert store.match(a, chain("p", 3), 0.0) == 3


def test_a04_one_owner_reserves_a_share_and_no_more(make: Make) -> None:
    store = make(64 * MIB)
    big = store.open_namespace(info("big", (MIB,)))
    tiny = store.open_namespace(info("tiny", (64,)))
    huge = store.open_namespace(info("huge", (40 * MIB,)))

    def reserved(ns: Namespace, name: str, count: int, owner: str) -> int:
        entries = store.reserve(ns, None, chain(name, count), owner, 0.0)
        got = sum(isinstance(entry, Reservation) for entry in entries)
        assert all(isinstance(e, Skip) and e.reason == "full" for e in entries[got:])
        return got

    share = store.stats().bytes_data // 2 // MIB
    assert reserved(big, "p", 100, "a") == share
    assert reserved(big, "q", 100, "a") == 0
    assert reserved(big, "q", 100, "b") == share
    assert reserved(huge, "h", 2, "c") == 1  # one is always allowed
    assert reserved(tiny, "t", 5, "c") == 0
    store.drop_owner("a")
    assert reserved(big, "p", 100, "a") == share
    audit(store)
    for owner in "abc":
        store.drop_owner(owner)
    assert not store._ledger._writing
    assert reserved(tiny, "t", 100, "a") == 100
    assert store.stats().evicted_total == 0


def test_a04_so_many_reservations_and_no_more(make: Make) -> None:
    store = make(512 * MIB)
    tiny = store.open_namespace(info("tiny", (64,)))
    entries = store.reserve(tiny, None, chain("t", 16392), "a", 0.0)
    assert [isinstance(entry, Reservation) for entry in entries] == [True] * 16384 + [False] * 8
    store.abort(entries[0])  # type: ignore[arg-type]


def test_b03_namespaces_that_are_only_opened_or_promised_leave_nothing(make: Make) -> None:
    store = make(max_namespaces=8)
    ns = store.open_namespace(info("a", (64,)))
    assert put(store, ns, chain("p", 4), 0.0) == ["stored"] * 4
    before = store.stats()
    for step in range(100):
        other = store.open_namespace(info(f"n{step}", (64,) * 100))
        store.match(other, chain("p", 1), 0.0)
        store.reserve(other, b"x" * 16, chain("p", 1), "w", 0.0)
        (entry,) = store.reserve(other, None, chain("p", 1), "w", 0.0)
        assert isinstance(entry, Reservation)
        store.abort(entry)
    after = store.stats()
    assert (after.namespaces, after.bytes_index) == (before.namespaces, before.bytes_index)
    assert store.match(ns, chain("p", 4), 0.0) == 4
    store.clear(ns)
    store.sweep(0.0)
    assert (store.stats().namespaces, store.stats().bytes_index) == (0, 0)


def test_b02_namespaces_count_in_the_index_budget(make: Make) -> None:
    store = make(16 * MIB)
    before = store.stats().bytes_index_limit
    gc.collect()
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        for step in range(40):
            ns = store.open_namespace(info(f"n{step}", [1000 + layer for layer in range(4096)]))
            (entry,) = store.reserve(ns, None, chain("p", 1), step, 0.0)
            if isinstance(entry, Skip):
                break
        del ns, entry
        gc.collect()
        measured = tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()
    stats = store.stats()
    assert 2 <= stats.namespaces < 40
    assert measured <= stats.bytes_index <= min(before, 2 * measured)
    small = store.open_namespace(info("small", (64,)))
    for owner in range(40):
        store.drop_owner(owner)
    assert (store.stats().namespaces, store.stats().bytes_index) == (0, 0)
    assert put(store, small, chain("p", 1), 1.0) == ["stored"]


def test_b01_stalled_writers_are_ended_some_at_a_time_and_are_in_nobodys_way(make: Make) -> None:
    store = make(256 * MIB)
    ns = store.open_namespace(info("a", (64,)))
    for owner in range(5):
        for step in range(1000):
            store.reserve(ns, None, chain(f"{owner} {step}", 1), owner, 0.0)
    store.sweep(5.0)
    left = store.stats().reservations
    assert 0 < left < 5000 and store.stats().stalled_total == 5000 - left
    (entry,) = store.reserve(ns, None, chain("4 999", 1), "new", 5.0)
    assert isinstance(entry, Reservation)
    for _ in range(9):
        store.sweep(5.0)
    assert store.stats().reservations == 1 and entry.open
    assert store.stats().stalled_total == 5000
