"""Requests in flight, as the client sees them: frames in, frames out, no I/O and no clock.

Each operation belongs to one request id on one channel. It ends exactly once, by :meth:`end`, with its
result; what it holds (staging buffers) is given back by the channel's own callbacks.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol

from fabrics import Channel, Frame, Outgoing, Sink
from hypercache import protocol
from hypercache.checksum import Verifier, checksum
from hypercache.client.buffers import ChunkPort, Landing
from hypercache.errors import CodecError, HyperCacheError, ProtocolError, Unavailable

APPROXIMATE = "approximate K/V are not stored: an engine that computed them anew says kv.mark_exact(tokens)"
RECLAIM_S = 1.0  # without a byte taken, after which memory lent to an ended store is got back by force

_log = logging.getLogger("hypercache.client")


class Operation:
    """Base: a request that waits for answers."""

    request_id = 0  # given when it begins
    heard = 0  # bytes that had come from the server when it began
    ended = False

    def on_message(self, channel: Channel, frame: Frame, message: protocol.Message) -> Sink | None:
        raise ProtocolError(f"unexpected {type(message).__name__}")

    def end(self, reason: str) -> None:
        """Over without a full answer: refused, cancelled, out of time or channel lost."""


class Call(Operation):
    """One question, one answer."""

    def __init__(self, future: asyncio.Future[protocol.Message | str]) -> None:
        self.future = future

    def on_message(self, channel: Channel, frame: Frame, message: protocol.Message) -> None:
        self.ended = True
        if not self.future.done():
            self.future.set_result(message)

    def end(self, reason: str) -> None:
        self.ended = True
        if not self.future.done():
            self.future.set_result(reason)


class Piece(NamedTuple):
    """Blocks of one stretch in one layer, as one frame brings them."""

    layer: int
    stretch: int
    first: int  # block of the stretch
    blocks: int
    row: int  # of the port
    last: bool  # nothing of this layer comes after it


class _FrameSink(Sink):
    """Memory for one frame of a fetch; its pieces are used one by one, as soon as they are there."""

    __slots__ = ("_ends", "_landing", "_operation", "_pieces", "_sizes", "_used", "_verifier")

    def __init__(
        self,
        operation: FetchOperation,
        pieces: Sequence[Piece],
        landing: Landing,
        crcs: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        self._operation = operation
        self._pieces = pieces
        self._sizes = sizes
        self._landing = landing
        self._verifier = Verifier(landing.chunks, crcs)
        self._used = 0
        self._ends: list[int] = []  # bytes that must be there before each piece is complete
        super().__init__(landing.views, landed=self._landed, closed=self._closed)
        at = 0
        for piece in pieces:
            at += piece.blocks * sizes[piece.layer]
            self._ends.append(at)

    def _landed(self, total: int) -> None:
        self._verifier.landed(total)
        while self._used < len(self._ends) and self._ends[self._used] <= total:
            index, self._used = self._used, self._used + 1
            piece = self._pieces[index]
            self._operation.wire_bytes += piece.blocks * self._sizes[piece.layer]
            self._operation.landed(piece, self._bad_in(index), partial(self._landing.keep, index))

    def _bad_in(self, index: int) -> int | None:
        """Offset of the first chunk of a piece that does not match its checksum."""
        if not self._verifier.bad:
            return None
        begin = sum([piece.blocks for piece in self._pieces[:index]])
        count = self._pieces[index].blocks
        return next((bad - begin for bad in self._verifier.bad if begin <= bad < begin + count), None)

    def _closed(self, complete: bool) -> None:
        self._landing.done()


class FetchOperation(Operation):
    """Receives layer after layer. Of each stretch that was asked for, the first ``good`` blocks are complete
    and verified in every layer so far.

    asked: blocks of the run from the first block on, then those of each chain; so are the rows of the port.
    """

    def __init__(
        self,
        port: ChunkPort,
        chunk_nbytes: Sequence[int],
        asked: Sequence[int],
        layers: range,
        frame_bytes: int,
        on_layer: Callable[[int], None],
        on_end: Callable[[], None],
        abandon: Callable[[str], None],
        gone: str,
    ) -> None:
        self.asked = asked
        self.good = [0] * len(asked)
        self.wire_bytes = 0
        self.reason = ""
        self.layers_done = layers.start  # every layer below it is in place
        self._port = port
        self.chunk_nbytes = chunk_nbytes
        self._layers = layers
        self._frame_bytes = frame_bytes
        self._on_layer = on_layer
        self._on_end = on_end
        self._abandon = abandon  # end this with a reason and tell the server
        self._gone = gone  # why less comes than was asked for
        self._blocks: int | None = None  # what the server sends of each layer
        self._ends: list[int] = []  # of each stretch, among those
        self._rows = [0, *accumulate(asked)]  # of the port, likewise
        self._cursor = protocol.Cursor(layers, 0)

    def on_message(self, channel: Channel, frame: Frame, message: protocol.Message) -> Sink | None:
        match message:
            case protocol.Fetching() if self._blocks is None:
                self._begin((message.blocks, *message.chains))
            case protocol.Layers() if self._blocks:
                return self._land(message, frame.payload_nbytes)
            case protocol.Fetched() if self._blocks is not None:
                if not self._cursor.done:
                    raise ProtocolError(f"fetch ended before layer {self._cursor.layer} was complete")
                self._finish()
            case _:
                raise ProtocolError(f"unexpected {type(message).__name__} in a fetch")
        return None

    def _begin(self, sent: tuple[int, ...]) -> None:
        """The server has counted: blocks of the run, and of each chain all or none."""
        asked = self.asked
        whole = len(sent) == len(asked) and all(
            blocks in (0, most) for blocks, most in zip(sent[1:], asked[1:], strict=True)
        )
        if not whole or not 0 <= sent[0] <= asked[0]:
            raise ProtocolError(f"FETCHING counts {sent[:8]}.. blocks of {tuple(asked[:8])}..")
        self.good = list(sent)
        self._ends = list(accumulate(sent))
        self._blocks = self._ends[-1]
        self._cursor = protocol.Cursor(self._layers, self._blocks)
        if self._blocks < sum(asked):
            self.reason = self._gone if self._blocks else "not stored"

    def _pieces(self, runs: Sequence[protocol.Run]) -> list[Piece]:
        """Runs of what the server sends, cut where one stretch ends and the next begins."""
        pieces: list[Piece] = []
        for layer, first, count in runs:
            stop = first + count
            stretch = bisect.bisect_right(self._ends, first)
            while first < stop:
                at = first - (self._ends[stretch - 1] if stretch else 0)
                count = min(stop, self._ends[stretch]) - first
                if count:
                    row, last = self._rows[stretch] + at, first + count == self._blocks
                    pieces.append(Piece(layer, stretch, at, count, row, last))
                first += count
                stretch += 1
        return pieces

    def _land(self, message: protocol.Layers, payload_nbytes: int) -> Sink | None:
        runs, crcs = message.runs, message.crcs
        for run in runs:
            if not self._cursor.take(run):
                cursor = self._cursor
                raise ProtocolError(
                    f"LAYERS has run {run}, layer {cursor.layer} block {cursor.block} is next"
                )
        sizes = self._port.below if message.below else self.chunk_nbytes
        if not sizes:
            raise ProtocolError("LAYERS in the codec on disk, which was not allowed")
        need = protocol.payload_nbytes(runs, sizes)
        largest = max(self._frame_bytes, *sizes)
        chunks = sum([count for _, _, count in runs])
        if not runs or len(crcs) != chunks or payload_nbytes != need or need > largest:
            raise ProtocolError(f"LAYERS carries {len(crcs)} checksums, {payload_nbytes} bytes for {need}")
        pieces = self._pieces(runs)
        try:
            rows = [(piece.layer, piece.row, piece.blocks) for piece in pieces]
            landing = self._port.landing(rows, message.below)
        except Exception as error:
            self._failed("the buffers cannot be written", error)
            return None
        return _FrameSink(self, pieces, landing, crcs, sizes)

    def landed(self, piece: Piece, bad: int | None, keep: Callable[[int], None]) -> None:
        """All chunks of ``piece`` are there; ``bad`` is the first that does not match its checksum."""
        if self.ended:
            return
        if bad is not None:
            self._spoil(piece.stretch, piece.first + bad, "checksum mismatch on arrival")
        try:
            keep(max(0, min(self.good[piece.stretch] - piece.first, piece.blocks)))
        except CodecError as error:
            self._spoil(piece.stretch, piece.first, f"cannot be decoded: {error}")
        except BaseException as error:
            self._failed("decoding failed", error)
            return
        if piece.last:
            self.layers_done = piece.layer + 1
            try:
                self._on_layer(piece.layer)
            except BaseException as error:
                self._failed("on_layer failed", error)

    def _failed(self, what: str, error: BaseException) -> None:
        """Code that is not ours raised: that ends this fetch, not the channel that others use as well."""
        _log.error("a fetch was ended: %s", what, exc_info=error)
        self._abandon(f"{what}: {error!r}")
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error

    def _spoil(self, stretch: int, block: int, reason: str) -> None:
        if block < self.good[stretch]:
            self.good[stretch] = block
            self.reason = reason

    def end(self, reason: str) -> None:
        if not self.ended:
            self.good = [0] * len(self.asked)  # some layer of every block is missing
            self.reason = reason
            self._finish()

    def _finish(self) -> None:
        self.ended = True
        self._on_end()


class StoreOwner(Protocol):
    """Who is told of a store operation's end."""

    def part_ended(self) -> None: ...

    def abandon(self, reason: str, part: StoreOperation | None = None) -> None:
        """The bytes cannot be had: end this part, or (None) all that belongs together."""


