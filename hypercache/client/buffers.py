"""Where fetched chunks land and stored chunks come from: engine K/V through a codec, or ready chunks."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hypercache import checks, protocol, rope
from hypercache.client.plan import Stretch
from hypercache.codecs.base import Codec
from hypercache.errors import SpecError
from hypercache.kv import Arrival, Exactness, KVBuffers
from hypercache.model import ModelSpec

Bytes = npt.NDArray[np.uint8]


class Staging:
    """A pool of frame-sized host buffers, so that the data path hardly ever allocates."""

    def __init__(self, nbytes: int, count: int) -> None:
        self._nbytes = nbytes
        self._count = count
        self._out = 0
        self._free: list[Bytes] = []
        self._waiting: list[Callable[[], None]] = []

    def take(self, wake: Callable[[], None]) -> Bytes | None:
        """A buffer, or None when ``count`` are out: then ``wake`` is called when one comes back."""
        if self._out >= self._count:
            self._waiting.append(wake)
            return None
        return self.take_now()

    def take_now(self) -> Bytes:
        """A buffer in any case, for what is arriving and cannot wait."""
        self._out += 1
        return self._free.pop() if self._free else np.empty(self._nbytes, np.uint8)

    def give(self, buffer: Bytes) -> None:
        self._out -= 1
        if len(self._free) < self._count:
            self._free.append(buffer)
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()


@dataclass(slots=True)
class Landing:
    """Memory for the chunks of one frame, and how to use them."""

    views: Sequence[memoryview]  # what the channel writes to
    chunks: Sequence[memoryview]  # the same bytes, one view a chunk
    keep: Callable[[int, int], None]  # (run, n): the first n chunks of that run are verified: use them
    done: Callable[[], None]  # the channel writes no more


OUTGOING = 4  # frames encoded and not yet sent, all stores of a client together
INCOMING = 2  # frames being received

Runs = Sequence[protocol.Run]


class ChunkPort(Protocol):
    """One sequence's chunks, addressed by layer and row: its blocks in the order in which they travel."""

    blocks: int
    borrowed: bool  # whether what lend() gives is the caller's own memory, not a copy

    @property
    def exact(self) -> int:
        """How many of them may be stored, as of now: a fetch may lower it at any time."""

    def check_writable(self) -> None:
        """Raises SpecError that names the layer whose memory cannot be written."""

    @property
    def below(self) -> Sequence[int]:
        """Bytes of a chunk in the codec on disk, of each layer; none: it does not take such chunks."""

    def landing(self, runs: Runs, below: bool = False) -> Landing:
        """below: in the codec on disk."""

    def lend(self, runs: Runs, wake: Callable[[], None]) -> Landing | None:
        """The encoded chunks of ``runs``, nothing to keep; None: no buffer is free, ``wake`` tells when."""


def cut(view: memoryview, size: int) -> list[memoryview]:
    """A flat view in pieces of ``size`` bytes."""
    if len(view) == size:
        return [view]
    return [view[at : at + size] for at in range(0, len(view), size)]


class ChunkBuffers:
    """Chunks in encoded form, as they travel: for paged memory, other tiers, and tools.

    layers: one uint8 array ``(blocks, chunk_nbytes)`` a layer, C-contiguous. Fetched bytes land in place: the
    blocks of the prefix, then those of each modular span, as they were stored. Keys of modular spans are not
    turned: that is left to whoever decodes them (``Codec.decode`` with ``rope.turn(rope, span.delta)``).
    Bytes of a fetch that fails are unspecified, as with any caller memory: use what FetchResult names.
    Stored bytes are sent from where they are: they must not change before the store's result is there.

    ``exact`` of the rows may be stored: those before the first that came from another context. As with
    KVBuffers, one memory has one ChunkBuffers.
    """

    def __init__(self, layers: Sequence[Bytes]) -> None:
        if not layers:
            raise SpecError("ChunkBuffers needs at least one layer")
        for index, layer in enumerate(layers):
            if layer.dtype != np.uint8 or layer.ndim != 2 or not layer.flags.c_contiguous:
                raise SpecError(
                    f"ChunkBuffers layer {index} must be C-contiguous uint8 (blocks, nbytes), "
                    f"got {layer.dtype} {layer.shape}"
                )
            if layer.shape[0] != layers[0].shape[0]:
                raise SpecError(
                    f"ChunkBuffers layer {index} has {layer.shape[0]} blocks, layer 0 {layers[0].shape[0]}"
                )
        self._layers = [as_bytes(layer) for layer in layers]
        self.sizes = [int(layer.shape[1]) for layer in layers]  # bytes of a chunk, a layer
        self.blocks = int(layers[0].shape[0])
        self._exact = Exactness(self.blocks)

    @property
    def exact(self) -> int:
        """Leading rows that may be stored; as :attr:`KVBuffers.exact`, in rows."""
        return self._exact.end

    def mark_exact(self, rows: int) -> None:
        """The first ``rows`` rows hold K/V that were computed over nothing approximate."""
        if checks.count("ChunkBuffers.mark_exact: rows", rows, 0) > self.blocks:
            raise SpecError(f"mark_exact({rows}): these ChunkBuffers hold {self.blocks} rows")
        self._exact.mark(0, rows)

    def mark_approximate(self, first: int) -> None:
        """The rows from ``first`` on are approximate: they are not stored."""
        self._exact.lower(checks.count("ChunkBuffers.mark_approximate: first", first, 0))

    def arriving(self, exact: int, approximate: int | None) -> Arrival:
        """As :meth:`KVBuffers.arriving`, in rows."""
        return Arrival(self._exact, exact, approximate)

    def check(self, chunk_nbytes: Sequence[int]) -> None:
        have = self.sizes
        if have != list(chunk_nbytes):
            raise SpecError(
                f"ChunkBuffers hold {len(have)} layers of {have[0]}.. bytes a chunk, "
                f"the namespace {len(chunk_nbytes)} of {chunk_nbytes[0]}.."
            )

    def check_writable(self) -> None:
        for index, layer in enumerate(self._layers):
            if layer.readonly:
                raise SpecError(f"ChunkBuffers layer {index} is read-only; fetch into a writable array")

    def layer(self, index: int) -> memoryview:
        """The bytes of all rows of a layer."""
        return self._layers[index]


