"""The causal index: who is whose prefix, what is visible, what is held, and in which tiers it lies.

A block is kept only together with its whole prefix, be it in memory or on disk. Holding a block (a lease, an
open reservation) holds its ancestors with it: ``held`` counts the holds on the block itself and its children
that are held, so one step up the chain is enough as soon as an ancestor is held already.
"""

from __future__ import annotations

import math
import secrets
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from hypercache.store.arena import Slab
from hypercache.store.namespace import Namespace

if TYPE_CHECKING:
    from hypercache.store.below import Recall
    from hypercache.store.holds import Reservation

PENDING: Final = 0  # being written
COMPLETE: Final = 1  # all layers in place, but an ancestor is still being written
COMMITTED: Final = 2  # visible, and so are all its ancestors
DOOMED: Final = 3  # invisible for ever; freed as soon as nothing holds it and no child is left
FREED: Final = 4

UNWRITTEN: Final = -1  # in L3
WRITING: Final = -2  # on its way there, and held meanwhile


class Tree:
    """The blocks of one namespace in one epoch. Clearing a namespace puts a new tree in its place."""

    __slots__ = (
        "blocks",
        "busy",
        "committed",
        "factor",
        "live",
        "mask",
        "record_nbytes",
        "space",
        "warm",
        "windows",
    )

    def __init__(self, space: Namespace) -> None:
        self.space = space
        self.blocks: dict[bytes, Block] = {}
        self.windows: dict[int, Block] = {}  # by a fingerprint's key, the newest: see modular.py
        self.mask = secrets.randbits(64)  # of the keys of fingerprints, and an odd factor
        self.factor = secrets.randbits(64) | 1
        self.committed = 0  # blocks, visible while live
        self.warm = 0  # of those, the ones that lie in the arena
        self.record_nbytes = 0  # of a block in L3; 0: none can be written there
        self.busy = 0  # leases and open reservations
        self.live = True

    def run(self, digests: Sequence[bytes]) -> list[Block]:
        """The committed blocks from ``digests[0]`` on; ends where one is missing or breaks the chain."""
        get = self.blocks.get
        found: list[Block] = []
        before: Block | None = None
        for digest in digests:
            block = get(digest)
            if (
                block is None
                or block.state != COMMITTED
                or (before is not None and block.parent is not before)
            ):
                break
            found.append(block)
            before = block
        return found

    def chain(self, tail: bytes, count: int) -> list[Block]:
        """The ``count`` blocks that end with ``tail``, first to last; none if they are not all there."""
        node = self.blocks.get(tail)
        if node is None or node.state != COMMITTED or count > node.depth + 1:
            return []
        found: list[Block] = []
        while node is not None and len(found) < count:
            found.append(node)
            node = node.parent
        return found[::-1]


class Dirty:
    """A visible block that L3 does not have yet, while it waits for being written: an item of a queue."""

    __slots__ = ("block", "queued")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.queued = 0

    @property
    def rank(self) -> float:
        return self.block.rank

    @property
    def evictable(self) -> bool:
        block = self.block
        return block.state == COMMITTED and block.tree.live and block.record == UNWRITTEN


