"""`int8`: symmetric 8-bit integers with a scale per token and head.

One signed byte per element, -127..127 (-128 is never written). At head dim 128 a chunk is 1.97x smaller
than bf16. The law of scales and the error bound are in :mod:`hypercache.codecs.scaled`.
"""

from __future__ import annotations

from hypercache.codecs import kernels
from hypercache.codecs.scaled import ScaledCodec


class Int8Codec(ScaledCodec):
    """See the module."""

    name = "int8"
    wire_id = 2
    code = kernels.INT8

    def row_nbytes(self, dim: int) -> int:
        return dim
