"""I04, D07, E02, L01: any order of operations keeps every identity and no byte in use is touched."""

from __future__ import annotations

import hashlib
from itertools import product

import numpy as np
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
from hypercache.store import Block, BlockStore, HoldEnded, Lease, Reservation, Skip
from hypercache.store.modular import find

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
MARKED = st.sampled_from([True, True, True, False])
CHAINS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4)), max_size=3)  # which, blocks


def name(path: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(bytes(path), digest_size=16).digest()


def prefixes(path: tuple[int, ...]) -> list[bytes]:
    return [name(path[:i]) for i in range(1, len(path) + 1)]


SIZE = 2  # tokens of a block
ALL = [path for length in range(1, 5) for path in product((0, 1), repeat=length)]
PATH = {name(path): path for path in ALL}


def text(path: tuple[int, ...]) -> int:
    """Fingerprint of a path's last block: its text is the path's last two steps, so that each text stands in
    several contexts, but in no more of them than a search looks at."""
    return 1 + int("".join(map(str, (1, *path[-2:]))), 2)


def marks(path: tuple[int, ...]) -> list[bytes]:
    return [text(path[:i]).to_bytes(8, "little") + name(path[:i]) for i in range(1, len(path) + 1)]


# Prompts: texts of stored paths, or their ends, at odd and even tokens, with other text between.
PROMPTS = st.lists(st.tuples(st.integers(0, 3), PATHS, st.integers(0, 2)), min_size=1, max_size=4)


def prompt(pieces: list[tuple[int, tuple[int, ...], int]]) -> list[int]:
    """The fingerprint at each token of a prompt; 0 where nothing known can stand."""
    out: list[int] = []
    for gap, path, first in pieces:
        out += [0] * gap
        for end in range(min(first, len(path) - 1) + 1, len(path) + 1):
            out += [text(path[:end]), 0]
    return out


def runs_of(visible: set[tuple[int, ...]], texts: list[int]) -> list[list[tuple[int, ...]]]:
    """All chains of blocks that hold ``texts``, each as long as it goes."""
    out = [[path] for path in visible if text(path) == texts[0]]
    for run in out:
        for wanted in texts[1:]:
            step = [path for path in visible if path[:-1] == run[-1] and text(path) == wanted]
            if not step:
                break
            run += step
    return out


class Machine(RuleBasedStateMachine):
    """The oracle knows what was committed and not removed since, and how much of it the store may evict."""

    reservations = Bundle("reservations")
    leases = Bundle("leases")
    pinned = Bundle("pinned")

    @initialize()
    def start(self) -> None:
        self.store = self.make()
        self.now = 0.0
        self.spaces = {key: self.store.open_namespace(info(key, c, SIZE)) for key, c in SPACES.items()}
        self.parents: dict[tuple[str, bytes], bytes | None] = {}
        self.full: set[tuple[str, bytes]] = set()  # all layers in, current epoch
        self.marked: dict[tuple[str, bytes], bool] = {}  # by the latest writer
        self.opened: list[Lease] = []
        self.pins: list[Lease | Reservation] = []
        self.evicted = 0

    def make(self) -> BlockStore:
        return BlockStore(4 * MIB, lease_limit_s=LEASE, store_stall_s=STALL)

    def moving(self) -> list[Block]:
        return []

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
        marked=MARKED,
    )
    def reserve(self, space, path, skip, owner, marked):
        return multiple(*self.take(space, path, skip, owner, marked))

    def take(self, space, path, skip, owner, marked):
        digests = prefixes(path)
        first = min(skip, len(digests) - 1)
        parent = digests[first - 1] if first else None
        before = set(self.store.contains(self.spaces[space], digests))
        given = marks(path)[first:] if marked else ()
        entries = self.store.reserve(self.spaces[space], parent, digests[first:], owner, self.now, given)
        assert len(entries) == len(digests) - first
        got = []
        for index, entry in enumerate(entries, first):
            if isinstance(entry, Skip):
                assert entry.reason in ("exists", "pending", "orphan", "full")
                if entry.reason == "exists":
                    assert True in before
                continue
            self.parents[space, entry.digest] = digests[index - 1] if index else None
            self.marked[space, entry.digest] = marked
            assert entry.nbytes == sum(SPACES[space])
            got.append((space, entry))
        self.reconcile()
        return got

    @rule(space=NAMES, paths=st.lists(PATHS, min_size=1, max_size=4), owner=OWNERS, marked=MARKED)
    def put(self, space, paths, owner, marked):
        for path in paths:
            for _, reservation in self.take(space, path, 0, owner, marked):
                self.fill((space, reservation), [0, 1, 2])

    @rule(target=reservations, item=reservations, owner=OWNERS, pin=st.booleans(), marked=MARKED)
    def write_again(self, item, owner, pin, marked):
        """E03: somebody wants a block whose writer may have stalled, perhaps with a transport at work."""
        space, reservation = item
        if pin:
            self.pin_any(reservation)
        self.now += STALL
        key = space, reservation.digest
        parent = self.parents[key]
        if key in self.full:
            return multiple()
        mark = marks(PATH[reservation.digest])[-1:] if marked else ()
        (entry,) = self.store.reserve(self.spaces[space], parent, [key[1]], owner, self.now, mark)
        self.reconcile()
        if isinstance(entry, Skip):
            assert entry.reason in ("full", "orphan")
            return multiple()
        assert not reservation.open or not reservation.block.tree.live  # cleared: refused when it fills
        self.marked[key] = marked
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
        was_open = reservation.open and reservation.block.tree.live  # or it is of before a clear
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

    def hit(self, space, path):
        """Blocks of the causal run."""
        visible = self.visible()
        missing = [i for i, digest in enumerate(prefixes(path)) if (space, digest) not in visible]
        return min(missing, default=len(path))

    @rule(target=leases, space=NAMES, path=PATHS, chains=CHAINS, owner=OWNERS, ttl=st.floats(0.5, 20))
    def lease(self, space, path, chains, owner, ttl):
        digests = prefixes(path)
        count = self.store.match(self.spaces[space], digests, self.now)
        known = sorted(PATH[d] for s, d in self.visible() if s == space)
        chains = [((known + ALL)[which % (2 * len(known) + 1)], length) for which, length in chains]
        asked = [(name(chain), length) for chain, length in chains]
        lease = self.store.lease(self.spaces[space], digests, owner, ttl, self.now, asked)
        visible = self.visible()
        want = [digests[: self.hit(space, path)]]
        for chain, length in chains:
            there = (space, name(chain)) in visible and length <= len(chain)
            want.append(prefixes(chain)[-length:] if there else [])
        assert [b.digest for b in lease.blocks] == [digest for chain in want for digest in chain]
        assert lease.counts == tuple(map(len, want)) and count == len(want[0])
        assert lease.open == any(want) and lease.expires <= self.now + LEASE
        self.opened.append(lease)
        return lease

    @rule(space=NAMES, path=PATHS, pieces=PROMPTS, first=st.integers(0, 4), least=st.integers(1, 3))
    def locate(self, space, path, pieces, first, least):
        asked = prompt(pieces)
        located = self.store.locate(
            self.spaces[space], prefixes(path), first, np.array(asked, np.uint64), least, self.now
        )
        hit = self.hit(space, path)
        assert located.hit == hit and located.complete
        self.check_runs(space, asked, first, hit * SIZE, least, located.runs)

    def check_runs(self, space, asked, first, start, least, runs):
        found = []
        for run in runs:
            paths = [PATH[block.digest] for block in run.blocks]
            assert paths == [paths[-1][: len(p)] for p in paths]  # parent -> child
            assert run.source == (len(paths[0]) - 1) * SIZE
            assert [block.modular for block in run.blocks] == [name(p) for p in paths]
            found.append((run.at - first, paths))
        visible = {PATH[d] for s, d in self.visible() if s == space and self.marked[s, d]}
        at, want = max(0, start - first), []
        while at < len(asked):
            best = runs_of(visible, asked[at::SIZE])
            longest = max(map(len, best), default=0)
            if longest >= least:
                want.append((at, [run for run in best if len(run) == longest]))
            at += longest * SIZE if longest >= least else 1
        assert [at for at, _ in found] == [at for at, _ in want]
        for (_, paths), (_, best) in zip(found, want, strict=True):
            assert paths in best
            assert len(paths[0]) == 1 or all(len(run[0]) > 1 for run in best)  # the isolated one, if there

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
        audit(self.store, self.pins, self.moving())
        visible = self.visible()
        assert self.store.stats().blocks == len(visible)
        for key, space in self.spaces.items():
            digests = [d for s, d in self.parents if s == key]
            assert self.store.contains(space, digests) == [(key, d) in visible for d in digests]

    @invariant()
    def what_is_visible_is_found(self):
        """Every text in every order it may be stored in, at even tokens and at odd ones."""
        if not hasattr(self, "store"):
            return
        asked = prompt([(0, path, 0) for path in ALL[-8:]] + [(1, path, 1) for path in ALL[-16:-8]])
        for space, handle in self.spaces.items():
            tree = self.store._tree(handle)
            if tree is not None:
                for least in (1, 2):
                    found = find(tree, self.store._room.sieve, 3, np.array(asked, np.uint64), 5, least)
                    assert found[1]
                    self.check_runs(space, asked, 3, 5, least, found[0])

    @invariant()
    def bytes_in_use_are_untouched(self):
        if not hasattr(self, "store"):
            return
        for lease in self.opened:
            if lease.open or lease.pins:
                assert intact(self.store, [block for block in lease.blocks if block.ready])
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
        left = stats.bytes_used, stats.bytes_index, stats.leases, stats.reservations, stats.bytes_held
        assert left == (0,) * 5, stats
        assert stats.largest_free_run == stats.bytes_data

    def teardown(self):
        if hasattr(self, "store"):
            self.end_everything()
            self.store.close()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
