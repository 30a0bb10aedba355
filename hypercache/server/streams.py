"""One fetch, one store: the state of a request that moves bulk data. No I/O of their own.

A :class:`FetchStream` is a source that the channel pulls frames from; a :class:`StoreStream` gives the
channel the arena slots that payload lands in. Both own what they hold of the store (a lease, or
reservations) and give it back exactly once, when no transport can touch the bytes any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from fabrics import Outgoing, Sink
from hypercache import protocol
from hypercache.checksum import Verifier
from hypercache.errors import ProtocolError, StoreFull
from hypercache.store import Block, BlockStore, HoldEnded, Lease, Namespace, Reservation, Skip

Clock = Callable[[], float]


#: Blocks of a lease as they lie in L3: the chunks of each, one a layer, and their checksums.
Raw = Mapping[Block, tuple[Sequence[memoryview], Sequence[int]]]


class FetchStream:
    """Sends leased blocks, layer after layer, as many chunks a frame as the client likes. ``raw`` are sent as
    they lie in L3, in frames of their own."""

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
        raw: Raw,
    ) -> None:
        self.request_id = request_id
        self.deadline = deadline
        self.bytes_sent = 0
        self.modular_bytes_sent = 0  # of those, what belongs to chains
        self.lent = 0  # frames that the channel may still be reading from the arena
        self.ended_at = 0.0
        self.outcome = ""  # "", then "ok", "deadline" or "cancelled"
        self._store = store
        self._lease = lease
        self._raw = raw
        self._sizes = (namespace.info.chunk_nbytes, namespace.info.below_nbytes if raw else ())
        self._frame_bytes = frame_bytes
        self._clock = clock
        self._finished = finished
        self._cursor = protocol.Cursor(layers, len(lease.blocks))

    def next_frame(self) -> Outgoing | None:
        if self.outcome:
            return None
        blocks, cursor = self._lease.blocks, self._cursor
        if cursor.done:
            self._end("ok")
            return self._reply(protocol.Fetched(len(blocks)))
        if self._clock() > self.deadline or self._lease.ended:
            self._end("deadline")
            return self._reply(protocol.Error(protocol.ErrorCode.DEADLINE, "the fetch ran out of time"))
        below = bool(self._raw) and blocks[cursor.block] in self._raw
        sizes = self._sizes[below]
        runs = protocol.plan_frame(self._ahead(below), sizes, self._frame_bytes)
        chunk, raw = self._store.chunk, self._raw
        payload: list[memoryview] = []
        crcs: list[int] = []
        causal = self._lease.counts[0]
        for run in runs:
            cursor.take(run)
            layer, first, count = run
            modular = count - max(0, min(causal - first, count))
            self.modular_bytes_sent += modular * sizes[layer]
            batch = blocks[first : first + count]
            if below:
                payload += [raw[block][0][layer] for block in batch]
                crcs += [raw[block][1][layer] for block in batch]
            else:
                payload += [chunk(block, layer) for block in batch]
                crcs += [block.crcs[layer] for block in batch]
        op, body = protocol.encode(protocol.Layers(tuple(runs), tuple(crcs), below))
        self._store.pin(self._lease)
        self.lent += 1
        self.bytes_sent += protocol.payload_nbytes(runs, sizes)
        return Outgoing(op, self.request_id, body, payload, release=self._taken_back)

    def _ahead(self, below: bool) -> Iterator[protocol.Run]:
        """What is left, as far as it lies in the same tier."""
        blocks, raw = self._lease.blocks, self._raw
        for layer, first, count in self._cursor.ahead():
            alike = count
            if raw:
                run = enumerate(blocks[first : first + count])
                alike = next((at for at, block in run if (block in raw) != below), count)
            if alike:
                yield layer, first, alike
            if alike < count:
                return

    def cancel(self) -> None:
        """The client gave up or is gone."""
        if not self.outcome:
            self._end("cancelled")

    def _reply(self, message: protocol.Message) -> Outgoing:
        op, body = protocol.encode(message)
        return Outgoing(op, self.request_id, body)

    def _taken_back(self, sent: bool) -> None:
        self.lent -= 1
        self._store.unpin(self._lease)

    def _end(self, outcome: str) -> None:
        self.outcome = outcome
        self._raw = {}
        self.ended_at = self._clock()
        self._store.release(self._lease)  # frames that are still lent out keep their pins
        self._finished(self)


class PutSink(Sink):
    """The arena slots that one PUT frame lands in, pinned until the channel is done with them."""

    __slots__ = ("chunks", "crcs", "held", "stream", "verifier")

    def __init__(
        self,
        stream: StoreStream,
        chunks: Sequence[tuple[int, int]],
        crcs: Sequence[int],
        held: Mapping[int, Reservation],
        views: Sequence[memoryview],
    ) -> None:
        self.stream = stream
        self.chunks = chunks  # (layer, index of the block in the request) of each view
        self.crcs = crcs
        self.held = held  # by index, pinned; the other views are not wanted
        self.verifier = verifier = Verifier(views, crcs)

        # Neither refers to the sink: it must go when the channel lets go of it, with the collector off.
        def landed(total: int) -> None:
            verifier.landed(total)
            stream.progress(held)

        super().__init__(views, landed=landed, closed=lambda complete: stream.unpin(held.values()))


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

        Raises ProtocolError when layers, blocks or sizes do not fit the namespace.
        """
        runs, crcs, sizes = message.runs, message.crcs, self._chunk_nbytes
        if not 0 < len(runs) <= len(crcs) <= protocol.MAX_FRAME_CHUNKS:
            raise ProtocolError(
                f"PUT of {len(runs)} runs and {len(crcs)} checksums, "
                f"at most {protocol.MAX_FRAME_CHUNKS} chunks"
            )
        for layer, first, count in runs:
            if not 0 <= layer < len(sizes):
                raise ProtocolError(f"PUT of layer {layer}, the namespace has {len(sizes)}")
            if first < 0 or not 0 < count <= len(crcs) or first + count > self._total:
                raise ProtocolError(f"PUT of blocks {first}+{count}, the request has {self._total}")
        chunks = [(layer, index) for layer, first, count in runs for index in range(first, first + count)]
        need = protocol.payload_nbytes(runs, sizes)
        if len(chunks) != len(crcs) or payload_nbytes != need or len(set(chunks)) != len(chunks):
            raise ProtocolError(
                f"PUT of {len(crcs)} checksums and {payload_nbytes} bytes, its runs need {need} bytes "
                "and must name each chunk once"
            )
        if len(chunks) > 1 and need > protocol.MAX_FRAME_BYTES:
            raise ProtocolError(
                f"PUT of {need} bytes, at most {protocol.MAX_FRAME_BYTES} unless it is one chunk"
            )
        held: dict[int, Reservation] = {}
        for _, index in chunks:
            if index not in held and (target := self._live(index)) is not None and self._pin(index, target):
                held[index] = target
        for index in [index for index, target in held.items() if target.ended]:
            self.unpin([held.pop(index)])  # it hung on one that found no place
            self._settle(index, "full")
        if not held:
            return None
        views = [
            held[index].chunk(layer) if index in held else self._discard(sizes[layer])
            for layer, index in chunks
        ]
        return PutSink(self, chunks, crcs, held, views)

    def _pin(self, index: int, target: Reservation) -> bool:
        """Take the block's place in the arena, which may evict others; False when there is none left."""
        try:
            self._store.pin(target)
        except StoreFull:
            self._settle(index, "full")
        except HoldEnded:
            self._settle(index, "aborted")
        else:
            return True
        return False

    def _live(self, index: int) -> Reservation | None:
        target = self._open.get(index)
        return None if target is None or target.ended else target

    def progress(self, held: Mapping[int, Reservation]) -> None:
        """Bytes of these blocks are landing: their writer is alive."""
        now = self._clock()
        for target in held.values():
            self._store.progress(target, now)
            return  # the reservations of one request stall together

    def unpin(self, targets: Iterable[Reservation]) -> None:
        for target in targets:
            self._store.unpin(target)

    def arrived(self, sink: PutSink) -> None:
        """All bytes of a frame are in place: fill what matches its checksum, abort what does not."""
        self.bytes_received += sink.nbytes
        bad = frozenset(sink.verifier.bad)
        now = self._clock()
        live = {index: target for index, target in sink.held.items() if self._live(index) is target}
        fill = self._store.fill
        for position, (layer, index) in enumerate(sink.chunks):
            target = live.get(index)
            if target is None:
                continue
            if position in bad:
                del live[index]
                self._settle(index, "corrupt")
                self._store.abort(target)
                continue
            try:
                if fill(target, layer, sink.crcs[position], now):
                    del live[index]
                    self._settle(index, "stored")
            except HoldEnded:  # cleared meanwhile, or its parent was corrupt: the next expire finds it
                del live[index]
        if bad:
            self.drop_dead()  # what was reserved on a corrupt block ended with it

    def drop_dead(self) -> None:
        """Forget reservations that ended without us: cleared, stalled, or their parent failed."""
        for index in [index for index, target in self._open.items() if target.ended]:
            self._settle(index, "aborted")

    def cancel(self) -> None:
        for index in list(self._open):
            target = self._open[index]
            self._settle(index, "aborted")
            self._store.abort(target)

    def lost(self) -> None:
        """The client is gone: ``BlockStore.drop_owner`` ends what it reserved."""
        for index in list(self._open):
            self._settle(index, "aborted")

    def _settle(self, index: int, how: str) -> None:
        del self._open[index]
        self.outcome[how] += 1
