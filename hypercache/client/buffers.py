"""Where fetched chunks land and stored chunks come from: engine K/V through a codec, or ready chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hypercache import protocol
from hypercache.codecs.base import Codec
from hypercache.errors import SpecError
from hypercache.kv import KVBuffers
from hypercache.model import ModelSpec


class Staging:
    """A pool of frame-sized host buffers, so that the data path hardly ever allocates."""

    def __init__(self, nbytes: int, count: int) -> None:
        self._nbytes = nbytes
        self._count = count
        self._out = 0
        self._free: list[npt.NDArray[np.uint8]] = []
        self._waiting: list[Callable[[], None]] = []

    def take(self, wake: Callable[[], None]) -> npt.NDArray[np.uint8] | None:
        """A buffer, or None when ``count`` are out: then ``wake`` is called when one comes back."""
        if self._out >= self._count:
            self._waiting.append(wake)
            return None
        return self.take_now()

    def take_now(self) -> npt.NDArray[np.uint8]:
        """A buffer in any case, for what is arriving and cannot wait."""
        self._out += 1
        return self._free.pop() if self._free else np.empty(self._nbytes, np.uint8)

    def give(self, buffer: npt.NDArray[np.uint8]) -> None:
        self._out -= 1
        if len(self._free) < self._count:
            self._free.append(buffer)
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()


class Landing:
    """Memory for ``count`` chunks of one frame, then a way to use them."""

    __slots__ = ("chunks", "done", "keep", "views")

    def __init__(
        self,
        views: Sequence[memoryview],
        chunks: Sequence[memoryview],
        keep: Callable[[int], None],
        done: Callable[[], None],
    ) -> None:
        self.views = views  # what the channel writes to
        self.chunks = chunks  # the same bytes, one view a chunk
        self.keep = keep  # the first n chunks are verified: use them
        self.done = done  # the channel writes no more


OUTGOING = 4  # frames encoded and not yet sent, all stores of a client together
INCOMING = 2  # frames being received

Lent = tuple[memoryview, Callable[[], None]]  # bytes, and what gives them back


class ChunkPort(Protocol):
    """One sequence's chunks, addressed by layer and block."""

    blocks: int

    def landing(self, layer: int, first: int, count: int) -> Landing: ...

    def lend(self, layer: int, first: int, count: int, wake: Callable[[], None]) -> Lent | None:
        """Encoded bytes of ``count`` chunks back to back; None: no buffer is free, ``wake`` tells when."""


class ChunkBuffers:
    """Chunks in encoded form, as they travel: for paged memory, other tiers, and tools.

    layers: one uint8 array ``(blocks, chunk_nbytes)`` a layer, C-contiguous. Fetched bytes land in place.
    Bytes of a fetch that fails are unspecified, as with any caller memory: use what FetchResult names.
    """

    def __init__(self, layers: Sequence[npt.NDArray[np.uint8]]) -> None:
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
        self._layers = layers
        self.blocks = int(layers[0].shape[0])

    def check(self, chunk_nbytes: Sequence[int]) -> None:
        have = [int(layer.shape[1]) for layer in self._layers]
        if have != list(chunk_nbytes):
            raise SpecError(
                f"ChunkBuffers hold {len(have)} layers of {have[0]}.. bytes a chunk, "
                f"the namespace {len(chunk_nbytes)} of {chunk_nbytes[0]}.."
            )

    def landing(self, layer: int, first: int, count: int) -> Landing:
        rows = self._layers[layer][first : first + count]
        whole = memoryview(rows).cast("B")  # type: ignore[arg-type]
        size = rows.shape[1]
        chunks = [whole[at : at + size] for at in range(0, whole.nbytes, size)]
        return Landing([whole], chunks, _nothing_n, _nothing)

    def lend(self, layer: int, first: int, count: int, wake: Callable[[], None]) -> Lent | None:
        return memoryview(self._layers[layer][first : first + count]).cast("B"), _nothing  # type: ignore[arg-type]


