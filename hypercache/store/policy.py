"""Who goes first: the ordering of eviction, apart from the mechanics of it.

Everything that can be evicted carries a ``rank``: the lowest goes first. A policy only sets ranks; the
index sees to it that a prefix outlives its suffixes, whatever the ranks say.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar


class Ranked(Protocol):
    """A candidate. ``queued`` is true while it has an entry in a :class:`ColdQueue`, and belongs to that."""

    rank: float
    queued: bool

    @property
    def evictable(self) -> bool: ...


class Place(Protocol):
    """Where a candidate lies: it is as hot as the hottest in it."""

    rank: float


class Placed(Protocol):
    rank: float

    @property
    def slab(self) -> Place: ...


class Policy(Protocol):
    def use(self, blocks: Iterable[Placed], now: float) -> None:
        """``blocks`` were stored or found at ``now``: set their ranks, and raise their slabs' to match.

        Their ancestors are passed too, up to a second late (see :class:`Climbs`): a rank may be lower than
        what ``now`` of an earlier call gave to another block in the same slab, and never lowers the slab's.
        """


class Lru:
    """Least recently used: the rank is the time of the last use, in seconds."""

    def use(self, blocks: Iterable[Placed], now: float) -> None:
        for block in blocks:
            block.rank = now
            slab = block.slab
            if slab.rank < now:
                slab.rank = now


class Linked(Placed, Protocol):
    @property
    def parent(self) -> Linked | None: ...


class Climbs:
    """The ancestors of a used block are used too, or a slab full of prefixes looks cold and takes what hangs
    on them along. Walking to the root on each use would let a small request cost as much as the chain is
    long. So an ancestor is raised at most once a second, and each walk goes on where the last one stopped.
    """

    __slots__ = ("_policy", "_waiting")

    STEPS = 256  # ancestors raised in one call of :meth:`use`

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._waiting: dict[Linked, float] = {}  # next to raise, and to what

    def __len__(self) -> int:
        return len(self._waiting)

    def use(self, chains: Iterable[Sequence[Linked]], now: float) -> None:
        """Chains, parent -> child, were stored or found at ``now``."""
        for chain in chains:
            self.note(chain, now)
        self.go(self.STEPS)

    def note(self, chain: Sequence[Linked], now: float) -> None:
        """The same of one chain; its ancestors wait for the next :meth:`go`."""
        if chain:
            self._policy.use(chain, now)
            above = chain[0].parent
            if above is not None and above.rank < math.floor(now):
                self._waiting[above] = now

    def go(self, steps: int) -> None:
        """Raise up to ``steps`` blocks."""
        while self._waiting and steps > 0:
            block, now = self._waiting.popitem()
            second = math.floor(now)
            raised: list[Linked] = []
            node: Linked | None = block
            while node is not None and node.rank < second and len(raised) < steps:
                raised.append(node)
                node = node.parent
            steps -= len(raised) + 1
            self._policy.use(raised, now)
            if node is not None and node.rank < second:
                self._waiting[node] = max(now, self._waiting.get(node, now))


Item = TypeVar("Item", bound=Ranked)


class ColdQueue(Generic[Item]):
    """Finds the evictable item of lowest rank in O(log n); ranks may rise without telling the queue.

    A heap with at most one entry per item. Entries are looked at only when they surface: an item that
    cannot be evicted is dropped (push it again when it can), one whose rank has risen sinks back.
    """

    __slots__ = ("_dead", "_heap", "_seq")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._seq = 0  # among equals, first in first out; and items are never compared
        self._dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._dead

    def push(self, item: Item) -> None:
        """Enter an evictable item. Nothing happens if it is in already."""
        if not item.queued:
            item.queued = True
            self._seq += 1
            heapq.heappush(self._heap, (item.rank, self._seq, item))

    def coldest(self) -> Item | None:
        """The evictable item of lowest rank; it stays in."""
        heap = self._heap
        while heap:
            rank, seq, item = heap[0]
            if not item.queued:
                heapq.heappop(heap)
                self._dead -= 1
            elif not item.evictable:
                heapq.heappop(heap)
                item.queued = False
            elif item.rank > rank:
                heapq.heapreplace(heap, (item.rank, seq, item))
            else:
                return item
        return None

    def forget(self, item: Item) -> None:
        """The item is gone for good. Its entry is dropped when half of the heap is such entries."""
        if item.queued:
            item.queued = False
            self._dead += 1
            if self._dead * 2 > len(self._heap) + 64:
                self._heap = [entry for entry in self._heap if entry[2].queued]
                heapq.heapify(self._heap)
                self._dead = 0
