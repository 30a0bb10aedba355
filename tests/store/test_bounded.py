"""No request costs more than its own size: faults of class B (small requests, large work), and D06."""

from __future__ import annotations

from hypercache.store import Block, BlockStore, Reservation
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
