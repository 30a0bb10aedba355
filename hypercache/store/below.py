"""What L3 has of a store's blocks: which are to be written there, which are being read, which are forgotten.

Pure, as the store is: it says what is to be moved, others move it and say how that went. Three things hold
at any time. What is being moved is held. A block gets its record when that is committed, and never another
block's bytes: whoever was evicted, cleared or replaced meanwhile is told apart by its state. And a prefix is
written before what continues it, so that the disk holds whole prompts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from hypercache.errors import HyperCacheError
from hypercache.store import hckv
from hypercache.store.hckv import ALIGN
from hypercache.store.hckv_file import Contents, number_of, place
from hypercache.store.hckv_geometry import check_sizes
from hypercache.store.index import COMMITTED, UNWRITTEN, WRITING, Block, Tree, attach, hold
from hypercache.store.namespace import Namespace, NamespaceInfo
from hypercache.store.policy import Policy
from hypercache.store.room import NO_CRCS, Room

ADMITTED: Final = 3  # uses, being stored and being asked for now among them
Chunks = list[memoryview]  # each layer's, in its slot


@dataclass(eq=False, slots=True)
class Recall:
    """Blocks whose bytes are coming from L3 into the slots that they have got."""

    blocks: list[Block] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    chunks: list[Chunks] = field(default_factory=list)  # writable, for each block
    nbytes: int = 0
    _once: Iterator[bool] = field(default_factory=lambda: iter((True,)))

    def claim(self) -> bool:
        """True for the first who asks, in whatever thread: who reads it, or who gives it up before."""
        return next(self._once, False)


class Below:
    """remove: hides a block and all behind it, and tells who was writing there."""

    def __init__(
        self,
        room: Room,
        policy: Policy,
        remove: Callable[[Block, str], int],
        plant: Callable[[Namespace], Tree | None],
    ) -> None:
        self._room = room
        self._policy = policy
        self._remove = remove
        self._plant = plant
        self._path: list[Block] = []  # ancestors of one that is written next, the first of them last
        self._orphans: dict[
            bytes, dict[bytes, list[Block]]
        ] = {}  # adopted before their parents: by both names
        self.takes: Callable[[NamespaceInfo], bool] = lambda info: True  # whether a segment has room for one
        self.writing = 0  # blocks
        self.loading = 0
        self.demoted_total = 0
        self.promoted_total = 0
        self.admitted_total = 0  # of those, the ones that rank as used
        self.damaged_total = 0

    @property
    def dirty(self) -> int:
        """Blocks that wait for being written."""
        return 0 if self._room.dirty is None else len(self._room.dirty)

    @property
    def dirty_nbytes(self) -> int:
        """What they take in the arena."""
        return self._room.dirty_nbytes

    @property
    def hurry(self) -> bool:
        """What comes next may soon take the place of blocks that wait for being written."""
        arena = self._room.arena
        return self.dirty_nbytes > max(arena.nbytes // 8, arena.nbytes - arena.used)

    def record_nbytes(self, info: NamespaceInfo) -> int:
        """Of a block in L3; 0: blocks of this namespace cannot be written there."""
        try:
            check_sizes(info)
            return hckv.block_nbytes(info) if self.takes(info) else 0
        except HyperCacheError:
            return 0

    # -- L2 -> L3

    def demote(self, limit_nbytes: int) -> list[Block]:
        """Blocks to be written next, in this order: the coldest that L3 lacks, each behind what L3 lacks of
        its prefix. At least one, and else no more than ``limit_nbytes`` of records. They are held until
        :meth:`demoted` or :meth:`undone`."""
        taken: list[Block] = []
        spare = limit_nbytes
        while (block := self._next_unwritten()) is not None:
            spare -= block.tree.record_nbytes
            if taken and spare < 0:
                self._path.append(block)
                break
            self._room.clean(block)
            block.record = WRITING
            self._hold(block)
            self.writing += 1
            taken.append(block)
        return taken

    def _next_unwritten(self) -> Block | None:
        dirty = self._room.dirty
        while dirty is not None:
            if not self._path:
                entry = dirty.coldest()
                if entry is None:
                    break
                self._path = _unwritten(entry.block)
            block = self._path.pop()
            behind = block.parent is None or block.parent.record != UNWRITTEN
            if behind and block.state == COMMITTED and block.record == UNWRITTEN and block.tree.live:
                if block.ready:
                    return block
                self._path = []
                break  # L3 forgot it while it was read from there: it will have come in a moment
            self._path = []  # much may have happened since it was made
        return None

    def demoted(self, blocks: Sequence[Block], places: Sequence[int]) -> None:
        """``blocks`` were written. A place of -1: it could not be, as its bytes in memory are not those that
        were stored; it goes."""
        for block, where in zip(blocks, places, strict=True):
            self.writing -= 1
            block.record = max(where, UNWRITTEN)
            if block.state == COMMITTED and block.tree.live:
                if where >= 0:
                    self.demoted_total += 1
                else:
                    self.damaged_total += 1
                    self._remove(block, "its bytes in memory are damaged")
            self._drop(block)

    def undone(self, blocks: Sequence[Block]) -> None:
        """``blocks`` were not written: they wait again."""
        for block in blocks:
            self.writing -= 1
            block.record = UNWRITTEN
            if block.state == COMMITTED and block.tree.live:
                self._room.soil(block)
            self._drop(block)

    def _hold(self, block: Block) -> None:
        block.tree.busy += 1
        hold(block)

    def _drop(self, block: Block) -> None:
        block.tree.busy -= 1
        self._room.drop_hold(block)

    # -- L3 -> L2

    def recall(self, blocks: Sequence[Block], limit_nbytes: int) -> tuple[list[Recall], list[Recall]]:
        """What is to be read so that these blocks lie in memory: in pieces of about so many bytes, and those
        that others have begun. Takes slots, as long as there are any."""
        fresh: list[Recall] = []
        joined: dict[Recall, None] = {}
        for block in blocks:
            if block.ready or block.hidden:
                continue
            if block.loading is not None:
                joined[block.loading] = None
                continue
            self._hold(block)
            if not self._room.place(block):
                self._drop(block)
                break
            if not fresh or fresh[-1].nbytes >= limit_nbytes:
                fresh.append(Recall())
            recall = fresh[-1]
            space, arena = block.tree.space, self._room.arena
            spans = (space.span(layer) for layer in range(space.layers))
            recall.blocks.append(block)
            recall.places.append(block.record)
            recall.chunks.append([arena.view(block.slab, block.slot, *span) for span in spans])
            recall.nbytes += space.nbytes
            block.loading = recall
            self.loading += 1
        return fresh, [recall for recall in joined if recall not in fresh]

    def lost(self, block: Block, was: int) -> None:
        """L3 has nothing at ``was``, where a cold block lay: it is gone, with all behind it."""
        if block.state == COMMITTED and block.tree.live and block.record == was and not block.placed:
            block.record = UNWRITTEN
            self.damaged_total += 1
            self._remove(block, "L3 has it no more")

    def wanted(self, blocks: Sequence[Block]) -> list[Block]:
        """Which of these blocks of one namespace, just read from L3, get a place in memory: as many as there
        is room for, and those that are used again and again."""
        cold = [block for block in blocks if block.state == COMMITTED and block.record >= 0]
        cold = [block for block in cold if not block.placed]
        spare = self._room.arena.spare(cold[0].tree.space.nbytes) if cold else 0
        return [block for at, block in enumerate(cold) if at < spare or block.uses >= ADMITTED]

    def recalled(self, recall: Recall, results: Sequence[array[int] | None]) -> None:
        """``recall`` is over: each block's checksums, or None where L3 has it no more, or damaged."""
        for block, was, crcs in zip(recall.blocks, recall.places, results, strict=True):
            self.loading -= 1
            if block.state != COMMITTED or not block.tree.live:
                pass  # it stays unread: nobody can ask for it any more
            elif crcs is not None:
                block.crcs, block.loading = crcs, None
                self._room.heat(block, 1)
                if block.record == UNWRITTEN:
                    self._room.soil(block)
                self.promoted_total += 1
                self.admitted_total += self._policy.admit(block, block.used)  # told by the lease
            elif block.record not in (was, UNWRITTEN):  # it was moved while it was read
                block.loading = None
                self._room.unplace(block)
            else:
                block.record = UNWRITTEN
                self.damaged_total += 1
                self._remove(block, "L3 has it no more")
            self._drop(block)
        recall.chunks = []

    def unread(self, recall: Recall) -> None:
        """``recall`` is given up before it has begun: its blocks lie in L3 as before."""
        for block in recall.blocks:
            self.loading -= 1
            if block.state == COMMITTED and block.tree.live:
                block.loading = None
                self._room.unplace(block)
            self._drop(block)
        recall.chunks = []

    # -- the directory's turn

    def adopt(self, number: int, contents: Contents, now: float) -> Iterator[None]:
        """What segment ``number`` holds, at start, in ascending order of numbers. Yields now and then."""
        entries = contents.entries
        spaces = [Namespace(info) if self.record_nbytes(info) else None for info in contents.namespaces]
        removed = iter(contents.removed())
        columns = (
            entries["kind"].tolist(),
            entries["offset"].tolist(),
            entries["namespace"].tolist(),
            entries["count"].tolist(),
            contents.names("digest"),
            contents.names("parent"),
            contents.names("mark"),
        )
        for step, (kind, offset, which, count, digest, parent, mark) in enumerate(zip(*columns, strict=True)):
            if step % 1024 == 1023:
                yield
            if kind == hckv.Kind.CLEAR:
                self._forget(digest, None)
            elif kind == hckv.Kind.REMOVE:
                self._forget(digest, set(islice(removed, count)))
            elif (space := spaces[which]) is not None:
                self._adopt(space, place(number, offset * ALIGN), digest, parent, mark, now)

    def _adopt(
        self, space: Namespace, where: int, digest: bytes, parent: bytes, mark: bytes, now: float
    ) -> None:
        tree = self._room.trees.get(space.info.digest)
        if tree is not None and tree.space.info != space.info:
            return
        known = None if tree is None else tree.blocks.get(digest)
        if known is not None:
            known.record = where
            return
        if tree is None:
            tree = self._plant(space)
            if tree is None:
                return
        tree.busy += 1  # or it could go while others make room for it
        before = tree.blocks.get(parent) if parent else None
        if before is not None and before.state != COMMITTED:
            before = None  # it waits itself
        if before is not None:
            hold(before)
        block = self._room.claim(tree, digest, mark)
        if block is not None:
            block.record, block.crcs = where, NO_CRCS
            tree.blocks[digest] = block
            if before is not None or not parent:
                self._commit(block, before, now)
            else:
                self._orphans.setdefault(tree.space.info.digest, {}).setdefault(parent, []).append(block)
        if before is not None:
            self._room.drop_hold(before)
        tree.busy -= 1
        if not tree.blocks and not tree.busy:
            self._room.uproot(tree)

    def _commit(self, block: Block, parent: Block | None, now: float) -> None:
        """An adopted block becomes visible, and so does what waited for it."""
        waiting = self._orphans.get(block.tree.space.info.digest, {})
        ready: list[tuple[Block, Block | None]] = [(block, parent)]
        for node, before in ready:
            attach(node, before)
            self._policy.use((node,), now)
            self._room.reveal(node)
            ready += [(child, node) for child in waiting.pop(node.digest, ())]

    def adopted(self) -> int:
        """All segments are read. What has no prefix is forgotten; returns how many these are."""
        lost = [block for waiting in self._orphans.values() for some in waiting.values() for block in some]
        for block in lost:
            self._room.discard(block)
        self._orphans = {}
        return len(lost)

    def _forget(self, namespace: bytes, digests: set[bytes] | None) -> None:
        """A tombstone: those blocks are gone, or all of the namespace, and what continues them."""
        tree = self._room.trees.get(namespace)
        if tree is None:
            return
        waiting = self._orphans.pop(namespace, {}) if digests is None else self._orphans.get(namespace, {})
        gone = set(waiting) if digests is None else set(digests)
        for parent, some in list(waiting.items()):
            waiting[parent] = [block for block in some if block.digest not in gone]
            for block in some:
                if block.digest in gone:
                    self._room.discard(block)
        todo = list(gone)
        while todo:
            for block in waiting.pop(todo.pop(), ()):
                self._room.discard(block)
                todo.append(block.digest)
        for digest in list(tree.blocks) if digests is None else digests:
            if (known := tree.blocks.get(digest)) is not None:
                self._remove(known, "removed")

    def survey(
        self, number: int, contents: Contents, budget: int
    ) -> Iterator[tuple[list[Block], list[Block]]]:
        """Which blocks of the oldest segment, ``number``, are worth writing again, hottest first and up to
        ``budget`` bytes, and which are not. Yields empty lists now and then, and last the result."""
        found: list[tuple[bool, float, int, Block]] = []
        trees = [self._room.trees.get(info.digest) for info in contents.namespaces]
        entries = contents.entries
        columns = (
            entries["kind"].tolist(),
            entries["offset"].tolist(),
            entries["nbytes"].tolist(),
            entries["namespace"].tolist(),
            contents.names("digest"),
        )
        for step, (kind, offset, units, which, digest) in enumerate(zip(*columns, strict=True)):
            if step % 1024 == 1023:
                yield [], []
            tree = trees[which] if kind == hckv.Kind.BLOCK else None
            block = None if tree is None else tree.blocks.get(digest)
            if (
                block is not None
                and block.state == COMMITTED
                and block.record == place(number, offset * ALIGN)
            ):
                found.append((block.held > 0, block.rank, units * ALIGN, block))
        found.sort(key=lambda entry: (entry[0], entry[1], -entry[3].depth), reverse=True)
        keep: list[Block] = []
        for _, _, nbytes, block in found:
            if nbytes > budget:
                break
            budget -= nbytes
            keep.append(block)
        yield keep, [block for *_, block in found[len(keep) :]]

    def lies_in(self, block: Block, number: int) -> bool:
        """Whether ``block`` is still to be had, and its record is one of that segment's."""
        return (
            block.state == COMMITTED
            and block.tree.live
            and block.record >= 0
            and number_of(block.record) == number
        )

    def moved(self, blocks: Sequence[Block], old: Sequence[int], new: Sequence[int]) -> None:
        """Records of ``blocks`` lie at ``new`` now; -1: it was damaged."""
        lost: list[Block] = []
        for block, was, where in zip(blocks, old, new, strict=True):
            if block.record == was:
                if where >= 0:
                    block.record = where
                else:
                    lost.append(block)
        self.forget(lost)

    @property
    def warm_nbytes(self) -> int:
        """Of the records that L3 has, or is to get, of all that is in memory."""
        return sum(tree.warm * tree.record_nbytes for tree in self._room.trees.values())

    def forget(self, blocks: Sequence[Block], again: bool = True) -> None:
        """L3 has these no more. What is not in the arena is gone, with all behind it; the rest is to be
        written again, unless ``again`` is False: then memory alone has it."""
        for block in blocks:
            if block.state != COMMITTED or not block.tree.live or block.record < 0:
                continue
            if block.placed:
                block.record = UNWRITTEN
                if again and block.ready:  # else it waits for being written when it has come
                    self._room.soil(block)
            else:
                self._room.evicted += self._remove(block, "L3 has no room for it")


def _unwritten(block: Block) -> list[Block]:
    """``block`` and what L3 lacks of its ancestors, deepest first."""
    path: list[Block] = []
    node: Block | None = block
    while node is not None and node.record == UNWRITTEN:
        path.append(node)
        node = node.parent
    return path
