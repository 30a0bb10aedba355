"""The CRC-32 of a whole from those of its parts, without a look at the bytes.

A CRC is linear: crc(A + B) is crc(B) xor crc(A) moved on by B's length, and moving on by n bytes multiplies
by x**(8n) modulo the polynomial (zlib's crc32_combine rests on the same). Multiplying by a constant takes
four table look-ups, so a record's payload gets its checksum for a fraction of a microsecond a chunk.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # IEEE 802.3, bit-reversed: the top bit is x**0
_Tables = tuple["array[int]", ...]


def _times(a: int, b: int) -> int:
    """Product of two polynomials, modulo the CRC's."""
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(1024)  # 4 KiB each
def _tables(nbytes: int) -> _Tables:
    """For each byte of a CRC, what each of its values becomes ``nbytes`` bytes later."""
    power, square = 0x80000000, 0x00800000  # x**0, x**8
    while nbytes:
        if nbytes & 1:
            power = _times(power, square)
        square = _times(square, square)
        nbytes >>= 1
    bits = [_times(power, 1 << bit) for bit in range(32)]
    tables = []
    for first in range(0, 32, 8):
        table = [0]
        for image in bits[first : first + 8]:
            table += [value ^ image for value in table]
        tables.append(array("I", table))
    return tuple(tables)


def joined(crcs: Sequence[int], lengths: Sequence[int]) -> int:
    """CRC-32 of parts that lie one after the other, given each one's CRC-32 and its length in bytes."""
    whole, nbytes = 0, -1
    for crc, length in zip(crcs, lengths, strict=True):
        if length != nbytes:
            first, second, third, fourth = _tables(length)
            nbytes = length
        whole = (
            crc
            ^ first[whole & 255]
            ^ second[whole >> 8 & 255]
            ^ third[whole >> 16 & 255]
            ^ fourth[whole >> 24]
        )
    return whole
