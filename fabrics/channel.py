"""What the channels of all fabrics have in common: states, order of output, endings.

A fabric adds how bytes move: it takes flights from the outbox and reports them with
:meth:`FrameChannel._sent`, hands heads to :meth:`FrameChannel._dispatch` and payload to
:class:`~fabrics.inbound.Inbound`.
"""

from __future__ import annotations

import abc
import asyncio
import os
from collections.abc import Callable

from fabrics.base import Channel, ChannelStats, Frame, Handler, Limits, Outgoing, Source
from fabrics.buffers import flat
from fabrics.errors import ChannelClosed, ChannelFull, ChannelStalled, FabricError, ForkedProcess, FrameError
from fabrics.framing import (
    FIRST_FABRIC_TYPE,
    FabricType,
    Goodbye,
    check_lengths,
    goodbye_body,
)
from fabrics.inbound import Inbound
from fabrics.outbox import FRAME_NBYTES, Flight, Outbox
from fabrics.pace import TICKS, Pace

BUDGET = 2 << 20  # bytes moved per callback, so that one channel does not hold up the others
TIME_BUDGET = 0.003  # seconds per callback, likewise: small frames cost by their number
_LINGER = 1.0  # seconds to wait for the peer's own end after our goodbye is on its way
_FULL = 4  # times max_queued may wait before send() refuses


def _refuse(frame: Outgoing) -> Flight:
    raise ChannelClosed("the channel is closed")


class FrameChannel(Channel):
    """States and rules of a channel, without the moving of bytes."""

    def __init__(self, local: str, peer: str, limits: Limits, *, guest: bool = False) -> None:
        self.local = local
        self.peer = peer
        self.stats = ChannelStats()
        self._limits = limits
        self._guest = guest  # the peer came to us and is not welcome yet
        self._loop = asyncio.get_running_loop()
        self._process = os.getpid()
        self._state = "open"
        self._outbox = Outbox(self._load, FRAME_NBYTES if guest else 0)
        self._inbound = Inbound(self, self.stats)
        self._heard_id = -1  # the highest request id that came
        self._attached = False
        self._error: Exception | None = None  # why it was closed
        self._flushed = False  # our goodbye is out
        self._gone = self._loop.create_future()
        self._ticker: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._last_call: asyncio.TimerHandle | None = None
        self._paces = (Pace(limits.min_rate_bytes), Pace(limits.min_rate_bytes))  # out, in

    def _attach(self, handler: Handler) -> None:
        """From here on the handler hears of everything, and at last of the loss."""
        self._inbound.handler = handler
        self._attached = True
        if self._state == "closed":  # the one who accepted it did not want it
            self._soon(self._tell_lost)
            return
        self._ticker = self._loop.call_later(self._limits.stall_timeout / TICKS, self._tick)

    # -- what a fabric adds

    @abc.abstractmethod
    def _wake(self) -> None:
        """There may be something to send: do so soon, not within this call."""

    @abc.abstractmethod
    def _owed(self) -> tuple[int, int]:
        """Bytes of output that wait for the peer, and bytes that it has not sent of a frame that it began."""

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
            if self._outbox.cost > _FULL * self._limits.max_queued:
                raise ChannelFull(
                    f"{self.peer} does not take what is sent to it: {self._outbox.cost} bytes wait, "
                    f"{_FULL} times max_queued ({self._limits.max_queued}); wait for answers first"
                )
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
        if self._state != "open":
            return
        withdrawn, unheard = self._outbox.withdraw(request_id)
        for flight in withdrawn:
            self._guarded(flight.release, False)
        if self._state == "open" and not (unheard and request_id > self._heard_id):
            self._push(Outgoing(FabricType.CANCEL, request_id, b""))

    def welcome(self) -> None:
        self._check_process()
        self._guest = False

    def hang_up(self) -> None:
        self._check_process()
        if self._state != "open":
            return
        self._state = "closing"
        self._outbox.stop_sources()
        self._push(Outgoing(FabricType.GOODBYE, 0, goodbye_body(None), release=self._said_goodbye))
        self._last_call = self._loop.call_later(self._limits.stall_timeout, self._too_late)
        self._guarded(self._inbound.hang_up)

    async def close(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        self.hang_up()
        limit = self._limits.stall_timeout if timeout is None else timeout
        try:
            await asyncio.wait([self._gone], timeout=limit)
        finally:
            self._too_late()
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
        if frame.request_id > self._heard_id:
            self._heard_id = frame.request_id
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
        self._inbound.deaf = self._inbound.over = True
        for timer in (self._ticker, self._linger, self._last_call):
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

    def _too_late(self) -> None:
        self._finish(ChannelStalled(f"{self.peer} did not take all that was queued for it in time"))

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
        """See that either side keeps what it owes the other coming."""
        seen = (self.stats.bytes_out, self.stats.bytes_in)
        faults = ("took too little of the bytes that wait for it", "sent too little of a frame it began")
        for pace, moved, owed, fault in zip(self._paces, seen, self._owed(), faults, strict=True):
            if pace.stalled(moved, owed):
                self._finish(ChannelStalled(f"{self.peer} {fault} for {self._limits.stall_timeout} s"))
                return
        self._ticker = self._loop.call_later(self._limits.stall_timeout / TICKS, self._tick)
