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
    """A bounded pool of frame-sized host buffers, so that the data path never allocates."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes = nbytes
        self._free: list[npt.NDArray[np.uint8]] = []
        self._left = count

    def take(self) -> npt.NDArray[np.uint8] | None:
        """A buffer of ``nbytes``, None when all are in use."""
        if self._free:
            return self._free.pop()
        if self._left == 0:
            return None
        self._left -= 1
        return np.empty(self.nbytes, np.uint8)

    def give(self, buffer: npt.NDArray[np.uint8]) -> None:
        self._free.append(buffer)


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


class ChunkPort(Protocol):
    """One sequence's chunks, addressed by layer and block."""

    blocks: int

    def landing(self, layer: int, first: int, count: int) -> Landing: ...

    def lend(self, layer: int, first: int, count: int) -> tuple[memoryview, Callable[[], None]] | None:
        """Encoded bytes of ``count`` chunks back to back and what returns them; None: no buffer is free."""


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

    def lend(self, layer: int, first: int, count: int) -> tuple[memoryview, Callable[[], None]] | None:
        return memoryview(self._layers[layer][first : first + count]).cast("B"), _nothing  # type: ignore[arg-type]


class CodecPort:
    """Engine-shaped K/V behind a codec. Bytes are decoded only after they are verified.

    first_block, start: block 0 of the port is block ``first_block`` of the sequence; tokens before ``start``
    are never written (the engine holds them already).
    """

    def __init__(
        self, codec: Codec, spec: ModelSpec, kv: KVBuffers, block_size: int, staging: Staging, start: int = 0
    ) -> None:
        self._codec = codec
        self._spec = spec
        self._kv = kv
        self._size = block_size
        self._staging = staging
        self._start = start
        self._first_block = start // block_size
        self.blocks = kv.tokens // block_size - self._first_block

    def landing(self, layer: int, first: int, count: int) -> Landing:
        buffer = self._staging.take()
        if buffer is None:  # receiving is serial on a channel, so this takes a fabric with deeper overlap
            buffer = np.empty(self._staging.nbytes, np.uint8)
        staging = buffer
        layout = self._spec.layout(layer)
        size = self._codec.chunk_nbytes(layout, self._size)
        rows = staging[: count * size].reshape(count, size)
        whole = memoryview(staging)[: count * size]  # type: ignore[arg-type]
        chunks = [whole[at : at + size] for at in range(0, count * size, size)]

        def keep(good: int) -> None:
            if good:
                self._decode(layer, first, rows[:good])

        return Landing([whole], chunks, keep, lambda: self._staging.give(staging))

    def lend(self, layer: int, first: int, count: int) -> tuple[memoryview, Callable[[], None]] | None:
        buffer = self._staging.take()
        if buffer is None:
            return None
        staging = buffer
        layout = self._spec.layout(layer)
        size = self._codec.chunk_nbytes(layout, self._size)
        rows = staging[: count * size].reshape(count, size)
        self._codec.encode(layout, self._parts(layer, first, count), rows)
        return memoryview(staging)[: count * size], lambda: self._staging.give(staging)  # type: ignore[arg-type]

    def _parts(self, layer: int, first: int, count: int) -> list[npt.NDArray[Any]]:
        begin = (self._first_block + first) * self._size
        return [part[:, begin : begin + count * self._size, :] for part in self._kv.layer(layer)]

    def _decode(self, layer: int, first: int, rows: npt.NDArray[np.uint8]) -> None:
        layout = self._spec.layout(layer)
        count = rows.shape[0]
        clip = self._start - (self._first_block + first) * self._size
        if clip <= 0:
            self._codec.decode(layout, rows, self._parts(layer, first, count))
            return
        # The engine already holds the head of this block: decode it aside and copy only its tail.
        aside = [
            np.empty((layout.heads, self._size, part.dim), layout.dtype.storage) for part in layout.parts
        ]
        self._codec.decode(layout, rows[:1], aside)
        for target, source in zip(self._parts(layer, first, 1), aside, strict=True):
            target[:, clip:, :] = source[:, clip:, :]
        if count > 1:
            self._codec.decode(layout, rows[1:], self._parts(layer, first + 1, count - 1))


def staging_for(codec: Codec, spec: ModelSpec, block_size: int, frame_bytes: int, count: int) -> Staging:
    """A pool whose buffers hold any frame of this namespace."""
    need = frame_bytes
    for group in spec.groups:
        size = codec.chunk_nbytes(spec.layout(group.layers[0]), block_size)
        need = max(need, size * protocol.batch_size(size, frame_bytes))
    return Staging(need, count)


def _nothing() -> None:
    return None


def _nothing_n(good: int) -> None:
    return None
