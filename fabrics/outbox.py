"""What a channel has to send, in which order. No I/O, no clock."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from fabrics.base import Outgoing, Source


class Flight:
    """A frame made ready: the views that have to move, and the number of their bytes."""

    __slots__ = ("frame", "nbytes", "views")

    def __init__(self, frame: Outgoing, views: list[memoryview], nbytes: int) -> None:
        self.frame = frame
        self.views = views
        self.nbytes = nbytes

    def release(self, sent: bool) -> None:
        """Give the payload back to its owner. Whoever takes a flight from its queue does so once."""
        self.views = []
        if self.frame.release is not None:
            self.frame.release(sent)


class Outbox:
    """Frames that were pushed go first, in order; then sources are asked for a frame each, in turn.

    ``load`` makes a flight of a frame, or raises: then it has released the frame.
    """

    __slots__ = ("_load", "_pushed", "_ring", "queued")

    def __init__(self, load: Callable[[Outgoing], Flight]) -> None:
        self._load = load
        self._pushed: deque[Flight] = deque()
        self._ring: OrderedDict[int, Source] = OrderedDict()
        self.queued = 0  # bytes of pushed frames that wait

    def __bool__(self) -> bool:
        return bool(self._pushed or self._ring)

    def push(self, frame: Outgoing) -> None:
        flight = self._load(frame)
        self.queued += flight.nbytes
        self._pushed.append(flight)

    def add(self, source: Source) -> None:
        self._ring.setdefault(id(source), source)

    def remove(self, source: Source) -> None:
        self._ring.pop(id(source), None)

    def stop_sources(self) -> None:
        self._ring.clear()

    def next(self) -> Flight | None:
        """What to send now, or None. An exception of a source passes through."""
        if self._pushed:
            flight = self._pushed.popleft()
            self.queued -= flight.nbytes
            return flight
        while self._ring:
            key, source = next(iter(self._ring.items()))
            self._ring.move_to_end(key)
            frame = source.next_frame()
            if frame is not None:
                return self._load(frame)
            self._ring.pop(key, None)
        return None

    def clear(self) -> list[Flight]:
        """Forget everything; the caller must release what is returned."""
        flights = list(self._pushed)
        self._pushed.clear()
        self._ring.clear()
        self.queued = 0
        return flights