class Coder:
    """A codec applied to one model in blocks of one size, with the buffers that takes."""

    def __init__(self, codec: Codec, spec: ModelSpec, block_size: int, frame_bytes: int) -> None:
        for group in spec.groups:
            if not codec.supports(group.layout.dtype):
                raise SpecError(
                    f"codec {codec.name!r} does not take {group.layout.dtype.value} K/V; use 'raw'"
                )
        self.codec = codec
        self.block_size = block_size
        self.layouts = [spec.layout(layer) for layer in range(spec.num_layers)]
        self.chunk_nbytes = tuple(codec.chunk_nbytes(layout, block_size) for layout in self.layouts)
        largest = max(size * protocol.batch_size(size, frame_bytes) for size in self.chunk_nbytes)
        self.outgoing = Staging(largest, OUTGOING)
        self.incoming = Staging(largest, INCOMING)


class CodecPort:
    """Engine-shaped K/V behind a codec. Bytes are decoded only after they are verified.

    Block 0 of the port is the block that holds token ``start``; tokens before it are never written, for the
    engine holds them already.
    """

    def __init__(self, coder: Coder, kv: KVBuffers, start: int = 0) -> None:
        self._coder = coder
        self._kv = kv
        self._start = start
        self._first_block = start // coder.block_size
        self.blocks = kv.tokens // coder.block_size - self._first_block

    def landing(self, layer: int, first: int, count: int) -> Landing:
        buffer = self._coder.incoming.take_now()
        rows = self._rows(buffer, layer, count)
        size = rows.shape[1]
        whole = memoryview(buffer)[: rows.nbytes]  # type: ignore[arg-type]
        chunks = [whole[at : at + size] for at in range(0, rows.nbytes, size)]

        def keep(good: int) -> None:
            if good:
                self._decode(layer, first, rows[:good])

        return Landing([whole], chunks, keep, lambda: self._coder.incoming.give(buffer))

    def lend(self, layer: int, first: int, count: int, wake: Callable[[], None]) -> Lent | None:
        buffer = self._coder.outgoing.take(wake)
        if buffer is None:
            return None
        rows = self._rows(buffer, layer, count)
        self._coder.codec.encode(self._coder.layouts[layer], self._parts(layer, first, count), rows)
        data = memoryview(buffer)[: rows.nbytes]  # type: ignore[arg-type]
        return data, lambda: self._coder.outgoing.give(buffer)

    def _rows(self, buffer: npt.NDArray[np.uint8], layer: int, count: int) -> npt.NDArray[np.uint8]:
        size = self._coder.chunk_nbytes[layer]
        return buffer[: count * size].reshape(count, size)

    def _parts(self, layer: int, first: int, count: int) -> list[npt.NDArray[Any]]:
        size = self._coder.block_size
        begin = (self._first_block + first) * size
        return [part[:, begin : begin + count * size, :] for part in self._kv.layer(layer)]

    def _decode(self, layer: int, first: int, rows: npt.NDArray[np.uint8]) -> None:
        layout, decode, size = self._coder.layouts[layer], self._coder.codec.decode, self._coder.block_size
        count = rows.shape[0]
        clip = self._start - (self._first_block + first) * size
        if clip <= 0:
            decode(layout, rows, self._parts(layer, first, count))
            return
        # The engine already holds the head of this block: decode it aside and copy only its tail.
        aside = [np.empty((layout.heads, size, part.dim), layout.dtype.storage) for part in layout.parts]
        decode(layout, rows[:1], aside)
        for target, source in zip(self._parts(layer, first, 1), aside, strict=True):
            target[:, clip:, :] = source[:, clip:, :]
        if count > 1:
            decode(layout, rows[1:], self._parts(layer, first + 1, count - 1))


def _nothing() -> None:
    return None


def _nothing_n(good: int) -> None:
    return None
