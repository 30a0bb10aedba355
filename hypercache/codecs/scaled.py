"""What `int8`, `fp8` and `int4` share: a scale per token and head, then codes.

An encoded chunk is ``[head][part]`` of ``scales[token]`` (little-endian IEEE 754 binary16) followed by
``codes[token][dim]``. The law of every scale and code:

* scale = the smallest binary16 >= amax / top, where amax is the row's largest finite magnitude (after the
  rotation, for `int4`) and top the largest code (127, 448 or 7). Rounding up keeps every finite value
  within the codes. It is at least 2**-24, so only an all-zero row has scale 0 (and all codes 0). It is at
  most 65504: a magnitude above top * 65504 (8.3e6, 2.9e7, 4.6e5) saturates there.
* code = nearest, ties to even, of value / scale with the scale as stored.
* infinities become the row's largest finite magnitude with their sign, and 0 if there is none. NaN is kept
  by `fp8` and becomes 0 in `int8` and `int4`. The sign of zero is kept by `fp8` unless all of the row is 0.
* decoding gives code * scale, rounded once to the output dtype, to nearest even. fp16 output saturates
  at 65504. Denormal values are values like any other.

So, with s = amax / top * (1 + 2**-10) + 2**-24, the error of a finite value, before the rounding of
the output, is at most s / 2 for the integer codes; for `fp8` it is at most 2**-4 of the value where that
is >= s * 2**-6, and s * 2**-10 below.
"""

from __future__ import annotations

import abc
from typing import ClassVar

import numpy as np

from hypercache.codecs import kernels
from hypercache.codecs.base import (
    KINDS,
    Bytes2D,
    Codec,
    CodecError,
    Parts,
    check_shapes,
    check_writable,
    place_turn,
)
from hypercache.model import KVDtype, KVLayout, Part
from hypercache.rope import Turn

SCALE = 2  # bytes


class ScaledCodec(Codec):
    """Base of the quantising codecs. Takes bf16, fp16 and fp32 K/V; an engine's own fp8 needs `raw`."""

    lossless = False
    code: ClassVar[int]  # one of kernels.INT8, FP8, INT4

    @abc.abstractmethod
    def row_nbytes(self, dim: int) -> int:
        """Bytes of the codes of one token, head and part."""

    def rotation(self, dim: int) -> int:
        """Size of the Walsh-Hadamard blocks along dim; 1 is none."""
        return 1

    def supports(self, dtype: KVDtype) -> bool:
        return dtype in KINDS

    def chunk_nbytes(self, layout: KVLayout, tokens: int) -> int:
        return layout.heads * tokens * sum(SCALE + self.row_nbytes(part.dim) for part in layout.parts)

    def encode(self, layout: KVLayout, parts: Parts, out: Bytes2D) -> None:
        blocks, tokens = check_shapes(self, layout, parts, out)
        check_writable("out", out)
        head_nbytes = out.shape[1] // layout.heads
        start, offset = out.ctypes.data, 0
        for part, array in zip(layout.parts, parts, strict=True):
            kernels.encoder(part.dim)(
                (self.code, self.rotation(part.dim), KINDS[layout.dtype]),
                (layout.heads, blocks, tokens, part.dim),
                (array.ctypes.data, array.strides[0], array.strides[1]),
                (start + offset, out.strides[0], head_nbytes),
            )
            offset += tokens * (SCALE + self.row_nbytes(part.dim))

    def decode(self, layout: KVLayout, data: Bytes2D, parts: Parts, turn: Turn | None = None) -> None:
        blocks, tokens = check_shapes(self, layout, parts, data)
        turns = place_turn(layout, turn)
        for part, array in zip(layout.parts, parts, strict=True):
            check_writable(f"part {part.name!r}", array)
        head_nbytes = data.shape[1] // layout.heads
        start, offset = data.ctypes.data, 0
        for part, array, turned in zip(layout.parts, parts, turns, strict=True):
            bad = kernels.decoder(part.dim)(
                (self.code, self.rotation(part.dim), KINDS[layout.dtype]),
                (layout.heads, blocks, tokens, part.dim),
                (start + offset, data.strides[0], head_nbytes),
                (array.ctypes.data, array.strides[0], array.strides[1]),
                turned,
            )
            if bad >= 0:
                raise self.bad_scale(layout, data, tokens, part, offset, bad)
            offset += tokens * (SCALE + self.row_nbytes(part.dim))

    def bad_scale(
        self, layout: KVLayout, data: Bytes2D, tokens: int, part: Part, offset: int, bad: int
    ) -> CodecError:
        """What is wrong with row ``bad``, as the kernels count them, of ``part``, which begins at ``offset``
        of a head."""
        blocks = data.shape[0]
        head, block, token = bad // (blocks * tokens), bad // tokens % blocks, bad % tokens
        at = head * (data.shape[1] // layout.heads) + offset + SCALE * token
        found = _describe(data[block, at : at + SCALE].tobytes())
        return CodecError(
            f"codec {self.name!r}: block {block}, head {head}, part {part.name!r}, token {token} has "
            f"{found} (byte {at} of the chunk), which no "
            f"encoder writes; the chunk is damaged or of another codec or layout: treat it as a miss"
        )


def _describe(stored: bytes) -> str:
    value = float(np.frombuffer(stored, "<f2")[0])
    return "scale 0 beside codes that are not 0" if stored == b"\0\0" else f"scale {value}"
