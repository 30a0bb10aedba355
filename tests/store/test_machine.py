"""I04, D07, E02, L01: any order of operations keeps every identity and no byte in use is touched."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from hypercache.errors import StoreFull
from hypercache.store import BlockStore, HoldEnded, Lease, Reservation, Skip

from .kit import MIB, audit, info, intact, write_layer

STALL, LEASE = 5.0, 10.0
# Blocks of several size classes in an arena of three regions of 1 MiB: with each other's slots, with slabs of
# their own, and over more than one region.
SPACES = {
    "small": (30_000, 7, 1_000),
    "half": (400_000, 200_001),
    "wide": (1_200_000,),
}
NAMES = st.sampled_from(sorted(SPACES))
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
OWNERS = st.sampled_from(["a", "b", "c"])


def name(path: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(bytes(path), digest_size=16).digest()


def prefixes(path: tuple[int, ...]) -> list[bytes]:
    return [name(path[:i]) for i in range(1, len(path) + 1)]


class Machine(RuleBasedStateMachine):
    """The oracle knows what was committed and not removed since, and how much of it the store may evict."""

    reservations = Bundle("reservations")
    leases = Bundle("leases")
    pinned = Bundle("pinned")

    @initialize()
    def start(self) -> None:
        self.store = BlockStore(4 * MIB, lease_limit_s=LEASE, store_stall_s=STALL)
        self.now = 0.0
        self.spaces = {key: self.store.open_namespace(info(key, chunks)) for key, chunks in SPACES.items()}
        self.parents: dict[tuple[str, bytes], bytes | None] = {}
        self.full: set[tuple[str, bytes]] = set()  # all layers in, current epoch
        self.opened: list[Lease] = []
        self.pins: list[Lease | Reservation] = []
        self.evicted = 0

    def visible(self) -> set[tuple[str, bytes]]:
        out = set()
        for space, digest in self.full:
            node: bytes | None = digest
            while node is not None and (space, node) in self.full:
                node = self.parents[space, node]
            if node is None:
                out.add((space, digest))
        return out

    def drop(self, space: str, digest: bytes) -> None:
        """The oracle's subtree removal."""
        gone = {digest}
        for _ in range(4):
            gone |= {d for (s, d), p in self.parents.items() if s == space and p in gone}
        self.full -= {(space, d) for d in gone}

    @rule(
        target=reservations,
        space=NAMES,
        path=PATHS,
        skip=st.integers(0, 2),
        owner=OWNERS,
    )
    def reserve(self, space, path, skip, owner):
        return multiple(*self.take(space, path, skip, owner))

    def take(self, space, path, skip, owner):
        digests = prefixes(path)
        first = min(skip, len(digests) - 1)
        parent = digests[first - 1] if first else None
        before = set(self.store.contains(self.spaces[space], digests))
        entries = self.store.reserve(self.spaces[space], parent, digests[first:], owner, self.now)
        assert len(entries) == len(digests) - first
        got = []
        for index, entry in enumerate(entries, first):
            if isinstance(entry, Skip):
                assert entry.reason in ("exists", "pending", "orphan", "full")
                if entry.reason == "exists":
                    assert True in before
                continue
            self.parents[space, entry.digest] = digests[index - 1] if index else None
            assert entry.nbytes == sum(SPACES[space])
            got.append((space, entry))
        self.reconcile()
        return got

    @rule(space=NAMES, path=PATHS, owner=OWNERS)
    def put(self, space, path, owner):
        for _, reservation in self.take(space, path, 0, owner):
            self.fill((space, reservation), [0, 1, 2])

    @rule(target=reservations, item=reservations, owner=OWNERS, pin=st.booleans())
    def write_again(self, item, owner, pin):
        """E03: somebody wants a block whose writer may have stalled, perhaps with a transport at work."""
        space, reservation = item
        if pin:
            self.pin_any(reservation)
        self.now += STALL
        key = space, reservation.digest
        parent = self.parents[key]
        if key in self.full:
            return multiple()
        (entry,) = self.store.reserve(self.spaces[space], parent, [reservation.digest], owner, self.now)
        self.reconcile()
        if isinstance(entry, Skip):
            assert entry.reason in ("full", "orphan")
            return multiple()
        assert not reservation.open or not reservation.block.tree.live  # cleared: refused when it fills
        return space, entry

    @rule(item=reservations, layers=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def fill(self, item, layers):
        space, reservation = item
        for layer in layers:
            if layer >= len(SPACES[space]):
                continue
            key = space, reservation.digest
            was_open = reservation.open
            try:
                reservation.chunk(layer)  # may evict
                self.reconcile()
                if write_layer(self.store, reservation, layer, self.now):
                    self.full.add(key)
            except HoldEnded:
                assert not reservation.open
            except StoreFull:
                assert was_open and reservation.ended == "full"
                self.reconcile()
                self.drop(*key)

    @rule(item=reservations)
    def fill_all(self, item):
        self.fill(item, [0, 1, 2])

    @rule(item=reservations)
    def abort(self, item):
        space, reservation = item
        was_open = reservation.open
        self.store.abort(reservation)
        if was_open:
            self.drop(space, reservation.digest)
        with pytest.raises(HoldEnded):
            reservation.chunk(0)

    @rule(target=pinned, item=reservations)
    def pin(self, item):
        return self.pin_any(item[1])

    @rule(target=pinned, lease=leases)
    def pin_lease(self, lease):
        return self.pin_any(lease)

    def pin_any(self, held):
        if not held.open:
            with pytest.raises(HoldEnded):
                self.store.pin(held)
            return multiple()
        try:
            self.store.pin(held)
        except (StoreFull, HoldEnded):  # HoldEnded: it was cleared, and that is found out only now
            assert not held.open
            self.reconcile()
            if held.ended == "full":
                self.drop(held.block.tree.space.info.label, held.digest)
            return multiple()
        self.reconcile()
        self.pins.append(held)
        return held

    @rule(held=consumes(pinned))
    def unpin(self, held):
        if held in self.pins:  # unless all has ended in between
            self.store.unpin(held)
            self.pins.remove(held)

    @rule(target=leases, space=NAMES, path=PATHS, owner=OWNERS, ttl=st.floats(0.5, 20))
    def lease(self, space, path, owner, ttl):
        digests = prefixes(path)
        count = self.store.match(self.spaces[space], digests, self.now)
        lease = self.store.lease(self.spaces[space], digests, owner, ttl, self.now)
        visible = self.visible()
        want = 0
        while want < len(digests) and (space, digests[want]) in visible:
            want += 1
        assert [b.digest for b in lease.blocks] == digests[:want] and count == want
        assert lease.open == bool(want) and lease.expires <= self.now + LEASE
        self.opened.append(lease)
        return lease

    @rule(lease=leases)
    def release(self, lease):
        self.store.release(lease)
        assert not lease.open

    @rule(space=NAMES, path=PATHS)
    def evict(self, space, path):
        digest = name(path)
        before = self.visible()
        self.drop(space, digest)
        assert self.store.evict(self.spaces[space], [digest]) == len(before - self.visible())

    @rule(space=NAMES)
    def clear(self, space):
        count = sum(s == space for s, _ in self.visible())
        self.full = {(s, d) for s, d in self.full if s != space}
        cleared = self.store.clear(self.spaces[space])
        assert cleared == (count, count * sum(SPACES[space]))

    @rule(owner=OWNERS)
    def drop_owner(self, owner):
        writing = self.written_by(owner)
        self.store.drop_owner(owner)
        for space, digest in writing:
            self.drop(space, digest)
        assert not any(lease.open for lease in self.opened if lease.owner == owner)

    def written_by(self, owner):
        held = [h for h in self.store._ledger.owned_by(owner) if isinstance(h, Reservation)]
        return [(h.block.tree.space.info.label, h.digest) for h in held if h.block.tree.live]

    @rule(step=st.sampled_from([0.5, 3.0, LEASE]))
    def wait(self, step):
        self.now += step

    @rule()
    def sweep(self):
        stalled = [
            (r.block.tree.space.info.label, r.digest)
            for batch in self.store._ledger._batches
            if self.now - batch.progress >= STALL
            for r in batch.open
            if r.block.tree.live
        ]
        self.store.sweep(self.now)
        for space, digest in stalled:
            self.drop(space, digest)
        assert not any(lease.open and lease.expires <= self.now for lease in self.opened)

    def reconcile(self):
        """What reserve evicted is gone from the oracle; it must be just as many as the store says."""
        visible = self.visible()
        gone = {
            (space, digest)
            for space, digest in visible
            if self.store.contains(self.spaces[space], [digest]) == [False]
        }
        total = self.store.stats().evicted_total
        assert len(gone) == total - self.evicted
        self.evicted = total
        self.full -= gone

    @invariant()
    def identities(self):
        if not hasattr(self, "store"):
            return
        audit(self.store, self.pins)
        visible = self.visible()
        assert self.store.stats().blocks == len(visible)
        for key, space in self.spaces.items():
            digests = [d for s, d in self.parents if s == key]
            assert self.store.contains(space, digests) == [(key, d) in visible for d in digests]

    @invariant()
    def bytes_in_use_are_untouched(self):
        if not hasattr(self, "store"):
            return
        for lease in self.opened:
            if lease.open or lease.pins:
                assert intact(self.store, lease.blocks)
        self.opened = [lease for lease in self.opened if lease.open or lease.pins]

    @rule()
    def end_everything(self):
        """I02: when all is over nothing is left, and space is in one piece again."""
        for held in self.pins:
            self.store.unpin(held)
        self.pins.clear()
        for owner in ("a", "b", "c"):
            self.drop_owner(owner)
        for space in SPACES:
            self.clear(space)
        self.store.sweep(self.now)
        stats = self.store.stats()
        assert (stats.bytes_used, stats.bytes_index, stats.leases, stats.reservations, stats.bytes_held) == (
            0,
        ) * 5
        assert stats.largest_free_run == stats.bytes_data

    def teardown(self):
        if hasattr(self, "store"):
            self.end_everything()
            self.store.close()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
