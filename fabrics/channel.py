"""What the channels of all fabrics have in common: states, order of output, placement of input, endings.

A fabric adds how bytes move: it takes flights from the outbox and reports them with
:meth:`FrameChannel._sent`, hands heads to :meth:`FrameChannel._dispatch` and payload to :class:`Inbound`.
"""

from __future__ import annotations

import abc
import asyncio
import os
from collections.abc import Callable

from fabrics.base import Channel, ChannelStats, Frame, Handler, Limits, Outgoing, Sink, Source
from fabrics.buffers import Cursor, flat
from fabrics.errors import ChannelClosed, ChannelStalled, FabricError, ForkedProcess, FrameError
from fabrics.framing import (
    FIRST_FABRIC_TYPE,
    FabricType,
    Goodbye,
    check_lengths,
    goodbye_body,
)
from fabrics.outbox import Flight, Outbox

CHUNK = 512 << 10  # bytes moved per step: what was just copied is still in L2 when ``landed`` sums it
BUDGET = 2 << 20  # bytes moved per callback, so that one channel does not hold up the others
_LINGER = 1.0  # seconds to wait for the peer's own end after our goodbye is on its way
_STALL_TICKS = 4  # the stall limit is looked at this many times

_DISCARD = memoryview(bytearray(CHUNK))  # written by all, read by none


class Inbound:
    """The frame that is arriving: where its payload goes, and who is told."""

    __slots__ = ("_channel", "_cursor", "_frame", "_sink", "handler", "left", "over", "stats")
    handler: Handler

    def __init__(self, channel: Channel, stats: ChannelStats) -> None:
        self._channel = channel
        self._frame: Frame | None = None
        self._sink: Sink | None = None
        self._cursor: Cursor | None = None
        self.stats = stats
        self.left = 0  # payload bytes still to come
        self.over = False  # the channel is closed: call nobody, write nowhere

    def start(self, frame: Frame) -> None:
        """Ask the handler where the payload goes."""
        self.skip(frame)
        sink = self.handler.on_frame(self._channel, frame)
        if sink is not None:
            self._frame, self._sink = frame, sink
        if self.over:
            self.drop(None)
            return
        try:
            frame.body.release()  # whoever reads it later gets an error, not another frame's bytes
        except BufferError:
            raise ValueError("on_frame kept a view of the body, whose memory is reused: copy it") from None
        if sink is None:
            return
        if sink.nbytes != frame.payload_nbytes:
            raise ValueError(
                f"on_frame gave a sink of {sink.nbytes} bytes for a payload of {frame.payload_nbytes}"
            )
        views = flat(sink.views)
        for view in views:
            if view.readonly:
                raise TypeError(
                    "on_frame gave a sink with a read-only view; payload can only land in writable memory"
                )
        self._cursor = Cursor(views, sink.nbytes)
        if not self.left:
            self._complete()

    def skip(self, frame: Frame) -> None:
        """Let the payload pass unseen."""
        self.left = frame.payload_nbytes
        self.stats.frames_in += 1

    def peek(self, limit: int) -> tuple[list[memoryview], int]:
        """Where the next bytes of payload go, and how many."""
        if self._cursor is not None:
            return self._cursor.peek(limit)
        count = min(limit, self.left, CHUNK)
        return [_DISCARD[:count]], count

    def advance(self, count: int) -> None:
        """``count`` bytes are where :meth:`peek` said."""
        self.left -= count
        sink, cursor = self._sink, self._cursor
        if sink is None or cursor is None:
            self.stats.bytes_dropped += count
            return
        cursor.advance(count)
        if sink.landed is not None:
            sink.landed(sink.nbytes - self.left)
        if not self.left and self._sink is sink:
            self._complete()

    def fill(self, data: memoryview) -> None:
        """Copy ``data`` (<= ``left`` bytes) to where the payload goes."""
        while data and not self.over:
            if self._cursor is None:
                self.advance(len(data))
                return
            data = data[self._copy(data) :]

    def _copy(self, data: memoryview) -> int:
        views, count = self.peek(len(data))
        at = 0
        for view in views:
            view[:] = data[at : at + len(view)]
            at += len(view)
        del view, views  # the sink's owner may take the memory back in a callback
        self.advance(count)
        return count

    def forget(self) -> None:
        """The channel is closed and everybody knows."""
        del self._channel, self.handler

    def drop(self, request_id: int | None) -> None:
        """Write no more to the sink, if it is this request's (None: whosever it is)."""
        frame, sink = self._frame, self._sink
        if frame is None or sink is None or request_id not in (None, frame.request_id):
            return
        if self._cursor is not None:
            self._cursor.clear()
        self._frame = self._sink = self._cursor = None
        if sink.closed is not None:
            sink.closed(False)

    def _complete(self) -> None:
        frame, sink = self._frame, self._sink
        assert frame is not None and sink is not None
        self._frame = self._sink = self._cursor = None
        if sink.closed is not None:
            sink.closed(True)
        if not self.over:
            self.handler.on_payload(self._channel, frame, sink)


