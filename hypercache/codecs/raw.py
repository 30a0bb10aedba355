"""`raw`: the engine's own bytes, of any dtype, gathered to ``[head][part][token][dim]``.

Lossless for every bit pattern, and the only codec for engines that keep K/V in fp8 themselves: their
bytes pass untouched, their scales live in :class:`hypercache.model.ModelSpec`.
"""

from __future__ import annotations

from collections.abc import Iterator

from hypercache.codecs import kernels
from hypercache.codecs.base import (
    KINDS,
    NO_TURN,
    Bytes2D,
    Codec,
    Parts,
    check_shapes,
    check_writable,
    place_turn,
)
from hypercache.model import KVDtype, KVLayout
from hypercache.rope import Turn

_Places = Iterator[tuple[kernels.Ints, kernels.Ints, kernels.Ints]]


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
        for shape, inside, outside in _places(layout, blocks, tokens, out, parts):
            kernels.copy_rows(shape, outside, inside)

    def decode(self, layout: KVLayout, data: Bytes2D, parts: Parts, turn: Turn | None = None) -> None:
        blocks, tokens = check_shapes(self, layout, parts, data)
        turns = place_turn(layout, turn)
        for part, array in zip(layout.parts, parts, strict=True):
            check_writable(f"part {part.name!r}", array)
        places = _places(layout, blocks, tokens, data, parts)
        for (shape, inside, outside), turned in zip(places, turns, strict=True):
            if turned == NO_TURN:
                kernels.copy_rows(shape, inside, outside)
            else:
                kernels.turner(2 * turned[2])(KINDS[layout.dtype], shape, inside, outside, turned)


def _places(layout: KVLayout, blocks: int, tokens: int, rows: Bytes2D, parts: Parts) -> _Places:
    """For each part: shape, its place in the chunks, its place in the engine's array, for ``copy_rows``."""
    head_nbytes = rows.shape[1] // layout.heads
    start = rows.ctypes.data
    for part, array in zip(layout.parts, parts, strict=True):
        row = part.dim * array.itemsize
        heads, token = array.strides[:2]
        yield (
            (layout.heads, blocks, tokens, row),
            (start, head_nbytes, rows.strides[0], row),
            (array.ctypes.data, heads, tokens * token, token),
        )
        start += tokens * row
