"""What a cache of N blocks would have hit in a trace, under each policy; and what the best possible would.

The policies, their queues and the walk to the ancestors are the product's own. The cache around them keeps a
block only with its prefix, as the store does: a hit is a block whose prefix is hit too, suffixes go before
prefixes, and what a request uses stays while it is served.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hypercache.audit.traces import Request
from hypercache.errors import SpecError
from hypercache.store.policy import Climbs, Policy, Queue


@dataclass(frozen=True, slots=True)
class Hits:
    """Of ``references`` block references, how many were ``hits``."""

    references: int
    hits: int

    @property
    def ratio(self) -> float:
        return self.hits / self.references if self.references else 0.0


class _Place:
    """All blocks lie in one, which never goes as a whole."""

    __slots__ = ("rank",)

    def __init__(self) -> None:
        self.rank = -math.inf


class _Block:
    """A block, resident or remembered by nobody."""

    __slots__ = ("bias", "block", "children", "held", "parent", "queued", "rank", "slab", "used", "uses")

    def __init__(self, block: int, parent: _Block | None, place: _Place) -> None:
        self.block = block
        self.parent = parent
        self.slab = place
        self.children = 0
        self.held = False
        self.queued = 0
        self.rank = -math.inf
        self.used = -math.inf
        self.uses = 0
        self.bias = 0.0

    @property
    def digest(self) -> bytes:
        return (self.block & (1 << 64) - 1).to_bytes(8, "little")

    @property
    def evictable(self) -> bool:
        return not self.held and not self.children


class Cache:
    """Room for ``capacity`` blocks under ``policy``, which must be new. Raises SpecError for no room."""

    def __init__(self, capacity: int, policy: Policy) -> None:
        if capacity < 1:
            raise SpecError(f"replay with a cache of {capacity} blocks: need 1 or more")
        self.capacity = capacity
        self._policy = policy
        self._climbs = Climbs(policy)
        self._queue: Queue[_Block] = policy.queue()
        self._blocks: dict[int, _Block] = {}
        self._place = _Place()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def serve(self, request: Request) -> int:
        """Look a prompt up, and store what is missing as far as there is room. Returns the blocks hit."""
        chain: list[_Block] = []
        for block in request.blocks:
            found = self._blocks.get(block)
            if found is None or found.parent is not (chain[-1] if chain else None):
                break
            chain.append(found)
        hits = len(chain)
        for node in chain:
            node.held = True
        self._climbs.use([chain], request.time)
        for block in request.blocks[hits:]:
            if block in self._blocks or not self._make_room():
                break  # known behind another prefix, or all that is left is this prompt's own
            node = _Block(block, chain[-1] if chain else None, self._place)
            node.held = True
            if node.parent is not None:
                node.parent.children += 1
            self._blocks[block] = node
            chain.append(node)
            self._climbs.note((node,), request.time)
        for node in chain:
            node.held = False
        if chain:
            self._offer(chain[-1])
        return hits

    def _make_room(self) -> bool:
        if len(self._blocks) < self.capacity:
            return True
        coldest = self._queue.coldest()
        if coldest is None:
            return False
        self._queue.forget(coldest)
        self._policy.leave(coldest)
        del self._blocks[coldest.block]
        parent = coldest.parent
        if parent is not None:
            parent.children -= 1
            parent.rank = max(parent.rank, coldest.rank)  # as Room does
            self._offer(parent)
        return True

    def _offer(self, node: _Block) -> None:
        if node.evictable:
            self._queue.push(node)


def replay(requests: Iterable[Request], capacity: int, policy: Policy) -> Hits:
    """Serve all ``requests``, by time, from a cache that starts empty."""
    cache = Cache(capacity, policy)
    references = hits = 0
    for request in requests:
        references += len(request.blocks)
        hits += cache.serve(request)
    return Hits(references, hits)


def belady(requests: Sequence[Request], capacity: int) -> Hits:
    """Belady's optimum (MIN, IBM Systems Journal 5(2), 1966), of a cache that need not keep what it computes:
    what is needed furthest in the future goes, or does not come in.

    References are taken one by one, and prefixes are not looked at: no policy hits more. Nor is that too much
    to ask where an id stands for one prefix: a prefix is needed again no later than what hangs on it, so that
    with ties decided for the prefix this cache never keeps a block without.
    """
    if capacity < 1:
        raise SpecError(f"replay with a cache of {capacity} blocks: need 1 or more")
    references = [block for request in requests for block in request.blocks]
    end = len(references)
    upcoming = [end] * end
    last: dict[int, int] = {}
    for at in range(end - 1, -1, -1):
        upcoming[at] = last.get(references[at], end)
        last[references[at]] = at
    kept: dict[int, int] = {}  # block -> when it is needed next
    furthest: list[tuple[int, int, int]] = []  # of the kept, and entries that no longer hold
    hits = 0
    for at, (block, following) in enumerate(zip(references, upcoming, strict=True)):
        hits += block in kept
        kept[block] = following
        heapq.heappush(furthest, (-following, -at, block))
        if len(kept) > capacity:
            while True:
                needed, _, candidate = heapq.heappop(furthest)
                if kept.get(candidate) == -needed:
                    del kept[candidate]
                    break
    return Hits(end, hits)
