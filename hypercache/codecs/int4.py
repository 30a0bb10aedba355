"""`int4` and `int4-plain`: symmetric 4-bit integers, two a byte, with a scale per token and head.

Codes are -7..7 in two's complement (-8 is never written). With half = ceil(dim / 2), byte j of a row
holds element j in its low four bits and element j + half in its high ones; the last high nibble of an
odd dim is 0. At head dim 128 a chunk is 3.88x smaller than bf16.

Two names, because the rotation is part of the format. `int4` rotates each row before quantising and back
after: keys have channels that are many times larger than the rest, and with 15 levels one such channel
sets the scale and flattens all others. An orthonormal Walsh-Hadamard transform spreads it over its block
(QuaRot, arXiv:2404.00456). Blocks are the largest power of two that divides dim: all of 64 and 128, 64 of
576, and nothing is rotated at an odd dim. On data without outliers the rotation gains nothing and costs
about half of the speed; that is what `int4-plain` is for.

The law of scales and the error bound are in :mod:`hypercache.codecs.scaled`. Under the rotation the bound
s / 2 holds for each rotated element, so for an element of the row it is the Euclidean one: the error of a
block of n elements has a norm of at most sqrt(n) * s / 2, and a code can saturate where a row's rotated
magnitude exceeds 7 * 65504.
"""

from __future__ import annotations

from hypercache.codecs import kernels
from hypercache.codecs.scaled import ScaledCodec


class Int4PlainCodec(ScaledCodec):
    """Without rotation; see the module."""

    name = "int4-plain"
    wire_id = 4
    code = kernels.INT4

    def row_nbytes(self, dim: int) -> int:
        return (dim + 1) // 2


class Int4Codec(Int4PlainCodec):
    """With rotation; see the module."""

    name = "int4"
    wire_id = 3

    def rotation(self, dim: int) -> int:
        return dim & -dim
