"""`fp8`: E4M3 of the OCP 8-bit floating point specification (OFP8, revision 1.0), scaled per token and head.

One byte per element: sign, 4 exponent bits (bias 7), 3 mantissa bits; largest magnitude 448, subnormals
in steps of 2**-9, no infinity, NaN is 0x7F or 0xFF. This is torch.float8_e4m3fn. Rounding is to nearest
even and saturates. At head dim 128 a chunk is 1.97x smaller than bf16, as with `int8`; on Gaussian-like
rows `int8` has a fraction of the error, because 3 mantissa bits are 2**-4 of every value.
The law of scales and the error bound are in :mod:`hypercache.codecs.scaled`.
"""

from __future__ import annotations

from hypercache.codecs import kernels
from hypercache.codecs.scaled import ScaledCodec


class Fp8Codec(ScaledCodec):
    """See the module."""

    name = "fp8"
    wire_id = 1
    code = kernels.FP8

    def row_nbytes(self, dim: int) -> int:
        return dim
