"""Match, leases and their ends: cases C08, D01, D04, D05, D06, D07, D09, D13, L01, L03."""

from __future__ import annotations

import random

import pytest

from hypercache.errors import ConfigError, HyperCacheError, SpecError
from hypercache.store import BlockStore, HoldEnded, Lease, Reservation

from .conftest import Make
from .kit import MIB, audit, chain, info, intact, payload, put, write

CHUNKS = (40_000, 24_000)


def test_a_stored_chain_is_found_as_far_as_it_goes(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", CHUNKS))
    digests = chain("p", 10)
    assert put(store, ns, digests[:6], 0.0) == ["stored"] * 6
    assert store.match(ns, digests, 1.0) == 6
    assert store.match(ns, digests[3:], 1.0) == 3
    assert store.match(ns, [], 1.0) == 0
    assert store.match(ns, chain("q", 2), 1.0) == 0
    assert store.contains(ns, digests) == [True] * 6 + [False] * 4


def test_a_run_is_a_chain_even_if_all_its_blocks_are_stored(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", CHUNKS))
    p, q = chain("p", 2), chain("q", 2)
    put(store, ns, p, 0.0)
    put(store, ns, q, 0.0)
    assert store.match(ns, [p[0], q[1]], 1.0) == 1
    assert store.match(ns, [p[1], p[0]], 1.0) == 1


def test_c08_a_hole_ends_the_prefix(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", CHUNKS))
    digests = chain("p", 3)
    put(store, ns, digests, 0.0)
    assert store.evict(ns, [digests[1]]) == 2
    assert store.match(ns, digests, 1.0) == 1
    assert store.match(ns, digests[2:], 1.0) == 0
    store.evict(ns, [digests[0]])
    assert store.match(ns, digests, 1.0) == 0
    assert store.stats().bytes_used == 0


def test_d13_a_block_that_lacks_a_part_is_no_block(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", CHUNKS))
    digests = chain("p", 3)
    for missing in range(2):
        entries = store.reserve(ns, None, digests, "w", 0.0)
        for entry in entries:
            assert isinstance(entry, Reservation)
            for layer in range(2):
                if entry.digest != digests[1] or layer != missing:
                    view = entry.chunk(layer)
                    view[:] = payload(entry.digest, layer, view.nbytes)
                    store.fill(entry, layer, 0, 0.0)
        assert store.match(ns, digests, 0.0) == 1
        assert store.contains(ns, digests) == [True, False, False]
        store.clear(ns)
        store.drop_owner("w")


def test_d01_a_fetch_after_eviction_is_a_shorter_prefix(make: Make) -> None:
    """10^4 rounds at 100 % memory: what is leased is whole, contiguous and intact; nothing is raised."""
    store = make(4 * MIB)
    ns = store.open_namespace(info("a", CHUNKS))
    rng = random.Random(1)
    prompts = [chain(f"p{i}", 12) for i in range(12)]
    shorter = 0
    for clock in range(10_000):
        now = float(clock)
        asked = rng.choice(prompts)
        promised = store.match(ns, asked, now)
        other = rng.choice(prompts)
        if rng.random() < 0.2:
            put(store, ns, other[: rng.randint(1, 12)], now)
        elif rng.random() < 0.1:
            store.evict(ns, [rng.choice(other)])
        lease = store.lease(ns, asked, "r", 5.0, now)
        assert [b.digest for b in lease.blocks] == asked[: len(lease.blocks)]
        shorter += len(lease.blocks) < promised
        if clock % 50 == 0:
            assert intact(store, lease.blocks)
        store.release(lease)
    assert shorter > 10
    assert store.stats().evicted_total > 1000
    assert store.stats().bytes_held == 0


def test_d04_blocks_looked_up_and_never_fetched_are_free_after_the_lease(make: Make) -> None:
    store = make(lease_limit_s=30.0)
    ns = store.open_namespace(info("a", CHUNKS))
    digests = chain("p", 50)
    put(store, ns, digests, 0.0)
    for client in range(1000):
        store.match(ns, digests, 0.0)
        store.lease(ns, digests, client, 1e9, 0.0)  # asks for ever, gets the limit
    assert store.stats().bytes_held >= 50 * sum(CHUNKS)
    for client in range(500):
        store.drop_owner(client)
    store.sweep(29.9)
    assert store.stats().leases == 500
    store.sweep(30.0)
    stats = store.stats()
    assert (stats.leases, stats.bytes_held, stats.expired_total) == (0, 0, 500)
    room = store.stats().bytes_data // sum(CHUNKS)
    assert put(store, ns, chain("q", room - 10), 31.0) == ["stored"] * (room - 10)
    assert store.match(ns, digests, 32.0) < 50


def test_d04_expired_leases_make_room_without_a_sweep(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", (MIB - 64,)))
    digests = chain("p", 7)
    assert put(store, ns, digests, 0.0) == ["stored"] * 7
    store.lease(ns, digests, "r", 5.0, 0.0)
    assert put(store, ns, chain("q", 1), 4.9) == ["full"]
    assert put(store, ns, chain("q", 1), 5.0) == ["stored"]


def test_d05_a_lease_ends_its_own_hold_only(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", (MIB - 64,)))
    (digest,) = chain("p", 1)
    put(store, ns, [digest], 0.0)
    first = store.lease(ns, [digest], "r", 30.0, 0.0)
    second = store.lease(ns, [digest], "r", 30.0, 0.0)
    store.release(first)
    store.release(first)
    (block,) = second.blocks
    assert second.open and block.held == 1
    put(store, ns, chain("q", 20), 1.0)
    assert intact(store, second.blocks)
    store.release(second)
    store.release(second)
    store.release(first)
    assert second.blocks == [] and block.held == 0
    audit(store)


def test_d06_lookups_do_not_keep_anything_from_being_evicted(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", CHUNKS))
    digests = chain("p", 1000)
    entries = put(store, ns, digests, 0.0)
    stored = entries.count("stored")
    assert set(entries[stored:]) == {"full"}  # a writer does not evict its own prefix
    for clock in range(100):
        assert store.match(ns, digests, float(clock)) == stored
        store.contains(ns, digests)
    assert put(store, ns, chain("q", 5), 100.0) == ["stored"] * 5
    assert store.match(ns, digests, 101.0) == stored - 5


def test_d07_suffixes_go_before_their_prefix(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", (MIB - 64,)))
    one, two, three, four = digests = chain("p", 4)
    put(store, ns, digests, 0.0)
    store.evict(ns, [three])
    assert put(store, ns, [three, four], 10.0, parent=two) == ["stored", "stored"]
    for step in range(8):
        put(store, ns, chain(f"q{step}", 1), 11.0 + step)
        found = store.contains(ns, digests)
        assert found == sorted(found, reverse=True)  # never a block without its prefix
        audit(store)
    assert found == [False] * 4
    assert store.contains(ns, [one]) == [False]


def test_d07_the_less_used_branch_goes_first_and_the_shared_prefix_last(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", (MIB - 64,)))
    root, left, right = chain("root", 1), chain("left", 2), chain("right", 2)
    put(store, ns, root, 0.0)
    put(store, ns, left, 1.0, parent=root[0])
    put(store, ns, right, 2.0, parent=root[0])
    store.match(ns, root + left, 3.0)
    gone = []
    for step in range(7):
        put(store, ns, chain(f"q{step}", 1), 4.0 + step)
        for name, digest in zip(("root", "l0", "l1", "r0", "r1"), root + left + right, strict=True):
            if name not in gone and store.contains(ns, [digest]) == [False]:
                gone.append(name)
    assert gone == ["r1", "r0", "l1", "l0", "root"]


def test_a_lookup_in_the_middle_of_a_chain_keeps_the_whole_prefix_warm(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", (MIB - 64,)))
    p, q = chain("p", 3), chain("q", 3)
    put(store, ns, p, 0.0)
    put(store, ns, q, 1.0)
    assert store.match(ns, p[2:], 2.0) == 1
    put(store, ns, chain("r", 4), 3.0)
    assert store.contains(ns, p) == [True] * 3
    assert store.contains(ns, q) == [False] * 3


def test_d09_after_its_lease_a_reader_gets_an_error_and_never_the_new_owners_bytes(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", (MIB - 64,)))
    digests = chain("p", 3)
    put(store, ns, digests, 0.0)
    lease = store.lease(ns, digests, "slow", 2.0, 0.0)
    blocks = lease.blocks
    assert len(blocks) == 3 and intact(store, blocks)
    put(store, ns, chain("q", 4), 1.0)
    put(store, ns, chain("r", 7), 2.0)  # the lease is over: its memory is used again
    assert not lease.open
    for block in blocks:
        with pytest.raises(HoldEnded, match="lease has ended"):
            store.chunk(block, 0)
    with pytest.raises(HoldEnded, match="expired"):
        store.pin(lease)


def test_d09_what_a_transport_still_reads_outlives_its_lease(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", (MIB - 64,)))
    digests = chain("p", 3)
    put(store, ns, digests, 0.0)
    lease = store.lease(ns, digests, "slow", 2.0, 0.0)
    store.pin(lease)
    store.pin(lease)
    store.clear(ns)
    store.sweep(50.0)
    assert not lease.open
    assert put(store, ns, chain("r", 7), 60.0).count("stored") == 4
    assert intact(store, lease.blocks)
    store.unpin(lease)
    assert intact(store, lease.blocks)
    store.unpin(lease)
    assert put(store, ns, chain("s", 7), 70.0).count("stored") == 7
    with pytest.raises(HyperCacheError, match="unpin without pin"):
        store.unpin(lease)


def test_views_of_stored_bytes_are_read_only(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", CHUNKS))
    put(store, ns, chain("p", 1), 0.0)
    (block,) = store.lease(ns, chain("p", 1), "r", 1.0, 0.0).blocks
    view = store.chunk(block, 1)
    assert view.nbytes == CHUNKS[1]
    with pytest.raises(TypeError):
        view[0] = 1
    with pytest.raises(SpecError, match=r"layers 0\.\.1"):
        store.chunk(block, 2)
    with pytest.raises(SpecError, match=r"layers 0\.\.1"):
        store.chunk(block, -1)


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan")])
def test_a_lease_needs_a_time(store: BlockStore, ttl: float) -> None:
    ns = store.open_namespace(info("a", CHUNKS))
    with pytest.raises(ConfigError, match="ttl_s"):
        store.lease(ns, chain("p", 1), "r", ttl, 0.0)


def test_l01_ends_in_any_order_and_twice(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", CHUNKS))
    digests = chain("p", 4)
    nothing = store.lease(ns, digests, "r", 1.0, 0.0)  # before there is anything
    assert nothing.blocks == [] and not nothing.open
    store.release(nothing)
    store.drop_owner("r")
    store.drop_owner("never seen")
    entries = store.reserve(ns, None, digests, "w", 0.0)
    for entry in reversed(entries):
        assert isinstance(entry, Reservation)
        if entry.digest == digests[2]:
            entry.chunk(0)
            store.fill(entry, 0, 0, 0.0)  # mid-layer
        store.abort(entry)
        store.abort(entry)
    assert store.stats().aborted_total == 4
    put(store, ns, digests, 1.0)
    lease = store.lease(ns, digests, "r", 1.0, 1.0)
    store.drop_owner("r")
    store.release(lease)
    store.sweep(99.0)
    store.release(lease)
    stats = store.stats()
    assert (stats.leases, stats.reservations, stats.bytes_held) == (0, 0, 0)


def test_l03_requests_that_end_between_layers(make: Make) -> None:
    """50 requests that start, read a layer, or end by whatever means, in 10^4 random steps."""
    store = make(4 * MIB, lease_limit_s=20.0)
    ns = store.open_namespace(info("a", CHUNKS))
    rng = random.Random(3)
    prompts = [chain(f"p{i}", 6) for i in range(10)]
    running: dict[int, Lease] = {}
    ended = 0
    for clock in range(10_000):
        request = rng.randrange(50)
        lease = running.get(request)
        what = rng.random()
        if lease is None:
            prompt = rng.choice(prompts)
            put(store, ns, prompt, float(clock))
            running[request] = store.lease(ns, prompt, request, rng.uniform(1, 40), float(clock))
        elif what < 0.6:
            for block in lease.blocks:
                if lease.open:
                    layer = rng.randrange(2)
                    assert bytes(store.chunk(block, layer)[:16]) == payload(block.digest, layer, 16)
        elif what < 0.75:
            store.release(running.pop(request))
        elif what < 0.9:
            store.drop_owner(request)
            del running[request]
        else:
            store.sweep(float(clock))
            store.release(lease)  # a stale handle
            ended += not lease.open
    assert ended > 100
    for request in list(running):
        store.drop_owner(request)
    assert store.stats().bytes_held == 0


def test_reservations_hold_their_prefix(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", (MIB - 64,)))
    p = chain("p", 3)
    put(store, ns, p[:2], 0.0)
    (entry,) = store.reserve(ns, p[1], [p[2]], "w", 1.0)
    assert isinstance(entry, Reservation)
    entry.chunk(0)
    assert put(store, ns, chain("q", 7), 2.0).count("stored") == 4
    write(store, entry, 3.0)
    assert store.match(ns, p, 4.0) == 3
