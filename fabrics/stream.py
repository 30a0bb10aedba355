"""A channel over a non-blocking stream socket.

Payload goes by ``recvmsg_into`` straight into the sink's views and by ``sendmsg`` straight out of the lent
ones. ``asyncio`` transports are not used: they copy, and do not say when the kernel is done with a buffer.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque

from fabrics.base import Handler, Limits, Outgoing
from fabrics.channel import BUDGET, CHUNK, FrameChannel
from fabrics.errors import ChannelClosed
from fabrics.framing import HEADER_NBYTES, Decoder, encode_head
from fabrics.outbox import Flight

_GATHER = 512 << 10  # bytes taken from the outbox ahead of the kernel: frames that share one system call
_MAX_VIEWS = 512  # per system call; a frame adds at most 256 more, and the kernel takes 1024
_JOIN = 4 << 10  # bodies up to this are joined with their header


class StreamChannel(FrameChannel):
    """Frames over a connected, non-blocking ``SOCK_STREAM`` socket, which it owns from here on."""

    def __init__(self, sock: socket.socket, local: str, peer: str, limits: Limits) -> None:
        super().__init__(local, peer, limits)
        self._sock = sock
        self._decoder = Decoder(limits, peer)
        self._flight: deque[Flight] = deque()
        self._in_flight = 0  # bytes in _flight
        self._head = HEADER_NBYTES  # size of the last head: read with a payload's end, as its like may follow
        self._reading = self._writing = False  # registered with the loop
        self._busy = False  # inside a callback that flushes when it ends
        self._woken = False  # a flush is due
        self._broken: Exception | None = None  # output failed; what the peer said before is read first

    def start(self, handler: Handler) -> None:
        """Begin to read and write."""
        self._attach(handler)
        self._read_on()

    def _read_on(self) -> None:
        if not self._reading and self._state != "closed":
            self._loop.add_reader(self._sock, self._on_readable)
            self._reading = True

    def _wake(self) -> None:
        if not (self._busy or self._woken or self._writing or self._broken):
            self._woken = True
            self._loop.call_soon(self._flush)

    def _owed(self) -> tuple[bool, bool]:
        return bool(self._flight), self._reading and (self._inbound.left > 0 or self._decoder.partial)

    def _end_output(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def _prepare(self, frame: Outgoing, payload_nbytes: int) -> Flight:
        head = encode_head(frame.type, frame.flags, frame.request_id, frame.body, payload_nbytes)
        if len(frame.body) <= _JOIN:
            return Flight(frame, (memoryview(head + frame.body), *frame.payload))
        return Flight(frame, (memoryview(head), memoryview(frame.body), *frame.payload))

    def _detach(self, goodbye: Outgoing | None) -> list[Flight]:
        if self._reading:
            self._loop.remove_reader(self._sock)
        if self._writing:
            self._loop.remove_writer(self._sock)
        self._reading = self._writing = False
        lost = list(self._flight)
        between = not (self._flight and self._flight[0].cursor.started)
        self._flight.clear()
        if goodbye is not None and between and not self._flushed and self._broken is None:
            with contextlib.suppress(OSError):  # as far as it needs no waiting
                self._sock.send(encode_head(goodbye.type, 0, 0, goodbye.body, 0) + goodbye.body)
        self._sock.close()
        return lost

    # -- input

    def _on_readable(self) -> None:
        self._busy = True
        budget = BUDGET
        try:
            while budget > 0 and self._state != "closed" and not self._choked:
                asked, got = self._receive()
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
        if self._outbox and not self._writing:
            self._flush()

    def _receive(self) -> tuple[int, int]:
        """One system call, and all that follows from it. Returns bytes asked for and got."""
        inbound, decoder = self._inbound, self._decoder
        if inbound.left:
            views, asked = inbound.peek(CHUNK)
            if asked == inbound.left:
                views.append(decoder.room(self._head))
            got = self._read_into(views)
            del views  # the sink's owner may take the memory back in a callback
            if not got:
                return 1, 0
            landed = min(got, asked)
            inbound.advance(landed)
            if got == landed:
                return asked, got
            decoder.wrote(got - landed)
        else:
            room = decoder.room()
            asked = len(room)
            got = self._read_into([room])
            if not got:
                return 1, 0
            decoder.wrote(got)
        while decoder.partial and self._state != "closed" and (frame := decoder.next()) is not None:
            self._head = HEADER_NBYTES + len(frame.body)
            self._dispatch(frame)
            if inbound.left and self._state != "closed":
                inbound.fill(decoder.take(inbound.left))
                if inbound.left:
                    break
        return asked, got

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
        if self._state == "closed" or self._broken is not None or self._busy:
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
        budget = BUDGET
        while budget > 0:
            while self._in_flight < _GATHER and (flight := self._outbox.next()) is not None:
                self._flight.append(flight)
                self._in_flight += flight.nbytes
            if not self._flight:
                return False
            views: list[memoryview] = []
            asked = 0
            for flight in self._flight:
                part, taken = flight.cursor.peek(_GATHER - asked)
                views += part
                asked += taken
                if taken < flight.cursor.left or asked >= _GATHER or len(views) > _MAX_VIEWS:
                    break
            try:
                sent = self._sock.sendmsg(views)
            except (BlockingIOError, InterruptedError):
                return True
            except OSError as error:
                self._break(error)
                return False
            del views, part  # the lenders may want their memory back in ``release``
            self._account(sent)
            budget -= sent
            if sent < asked:
                break
        return bool(self._flight or self._outbox)

    def _account(self, sent: int) -> None:
        """``sent`` bytes are the kernel's: release what it has in full."""
        self.stats.bytes_out += sent
        self._in_flight -= sent
        while sent and self._flight:
            flight = self._flight[0]
            step = min(sent, flight.cursor.left)
            flight.cursor.advance(step)
            sent -= step
            if flight.cursor.left:
                return
            self._flight.popleft()
            self._sent(flight)

    def _break(self, error: OSError) -> None:
        """The peer takes no more. It may have said why: read on until the stream ends."""
        self._broken = ChannelClosed(f"{self.peer}: connection lost while sending: {error}")
        if self._writing:
            self._loop.remove_writer(self._sock)
            self._writing = False
        lost = list(self._flight)
        self._flight.clear()
        self._in_flight = 0
        lost += self._outbox.clear()
        for flight in lost:
            self._guarded(flight.release, False)
        self._read_on()
