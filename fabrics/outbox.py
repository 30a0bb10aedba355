"""What a channel has to send, in which order. No I/O, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from fabrics.base import Outgoing, Source
from fabrics.framing import FIRST_FABRIC_TYPE

FRAME_NBYTES = 1 << 10  # about what a waiting frame takes beside its bytes


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

    ``load`` makes a flight of a frame, or raises: then it has released the frame. ``charge`` is added to the
    bytes of each pushed frame.
    """

    __slots__ = ("_by_id", "_charge", "_load", "_pushed", "_pushes", "_ring", "_sent_id", "queued")

    def __init__(self, load: Callable[[Outgoing], Flight], charge: int = 0) -> None:
        self._load = load
        self._charge = charge
        self._pushed: OrderedDict[int, Flight] = OrderedDict()  # by number of push
        self._pushes = 0
        # request id -> the user's pushes that wait. Made by a withdrawal, kept until a frame goes out: most
        # queues never need it, and one that is withdrawn frame by frame is not searched for each.
        self._by_id: dict[int, list[int]] | None = None
        self._sent_id = -1  # the highest request id that was given out
        self._ring: OrderedDict[int, Source] = OrderedDict()
        self.queued = 0  # what the pushed frames that wait are charged with

    def __bool__(self) -> bool:
        return bool(self._pushed or self._ring)

    @property
    def cost(self) -> int:
        """About the memory that pushed frames hold, in bytes."""
        return self.queued + len(self._pushed) * (FRAME_NBYTES - self._charge)

    def push(self, frame: Outgoing) -> None:
        flight = self._load(frame)
        self.queued += flight.nbytes + self._charge
        self._pushes += 1
        self._pushed[self._pushes] = flight
        if self._by_id is not None:
            self._note(self._by_id, self._pushes, frame)

    @staticmethod
    def _note(by_id: dict[int, list[int]], number: int, frame: Outgoing) -> None:
        if frame.type < FIRST_FABRIC_TYPE:
            by_id.setdefault(frame.request_id, []).append(number)

    def withdraw(self, request_id: int) -> tuple[list[Flight], bool]:
        """Take back the user's pushed frames of a request that still wait; the caller must release them.
        Also: whether the peer can never have heard of the request from us. Ids that grow make the answer
        exact, others err towards "it may have"."""
        if not self._pushed:
            return [], False
        if self._by_id is None:
            self._by_id = {}
            for number, flight in self._pushed.items():
                self._note(self._by_id, number, flight.frame)
        taken = []
        for number in self._by_id.pop(request_id, ()):
            taken.append(waiting := self._pushed.pop(number))
            self.queued -= waiting.nbytes + self._charge
        return taken, bool(taken) and request_id > self._sent_id

    def add(self, source: Source) -> None:
        self._ring.setdefault(id(source), source)

    def remove(self, source: Source) -> None:
        self._ring.pop(id(source), None)

    def stop_sources(self) -> None:
        self._ring.clear()

    def next(self) -> Flight | None:
        """What to send now, or None. An exception of a source passes through."""
        if self._pushed:
            _, flight = self._pushed.popitem(last=False)
            self.queued -= flight.nbytes + self._charge
            self._by_id = None
            return self._given(flight)
        while self._ring:
            key, source = next(iter(self._ring.items()))
            self._ring.move_to_end(key)
            frame = source.next_frame()
            if frame is not None:
                return self._given(self._load(frame))
            self._ring.pop(key, None)
        return None

    def _given(self, flight: Flight) -> Flight:
        if flight.frame.type < FIRST_FABRIC_TYPE and flight.frame.request_id > self._sent_id:
            self._sent_id = flight.frame.request_id
        return flight

    def clear(self) -> list[Flight]:
        """Forget everything; the caller must release what is returned."""
        flights = list(self._pushed.values())
        self._pushed.clear()
        self._by_id = None
        self._ring.clear()
        self.queued = 0
        return flights
