"""The machine of test_machine.py above a disk: blocks go down and come back in any order with all else."""

from __future__ import annotations

import zlib
from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from hypercache.store import BlockStore, Lease
from hypercache.store.index import COMMITTED, Block
from hypercache.store.policy import get

from .kit import MIB, intact
from .test_machine import ALL, LEASE, NAMES, OWNERS, PATH, PATHS, STALL, Machine, prefixes


class Tiered(Machine):
    """Beside the oracle of what is visible, it has the bytes on disk: what was in a block's slot while it was
    written, by place."""

    POLICY = "lrfu"

    def make(self) -> BlockStore:
        self.bytes: dict[int, list[bytes]] = {}
        self.going: list[list[Block]] = []
        self.coming = []
        return BlockStore(
            4 * MIB,
            lease_limit_s=LEASE,
            store_stall_s=STALL,
            policy=get(self.POLICY),
            pin_limit_s=LEASE,
            disk=8 * MIB,
        )

    def moving(self) -> list[Block]:
        written = [block for blocks in self.going for block in blocks]
        return written + [block for recall in self.coming for block in recall.blocks]

    @rule(nbytes=st.sampled_from([1, MIB, 8 * MIB]))
    def demote(self, nbytes):
        trees = self.store._trees.values()
        known = [b for tree in trees for b in tree.blocks.values() if b.state == COMMITTED]
        blocks = self.store.below.demote(nbytes)
        if not self.coming:
            assert bool(blocks) == any(b.record == -1 or b in blocks for b in known)
        for block in blocks:
            assert block.state == COMMITTED and block.ready
            before = block.parent
            assert before is None or before.record != -1  # its prefix is there, or on its way before it
        if blocks:
            self.going.append(blocks)

    @rule(good=st.sampled_from([True, True, True, False]), damaged=st.integers(0, 9))
    def written(self, good, damaged):
        if not self.going:
            return
        blocks = self.going.pop(0)  # one thread writes, in order
        if not good:
            self.store.below.undone(blocks)
            return
        places = []
        for block in blocks:
            spans = map(block.tree.space.span, range(block.tree.space.layers))
            chunks = [bytes(self.store._arena.readonly(block.slab, block.slot, *span)) for span in spans]
            assert [zlib.crc32(chunk) for chunk in chunks] == list(block.crcs)
            places.append(len(self.bytes) + 1)
            self.bytes[places[-1]] = chunks
        if damaged == 0:  # the last, in memory
            places[-1] = -1
            last = blocks[-1]
            if last.state == COMMITTED and last.tree.live:
                self.drop(last.tree.space.info.label, last.digest)
        self.store.below.demoted(blocks, places)

    @rule(space=NAMES, paths=st.lists(PATHS, min_size=1, max_size=4))
    def press(self, space, paths):
        """All that is in memory goes down, and others take its place there."""
        self.demote(8 * MIB)
        while self.going:
            self.written(True, 1)
        self.put(space, paths, "a", True)

    @rule(space=NAMES, path=PATHS, bad=st.integers(0, 9))
    def read(self, space, path, bad):
        lease = self.lease(space, path, [], "b", 5.0)
        if not lease.open:
            return
        self.ask(lease)
        while self.coming:
            self.recalled(0, bad)
        lease.settle()
        assert intact(self.store, lease.blocks)
        self.store.release(lease)

    @rule(which=st.integers(0, 100), bad=st.sampled_from([0, 1, 9, 9, 9]), go=st.booleans())
    def warm(self, which, bad, go):
        """Somebody asks for a block that only the disk has."""
        cold = [b for tree in self.store._trees.values() for b in tree.blocks.values() if b.slot < 0]
        cold = sorted((b.tree.space.info.label, PATH[b.digest]) for b in cold if b.state == COMMITTED)
        if not cold:
            self.press("half", [(1, 1), (0, 1), (1, 0, 1), (0, 0)])
        elif go:
            self.read(*cold[which % len(cold)], bad)
        else:
            self.ask(self.lease(*cold[which % len(cold)], [], "b", 5.0))

    @rule(which=st.integers(0, 100))
    def recall(self, which):
        opened = [lease for lease in self.opened if lease.open]
        if opened:
            self.ask(opened[which % len(opened)])

    def ask(self, lease: Lease) -> None:
        fresh, joined = self.store.below.recall(lease.blocks, MIB)
        assert set(joined) <= set(self.coming) and not set(fresh) & set(joined)
        self.coming += fresh
        self.reconcile()

    @rule(which=st.integers(0, 100), bad=st.integers(0, 9))
    def recalled(self, which, bad):
        if not self.coming:
            return
        recall = self.coming.pop(which % len(self.coming))
        results = []
        for number, (block, place, views) in enumerate(
            zip(recall.blocks, recall.places, recall.chunks, strict=True)
        ):
            if number == bad:
                results.append(None)
                if block.state == COMMITTED and block.tree.live and block.record in (place, -1):
                    self.drop(block.tree.space.info.label, block.digest)
                continue
            for view, chunk in zip(views, self.bytes[place], strict=True):
                view[:] = chunk
            results.append(array("I", map(zlib.crc32, self.bytes[place])))
        self.store.below.recalled(recall, results)
        self.reconcile()

    @rule(which=st.integers(0, 100), moved=st.booleans())
    def lost(self, which, moved):
        """A block that was to be sent as it lies on disk is not there, unless it only has moved."""
        cold = [b for tree in self.store._trees.values() for b in tree.blocks.values() if b.slot < 0]
        cold = [b for b in cold if b.state == COMMITTED]
        if cold:
            block = cold[which % len(cold)]
            if not moved:
                self.drop(block.tree.space.info.label, block.digest)
            self.store.below.lost(block, block.record + moved)

    @rule(which=st.integers(0, 100))
    def settle(self, which):
        """A lease whose blocks have not all come is shortened to those that can be read."""
        opened = [lease for lease in self.opened if lease.open]
        if not opened:
            return
        lease = opened[which % len(opened)]
        first = lease.counts[0]
        ready = [block.ready for block in lease.blocks]
        lease.settle()
        assert lease.counts[0] == [*ready[:first], False].index(False)
        assert lease.ready and sum(lease.counts) == len(lease.blocks)
        if all(ready):
            assert len(lease.blocks) == len(ready)

    @rule(space=NAMES, path=PATHS, steps=st.integers(-1, 100), priority=st.integers(-3, 3))
    def hint(self, space, path, steps, priority):
        known = self.store.hint(self.spaces[space], prefixes(path), steps, priority, self.now)
        assert known == self.hit(space, path)

    @rule(space=NAMES, path=PATHS, owner=OWNERS, seconds=st.sampled_from([1.0, 100.0]))
    def pin_run(self, space, path, owner, seconds):
        digests = prefixes(path)
        count, granted = self.store.pin_run(self.spaces[space], digests, owner, seconds, self.now)
        assert count <= self.hit(space, path) and granted <= LEASE

    @rule(space=NAMES, path=PATHS, owner=OWNERS)
    def unpin_run(self, space, path, owner):
        self.store.unpin_run(self.spaces[space], prefixes(path), owner)

    @rule(count=st.integers(1, 3), move=st.integers(0, 4))
    def reclaim(self, count, move):
        """The records that were written first give their room back; some of them are written again."""
        below = self.store.below
        places = sorted(self.bytes)[:count]
        trees = self.store._trees.values()
        blocks = [b for tree in trees for b in tree.blocks.values() if b.record in places]
        kept = [b for b in blocks if below.lies_in(b, 0)][:move]
        again = {block.record: len(self.bytes) + 1 + n for n, block in enumerate(kept)}
        for old, new in again.items():
            self.bytes[new] = self.bytes[old]
        old = [block.record for block in kept]
        below.moved(kept, old, [again[place] for place in old])
        below.forget([block for block in blocks if block.record in places])
        self.reconcile()

    @rule()
    def end_everything(self):
        while self.going:
            self.store.below.undone(self.going.pop())
        while self.coming:
            self.recalled(0, 9)
        for space in self.spaces:
            for owner in ("a", "b", "c"):
                for path in ALL:
                    self.store.unpin_run(self.spaces[space], prefixes(path), owner)
        super().end_everything()
        assert not self.store.below.dirty and not self.store.stats().bytes_pinned


class TieredLru(Tiered):
    POLICY = "lru"


class TieredS3Fifo(Tiered):
    POLICY = "s3-fifo"


TestTiered = Tiered.TestCase
TestTieredLru = TieredLru.TestCase
TestTieredS3Fifo = TieredS3Fifo.TestCase
for case in (TestTiered, TestTieredLru, TestTieredS3Fifo):
    case.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
del case
