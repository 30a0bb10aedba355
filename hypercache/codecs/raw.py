"""`raw`: the engine's own bytes, of any dtype, gathered to ``[head][part][token][dim]``.

Lossless for every bit pattern, and the only codec for engines that keep K/V in fp8 themselves: their
bytes pass untouched, their scales live in :class:`hypercache.model.ModelSpec`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hypercache.codecs.base import Bytes2D, Codec, Parts, check_shapes
from hypercache.codecs.scaled import check_writable
from hypercache.model import KVDtype, KVLayout

_Pairs = Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]


class RawCodec(Codec):
    """See the module."""

    name = "raw"
    wire_id = 0
    lossless = True

    def supports(self, dtype: KVDtype) -> bool:
        return True

    def chunk_nbytes(self, layout: KVLayout, tokens: int) -> int:
        return layout.chunk_nbytes(tokens)

    def encode(self, layout: KVLayout, parts: Parts, out: Bytes2D) -> None:
        blocks, tokens = check_shapes(self, layout, parts, out)
        check_writable("out", out)
        for inside, outside in _views(layout, blocks, tokens, out, parts):
            np.copyto(inside, outside)

    def decode(self, layout: KVLayout, data: Bytes2D, parts: Parts) -> None:
        blocks, tokens = check_shapes(self, layout, parts, data)
        for part, array in zip(layout.parts, parts, strict=True):
            check_writable(f"part {part.name!r}", array)
        for inside, outside in _views(layout, blocks, tokens, data, parts):
            np.copyto(outside, inside)


def _views(layout: KVLayout, blocks: int, tokens: int, rows: Bytes2D, parts: Parts) -> _Pairs:
    """For each part, the same bytes in the chunks and in the engine's array: (block, head, token, byte)."""
    head_nbytes = layout.chunk_nbytes(tokens) // layout.heads
    offset = 0
    for part, array in zip(layout.parts, parts, strict=True):
        row = part.dim * array.itemsize
        shape = (blocks, layout.heads, tokens, row)
        inside = _strided(rows[:1, offset : offset + 1], shape, (rows.strides[0], head_nbytes, row, 1))
        first = array[:1, :1, :1].reshape(1).view(np.uint8)
        outside = _strided(first, shape, (tokens * array.strides[1], array.strides[0], array.strides[1], 1))
        yield inside, outside
        offset += tokens * row


def _strided(start: npt.NDArray[np.uint8], shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    return np.lib.stride_tricks.as_strided(start, shape, strides, writeable=start.flags.writeable)
