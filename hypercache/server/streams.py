"""One fetch, one store: the state of a request that moves bulk data. No I/O of their own.

A :class:`FetchStream` is a source that the channel pulls frames from; a :class:`StoreStream` gives the
channel the arena slots that payload lands in. Both own what they hold of the store (a lease, or
reservations) and give it back exactly once, when no transport can touch the bytes any more.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from fabrics import Outgoing, Sink
from hypercache import protocol
from hypercache.checksum import Verifier
from hypercache.errors import ProtocolError
from hypercache.store import BlockStore, HoldEnded, Lease, Namespace, Reservation, Skip

Clock = Callable[[], float]


class FetchStream:
    """Sends a leased run of blocks, layer after layer, as many chunks a frame as the client likes."""

    def __init__(
        self,
        store: BlockStore,
        namespace: Namespace,
        lease: Lease,
        request_id: int,
        *,
        layers: range,
        frame_bytes: int,
        deadline: float,
        clock: Clock,
        finished: Callable[[FetchStream], None],
    ) -> None:
        self.request_id = request_id
        self.deadline = deadline
        self.bytes_sent = 0
        self.outcome = ""  # "", then "ok", "deadline" or "cancelled"
        self._store = store
        self._lease = lease
        self._chunk_nbytes = namespace.info.chunk_nbytes
        self._frame_bytes = frame_bytes
        self._clock = clock
        self._finished = finished
        self._layers = layers
        self._layer = layers.start
        self._block = 0

    def next_frame(self) -> Outgoing | None:
        if self.outcome:
            return None
        blocks = self._lease.blocks
        if self._layer == self._layers.stop:
            self._end("ok")
            return self._reply(protocol.Fetched(len(blocks)))
        if self._clock() > self.deadline or self._lease.ended:
            self._end("deadline")
            return self._reply(protocol.Error(protocol.ErrorCode.DEADLINE, "the fetch ran out of time"))
        layer, first = self._layer, self._block
        count = protocol.batch_size(self._chunk_nbytes[layer], self._frame_bytes)
        batch = blocks[first : first + count]
        self._block += len(batch)
        if self._block == len(blocks):
            self._block = 0
            self._layer += 1
        chunk = self._store.chunk
        payload = [chunk(block, layer) for block in batch]
        crcs = tuple([block.crcs[layer] for block in batch])
        op, body = protocol.encode(protocol.Layer(layer, first, crcs))
        self._store.pin(self._lease)
        self.bytes_sent += len(batch) * self._chunk_nbytes[layer]
        return Outgoing(op, self.request_id, body, payload, release=self._taken_back)

    def cancel(self) -> None:
        """The client gave up or is gone."""
        if not self.outcome:
            self._end("cancelled")

    def _reply(self, message: protocol.Message) -> Outgoing:
        op, body = protocol.encode(message)
        return Outgoing(op, self.request_id, body)

    def _taken_back(self, sent: bool) -> None:
        self._store.unpin(self._lease)

    def _end(self, outcome: str) -> None:
        self.outcome = outcome
        self._store.release(self._lease)  # frames that are still lent out keep their pins
        self._finished(self)


class PutSink(Sink):
    """The arena slots that one PUT frame lands in, pinned until the channel is done with them."""

    __slots__ = ("crcs", "first", "layer", "stream", "targets", "verifier")

    def __init__(
        self,
        stream: StoreStream,
        layer: int,
        first: int,
        crcs: Sequence[int],
        targets: dict[int, Reservation],
        views: Sequence[memoryview],
    ) -> None:
        self.stream = stream
        self.layer = layer
        self.first = first
        self.crcs = crcs
        self.targets = targets
        self.verifier = Verifier(views, crcs)
        super().__init__(views, landed=self.verifier.landed, closed=self._closed)
        stream.pin(targets.values())

    def _closed(self, complete: bool) -> None:
        self.stream.unpin(self.targets.values())


class StoreStream:
    """Receives chunks into reserved slots and commits each block when all its layers are verified."""

    def __init__(
        self,
        store: BlockStore,
        namespace: Namespace,
        entries: Sequence[Reservation | Skip],
        request_id: int,
        *,
        deadline: float,
        clock: Clock,
        discard: Callable[[int], memoryview],
    ) -> None:
        self.request_id = request_id
        self.deadline = deadline
        self.outcome: Counter[str] = Counter()
        self.bytes_received = 0
        self._store = store
        self._chunk_nbytes = namespace.info.chunk_nbytes
        self._total = len(entries)
        self._clock = clock
        self._discard = discard
        self._open: dict[int, Reservation] = {}
        for index, entry in enumerate(entries):
            if isinstance(entry, Skip):
                self.outcome[entry.reason] += 1
            else:
                self._open[index] = entry

    @property
    def done(self) -> bool:
        return not self._open

    def wanted(self) -> tuple[tuple[int, int], ...]:
        """Open blocks as (first, count) runs."""
        runs: list[tuple[int, int]] = []
        for index in self._open:  # in ascending order: filled so, and deletion keeps it
            if runs and sum(runs[-1]) == index:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((index, 1))
        return tuple(runs)

    def put(self, message: protocol.Put, payload_nbytes: int) -> PutSink | None:
        """Where the chunks of one frame go, None when nobody wants them.

        Raises ProtocolError when layer, blocks or sizes do not fit the namespace.
        """
        layer, first, crcs = message.layer, message.first, message.crcs
        if not 0 <= layer < len(self._chunk_nbytes):
            raise ProtocolError(f"PUT of layer {layer}, the namespace has {len(self._chunk_nbytes)}")
        size = self._chunk_nbytes[layer]
        if not crcs or first < 0 or first + len(crcs) > self._total:
            raise ProtocolError(f"PUT of blocks {first}+{len(crcs)}, the request has {self._total}")
        if payload_nbytes != len(crcs) * size:
            raise ProtocolError(
                f"PUT of {len(crcs)} chunks of layer {layer} carries {payload_nbytes} bytes, "
                f"needs {len(crcs) * size}"
            )
        indices = range(first, first + len(crcs))
        targets = {index: self._open[index] for index in indices if index in self._open}
        targets = {index: target for index, target in targets.items() if not target.ended}
        if not targets:
            return None
        views = [
            targets[index].chunk(layer) if index in targets else self._discard(size) for index in indices
        ]
        return PutSink(self, layer, first, crcs, targets, views)

    def pin(self, targets: Iterable[Reservation]) -> None:
        for target in targets:
            self._store.pin(target)

    def unpin(self, targets: Iterable[Reservation]) -> None:
        for target in targets:
            self._store.unpin(target)

    def arrived(self, sink: PutSink) -> None:
        """All bytes of a frame are in place: fill what matches its checksum, abort what does not."""
        self.bytes_received += sink.nbytes
        bad = {sink.first + offset for offset in sink.verifier.bad}
        now = self._clock()
        for index, target in sink.targets.items():
            if self._open.get(index) is not target or target.ended:
                continue
            if index in bad:
                self._settle(index, "corrupt")
                self._store.abort(target)
                continue
            with contextlib.suppress(HoldEnded):  # cleared meanwhile: drop_dead finds it
                if self._store.fill(target, sink.layer, sink.crcs[index - sink.first], now):
                    self._settle(index, "stored")
        self.drop_dead()

    def drop_dead(self) -> None:
        """Forget reservations that ended without us: cleared, stalled, or their parent failed."""
        for index in [index for index, target in self._open.items() if target.ended]:
            self._settle(index, "aborted")

    def cancel(self) -> None:
        for index in list(self._open):
            target = self._open[index]
            self._settle(index, "aborted")
            self._store.abort(target)

    def _settle(self, index: int, how: str) -> None:
        del self._open[index]
        self.outcome[how] += 1
