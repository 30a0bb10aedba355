"""``loop://name``: both ends in one event loop. Payload is copied once, from lent views into the sink's."""

from __future__ import annotations

import asyncio
import weakref

from fabrics.base import AcceptCallback, Channel, Fabric, Frame, Handler, Limits, Listener, Outgoing
from fabrics.buffers import Cursor
from fabrics.channel import BUDGET, TIME_BUDGET, FrameChannel
from fabrics.errors import AddressError, ChannelClosed, ConnectFailed
from fabrics.framing import HEADER_NBYTES, Goodbye, check_lengths, encode_head
from fabrics.inbound import CHUNK
from fabrics.outbox import Flight

_listeners: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, LoopbackListener]]
_listeners = weakref.WeakKeyDictionary()


def _name(uri: str) -> str:
    scheme, _, name = uri.partition("://")
    if scheme != LoopbackFabric.scheme or not name or "/" in name:
        raise AddressError(f"{uri!r} is not a loopback address; write loop://NAME")
    return name


class LoopbackFabric(Fabric):
    """Channels between parties of one event loop, found by name."""

    scheme = "loop"

    def check(self, uri: str) -> None:
        _name(uri)

    async def connect(self, uri: str, handler: Handler, *, timeout: float) -> Channel:  # noqa: ASYNC109
        name = _name(uri)
        listener = _listeners.get(asyncio.get_running_loop(), {}).get(name)
        if listener is None:
            raise ConnectFailed(f"{uri}: nobody listens on this name in this event loop")
        ours = LoopbackChannel(f"loop://{name}#client", f"loop://{name}", self.limits)
        theirs = LoopbackChannel(f"loop://{name}", f"loop://{name}#client", listener.limits, guest=True)
        ours._other, theirs._other = theirs, ours
        try:
            their_handler = listener.accept(theirs)
        except Exception as error:
            raise ConnectFailed(f"{uri}: the listener refused the channel: {error}") from error
        ours.start(handler)
        theirs.start(their_handler)
        return ours

    async def listen(self, uri: str, accept: AcceptCallback) -> Listener:
        return LoopbackListener(_name(uri), accept, self.limits)


class LoopbackListener(Listener):
    """A name under which channels are accepted, until closed."""

    def __init__(self, name: str, accept: AcceptCallback, limits: Limits) -> None:
        names = _listeners.setdefault(asyncio.get_running_loop(), {})
        if name in names:
            raise AddressError(
                f"cannot listen on loop://{name}: EADDRINUSE, the name is taken in this event loop"
            )
        names[name] = self
        self._names = names
        self._name = name
        self.uris = [f"loop://{name}"]
        self.accept = accept
        self.limits = limits

    def pause(self) -> None:
        """Nobody can wait here."""

    def resume(self) -> None:
        """Nobody waits here."""

    async def close(self) -> None:
        if self._names.get(self._name) is self:
            del self._names[self._name]


class LoopbackChannel(FrameChannel):
    """One end. It moves its own output into the other end's sinks, a budget at a time."""

    _other: LoopbackChannel

    def __init__(self, local: str, peer: str, limits: Limits, *, guest: bool = False) -> None:
        super().__init__(local, peer, limits, guest=guest)
        self._flight: Flight | None = None  # being moved
        self._cursor = Cursor([], 0)
        self._woken = False

    def start(self, handler: Handler) -> None:
        self._attach(handler)

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._move)

    def _owed(self) -> tuple[int, int]:
        waits = self._flight is not None or bool(self._outbox)  # of a source's frames the size is not known
        return max(self._cursor.left, int(waits)), 0

    def _prepare(self, frame: Outgoing, payload: list[memoryview], nbytes: int) -> Flight:
        encode_head(frame.type, frame.flags, frame.request_id, b"", 0)  # refuses what other fabrics refuse
        return Flight(frame, payload, nbytes)

    def _detach(self, goodbye: Outgoing | None) -> list[Flight]:
        lost = [] if self._flight is None else [self._flight]
        self._flight = None
        self._cursor = Cursor([], 0)
        error: Exception | None = ChannelClosed(f"{self.local} closed the channel without a goodbye")
        if goodbye is not None:
            error = Goodbye.parse(memoryview(goodbye.body)).error(self.local)
        self._soon(self._other._left, error)
        return lost

    def _left(self, error: Exception | None) -> None:
        """The other end is gone."""
        self._finish(None if self._flushed else error)

    def _move(self) -> None:
        """Bring output to the other end until the budget is spent, nothing is left, or it must wait."""
        self._woken = False
        budget, until = BUDGET, self._loop.time() + TIME_BUDGET
        try:
            while budget > 0 and self._state != "closed" and not self._other._choked:
                flight = self._flight or self._begin()
                if flight is None:
                    return
                if self._flight is not None:
                    budget -= self._step(flight)
                if self._loop.time() >= until:
                    break
        except Exception as error:
            self._fail(error)
            return
        if self._state != "closed" and not self._other._choked:
            self._wake()

    def _begin(self) -> Flight | None:
        """Take up the next frame and deliver its head."""
        choked = self._choked
        self._flight = flight = self._outbox.next()
        if flight is None:
            return None
        self._cursor = Cursor(flight.views, flight.nbytes)
        flight.views = []
        frame, other = flight.frame, self._other
        head = HEADER_NBYTES + len(frame.body)
        self.stats.bytes_out += head
        other.stats.bytes_in += head
        if choked:
            other._wake()  # it waits for our queue to shrink
        body = memoryview(frame.body)
        other._receive(Frame(frame.type, frame.flags, frame.request_id, body, flight.nbytes))
        return flight

    def _receive(self, frame: Frame) -> None:
        if self._state == "closed":
            return
        try:
            lengths = len(frame.body), frame.payload_nbytes
            check_lengths(frame.type, *lengths, self._limits, self.peer, guest=self._guest)
            self._dispatch(frame)
        except Exception as error:
            self._fail(error)

    def _step(self, flight: Flight) -> int:
        """Move up to a chunk of a frame; give it back when all of it has gone. Returns bytes."""
        moved = self._copy() if self._cursor.left else 0
        if self._flight is None:  # a callback closed the channel
            return moved
        if moved:
            self._cursor.advance(moved)
            self.stats.bytes_out += moved
        if not self._cursor.left:
            self._flight = None
            self._sent(flight)
        return max(moved, HEADER_NBYTES)

    def _copy(self) -> int:
        views, count = self._cursor.peek(CHUNK)
        for view in views:
            self._other._place(view)
        return count

    def _place(self, data: memoryview) -> None:
        if self._state == "closed":
            return
        self.stats.bytes_in += len(data)
        try:
            self._inbound.fill(data)
        except Exception as error:
            self._fail(error)
