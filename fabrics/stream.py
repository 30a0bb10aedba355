"""A channel over a non-blocking stream socket.

Payload goes by ``recvmsg_into`` straight into the sink's views and by ``sendmsg`` straight out of the lent
ones. ``asyncio`` transports are not used: they copy, and do not say when the kernel is done with a buffer.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from itertools import islice

from fabrics.base import Handler, Limits, Outgoing
from fabrics.channel import BUDGET, TIME_BUDGET, FrameChannel
from fabrics.errors import ChannelClosed
from fabrics.framing import HEADER_NBYTES, Decoder, encode_head
from fabrics.inbound import CHUNK
from fabrics.outbox import Flight

_GATHER = 1 << 20  # bytes taken from the outbox ahead of the kernel: frames that share one system call
_GATHER_FRAMES = 256  # ... and as many frames at most, so that they cost little until the kernel has them
_MAX_VIEWS = 1024  # the kernel takes no more in one call
_JOIN = 4 << 10  # bodies up to this are joined with their header


class StreamChannel(FrameChannel):
    """Frames over a connected, non-blocking ``SOCK_STREAM`` socket, which it owns from here on."""

    def __init__(
        self, sock: socket.socket, local: str, peer: str, limits: Limits, *, guest: bool = False
    ) -> None:
        super().__init__(local, peer, limits, guest=guest)
        self._sock = sock
        self._decoder = Decoder(limits, peer, guest=guest)
        self._views: deque[memoryview] = deque()  # what the kernel gets next
        self._ends: deque[tuple[int, Flight]] = deque()  # where in the stream each frame of _views ends
        self._loaded = 0  # the stream's position behind _views
        self._complete = 0  # ... and behind the last frame the kernel has in full; bytes_out lies between
        self._head = HEADER_NBYTES  # size of the last head: read with a payload's end, as its like may follow
        self._reading = self._writing = False  # registered with the loop
        self._busy = False  # inside a callback that flushes when it ends
        self._woken = False  # a flush is due
        self._resuming = False  # frames are staged, and the next turn of the loop goes on with them
        self._broken: Exception | None = None  # output failed; what the peer said before is read first

    def start(self, handler: Handler) -> None:
        """Begin to read and write."""
        self._attach(handler)
        self._read_on()

    def welcome(self) -> None:
        super().welcome()
        self._decoder.welcome()

    def _read_on(self) -> None:
        if not self._reading and self._state != "closed":
            self._loop.add_reader(self._sock, self._on_readable)
            self._reading = True
            if self._decoder.partial:  # frames that were staged when reading had to pause
                self._resume_soon()

    def _resume_soon(self) -> None:
        if not self._resuming:
            self._resuming = True
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        self._resuming = False
        self._on_readable()

    def _wake(self) -> None:
        if not (self._busy or self._woken or self._writing):
            self._woken = True
            self._loop.call_soon(self._flush)

    def _owed(self) -> tuple[int, int]:
        ours = self._loaded - self.stats.bytes_out if self._views else 0
        theirs = self._inbound.left or self._decoder.missing
        return ours, theirs if self._reading else 0

    def _end_output(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def _prepare(self, frame: Outgoing, payload: list[memoryview], nbytes: int) -> Flight:
        body = frame.body
        head = encode_head(frame.type, frame.flags, frame.request_id, body, nbytes)
        if len(body) <= _JOIN:
            payload.insert(0, memoryview(head + body))
        else:
            payload[:0] = memoryview(head), memoryview(body)
        return Flight(frame, payload, len(head) + len(body) + nbytes)

    def _detach(self, goodbye: Outgoing | None) -> list[Flight]:
        if self._reading:
            self._loop.remove_reader(self._sock)
        if self._writing:
            self._loop.remove_writer(self._sock)
        self._reading = self._writing = False
        lost = self._take_back()
        between = self.stats.bytes_out == self._complete
        if goodbye is not None and between and not self._flushed and self._broken is None:
            with contextlib.suppress(OSError):  # as far as it needs no waiting
                self._sock.send(encode_head(goodbye.type, 0, 0, goodbye.body, 0) + goodbye.body)
        self._sock.close()
        return lost

    # -- input

    def _on_readable(self) -> None:
        if self._state == "closed" or self._resuming:
            return
        self._busy = True
        budget, until = BUDGET, self._loop.time() + TIME_BUDGET
        inbound, limit = self._inbound, self._limits.max_queued
        try:
            more = self._parse(until)
            while more and budget > 0 and not inbound.over and self._outbox.queued <= limit:
                asked, got, more = self._receive(until)
                budget -= got
                if got < asked:
                    break
        except Exception as error:
            self._fail(error)
        finally:
            self._busy = False
        if self._state == "closed":
            return
        if self._choked and self._broken is None:
            self._loop.remove_reader(self._sock)
            self._reading = False
        elif not more and self._decoder.partial:
            self._resume_soon()
        if self._outbox and not self._writing:
            self._flush()

    def _receive(self, until: float) -> tuple[int, int, bool]:
        """One system call, and all that follows from it. Returns bytes asked for and got, and whether there
        is time for another."""
        inbound, decoder = self._inbound, self._decoder
        if inbound.left:
            views, asked = inbound.peek(CHUNK)
            if asked == inbound.left:
                views.append(decoder.room(self._head))
            got = self._read_into(views)
            del views  # the sink's owner may take the memory back in a callback
            if not got:
                return 1, 0, True
            landed = min(got, asked)
            inbound.advance(landed)
            if got == landed:
                return asked, got, self._loop.time() < until
            decoder.wrote(got - landed)
        else:
            room = decoder.room()
            asked = len(room)
            got = self._read_into([room])
            if not got:
                return 1, 0, True
            decoder.wrote(got)
        return asked, got, self._parse(until)

    def _parse(self, until: float) -> bool:
        """Act on what is staged, until it is used up or our answers have to go first (True), or the time is
        over (False)."""
        inbound, decoder, limit = self._inbound, self._decoder, self._limits.max_queued
        while not inbound.over and self._outbox.queued <= limit:
            if (frame := decoder.next()) is None:
                return True
            self._head = HEADER_NBYTES + len(frame.body)
            self._dispatch(frame)
            if inbound.left and not inbound.over:
                inbound.fill(decoder.take(inbound.left))
            if self._loop.time() >= until:
                return False
        return True

    def _read_into(self, views: list[memoryview]) -> int:
        """Bytes read; 0: nothing there, or the stream has ended and with it the channel."""
        try:
            got = self._sock.recvmsg_into(views)[0] if len(views) > 1 else self._sock.recv_into(views[0])
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self._finish(self._broken or ChannelClosed(f"{self.peer}: connection lost: {error}"))
            return 0
        self.stats.bytes_in += got
        if not got:
            self._end_of_stream()
        return got

    def _end_of_stream(self) -> None:
        if self._state == "closing" and self._flushed:
            self._finish(None)
            return
        missing = self._inbound.left
        where = f"in the middle of a frame ({missing} bytes of payload missing)"
        if not (missing or self._decoder.partial):
            where = "without a goodbye"
        self._finish(self._broken or ChannelClosed(f"{self.peer} closed the connection {where}"))

    # -- output

    def _flush(self) -> None:
        self._woken = False
        if self._state == "closed" or self._busy:
            return
        if self._broken is not None:
            self._drop_output()
            return
        self._busy = True
        try:
            waits = self._transmit()
        except Exception as error:
            self._fail(error)
            return
        finally:
            self._busy = False
        if self._state == "closed":
            return
        if waits and not self._writing:
            self._loop.add_writer(self._sock, self._flush)
            self._writing = True
        elif not waits and self._writing:
            self._loop.remove_writer(self._sock)
            self._writing = False
        if not self._choked:
            self._read_on()

    def _transmit(self) -> bool:
        """Send until the kernel takes no more, the budget is spent (True) or nothing is left (False)."""
        budget, until = BUDGET, self._loop.time() + TIME_BUDGET
        while budget > 0:
            in_time = True
            while (
                in_time
                and self._loaded - self.stats.bytes_out < _GATHER
                and len(self._ends) < _GATHER_FRAMES
                and (flight := self._outbox.next()) is not None
            ):
                in_time = self._loop.time() < until
                self._views += flight.views
                self._loaded += flight.nbytes
                self._ends.append((self._loaded, flight))
                flight.views = []
            if not self._views:
                return False
            asked = self._loaded - self.stats.bytes_out
            try:
                sent = self._sock.sendmsg(islice(self._views, _MAX_VIEWS))
            except (BlockingIOError, InterruptedError):
                return True
            except OSError as error:
                self._break(error)
                return False
            budget -= sent
            self._account(sent)
            if sent < asked:
                return True
            if self._loop.time() >= until:
                break
        return bool(self._views or self._outbox)

    def _account(self, sent: int) -> None:
        """``sent`` bytes are the kernel's: release what it has in full."""
        self.stats.bytes_out += sent
        views = self._views
        while sent:
            view = views.popleft()
            if sent < len(view):
                views.appendleft(view[sent:])
            sent -= min(sent, len(view))
            del view  # the lender may want the memory back in ``release``
        while self._ends and self._ends[0][0] <= self.stats.bytes_out:
            self._complete, flight = self._ends.popleft()
            self._sent(flight)

    def _take_back(self) -> list[Flight]:
        """Frames that the kernel does not have in full."""
        lost = [flight for _, flight in self._ends]
        self._ends.clear()
        self._views.clear()
        return lost

    def _break(self, error: OSError) -> None:
        """The peer takes no more. It may have said why: read on until the stream ends."""
        self._broken = ChannelClosed(f"{self.peer}: connection lost while sending: {error}")
        if self._writing:
            self._loop.remove_writer(self._sock)
            self._writing = False
        self._drop_output()
        self._read_on()

    def _drop_output(self) -> None:
        for flight in (*self._take_back(), *self._outbox.clear()):
            self._guarded(flight.release, False)
