"""Finds the records of an `.hckv` file without its footer: one after the other, and again behind damage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from hypercache.store.hckv import ALIGN, MARKER_NBYTES, Record, check_commit, header_nbytes, parse
from hypercache.store.hckv_file import SEGMENT_HEADER_NBYTES
from hypercache.store.hckv_geometry import HckvError, broken

Read = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True)
class Bad:
    """Bytes where no intact record is."""

    offset: int
    nbytes: int
    error: HckvError


def scan(
    read: Read,
    end: int,
    store: bytes | None,
    start: int = SEGMENT_HEADER_NBYTES,
    data: Callable[[int], int] = lambda offset: offset,
) -> Iterator[tuple[int, Record] | Bad]:
    """The records between ``start`` and ``end`` of a file with their offsets, headers and commit markers
    verified (not payloads), and what lies between them.

    read: ``read(offset, nbytes)`` gives that many bytes, fewer only at the file's end; its errors pass.
    store: the id in the segment's header. None, where that is damaged: the search ends at the first bytes
        that are no record, since behind them anything that a client once stored could pass for one.
    data: the first offset from the given one on where a sparse file has bytes.
    """
    offset, sequence = start, 0
    while offset < end:
        length = 0
        try:
            record = _record_at(read, offset, end, store)
            length = record.nbytes
            if offset + length > end:
                broken("truncated", f"{end - offset} bytes of a record of {length}")
            last = max(MARKER_NBYTES, min(length - record.payload - record.payload_nbytes, 2 * ALIGN))
            check_commit(record, read(offset + length - last, last))
            if record.sequence <= sequence:
                broken("sequence", f"sequence {record.sequence} after {sequence}: a record that was copied")
        except HckvError as error:
            if 0 < length <= end - offset:
                after = offset + length
            else:
                after = end if store is None else _next_magic(read, offset + ALIGN, end, data)
            yield Bad(offset, after - offset, error)
            offset = after
        else:
            yield offset, record
            offset, sequence = offset + length, record.sequence


def _record_at(read: Read, offset: int, end: int, store: bytes | None) -> Record:
    head = read(offset, min(ALIGN, end - offset))
    need = header_nbytes(head)
    if len(head) < need <= end - offset:
        head += read(offset + len(head), need - len(head))
    return parse(head, store)


_WINDOW = 1 << 20
_RECORD_MAGIC = int.from_bytes(b"HCKR", "little")


def _next_magic(read: Read, offset: int, end: int, data: Callable[[int], int]) -> int:
    """Where the next record may begin, ``end`` if nowhere."""
    while (offset := max(offset, data(offset) // ALIGN * ALIGN)) < end:
        window = read(offset, min(_WINDOW, end - offset))
        first = np.frombuffer(window, "<u4", len(window) // 4)[:: ALIGN // 4]
        found = np.flatnonzero(first == _RECORD_MAGIC)
        if len(found):
            return offset + int(found[0]) * ALIGN
        if len(window) < _WINDOW:
            break
        offset += _WINDOW
    return end