class Block:
    """Node of the tree and owner of one slot, which it gets when its first bytes come: ``slot`` is -1 before,
    and ``slab`` one that is nowhere. ``record`` is its place in L3 (see hckv_file.place), or UNWRITTEN or
    WRITING; a visible block with a record and no slot is *cold*. ``crcs[layer]`` is the checksum of what lies
    in its slot (uint32); ``depth`` blocks stand before it in its prompt. ``fingerprint`` and ``modular``
    (16 bytes) are its writer's mark, 0 and b"" without one; ``newer`` and ``older`` link it while the modular
    index has it."""

    __slots__ = (
        "bias",
        "child",
        "crcs",
        "depth",
        "digest",
        "dirty",
        "fingerprint",
        "held",
        "loading",
        "modular",
        "newer",
        "next",
        "older",
        "parent",
        "previous",
        "queued",
        "rank",
        "record",
        "slab",
        "slot",
        "state",
        "tree",
        "used",
        "uses",
        "warm",
        "writer",
    )

    def __init__(self, digest: bytes, tree: Tree, nowhere: Slab[Block], mark: bytes) -> None:
        self.digest = digest
        self.tree = tree
        self.slab = nowhere
        self.slot = -1
        self.record = UNWRITTEN
        self.warm = 0  # children that have slots
        self.dirty: Dirty | None = None  # while it waits for being written to L3
        self.loading: Recall | None = None  # while its bytes come from L3: the slot is not to be read
        self.crcs = array("I", bytes(4 * tree.space.layers))
        self.writer: Reservation | None = None  # while PENDING
        self.state = PENDING
        self.held = 0
        self.rank = -math.inf  # this and the next three are the policy's: see policy.py
        self.used = -math.inf
        self.uses = 0
        self.bias = 0.0
        self.queued = 0
        self.parent: Block | None = None
        self.child: Block | None = None  # the first; the others follow by ``next``
        self.next: Block | None = None
        self.previous: Block | None = None
        self.depth = 0
        self.newer: Block | None = None
        self.older: Block | None = None
        self.mark(mark)

    def mark(self, mark: bytes) -> None:
        """What it shall be found by out of context: 24 bytes, or none. Not while it is visible."""
        self.fingerprint = int.from_bytes(mark[:8], "little")
        self.modular = mark[8:]

    @property
    def marked(self) -> bytes:
        """Its writer's mark, as given; b"" without one."""
        return self.modular and self.fingerprint.to_bytes(8, "little") + self.modular

    @property
    def placed(self) -> bool:
        return self.slot >= 0

    @property
    def ready(self) -> bool:
        """Its bytes can be read from its slot."""
        return self.slot >= 0 and self.loading is None

    @property
    def evictable(self) -> bool:
        """It may lose its slot, or if it has none, its place in the index. Suffixes go before prefixes."""
        if self.state != COMMITTED or self.held:
            return False
        return self.warm == 0 if self.slot >= 0 else self.child is None

    @property
    def context(self) -> bytes:
        """Digest of the block that it was computed behind; b"" at the start of a prompt."""
        return b"" if self.parent is None else self.parent.digest

    @property
    def hidden(self) -> bool:
        """Nobody can find it any more: evicted, aborted, or its namespace was cleared."""
        return self.state == DOOMED or not self.tree.live

    def __repr__(self) -> str:
        state = ("pending", "complete", "committed", "doomed", "freed")[self.state]
        return f"<block {self.digest.hex()[:12]} {state} held={self.held}>"


def attach(block: Block, parent: Block | None) -> None:
    """Make ``block`` a child of ``parent``, its holds included."""
    block.parent = parent
    if parent is None:
        return
    block.depth = parent.depth + 1
    parent.warm += block.slot >= 0
    block.next = parent.child
    if parent.child is not None:
        parent.child.previous = block
    parent.child = block
    if block.held:
        hold(parent)


def detach(block: Block) -> None:
    """Take ``block`` from its parent; it must not be held, or the parent must be held otherwise."""
    parent = block.parent
    if parent is None:
        return
    if block.previous is not None:
        block.previous.next = block.next
    else:
        parent.child = block.next
    if block.next is not None:
        block.next.previous = block.previous
    block.parent = block.next = block.previous = None
    parent.warm -= block.slot >= 0
    if block.held:
        parent.held -= 1


def hold(block: Block) -> int:
    """Keep ``block`` and its ancestors where they are until :func:`unhold`. Returns how many were not held
    yet: what it has cost."""
    count = 0
    node: Block | None = block
    while node is not None:
        node.held += 1
        if node.held > 1:
            break
        node.slab.held += 1
        node = node.parent
        count += 1
    return count


def unhold(block: Block, steps: int) -> tuple[list[Block], Block | None]:
    """Undo one :func:`hold`, as far as ``steps`` go. Returns the blocks that nothing holds any more, deepest
    first, and the ancestor whose hold is still to be undone, if there is one."""
    loose: list[Block] = []
    node: Block | None = block
    while node is not None and len(loose) < steps:
        node.held -= 1
        if node.held:
            return loose, None
        node.slab.held -= 1
        loose.append(node)
        node = node.parent
    return loose, node


def subtree(block: Block) -> list[Block]:
    """``block`` and all its descendants, parents before children."""
    nodes = [block]
    for node in nodes:  # grows while it is walked
        child = node.child
        while child is not None:
            nodes.append(child)
            child = child.next
    return nodes