class RowPort:
    """ChunkBuffers as they are: nothing is copied. Rows from ``approximate`` on come from another context."""

    borrowed = True
    below: Sequence[int] = ()

    def __init__(self, rows: ChunkBuffers, approximate: int | None) -> None:
        self._rows = rows
        self._approximate = approximate
        self.blocks = rows.blocks

    @property
    def exact(self) -> int:
        return self._rows.exact

    def check_writable(self) -> None:
        self._rows.check_writable()

    def landing(self, runs: Runs, below: bool = False) -> Landing:
        first = self._approximate
        if first is None or all(row + count <= first for _, row, count in runs):
            return self.lend(runs)
        taint = partial(self._rows.mark_approximate, first)
        taint()
        landing = self.lend(runs)
        landing.done = taint  # whatever was marked meanwhile
        return landing

    def lend(self, runs: Runs, wake: Callable[[], None] | None = None) -> Landing:
        views: list[memoryview] = []
        chunks: list[memoryview] = []
        for layer, first, count in runs:
            size = self._rows.sizes[layer]
            view = self._rows.layer(layer)[first * size : (first + count) * size]
            views.append(view)
            chunks += cut(view, size)
        return Landing(views, chunks, _keep_nothing, _nothing)


class Coder:
    """A codec applied to one model in blocks of one size, with the buffers that takes. below: the codec on
    the server's disk, where that is another."""

    def __init__(
        self, codec: Codec, spec: ModelSpec, block_size: int, frame_bytes: int, below: Codec | None = None
    ) -> None:
        for group in spec.groups:
            if not codec.supports(group.layout.dtype):
                raise SpecError(
                    f"codec {codec.name!r} does not take {group.layout.dtype.value} K/V; use 'raw'"
                )
        self.codec = codec
        self.below = below
        self.block_size = block_size
        self.layouts = [spec.layout(layer) for layer in range(spec.num_layers)]
        self.ropes = [group.rope for group in spec.groups]
        groups = {layer: i for i, group in enumerate(spec.groups) for layer in group.layers}
        self.rope_of = [groups[layer] for layer in range(spec.num_layers)]  # index into ropes
        self.chunk_nbytes = tuple(codec.chunk_nbytes(layout, block_size) for layout in self.layouts)
        lying = [] if below is None else [below.chunk_nbytes(layout, block_size) for layout in self.layouts]
        self.below_nbytes = tuple(lying)
        largest = max(frame_bytes, *self.chunk_nbytes, *lying)
        self.outgoing = Staging(largest, OUTGOING)
        self.incoming = Staging(largest, INCOMING)


