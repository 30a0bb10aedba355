"""Leases cost what they are: memory is bounded, and ending many of them is done in steps (class B faults)."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import pytest

from hypercache.errors import StoreFull
from hypercache.store import BlockStore, Lease, Namespace, Reservation, Skip
from hypercache.store.ledger import CHAIN_STEPS
from hypercache.store.room import index_nbytes, namespace_nbytes

from .conftest import Make
from .kit import MIB, audit, chain, info, put


def stored(store: BlockStore, length: int, name: str = "p") -> tuple[Namespace, list[bytes]]:
    """One prompt of so many small blocks."""
    ns = store.open_namespace(info("a", (64,)))
    digests = chain(name, length)
    parent = None
    for first in range(0, length, 1024):
        part = digests[first : first + 1024]
        for entry in store.reserve(ns, parent, part, "w", 0.0):
            assert isinstance(entry, Reservation)
            entry.chunk(0)
            store.fill(entry, 0, 0, 0.0)
        parent = part[-1]
    assert store.count(ns) == length
    return ns, digests


def lease_all(store: BlockStore, take: Callable[[], Lease]) -> list[Lease]:
    """Leases until the store gives no more."""
    leases = []
    with pytest.raises(StoreFull, match="lease: no memory"):
        while True:
            leases.append(take())
    return leases


@pytest.mark.parametrize(("count", "times"), [(2000, 60), (1, 4096), (16, 100)])
def test_what_leases_take_is_counted_and_has_an_end(make: Make, count: int, times: int) -> None:
    """One chain named again and again costs the asker little; each naming costs the store memory."""
    store = make(64 * MIB)
    ns, digests = stored(store, 2000)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        many: list[Lease] = []
        for owner in range(5):
            many += lease_all(
                store,
                lambda: store.lease(ns, [], owner, 30.0, 0.0, ((digests[-1], count),) * times),  # noqa: B023
            )
        gc.collect()
        measured = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    stats = store.stats()
    assert measured <= stats.bytes_leases <= 2 * MIB
    assert stats.bytes_leases == sum(lease.nbytes for lease in many) == store._ledger.lease_bytes
    with pytest.raises(StoreFull):  # nor has anybody else any: the node has given what it has
        for owner in range(100, 200):
            store.lease(ns, digests, owner, 30.0, 0.0)
    audit(store)
    for owner in (*range(5), *range(100, 200)):
        store.drop_owner(owner)
    for lease in many:
        assert not lease.open and lease.blocks == []
    assert store.stats().bytes_leases == 0 and not store._ledger._reading
    assert store.lease(ns, digests, 0, 30.0, 0.0).counts == (2000,)


def test_an_owner_has_a_share_of_leases_and_may_always_have_one(make: Make) -> None:
    store = make(64 * MIB)
    ns, digests = stored(store, 2000)
    tails = ((digests[-1], 2000),) * 32
    first = store.lease(ns, digests, "greedy", 30.0, 0.0, tails)
    assert first.nbytes > 2 * MIB // 4 and sum(first.counts) == 66_000
    with pytest.raises(StoreFull):
        store.lease(ns, digests[:1], "greedy", 30.0, 0.0)
    assert store.lease(ns, digests, "modest", 30.0, 0.0).counts == (2000,)
    store.release(first)
    assert store.lease(ns, digests[:1], "greedy", 30.0, 0.0).counts == (1,)


def test_a_lease_that_is_still_sent_from_counts_until_it_is_not(make: Make) -> None:
    store = make(64 * MIB)
    ns, digests = stored(store, 2000)
    leases = lease_all(store, lambda: store.lease(ns, digests, "r", 30.0, 0.0))
    for lease in leases:
        store.pin(lease)
        store.release(lease)
    with pytest.raises(StoreFull):
        store.lease(ns, digests, "r", 30.0, 0.0)
    for lease in leases:
        assert len(lease.blocks) == 2000
        store.unpin(lease)
        assert lease.blocks == []
    assert store.stats().bytes_leases == store.stats().bytes_held == 0


def test_equal_chains_are_each_served(make: Make) -> None:
    """A prompt that has one document twice asks for it twice."""
    store = make(64 * MIB)
    ns, digests = stored(store, 30)
    lease = store.lease(
        ns, digests[:3], "r", 30.0, 0.0, ((digests[29], 10), (digests[29], 10), (digests[25], 10))
    )
    assert lease.counts == (3, 10, 10, 10)
    assert [b.digest for b in lease.blocks] == [*digests[:3], *digests[20:] * 2, *digests[16:26]]
    store.release(lease)
    assert store.stats().bytes_held == 0


def test_what_chains_find_costs_and_has_an_end(make: Make) -> None:
    """Chains that are deep, each apart from the others: what is beyond the limit counts nothing."""
    store = make(512 * MIB)
    ns, deep = stored(store, 5000)
    asked = ((deep[-1], 5000),) * 20
    lease = store.lease(ns, [], "r", 30.0, 0.0, asked)
    counts = lease.counts[1:]
    assert set(counts) == {0, 5000} and sorted(counts, reverse=True) == list(counts)
    assert 2 * sum(counts) <= CHAIN_STEPS < 2 * (sum(counts) + 5000) + 5000


@pytest.mark.parametrize("end", ["drop", "expire", "unpin", "release"])
def test_many_holds_are_let_go_of_in_steps(make: Make, end: str) -> None:
    store = make(512 * MIB)
    ns, digests = stored(store, 6000)
    tails = [(digest, 1) for digest in digests[::2]]
    leases = [store.lease(ns, digests[-1:], "r", 9.0, 0.0, tails) for _ in range(10)]
    ending = store._room.ending
    if end == "drop":
        store.drop_owner("r")
    elif end == "expire":
        store.sweep(9.0)
    elif end == "release":
        for lease in leases:
            store.release(lease)
            assert len(ending) < 4000
    else:
        for lease in leases:
            store.pin(lease)
            store.release(lease)
        assert not ending
        for lease in leases:
            store.unpin(lease)
    held = store.stats().bytes_held
    assert not any(lease.open for lease in leases) and held > 0
    assert store.stats().bytes_leases == 0
    audit(store)  # what waits is accounted for
    sweeps = 0
    while store.stats().bytes_held:
        store.sweep(9.0)
        sweeps += 1
    assert 1 <= sweeps <= 10
    assert not ending


def test_a_deep_block_that_is_held_again_before_it_was_let_go_of_stays(make: Make) -> None:
    store = make(512 * MIB)
    ns, digests = stored(store, 6000)
    for _ in range(50):
        lease = store.lease(ns, digests[-1:], "r", 9.0, 0.0)
        store.release(lease)
    audit(store)
    last = store.lease(ns, digests[-1:], "r", 9.0, 0.0)
    while store._room.ending:
        store.sweep(1.0)
    audit(store)
    assert last.open and store.stats().bytes_held == 6000 * last.blocks[0].slab.klass.nbytes
    store.clear(ns)
    store.release(last)
    while store.stats().blocks_hidden:
        store.sweep(1.0)
    assert store.stats().bytes_used == 0 and not store._trees


def test_what_waits_to_be_let_go_of_is_let_go_of_when_room_is_needed(make: Make) -> None:
    store = make(4 * MIB)
    tiny = store.open_namespace(info("tiny", (1,)))
    big = store.open_namespace(info("big", (MIB - 64,)))
    digests = chain("p", 120)
    assert put(store, tiny, digests, 0.0) == ["stored"] * 120
    lease = store.lease(tiny, digests, "r", 9.0, 0.0, [(digest, 1) for digest in digests])
    store._ledger.end(lease, "over")  # and nothing more: all of it waits
    assert len(store._room.ending) == 121
    assert put(store, big, chain("b", 3), 1.0) == ["stored"] * 3
    assert store.contains(tiny, digests) == [False] * 120


def test_what_waits_to_be_let_go_of_is_let_go_of_when_the_index_is_full(make: Make) -> None:
    store = make(4 * MIB)
    count = (store.stats().bytes_index_limit - namespace_nbytes(1)) // index_nbytes(1)
    ns, digests = stored(store, count)
    lease = store.lease(ns, digests, "r", 9.0, 0.0)
    assert put(store, ns, chain("q", 1), 1.0) == ["full"]
    store._ledger.end(lease, "over")
    assert len(store._room.ending) == 1
    assert put(store, ns, chain("q", 1), 1.0) == ["stored"]
    assert store.stats().evicted_total == 1


def test_what_the_gone_had_reserved_ends_in_steps(make: Make) -> None:
    store = make(512 * MIB)
    ns = store.open_namespace(info("a", (64,)))
    digests = chain("p", 5000)
    first = store.reserve(ns, None, digests, "w", 0.0)
    store.drop_owner("w")
    left = store.stats().reservations
    assert 0 < left < 5000 and isinstance(first[0], Reservation) and first[0].open
    again = store.reserve(ns, None, chain("q", 16_384), "w", 0.0)  # it is back, and owes nothing
    assert all(isinstance(entry, Reservation) for entry in again)
    assert store.stats().reservations == 16_384  # and as much as it took, others have left
    audit(store)
    store.drop_owner("w")
    store.drop_owner("w")
    assert isinstance(store.reserve(ns, None, chain("q", 1), "x", 0.0)[0], Skip)
    for _ in range(40):
        store.sweep(1.0)
    stats = store.stats()
    assert (stats.reservations, stats.bytes_index, stats.aborted_total) == (0, 0, 5000 + 16_384)
    assert not store._ledger._owned and not store._ledger._writing
