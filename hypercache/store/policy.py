"""Who goes first: the ordering of eviction, apart from the mechanics of it.

Everything that can be evicted carries a ``rank``: the lowest goes first. A policy sets ranks and makes the
queues that find the lowest; the index sees to it that a prefix outlives its suffixes, whatever the ranks say.

What one request asks of a block (look-up, lease, store) is one use of it: within a second of the clock uses
count once. So do those of its ancestors, which are told later (see :class:`Climbs`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from hypercache.errors import ConfigError

STEP_S: Final = 30.0  # what a hint takes a step of an agent for
# In replays of the public Mooncake traces (9 and 11 minutes) hits rise with the half-life up to 300..600 s
# and hardly change beyond. They are too short to say more; so a hot set is forgotten within hours.
HALF_LIFE_S: Final = 600.0
GHOSTS: Final = 65536  # about 145 bytes each; in the same replays they nearly double the hits of small caches
_LN2: Final = math.log(2)
NUMBER: Final = 0xFFFF  # the part of a ticket that says which queue gave it
_tickets = itertools.count(1)


class Ranked(Protocol):
    """A candidate. ``queued`` is not 0 while it has an entry in a queue, and belongs to that: the entry's
    ticket, so that what left one queue for another is never taken for what it was there."""

    queued: int

    @property
    def rank(self) -> float: ...

    @property
    def evictable(self) -> bool: ...


class Place(Protocol):
    """Where a candidate lies: it is as hot as the hottest in it."""

    rank: float


class Placed(Protocol):
    """A block. ``rank``, ``used`` (seconds, the last use), ``uses`` and ``bias`` are the policy's alone; they
    begin as -inf, -inf, 0 and 0.0."""

    rank: float
    used: float
    uses: int
    bias: float
    queued: int

    @property
    def digest(self) -> bytes: ...

    @property
    def slab(self) -> Place: ...


class Linked(Placed, Protocol):
    @property
    def parent(self) -> Linked | None: ...


class Candidate(Linked, Protocol):
    @property
    def evictable(self) -> bool: ...


Item = TypeVar("Item", bound=Ranked)


class Queue(Protocol[Item]):
    """Candidates; not more than one entry for each."""

    def __len__(self) -> int: ...

    def push(self, item: Item) -> None:
        """Enter an evictable item. Nothing happens if it is in already."""

    def coldest(self) -> Item | None:
        """The evictable item that should go first; it stays in. What cannot be evicted is dropped on the
        way: push it again when it can."""

    def forget(self, item: Item) -> None:
        """The item is gone for good, or to another queue."""


class Policy(Protocol):
    def use(self, blocks: Iterable[Placed], now: float) -> None:
        """``blocks`` were stored or found at ``now``: set their ranks, and raise their slabs' to match.

        Their ancestors are passed too, up to a second late (see :class:`Climbs`): ``now`` may be lower than
        that of an earlier call.
        """

    def hint(self, blocks: Iterable[Placed], steps: int, priority: int, now: float) -> None:
        """A client says when it will need ``blocks`` again: in ``steps`` steps of ``STEP_S`` (-1: it does not
        say), and how much it cares: -3..3. It holds until a use in another second, and less and less: a hint
        moves a block as far as some uses would, and what is used afterwards overtakes it."""

    def leave(self, block: Placed) -> None:
        """``block`` lost its slot, or is gone. May be told twice."""

    def admit(self, block: Placed, now: float) -> bool:
        """``block`` comes back from L3 for a use at ``now``, which may have been told already, a second ago.
        False: it is worth less than what would have to go for it, and has been ranked to go first, so that a
        scan replaces itself."""

    def queue(self) -> Queue[Any]:
        """A new queue, for blocks that compete for the same slots."""


class ColdQueue(Generic[Item]):
    """Finds the evictable item of lowest rank in O(log n); ranks may rise without telling the queue.

    A heap with at most one live entry per item. Entries are looked at only when they surface: one whose item
    cannot be evicted is dropped, one whose item's rank has risen sinks back. ``number`` (1..65535) tells the
    queues of one policy apart.
    """

    __slots__ = ("_dead", "_heap", "number")

    def __init__(self, number: int = 0) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self.number = number
        self._dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._dead

    def push(self, item: Item) -> None:
        """Enter an evictable item. Nothing happens if it is in already."""
        if not item.queued:
            # Tickets rise: among equals, first in first out; and items are never compared.
            item.queued = next(_tickets) << 16 | self.number
            heapq.heappush(self._heap, (item.rank, item.queued, item))

    def coldest(self) -> Item | None:
        """The evictable item of lowest rank; it stays in."""
        heap = self._heap
        while heap:
            rank, ticket, item = heap[0]
            if item.queued != ticket:
                heapq.heappop(heap)
                self._dead -= 1
            elif not item.evictable:
                heapq.heappop(heap)
                item.queued = 0
            elif item.rank > rank:
                heapq.heapreplace(heap, (item.rank, ticket, item))
            else:
                return item
        return None

    def forget(self, item: Item) -> None:
        """The item is gone, or changes its queue. Its entry is dropped when half of the heap is such."""
        if item.queued:
            item.queued = 0
            self._dead += 1
            if self._dead * 2 > len(self._heap) + 64:
                self._heap = [entry for entry in self._heap if entry[2].queued == entry[1]]
                heapq.heapify(self._heap)
                self._dead = 0

    def fell(self, item: Item) -> None:
        """The rank of an item that is in has fallen."""
        self.forget(item)
        self.push(item)


class Ranking:
    """What policies by rank have in common: their queues, which are to be told when a rank falls."""

    def __init__(self) -> None:
        self._queues: list[ColdQueue[Any]] = []

    def queue(self) -> Queue[Any]:
        return self.new_queue()

    def leave(self, block: Placed) -> None:
        """Nothing to remember: what L3 keeps has its rank on it."""

    def new_queue(self) -> ColdQueue[Any]:
        queue: ColdQueue[Any] = ColdQueue(len(self._queues) + 1)
        self._queues.append(queue)
        return queue

    def put(self, block: Placed, rank: float) -> None:
        """Rank ``block``."""
        fell = rank < block.rank
        block.rank = rank
        slab = block.slab
        if slab.rank < rank:
            slab.rank = rank
        if fell and (number := block.queued & NUMBER):
            self._queues[number - 1].fell(block)


class Lru(Ranking):
    """Least recently used: the rank is the time of the last use, in seconds.

    A hint ranks a block as if it was last used as long ago as it will be needed, and ``half_life_s`` later
    for each point of priority. Whatever comes back from L3 is admitted.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        super().__init__()
        self._point = _positive(half_life_s)

    def use(self, blocks: Iterable[Placed], now: float) -> None:
        for block in blocks:
            if block.used < math.floor(now):
                block.uses += 1
            if block.used < now:
                block.used = now
                self.put(block, now)

    def hint(self, blocks: Iterable[Placed], steps: int, priority: int, now: float) -> None:
        for block in blocks:
            since = block.used if steps < 0 else now - STEP_S * steps
            self.put(block, since + self._point * within(priority))

    def admit(self, block: Placed, now: float) -> bool:
        return True