class CodecPort:
    """Engine-shaped K/V behind a codec. Bytes are decoded only after they are verified.

    Its rows are the blocks of ``stretches``, which lie anywhere in ``kv``; no run of rows goes from one of
    them to the next. Keys of a stretch that moved are turned as they are decoded. Tokens before ``start`` are
    never written, for the engine holds them already.
    """

    borrowed = False

    def __init__(self, coder: Coder, kv: KVBuffers, stretches: Sequence[Stretch], start: int) -> None:
        self._coder = coder
        self._kv = kv
        self._start = start
        self._stretches = stretches
        self._ends = list(accumulate(stretch.blocks for stretch in stretches))
        self._turns: dict[tuple[int, int], rope.Turn | None] = {}
        self.blocks = self._ends[-1]

    @property
    def exact(self) -> int:
        size = self._coder.block_size
        return self._kv.exact // size - self._stretches[0].begin // size

    def check_writable(self) -> None:
        for layer in range(len(self._coder.layouts)):
            if not all(part.flags.writeable for part in self._kv.layer(layer)):
                raise SpecError(f"the K/V buffers of layer {layer} are read-only; fetch into writable arrays")

    @property
    def below(self) -> Sequence[int]:
        return self._coder.below_nbytes

    def landing(self, runs: Runs, below: bool = False) -> Landing:
        coder = self._coder
        codec = coder.below if below and coder.below is not None else coder.codec
        buffer = coder.incoming.take_now()
        rows = self._rows(buffer, runs, coder.below_nbytes if below else coder.chunk_nbytes)

        def keep(run: int, good: int) -> None:
            if good:
                layer, first, _ = runs[run]
                self._decode(codec, layer, first, rows[run][:good])

        return self._landing(buffer, rows, keep, lambda: coder.incoming.give(buffer))

    def lend(self, runs: Runs, wake: Callable[[], None]) -> Landing | None:
        buffer = self._coder.outgoing.take(wake)
        if buffer is None:
            return None
        rows = self._rows(buffer, runs, self._coder.chunk_nbytes)
        try:
            for (layer, first, count), into in zip(runs, rows, strict=True):
                self._coder.codec.encode(self._coder.layouts[layer], self._parts(layer, first, count), into)
        except BaseException:
            self._coder.outgoing.give(buffer)
            raise
        return self._landing(buffer, rows, _keep_nothing, lambda: self._coder.outgoing.give(buffer))

    def _landing(
        self,
        buffer: Bytes,
        rows: Sequence[Bytes],
        keep: Callable[[int, int], None],
        done: Callable[[], None],
    ) -> Landing:
        whole = as_bytes(buffer)[: sum([run.size for run in rows])]
        chunks: list[memoryview] = []
        at = 0
        for run in rows:
            chunks += cut(whole[at : at + run.size], run.shape[1])
            at += run.size
        return Landing([whole], chunks, keep, done)

    def _rows(self, buffer: Bytes, runs: Runs, sizes: Sequence[int]) -> list[Bytes]:
        """``buffer`` as one array (blocks, chunk bytes) a run, back to back."""
        rows = []
        at = 0
        for layer, _, count in runs:
            size = sizes[layer]
            rows.append(buffer[at : at + count * size].reshape(count, size))
            at += count * size
        return rows

    def _place(self, row: int) -> tuple[int, int]:
        """Where a row begins in the buffers, and by how many positions it moved there."""
        index = bisect.bisect_right(self._ends, row)
        stretch = self._stretches[index]
        before = self._ends[index] - stretch.blocks
        return stretch.begin + (row - before) * self._coder.block_size, stretch.delta

    def _turn(self, layer: int, delta: int) -> rope.Turn | None:
        group = self._coder.rope_of[layer]
        if delta and (group, delta) not in self._turns:
            self._turns[group, delta] = rope.turn(self._coder.ropes[group], delta)
        return self._turns.get((group, delta))

    def _parts(self, layer: int, first: int, count: int) -> list[npt.NDArray[Any]]:
        begin, _ = self._place(first)
        stop = begin + count * self._coder.block_size
        return [part[:, begin:stop, :] for part in self._kv.layer(layer)]

    def _decode(self, codec: Codec, layer: int, first: int, rows: Bytes) -> None:
        layout, decode, size = self._coder.layouts[layer], codec.decode, self._coder.block_size
        count = rows.shape[0]
        begin, delta = self._place(first)
        turn, clip = self._turn(layer, delta), self._start - begin
        if first >= self._ends[0]:
            self._kv.mark_approximate(max(begin, self._start))
        if clip <= 0:
            decode(layout, rows, self._parts(layer, first, count), turn)
            return
        # The engine already holds the head of this block: decode it aside and copy only its tail.
        aside = [np.empty((layout.heads, size, part.dim), layout.dtype.storage) for part in layout.parts]
        decode(layout, rows[:1], aside, turn)
        for target, source in zip(self._parts(layer, first, 1), aside, strict=True):
            target[:, clip:, :] = source[:, clip:, :]
        if count > 1:
            decode(layout, rows[1:], self._parts(layer, first + 1, count - 1), turn)


def arriving(
    into: KVBuffers | ChunkBuffers, stretches: Sequence[Stretch], start: int, *, whole: bool
) -> Arrival:
    """Tell the buffers what is on its way. whole: into all layers."""
    own, moved = stretches[0], len(stretches) > 1
    whole = whole and not start
    if isinstance(into, ChunkBuffers):
        return into.arriving(own.blocks if whole else 0, own.blocks if moved else None)
    first = max(start, stretches[1].begin) if moved else None
    return into.arriving(into.tokens if whole else 0, first)


def as_bytes(array: Bytes) -> memoryview:
    """A flat view of C-contiguous bytes."""
    return memoryview(array).cast("B")  # type: ignore[arg-type]


def _nothing() -> None:
    return None


def _keep_nothing(run: int, good: int) -> None:
    return None
