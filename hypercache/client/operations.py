"""Requests in flight, as the client sees them: frames in, frames out, no I/O and no clock.

Each operation belongs to one request id on one channel. It ends exactly once, by :meth:`end`, with its
result; what it holds (staging buffers) is given back by the channel's own callbacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fabrics import Channel, Frame, Outgoing, Sink
from hypercache import protocol
from hypercache.checksum import Verifier, checksum
from hypercache.client.buffers import ChunkPort, Landing
from hypercache.errors import CodecError, ProtocolError


class Operation:
    """Base: a request that waits for answers."""

    request_id: int

    def on_message(self, channel: Channel, frame: Frame, message: protocol.Message) -> Sink | None:
        raise ProtocolError(f"unexpected {type(message).__name__}")

    def on_payload(self, sink: Sink) -> None:
        """The payload of a sink that ``on_message`` gave is in place."""

    def end(self, reason: str) -> None:
        """Over without a full answer: refused, cancelled, out of time or channel lost."""


class Call(Operation):
    """One question, one answer."""

    def __init__(self, future: asyncio.Future[protocol.Message | str]) -> None:
        self.future = future

    def on_message(self, channel: Channel, frame: Frame, message: protocol.Message) -> None:
        if not self.future.done():
            self.future.set_result(message)

    def end(self, reason: str) -> None:
        if not self.future.done():
            self.future.set_result(reason)


class _LandingSink(Sink):
    __slots__ = ("first", "landing", "layer", "verifier")

    def __init__(self, layer: int, first: int, landing: Landing, crcs: Sequence[int]) -> None:
        self.layer = layer
        self.first = first
        self.landing = landing
        self.verifier = Verifier(landing.chunks, crcs)
        super().__init__(landing.views, landed=self.verifier.landed, closed=self._closed)

    def _closed(self, complete: bool) -> None:
        self.landing.done()


class FetchOperation(Operation):
    """Receives layer after layer. ``good`` blocks are complete and verified in every layer so far."""

    def __init__(
        self,
        port: ChunkPort,
        chunk_nbytes: Sequence[int],
        asked: int,
        layers: range,
        frame_bytes: int,
        on_layer: Callable[[int], None],
        on_end: Callable[[], None],
    ) -> None:
        self.asked = asked
        self.good = 0
        self.wire_bytes = 0
        self.reason = ""
        self.ended = False
        self.layers_done = layers.start  # every layer below it is in place
        self._port = port
        self._chunk_nbytes = chunk_nbytes
        self._layers = layers
        self._frame_bytes = frame_bytes
        self._on_layer = on_layer
        self._on_end = on_end
        self._blocks: int | None = None  # the server's run
        self._next = (layers.start, 0)

    def on_message(self, channel: Channel, frame: Frame, message: protocol.Message) -> Sink | None:
        match message:
            case protocol.Fetching(blocks=blocks) if self._blocks is None and 0 <= blocks <= self.asked:
                self._blocks = self.good = blocks
                if blocks < self.asked:
                    self.reason = "evicted since the match" if blocks else "not stored"
            case protocol.Layer() if self._blocks:
                return self._land(message, frame.payload_nbytes)
            case protocol.Fetched() if self._blocks is not None:
                if self._blocks and self._next != (self._layers.stop, 0):
                    raise ProtocolError(f"fetch ended before layer {self._next[0]} was complete")
                self._finish()
            case _:
                raise ProtocolError(f"unexpected {type(message).__name__} in a fetch")
        return None

    def _land(self, message: protocol.Layer, payload_nbytes: int) -> Sink:
        layer, first, count = message.layer, message.first, len(message.crcs)
        if (layer, first) != self._next or layer >= self._layers.stop:
            raise ProtocolError(
                f"LAYER {layer} block {first}, expected layer {self._next[0]} block {self._next[1]}"
            )
        assert self._blocks is not None
        size = self._chunk_nbytes[layer]
        most = min(self._blocks - first, protocol.batch_size(size, self._frame_bytes))
        if not 0 < count <= most or payload_nbytes != count * size:
            raise ProtocolError(f"LAYER {layer} carries {count} chunks in {payload_nbytes} bytes")
        end = first + count
        self._next = (layer, end) if end < self._blocks else (layer + 1, 0)
        return _LandingSink(layer, first, self._port.landing(layer, first, count), message.crcs)

    def on_payload(self, sink: Sink) -> None:
        assert isinstance(sink, _LandingSink)
        if self.ended:
            return
        self.wire_bytes += sink.nbytes
        bad = sink.verifier.bad
        if bad:
            self._spoil(sink.first + bad[0], "checksum mismatch on arrival")
        good = max(0, min(self.good - sink.first, len(sink.landing.chunks)))
        try:
            sink.landing.keep(good)
        except CodecError as error:
            self._spoil(sink.first, f"cannot be decoded: {error}")
        if self._next == (sink.layer + 1, 0):
            self.layers_done = sink.layer + 1
            self._on_layer(sink.layer)

    def _spoil(self, block: int, reason: str) -> None:
        if block < self.good:
            self.good = block
            self.reason = reason

    def end(self, reason: str) -> None:
        if not self.ended:
            self.good = 0  # some layer of every block is missing
            self.reason = reason
            self._finish()

    def _finish(self) -> None:
        self.ended = True
        self._on_end()


class StoreOperation(Operation):
    """A source of PUT frames, layer after layer, as far as layers are ready and the server wants them."""

    def __init__(
        self,
        port: ChunkPort,
        chunk_nbytes: Sequence[int],
        blocks: int,
        ready_layers: int,
        frame_bytes: int,
        on_end: Callable[[], None],
    ) -> None:
        self.outcome: dict[str, int] = {}
        self.wire_bytes = 0
        self.reason = ""
        self.ended = False
        self._port = port
        self._chunk_nbytes = chunk_nbytes
        self._ready = ready_layers
        self._frame_bytes = frame_bytes
        self._on_end = on_end
        self._channel: Channel | None = None
        self._runs: Sequence[tuple[int, int]] = ((0, blocks),)
        self._blocks = blocks
        self._layer = 0
        self._block = 0

    def begin(self, channel: Channel, request_id: int) -> None:
        self._channel = channel
        self.request_id = request_id
        channel.add_source(self)

    def layer_ready(self, layer: int) -> None:
        """Layers up to and with ``layer`` are in the buffers."""
        self._ready = max(self._ready, layer + 1)
        self._wake()

    def next_frame(self) -> Outgoing | None:
        if self.ended:
            return None
        at = self._seek()
        if at is None:
            return None
        layer, first, room = at
        count = min(room, protocol.batch_size(self._chunk_nbytes[layer], self._frame_bytes))
        lent = self._port.lend(layer, first, count, self._wake)
        if lent is None:
            return None
        data, give_back = lent
        size = self._chunk_nbytes[layer]
        crcs = tuple([checksum(data[at : at + size]) for at in range(0, count * size, size)])
        self._block = first + count
        self.wire_bytes += data.nbytes
        op, body = protocol.encode(protocol.Put(layer, first, crcs))

        def release(sent: bool) -> None:
            give_back()
            self._wake()

        return Outgoing(op, self.request_id, body, (data,), release=release)

    def _seek(self) -> tuple[int, int, int] | None:
        """Layer, block and length of the next run to send."""
        while self._layer < min(self._ready, len(self._chunk_nbytes)):
            for first, count in self._runs:
                begin = max(first, self._block)
                if begin < first + count:
                    return self._layer, begin, first + count - begin
            self._layer += 1
            self._block = 0
        return None

    def _wake(self) -> None:
        if self._channel is not None and not self.ended and self._channel.state == "open":
            self._channel.add_source(self)

    def on_message(self, channel: Channel, frame: Frame, message: protocol.Message) -> None:
        match message:
            case protocol.Storing(wanted=wanted):
                position = 0
                for first, count in wanted:
                    if first < position or count < 1 or first + count > self._blocks:
                        raise ProtocolError("STORING names blocks that were not offered")
                    position = first + count
                self._runs = wanted
            case protocol.Stored(outcome=outcome):
                self.outcome = outcome
                self._finish()
            case _:
                raise ProtocolError(f"unexpected {type(message).__name__} in a store")

    def end(self, reason: str) -> None:
        if not self.ended:
            self.reason = reason
            self._finish()

    def _finish(self) -> None:
        self.ended = True
        if self._channel is not None:
            self._channel.remove_source(self)
        self._on_end()


__all__ = ["Call", "FetchOperation", "Operation", "StoreOperation"]