class StoreOperation(Operation):
    """A source of PUT frames, layer after layer, as far as layers are ready and the server wants them.

    blocks: which of the port's blocks this request offers.
    """

    def __init__(
        self,
        port: ChunkPort,
        chunk_nbytes: Sequence[int],
        blocks: range,
        ready_layers: int,
        frame_bytes: int,
        owner: StoreOwner,
    ) -> None:
        self.blocks = blocks
        self.outcome: dict[str, int] = {}
        self.lent = 0  # frames of the caller's own memory that the channel may still read
        self.wire_bytes = 0
        self.reason = ""
        self._port = port
        self._chunk_nbytes = chunk_nbytes
        self._ready = ready_layers
        self._frame_bytes = frame_bytes
        self._owner = owner
        self._channel: Channel | None = None
        self._wanted: Sequence[tuple[int, int]] = ((0, len(blocks)),)
        self._layer = 0
        self._block = 0

    def begin(self, channel: Channel) -> None:
        self._channel = channel
        channel.add_source(self)

    @property
    def settled(self) -> bool:
        """Ended, and nobody reads the caller's memory any more."""
        return self.ended and not self.lent

    def reclaim(self) -> None:
        """Given up: get the caller's memory back, from a server that takes nothing by closing the line."""
        channel = self._channel
        if self.lent and channel is not None:
            asyncio.get_running_loop().call_later(RECLAIM_S, self._reclaim, channel, channel.stats.bytes_out)

    def _reclaim(self, channel: Channel, sent: int) -> None:
        if self.lent and channel.stats.bytes_out == sent:
            channel.abort(Unavailable(f"{channel.peer} takes nothing, not even what an ended store left"))
        else:
            self.reclaim()

    def layer_ready(self, layer: int) -> None:
        """Layers up to and with ``layer`` are in the buffers."""
        self._ready = max(self._ready, layer + 1)
        self._wake()

    def next_frame(self) -> Outgoing | None:
        if self.ended:
            return None
        runs = protocol.plan_frame(self._ahead(), self._chunk_nbytes, self._frame_bytes)
        if not runs:
            return None
        try:
            base = self.blocks.start
            lent = self._port.lend([(layer, base + at, count) for layer, at, count in runs], self._wake)
        except HyperCacheError as error:
            self._owner.abandon(f"cannot be encoded: {error}")
            return None
        except Exception as error:
            _log.error("a store was ended: encoding failed", exc_info=error)
            self._owner.abandon(f"encoding failed: {error!r}")
            return None
        if lent is None:
            return None
        crcs = tuple([checksum(chunk) for chunk in lent.chunks])
        if base + max([at + count for _, at, count in runs]) > self._port.exact:
            # Asked when the bytes are read and summed: whoever writes approximate ones says so before.
            lent.done()
            self._owner.abandon(APPROXIMATE, self)
            return None
        borrowed = int(self._port.borrowed)
        self.lent += borrowed
        layer, first, count = runs[-1]
        self._layer, self._block = layer, first + count
        self.wire_bytes += protocol.payload_nbytes(runs, self._chunk_nbytes)
        op, body = protocol.encode(protocol.Put(tuple(runs), crcs))

        def release(sent: bool) -> None:
            lent.done()
            self.lent -= borrowed
            self._wake()
            if borrowed and self.settled:
                self._owner.part_ended()

        return Outgoing(op, self.request_id, body, lent.views, release=release)

    def _ahead(self) -> Iterator[protocol.Run]:
        """What is ready, wanted and not yet sent, in order."""
        after = self._block
        for layer in range(self._layer, min(self._ready, len(self._chunk_nbytes))):
            for first, count in self._wanted:
                begin = max(first, after)
                if begin < first + count:
                    yield layer, begin, first + count - begin
            after = 0

    def _wake(self) -> None:
        if self._channel is not None and not self.ended and self._channel.state == "open":
            self._channel.add_source(self)

    def on_message(self, channel: Channel, frame: Frame, message: protocol.Message) -> None:
        match message:
            case protocol.Storing(wanted=wanted):
                position = 0
                for first, count in wanted:
                    if first < position or count < 1 or first + count > len(self.blocks):
                        raise ProtocolError("STORING names blocks that were not offered")
                    position = first + count
                self._wanted = wanted
            case protocol.Stored(outcome=outcome):
                if min(outcome.values(), default=0) < 0 or sum(outcome.values()) > len(self.blocks):
                    raise ProtocolError(f"STORED counts {outcome} of {len(self.blocks)} blocks")
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
        self._owner.part_ended()


__all__ = ["Call", "FetchOperation", "Operation", "StoreOperation"]
