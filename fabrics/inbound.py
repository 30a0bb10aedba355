"""The arriving side of a channel: where payload goes, and who is told. No I/O."""

from __future__ import annotations

from fabrics.base import Channel, ChannelStats, Frame, Handler, Sink
from fabrics.buffers import Cursor, flat

CHUNK = 512 << 10  # bytes moved per step: what was just copied is still in L2 when ``landed`` sums it

_DISCARD = memoryview(bytearray(CHUNK))  # written by all, read by none


def _let_go(sink: Sink, complete: bool) -> None:
    """Tell the sink's owner that its memory is free. The callbacks are undone: they are often the sink's own
    bound methods, and that circle would keep the sink until a garbage collector comes by."""
    closed, sink.closed, sink.landed = sink.closed, None, None
    sink.spent = True
    if closed is not None:
        closed(complete)


class Inbound:
    """The frame that is arriving: where its payload goes, and who is told."""

    __slots__ = ("_channel", "_cursor", "_frame", "_sink", "deaf", "handler", "left", "over", "stats")
    handler: Handler

    def __init__(self, channel: Channel, stats: ChannelStats) -> None:
        self._channel = channel
        self._frame: Frame | None = None
        self._sink: Sink | None = None
        self._cursor: Cursor | None = None
        self.stats = stats
        self.left = 0  # payload bytes still to come
        self.deaf = False  # we hung up: nothing more is handed to anybody
        self.over = False  # ... and the channel is closed: there is nothing to write to any more

    def start(self, frame: Frame) -> None:
        """Ask the handler where the payload goes."""
        self.skip(frame)
        sink = self.handler.on_frame(self._channel, frame)
        if sink is not None:
            self._frame, self._sink = frame, sink
        if self.deaf:
            self.drop(None)
            sink = None
        if self.over:
            return
        try:
            frame.body.release()  # whoever reads it later gets an error, not another frame's bytes
        except BufferError:
            raise ValueError("on_frame kept a view of the body, whose memory is reused: copy it") from None
        if sink is None:
            return
        if sink.spent:
            raise ValueError("on_frame gave a sink that had a payload already; make one for each")
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

    def hang_up(self) -> None:
        """From here on payload passes unseen, that of the present frame too."""
        self.deaf = True
        self.drop(None)

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
        _let_go(sink, False)

    def _complete(self) -> None:
        frame, sink = self._frame, self._sink
        assert frame is not None and sink is not None
        self._frame = self._sink = self._cursor = None
        _let_go(sink, True)
        if not self.deaf:
            self.handler.on_payload(self._channel, frame, sink)
