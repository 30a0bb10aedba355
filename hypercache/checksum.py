"""End-to-end checksums of layer chunks, made at ``store`` and checked by whoever uses the bytes.

CRC-32 (IEEE 802.3, the one of zlib) by carry-less multiplication, through ISA-L: about twice as fast here as
CRC-32C with the CPU's crc32 instruction, and any zlib can check it.
"""

from __future__ import annotations

from collections.abc import Sequence

from isal.isal_zlib import crc32

_STEP = 128 << 10  # fewer bytes are not worth a call while more are on their way


def checksum(data: memoryview) -> int:
    """CRC-32 of contiguous bytes, 0..2**32-1."""
    return crc32(data)


class Verifier:
    """Checks chunks while they arrive, so that their bytes are still in the CPU's cache.

    chunks: byte views in arrival order; crcs: what each must have. Feed :meth:`landed` with the running
    total of bytes; afterwards ``bad`` lists the indices of chunks that do not match.
    """

    __slots__ = ("_chunks", "_crc", "_crcs", "_index", "_offset", "_start", "bad")

    def __init__(self, chunks: Sequence[memoryview], crcs: Sequence[int]) -> None:
        self._chunks = chunks
        self._crcs = crcs
        self._index = 0  # chunk being summed
        self._start = 0  # where it begins in the stream
        self._offset = 0  # bytes of it already summed
        self._crc = 0
        self.bad: list[int] = []

    def landed(self, total: int) -> None:
        while self._index < len(self._chunks):
            chunk = self._chunks[self._index]
            have = total - self._start
            if have < chunk.nbytes:
                if have - self._offset >= _STEP:
                    self._crc = crc32(chunk[self._offset : have], self._crc)
                    self._offset = have
                return
            rest = chunk[self._offset :] if self._offset else chunk
            if crc32(rest, self._crc) != self._crcs[self._index]:
                self.bad.append(self._index)
            self._index += 1
            self._start += chunk.nbytes
            self._offset = self._crc = 0

    @property
    def complete(self) -> bool:
        return self._index == len(self._chunks)
