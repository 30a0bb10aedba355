"""Space for blocks: gives slots, takes them back, and decides what goes when there is no room.

Two limits hold apart from each other: the arena's regions, and a budget for the index that describes them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final

from hypercache.store.arena import Arena, SizeClass, Slab
from hypercache.store.index import (
    COMMITTED,
    COMPLETE,
    DOOMED,
    FREED,
    PENDING,
    UNWRITTEN,
    Block,
    Dirty,
    Tree,
    detach,
    hold,
    subtree,
    unhold,
)
from hypercache.store.modular import Sieve, enter, leave
from hypercache.store.policy import ColdQueue, Policy, Queue

BLOCK_OVERHEAD = 864  # index bytes charged per block, its mark and its entry in both indices included ...
LAYER_OVERHEAD = 4  # ... and per layer of it (its checksum). tests/store/test_memory.py measures both.
BELOW_OVERHEAD = 192  # more where there is an L3: the block's place there, and its turn to be written
NAMESPACE_OVERHEAD = 2048  # per namespace that has blocks ...
NAMESPACE_LAYER_OVERHEAD = 96  # ... and per layer of it (its chunk's size and place)
NO_CRCS: Final = array("I")  # of what has no bytes in the arena
_REAP_ON_DEMAND = 64
_LET_GO_ON_DEMAND = 1024
_LET_GO_AT_ONCE = 8192  # blocks that the end of one hold lets go of there and then: about a millisecond


def index_nbytes(layers: int) -> int:
    """Bytes charged to the index for one block."""
    return BLOCK_OVERHEAD + LAYER_OVERHEAD * layers


def namespace_nbytes(layers: int) -> int:
    """Bytes charged to the index for one namespace, beside its blocks."""
    return NAMESPACE_OVERHEAD + NAMESPACE_LAYER_OVERHEAD * layers


class Room:
    """Owns the arena and the order of eviction. Counts what is in it; all counts are of live blocks."""

    def __init__(self, arena: Arena[Block], index_capacity: int, policy: Policy, tiers: bool) -> None:
        self.arena = arena
        self._policy = policy
        self.dirty: ColdQueue[Dirty] | None = ColdQueue() if tiers else None
        self.dirty_nbytes = 0  # of the blocks in it
        self.sieve = Sieve(index_capacity // index_nbytes(1))
        self.index_capacity = index_capacity - self.sieve.nbytes
        self.index_used = 0
        self.blocks = 0  # in any state
        self.visible = 0
        self.warm = 0  # visible blocks in the arena, and their bytes
        self.warm_nbytes = 0
        self.evicted = 0
        self.cooled = 0  # of L2, while L3 has them
        self.trees: dict[bytes, Tree] = {}  # by namespace; the one used longest ago comes first
        self._leaves: dict[int, Queue[Block]] = {}  # per slot size
        self._cold: ColdQueue[Block] = ColdQueue()  # leaves that only L3 has
        self._slabs: ColdQueue[Slab[Block]] = ColdQueue()
        self._dead: list[Tree] = []  # cleared, not yet freed
        self.ending: list[Block] = []  # on each, one hold is still to be undone: see let_go
        self._nowhere: Slab[Block] = Slab(SizeClass(0, 0, 0), 0, 0)  # where blocks without a slot lie

    # -- in

    def plant(self, tree: Tree) -> bool:
        """Enter an empty tree. False: the index has no room, and everything in it is held."""
        charge = namespace_nbytes(tree.space.layers)
        if not self._make_index(charge):
            return False
        self.index_used += charge
        self.trees[tree.space.info.digest] = tree
        return True

    def uproot(self, tree: Tree) -> None:
        """Forget a namespace, whose blocks are gone or cleared."""
        if self.trees.get(tree.space.info.digest) is tree:
            del self.trees[tree.space.info.digest]
            self.index_used -= namespace_nbytes(tree.space.layers)

    def _make_index(self, charge: int) -> bool:
        if self.index_used + charge > self.index_capacity:
            self.reap(_REAP_ON_DEMAND)
        while self.index_used + charge > self.index_capacity:
            if not self._evict_coldest() and not self.let_go(_LET_GO_ON_DEMAND):
                return False
        return True

    def claim(self, tree: Tree, digest: bytes, mark: bytes) -> Block | None:
        """A new pending block, not yet in the tree, and without a slot: nothing has come for it, so no stored
        bytes go for it. None: the index has no room, and everything in it is held."""
        charge = self.charge(tree)
        if not self._make_index(charge):
            return None
        self.index_used += charge
        self.blocks += 1
        return Block(digest, tree, self._nowhere, mark)

    def charge(self, tree: Tree) -> int:
        """Bytes charged to the index for a block of ``tree``."""
        return index_nbytes(tree.space.layers) + (0 if self.dirty is None else BELOW_OVERHEAD)

    def place(self, block: Block) -> bool:
        """Give a held block its slot, whatever has to go for it. False: everything left is held."""
        klass = self.arena.size_class(block.tree.space.nbytes)
        if klass is None:
            return False
        found = self.arena.allocate(klass)
        if found is None:
            self.reap(_REAP_ON_DEMAND)
            found = self.arena.allocate(klass)
        while found is None:
            if not self._evict_for(klass) and not self.let_go(_LET_GO_ON_DEMAND):
                return False
            found = self.arena.allocate(klass)
        slab, slot = found
        if block.queued:
            self._cold.forget(block)
        slab.owners[slot] = block
        slab.held += 1
        slab.rank = max(slab.rank, block.rank)
        self._nowhere.held -= 1
        block.slab, block.slot = slab, slot
        if block.parent is not None:
            block.parent.warm += 1
        return True

    def unplace(self, block: Block) -> None:
        """Take a block's slot away; L3 has its bytes. Nobody may be reading it."""
        slab = block.slab
        if block.queued:
            self._queue(block).forget(block)
        if block.held:
            slab.held -= 1
            self._nowhere.held += 1
        self.arena.release(slab, block.slot)
        if slab.used == 0:
            self._slabs.forget(slab)
        elif slab.held == 0:
            self._slabs.push(slab)
        block.slab, block.slot, block.crcs = self._nowhere, -1, NO_CRCS
        self._policy.leave(block)
        parent = block.parent
        if parent is not None:
            parent.warm -= 1
            self._inherit(parent, block.rank)
            self._offer(parent)
        self._offer(block)

    def reorder(self, blocks: Iterable[Block]) -> None:
        """Ranks may have fallen. The policy's own queues know; that of cold blocks does not."""
        for block in blocks:
            if block.queued and not block.placed:
                self._cold.fell(block)

    def heat(self, block: Block, sign: int) -> None:
        """A visible block's bytes are in the arena now (1), or no more (-1)."""
        tree = block.tree
        tree.warm += sign
        if tree.live:
            self.warm += sign
            self.warm_nbytes += sign * tree.space.nbytes

    def soil(self, block: Block) -> None:
        """L3 lacks a visible block: it waits for being written."""
        if self.dirty is not None and block.tree.record_nbytes and block.dirty is None:
            block.dirty = Dirty(block)
            self.dirty.push(block.dirty)
            self.dirty_nbytes += block.tree.space.nbytes

    def clean(self, block: Block) -> None:
        """It waits no more."""
        if block.dirty is not None and self.dirty is not None:
            self.dirty.forget(block.dirty)
            block.dirty = None
            self.dirty_nbytes -= block.tree.space.nbytes

    def complete(self, block: Block) -> None:
        """All layers of ``block`` are in place. It becomes visible, and so does what waited for it; or it
        waits for its prefix, and is held meanwhile: its writer was told that it is stored."""
        block.state = COMPLETE
        hold(block)
        if block.parent is not None and block.parent.state != COMMITTED:
            return
        ready = [block]
        for node in ready:
            node.state = COMMITTED
            enter(node, self.sieve)
            node.tree.committed += 1
            self.visible += 1
            self.heat(node, 1)
            self.soil(node)
            child = node.child
            while child is not None:
                if child.state == COMPLETE:
                    ready.append(child)
                child = child.next
        for node in ready:
            self.drop_hold(node)

    def reveal(self, block: Block) -> None:
        """``block``, attached and without a slot, is visible: L3 has it."""
        block.state = COMMITTED
        enter(block, self.sieve)
        block.tree.committed += 1
        self.visible += 1
        self._offer(block)

    def discard(self, block: Block) -> None:
        """Forget a claimed block that nothing holds and that was never attached."""
        self._free(block)

    # -- held

    def drop_hold(self, block: Block) -> None:
        """End one hold on ``block``. What nothing holds any more can be evicted; if hidden, it goes now. A
        very deep block's first ancestors stay held until :meth:`let_go` comes to them."""
        self._undo(block, _LET_GO_AT_ONCE)

    def let_go(self, steps: int) -> bool:
        """Undo holds that wait in ``ending``, up to ``steps`` blocks. False if there were none."""
        if not self.ending:
            return False
        while self.ending and steps > 0:
            steps -= 1 + self._undo(self.ending.pop(), steps)
        return True

    def _undo(self, block: Block, steps: int) -> int:
        loose, rest = unhold(block, steps)
        if rest is not None:
            self.ending.append(rest)
        for node in loose:
            if node.slab.held == 0 and node.placed:
                self._slabs.push(node.slab)
            if not node.hidden:
                self._offer(node)
            elif node.child is None:
                self._free(node)
        return len(loose)

    def _offer(self, block: Block) -> None:
        if block.evictable:
            self._queue(block).push(block)

    def _queue(self, block: Block) -> Queue[Block]:
        """Where it waits for its eviction, from the tier it is in."""
        if not block.placed:
            return self._cold
        size = block.slab.klass.nbytes
        queue = self._leaves.get(size)
        if queue is None:
            queue = self._leaves[size] = self._policy.queue()
        return queue

    # -- out

    def doom(self, block: Block, recorded: list[bytes] | None = None) -> tuple[int, list[Block]]:
        """Hide ``block`` and all behind it; free what is not held. Returns how many were visible, and those
        that were being written: their writers are still to be told.

        recorded: gets the digests of those that L3 has, or is just getting.
        """
        nodes = subtree(block)
        count = 0
        pending: list[Block] = []
        waiting: list[Block] = []
        for node in nodes:
            blocks = node.tree.blocks
            if blocks.get(node.digest) is node:
                del blocks[node.digest]
            if recorded is not None and node.record != UNWRITTEN:
                recorded.append(node.digest)
            if node.state == COMMITTED:
                count += self._hide(node)
            elif node.state == PENDING:
                pending.append(node)
            elif node.state == COMPLETE:
                waiting.append(node)
            node.state = DOOMED
        for node in waiting:
            self.drop_hold(node)
        for node in reversed(nodes):
            if node.state == DOOMED and node.held == 0 and node.child is None:
                self._free(node)
        return count, pending

    def _hide(self, block: Block) -> int:
        tree = block.tree
        leave(block, self.sieve)
        self.clean(block)
        tree.committed -= 1
        if block.ready:
            self.heat(block, -1)
        if not tree.live:
            return 0
        self.visible -= 1
        return 1

    def _free(self, block: Block) -> None:
        """Free a block that nothing holds and that has no child."""
        parent = block.parent
        detach(block)
        tree = block.tree
        if tree.blocks.get(block.digest) is block:
            del tree.blocks[block.digest]
        if block.state == COMMITTED:
            self._hide(block)
        self.index_used -= self.charge(tree)
        self.blocks -= 1
        if block.queued:
            self._queue(block).forget(block)
        block.state = FREED
        self._policy.leave(block)
        if block.placed:
            self.arena.release(block.slab, block.slot)
            if block.slab.used == 0:
                self._slabs.forget(block.slab)
        if not tree.blocks and not tree.busy:
            self.uproot(tree)
        if parent is not None:
            self._inherit(parent, block.rank)
            self._offer(parent)

    def _inherit(self, parent: Block, rank: float) -> None:
        """A use of a block was a use of its parent, which may not have been told so yet."""
        if parent.rank < rank:
            parent.rank = rank
            parent.slab.rank = max(parent.slab.rank, rank)

    def clear(self, tree: Tree) -> tuple[int, int]:
        """Hide a whole tree at once; :meth:`reap` frees it step by step. Returns visible blocks and bytes."""
        count, nbytes = tree.committed, tree.committed * tree.space.nbytes
        tree.live = False
        self.visible -= count
        self.warm -= tree.warm
        self.warm_nbytes -= tree.warm * tree.space.nbytes
        if tree.blocks:
            self._dead.append(tree)
        return count, nbytes

    def reap(self, steps: int) -> None:
        """Free up to ``steps`` blocks of cleared trees. Youngest first: children come after their parents, so
        nearly each step frees one; what is held is freed when its last hold ends."""
        while self._dead and steps:
            tree = self._dead[-1]
            while tree.blocks and steps:
                steps -= 1
                _, block = tree.blocks.popitem()
                if block.held == 0 and block.child is None:
                    self._free(block)
            if not tree.blocks:
                self._dead.pop()

    # -- who has to go

    def _evict(self, block: Block) -> None:
        """From the arena: L3 keeps it, or it goes, and what hangs on it."""
        if block.record > UNWRITTEN and block.state == COMMITTED:
            self.heat(block, -1)
            self.cooled += 1
            self.unplace(block)
        else:
            self.evicted += self.doom(block)[0]

    def _evict_coldest(self) -> bool:
        """One leaf, of whatever class and tier: the index is at its limit."""
        queues: tuple[Queue[Block], ...] = (self._cold, *self._leaves.values())
        leaves = [leaf for queue in queues if (leaf := queue.coldest()) is not None]
        if not leaves:
            return False
        self.evicted += self.doom(min(leaves, key=lambda leaf: leaf.rank))[0]
        return True

    def _evict_for(self, klass: SizeClass[Block]) -> bool:
        """Make a slot, or a slab, of ``klass`` free: its coldest leaf, or all that lies in colder regions.

        False: neither exists, everything is held.
        """
        queue = self._leaves.get(klass.nbytes)
        leaf = None if queue is None else queue.coldest()
        slab = self._slabs.coldest()
        if leaf is not None and (slab is None or slab.rank >= leaf.rank):
            self._evict(leaf)
            return True
        if klass.run == 1 and slab is not None:
            self._empty(slab)
            return True
        window = self.arena.coldest_window(klass.run)
        if leaf is not None and (window is None or window[0] >= leaf.rank):
            self._evict(leaf)
            return True
        if window is None:
            return False
        for cold in window[1]:
            self._empty(cold)
        return True

    def _empty(self, slab: Slab[Block]) -> None:
        """Evict all blocks in ``slab``. None is held, so nothing behind is."""
        for block in slab.owners.copy():
            if block is not None and block.slab is slab and block.state != FREED:
                self._evict(block)

    def held_nbytes(self) -> int:
        """Bytes in slots that leases, reservations or pins keep in place."""
        return sum(slab.held * slab.klass.nbytes for slab in self.arena.slabs())