class Lrfu(Ranking):
    """The spectrum between recency and frequency (Lee et al., LRFU, IEEE Transactions on Computers 50(12),
    2001): each use counts for 1 at first, and for half of what it did after ``half_life_s`` more. A short
    half-life is LRU, a long one LFU.

    The count C of a block decays by 2^(-λ dt), all blocks' alike. So log2 C + λt, taken at the last use,
    orders them at any time without being touched: that is the rank, in half-lives.

    What has gone is remembered for a while: a block that is stored again takes up its old count.

    A hint ranks a block as if it was used now, colder by the half-lives until it will be needed, and warmer
    by one for each point of priority.
    """

    OUT: Final = -1e6  # half-lives: the bias of what goes first

    def __init__(self, half_life_s: float = HALF_LIFE_S, ghosts: int = GHOSTS) -> None:
        super().__init__()
        self._decay = 1 / _positive(half_life_s)
        self.ghosts = Ghosts(ghosts)

    def use(self, blocks: Iterable[Placed], now: float) -> None:
        second, at = math.floor(now), self._decay * now
        for block in blocks:
            if block.used < second:
                own = self._own(block)
                if not block.uses and (known := self.ghosts.take(block.digest)) > -math.inf:
                    own = max(own, known)
                    block.uses = math.ceil(_count(own - at))
                block.uses += 1
                self.put(block, _added(own, at))
                block.bias = 0.0
                block.used = now

    def _own(self, block: Placed) -> float:
        """The rank without its hint. A block may have taken over the rank of a child that was hinted; but no
        count exceeds the number of its uses."""
        if not block.bias:
            return block.rank
        most = self._decay * block.used + math.log2(block.uses) if block.uses else -math.inf
        return min(block.rank - block.bias, most)

    def hint(self, blocks: Iterable[Placed], steps: int, priority: int, now: float) -> None:
        at = self._decay * now
        for block in blocks:
            own = self._own(block)
            hinted = own if steps < 0 else _added(own, at) - self._decay * STEP_S * steps
            hinted += within(priority)
            if hinted > -math.inf:
                block.bias = hinted - own if own > -math.inf else 0.0
                self.put(block, hinted)

    def leave(self, block: Placed) -> None:
        if block.uses:
            self.ghosts.add(block.digest, self.ghosts.most, self._own(block))

    def admit(self, block: Placed, now: float) -> bool:
        """By what its earlier uses are worth, against the coldest candidate."""
        if block.used < math.floor(now) - 1:
            self.use((block,), now)
        at, own = self._decay * block.used, self._own(block)
        earlier = _count(own - at) - 1  # what it comes back for counts for 1
        before = at + math.log2(earlier) if earlier > 1e-9 else -math.inf
        coldest = [item.rank for queue in self._queues if (item := queue.coldest()) is not None]
        if not coldest or before > min(coldest):
            return True
        block.bias = self.OUT
        self.put(block, own + self.OUT)
        return False


