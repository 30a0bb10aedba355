"""The policy S3-FIFO: what is new has to prove itself before it may displace what has."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

from hypercache.store.policy import (
    GHOSTS,
    NUMBER,
    Candidate,
    ColdQueue,
    Ghosts,
    Linked,
    Placed,
    Queue,
    Ranking,
    within,
)


class S3Fifo(Ranking):
    """Three FIFO queues (Yang et al., SOSP 2023): what is new waits in a small one, a tenth of all, and goes
    unless it is used twice there; a main one gives a turn more for each use, up to three; and a list of
    ghosts sends what was thrown out too early straight to the main one.

    The rank is the time of entry into the queue, in seconds; ``uses`` counts up to three, and ``bias`` says
    which queue it is. A hint sets the count: 2 and the priority, less one for each ten steps. So it is worth
    three turns at most.
    """

    SMALL: Final = 1.0
    MAIN: Final = 2.0
    MOST: Final = 3
    AGAIN: Final = 2  # uses in the small queue that lead to the main one
    ABOVE: Final = 64  # ancestors whose slabs are kept warm at each turn; the others are by their last use

    def __init__(self, ghosts: int = GHOSTS) -> None:
        super().__init__()
        self.ghosts = Ghosts(ghosts)
        self._blocks = 0  # in either queue
        self._clock = -math.inf

    def queue(self) -> Queue[Any]:
        return _S3Queue(self, self.new_queue(), self.new_queue())

    def _tick(self, now: float = -math.inf) -> float:
        """A time of entry: each is later than the one before, or among equals the order would be lost."""
        self._clock = max(now, math.nextafter(self._clock, math.inf))
        return self._clock

    def use(self, blocks: Iterable[Placed], now: float) -> None:
        second = math.floor(now)
        for block in blocks:
            if not block.bias:
                self._blocks += 1
                block.bias = self.SMALL if self.ghosts.take(block.digest) < 0 else self.MAIN
                block.uses = 0
                self.put(block, self._tick(now))
            elif block.used < second:
                block.uses = min(block.uses + 1, self.MOST)
            block.used = max(block.used, now)
            slab = block.slab
            slab.rank = max(slab.rank, now)

    def hint(self, blocks: Iterable[Placed], steps: int, priority: int, now: float) -> None:
        for block in blocks:
            turns = 2 + within(priority) - max(steps, 0) // 10
            block.uses = min(max(turns, 0), self.MOST)

    def leave(self, block: Placed) -> None:
        if block.bias == self.SMALL:
            self.ghosts.add(block.digest, self._blocks * 9 // 10)
        self._blocks -= block.bias != 0.0
        block.bias, block.uses = 0.0, 0

    def admit(self, block: Placed, now: float) -> bool:
        """The small queue is where it has to prove itself, unless its ghost is remembered."""
        if not block.bias:
            self.use((block,), now)
        return block.bias == self.MAIN

    def to_main(self, block: Linked) -> None:
        """It has proved itself."""
        block.bias, block.uses = self.MAIN, 0
        self._turn(block)

    def again(self, block: Linked) -> None:
        """One turn more in the main queue."""
        block.uses -= 1
        self._turn(block)

    def _turn(self, block: Linked) -> None:
        """It shall stay, and so shall what it hangs on: no slab of these is to go as a whole."""
        at = self._tick()
        self.put(block, at)
        above = block.parent
        for _ in range(self.ABOVE):
            if above is None:
                break
            above.slab.rank = max(above.slab.rank, at)
            above = above.parent


class _S3Queue:
    """The small and the main queue of one slot size. Heaps by time of entry: a block that becomes a candidate
    late, because others hung on it, takes the place that its age gives it."""

    __slots__ = ("_main", "_policy", "_small")

    def __init__(self, policy: S3Fifo, small: ColdQueue[Candidate], main: ColdQueue[Candidate]) -> None:
        self._policy = policy
        self._small = small
        self._main = main

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def push(self, item: Candidate) -> None:
        (self._main if item.bias == S3Fifo.MAIN else self._small).push(item)

    def forget(self, item: Candidate) -> None:
        (self._main if item.queued & NUMBER == self._main.number else self._small).forget(item)

    def coldest(self) -> Candidate | None:
        while True:
            small, main = self._small.coldest(), self._main.coldest()
            if small is not None and (main is None or len(self._small) * 10 >= len(self)):
                if small.uses < S3Fifo.AGAIN:
                    return self._out(small, main)
                self._small.forget(small)
                self._policy.to_main(small)
                self._main.push(small)
            elif main is None or not main.uses:
                return self._out(main, small)
            else:
                self._policy.again(main)

    def _out(self, item: Candidate | None, other: Candidate | None) -> Candidate | None:
        """``item`` goes before ``other``, though it may have come later. Ranked as the older of the two, it
        also goes before the slabs of what is kept; those of other sizes go if they are older still."""
        for one in (item, other):
            if item is not None and one is not None:
                item.rank = min(item.rank, one.rank, one.used)
        return item