def _refuse(frame: Outgoing) -> Flight:
    raise ChannelClosed("the channel is closed")


class FrameChannel(Channel):
    """States and rules of a channel, without the moving of bytes."""

    def __init__(self, local: str, peer: str, limits: Limits) -> None:
        self.local = local
        self.peer = peer
        self.stats = ChannelStats()
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._process = os.getpid()
        self._state = "open"
        self._outbox = Outbox(self._load)
        self._inbound = Inbound(self, self.stats)
        self._attached = False
        self._error: Exception | None = None  # why it was closed
        self._flushed = False  # our goodbye is out
        self._gone = self._loop.create_future()
        self._ticker: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._stalled = [0, 0]  # ticks without progress: out, in
        self._seen = (0, 0)

    def _attach(self, handler: Handler) -> None:
        """From here on the handler hears of everything, and at last of the loss."""
        self._inbound.handler = handler
        self._attached = True
        if self._state == "closed":  # the one who accepted it did not want it
            self._soon(self._tell_lost)
            return
        self._ticker = self._loop.call_later(self._limits.stall_timeout / _STALL_TICKS, self._tick)

    # -- what a fabric adds

    @abc.abstractmethod
    def _wake(self) -> None:
        """There may be something to send: do so soon, not within this call."""

    @abc.abstractmethod
    def _owed(self) -> tuple[bool, bool]:
        """Whether output waits for the peer, and whether the peer began a frame and has not ended it."""

    @abc.abstractmethod
    def _prepare(self, frame: Outgoing, payload: list[memoryview], nbytes: int) -> Flight:
        """Lay out what has to move for a frame."""

    @abc.abstractmethod
    def _detach(self, goodbye: Outgoing | None) -> list[Flight]:
        """Free the transport now, with a last frame if that needs no waiting. Returns frames not sent."""

    def _end_output(self) -> None:
        """Our goodbye has been sent; nothing of ours follows."""

    # -- the contract

    @property
    def state(self) -> str:
        return self._state

    def send(self, frame: Outgoing) -> None:
        try:
            self._check_usable()
            if frame.type >= FIRST_FABRIC_TYPE:
                raise ValueError(
                    f"frame type {frame.type} belongs to the fabric; use 0..{FIRST_FABRIC_TYPE - 1}"
                )
        except Exception:
            if frame.release is not None:
                frame.release(False)
            raise
        self._push(frame)

    def add_source(self, source: Source) -> None:
        self._check_usable()
        self._outbox.add(source)
        self._wake()

    def remove_source(self, source: Source) -> None:
        self._check_process()
        self._outbox.remove(source)

    def drop_sink(self, request_id: int) -> None:
        self._check_process()
        if self._state != "closed":
            self._guarded(self._inbound.drop, request_id)

    def cancel(self, request_id: int) -> None:
        self.drop_sink(request_id)
        if self._state == "open":
            self._push(Outgoing(FabricType.CANCEL, request_id, b""))

    async def close(self) -> None:
        self._check_process()
        if self._state == "open":
            self._state = "closing"
            self._outbox.stop_sources()
            self._push(Outgoing(FabricType.GOODBYE, 0, goodbye_body(None), release=self._said_goodbye))
            self._guarded(self._inbound.drop, None)
        try:
            await asyncio.wait([self._gone], timeout=self._limits.stall_timeout)
        finally:
            self._finish(ChannelStalled(f"{self.peer} did not take all that was queued for it in time"))
        await asyncio.wait([self._gone])

    def abort(self, error: Exception | None = None) -> None:
        self._check_process()
        self._finish(error or ChannelClosed(f"the channel to {self.peer} was aborted on this side"))

    # -- for fabrics

    def _load(self, frame: Outgoing) -> Flight:
        """Check a frame and make it ready. One that cannot be sent is released."""
        try:
            views = flat(frame.payload)
            payload = sum(map(len, views))
            check_lengths(frame.type, len(frame.body), payload, self._limits, self.peer)
            if self._state == "closed":  # a source ended the channel while it was asked
                raise ChannelClosed(f"the channel to {self.peer} is closed")
            return self._prepare(frame, views, payload)
        except Exception:
            if frame.release is not None:
                frame.release(False)
            raise

    def _sent(self, flight: Flight) -> None:
        self.stats.frames_out += 1
        flight.release(True)

    def _dispatch(self, frame: Frame) -> None:
        """A head arrived."""
        if frame.type < FIRST_FABRIC_TYPE and self._state == "open":
            self._inbound.start(frame)
            return
        self._inbound.skip(frame)
        if frame.type == FabricType.GOODBYE:
            self._finish(Goodbye.parse(frame.body).error(self.peer))
        elif frame.type == FabricType.CANCEL and self._state == "open":
            self._inbound.handler.on_cancel(self, frame.request_id)

    @property
    def _choked(self) -> bool:
        """Whether reading must wait until the peer takes what we have for it."""
        return self._outbox.queued > self._limits.max_queued

    def _fail(self, error: Exception) -> None:
        """Something went wrong while moving bytes. Programming errors are reported to the loop as well."""
        if self._state != "closed" and not isinstance(error, FabricError):
            self._report(error)
        self._finish(error)

    def _finish(self, error: Exception | None) -> None:
        """The one way out: free everything, then tell the handler from a fresh stack."""
        if self._state == "closed":
            return
        self._state = "closed"
        self._error = error
        self._inbound.over = True
        for timer in (self._ticker, self._linger):
            if timer is not None:
                timer.cancel()
        last = None
        if isinstance(error, FrameError):
            last = Outgoing(FabricType.GOODBYE, 0, goodbye_body(error))
        lost = [*self._detach(last), *self._outbox.clear()]
        for flight in lost:
            self._guarded(flight.release, False)
        self._guarded(self._inbound.drop, None)
        if self._attached:
            self._soon(self._tell_lost)

    # -- inner

    def _push(self, frame: Outgoing) -> None:
        self._outbox.push(frame)
        self._wake()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ForkedProcess(
                f"the channel to {self.peer} was opened in process {self._process} and is used in its fork "
                f"{os.getpid()}: channels are not fork-safe. Connect in the child, or start it with 'spawn'"
            )

    def _check_usable(self) -> None:
        self._check_process()
        if self._state != "open":
            raise ChannelClosed(f"the channel to {self.peer} is {self._state}; connect again")

    def _said_goodbye(self, sent: bool) -> None:
        if sent:
            self._flushed = True
            self._end_output()
            self._linger = self._loop.call_later(_LINGER, self._finish, None)

    def _soon(self, callback: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon(callback, *args)

    def _tell_lost(self) -> None:
        try:
            self._inbound.handler.on_lost(self, self._error)
        except Exception as failure:
            self._report(failure)
        if not self._gone.done():
            self._gone.set_result(None)
        # Nobody is called any more. Undo the references that lead back here, so that the memory goes now and
        # not when a garbage collector comes by: a server may run with its collector off.
        self._inbound.forget()
        self._outbox = Outbox(_refuse)
        self._error = None

    def _guarded(self, callback: Callable[..., None], *args: object) -> None:
        """Call a user's callback whose failure must not keep others from being called."""
        try:
            callback(*args)
        except Exception as error:
            self._report(error)
            self._finish(error)

    def _report(self, error: Exception) -> None:
        self._loop.call_exception_handler(
            {"message": f"a callback of {self!r} failed", "exception": error, "channel": self}
        )

    def _tick(self) -> None:
        """Count ticks without progress on what one side owes the other."""
        seen = (self.stats.bytes_out, self.stats.bytes_in)
        for way, owed in enumerate(self._owed()):
            moved = seen[way] != self._seen[way]
            self._stalled[way] = 0 if moved or not owed else self._stalled[way] + 1
        self._seen = seen
        if max(self._stalled) >= _STALL_TICKS:
            fault = (
                "took none of the bytes that wait for it" if self._stalled[0] else "sent no more of a frame"
            )
            self._finish(ChannelStalled(f"{self.peer} {fault} for {self._limits.stall_timeout} s"))
            return
        self._ticker = self._loop.call_later(self._limits.stall_timeout / _STALL_TICKS, self._tick)