def _added(rank: float, at: float) -> float:
    """The rank after one use more, at ``at`` half-lives."""
    high, low = (rank, at) if rank > at else (at, rank)
    return high + math.log1p(2.0 ** (low - high)) / _LN2


def _count(log2: float) -> float:
    return math.exp2(min(log2, 60.0))


def within(priority: int) -> int:
    return min(max(priority, -3), 3)


def _positive(half_life_s: float) -> float:
    if not 0 < half_life_s < math.inf:
        raise ConfigError(f"policy half_life_s={half_life_s!r}: need a finite number of seconds > 0")
    return half_life_s


class Ghosts:
    """What is remembered of blocks that have gone, the newest ``most`` of them: eight bytes of the digest,
    which is enough to rank by, and a rank."""

    __slots__ = ("_ranks", "most")

    def __init__(self, most: int) -> None:
        if most < 0:
            raise ConfigError(f"policy ghosts={most!r}: need an integer >= 0")
        self._ranks: dict[bytes, float] = {}
        self.most = most

    def __len__(self) -> int:
        return len(self._ranks)

    def add(self, digest: bytes, room: int, rank: float = 0.0) -> None:
        """Remember it; keep the newest ``room`` at most."""
        key = digest[:8]
        self._ranks.pop(key, None)
        self._ranks[key] = rank
        while len(self._ranks) > min(room, self.most):
            del self._ranks[next(iter(self._ranks))]

    def take(self, digest: bytes) -> float:
        """What rank was remembered, -inf if none; it is no more."""
        return self._ranks.pop(digest[:8], -math.inf)


NAMES: Final = ("lrfu", "lru", "s3-fifo")


def get(name: str, **options: Any) -> Policy:
    """The policy of that name. Options: ``half_life_s`` (seconds) of "lrfu" and "lru", ``ghosts`` (how
    many blocks that have gone are remembered) of "lrfu" and "s3-fifo".

    Raises ConfigError for an unknown name, and for options out of range.
    """
    match name:
        case "lrfu":
            return Lrfu(**options)
        case "lru":
            return Lru(**options)
        case "s3-fifo":
            from hypercache.store.s3_fifo import S3Fifo

            return S3Fifo(**options)
    raise ConfigError(f"eviction policy {name!r}: choose one of {', '.join(NAMES)}")


class Climbs:
    """The ancestors of a used block are used too, or a slab full of prefixes looks cold and takes what hangs
    on them along. Walking to the root on each use would let a small request cost as much as the chain is
    long. So an ancestor is told at most once a second, and each walk goes on where the last one stopped.
    """

    __slots__ = ("_policy", "_waiting")

    STEPS = 256  # ancestors told in one call of :meth:`use`

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._waiting: dict[Linked, float] = {}  # next to tell, and of what time

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
            if above is not None and above.used < math.floor(now):
                self._waiting[above] = now

    def go(self, steps: int) -> None:
        """Tell up to ``steps`` blocks."""
        while self._waiting and steps > 0:
            block, now = self._waiting.popitem()
            second = math.floor(now)
            told: list[Linked] = []
            node: Linked | None = block
            while node is not None and node.used < second and len(told) < steps:
                told.append(node)
                node = node.parent
            steps -= len(told) + 1
            self._policy.use(told, now)
            if node is not None and node.used < second:
                self._waiting[node] = max(now, self._waiting.get(node, now))
