"""`raw`: the engine's own bytes, of any dtype, gathered to ``[head][part][token][dim]``.

Lossless for every bit pattern, and the only codec for engines that keep K/V in fp8 themselves: their
bytes pass untouched, their scales live in :class:`hypercache.model.ModelSpec`.
"""

from __future__ import annotations

from collections.abc import Iterator

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
    """For each part, views of its bytes in the chunks and in the engine's array: (head, block, token, byte).

    Every reshape only splits an axis, so none of them copies.
    """
    chunks = rows.reshape(blocks, layout.heads, -1).transpose(1, 0, 2)
    offset = 0
    for part, array in zip(layout.parts, parts, strict=True):
        row = part.dim * array.itemsize
        shape = (layout.heads, blocks, tokens, row)
        yield chunks[:, :, offset : offset + tokens * row].reshape(shape), array.view(np.uint8).reshape(shape)
        offset += tokens * row
