"""The `.hckv` file: a segment's header, its records, its footer. Bytes in, facts out; no I/O.

::

    header (4096 bytes) | record | record | ... | footer, once the segment is sealed

    footer: an entry (120 bytes) for each record | digests that REMOVEs name | namespaces | zeros | locator

The locator is the file's last 64 bytes. What the footer says is what a scan of the records would find, only
faster; who reads a record verifies it nevertheless.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hypercache.checksum import checksum
from hypercache.store.hckv import (
    ALIGN,
    CRC32,
    MARK_NBYTES,
    MAX_DEPTH,
    MAX_NUMBER,
    MAX_SEGMENT_NBYTES,
    MAX_SEQUENCE,
    REMOVALS,
    STORE_ID_NBYTES,
    VERSION,
    Kind,
    Record,
    aligned,
    block_nbytes,
    removal_nbytes,
)
from hypercache.store.hckv_geometry import broken, geometry, read_geometry
from hypercache.store.namespace import NamespaceInfo

SEGMENT_HEADER_NBYTES: Final = ALIGN
LOCATOR_NBYTES: Final = 64
MAX_FOOTER_NBYTES: Final = 512 << 20  # what a reader must be ready to hold
NO_NAMESPACE: Final = 0xFFFFFFFF

_SEGMENT_MAGIC = b"HCKV\r\n\x1a\n"
_SEGMENT = struct.Struct("<8sBB6xQ16s")  # magic, version, checksum algorithm, number, the store's id
_LOCATOR_MAGIC = b"HCKF"
# Magic, version, checksum algorithm; segment number; bytes of the footer; numbers of entries, removed digests
# and namespaces, bytes of the last; CRC of all before the locator, and of the locator.
_LOCATOR = struct.Struct("<4sBB2xQQIIIII16sI")
_TABLE = struct.Struct("<IB3x32s")  # bytes of the geometry that follows; namespace digest
_CRC = struct.Struct("<I")
_REMOVED = np.dtype([("nbytes", "u1"), ("digest", "V32")])
#: Of one record. ``offset`` and ``nbytes`` count ALIGN. ``namespace``: its number in the footer's table; a
#: tombstone has NO_NAMESPACE, and its namespace's digest in ``digest``. ``count``: digests a REMOVE names.
ENTRY: Final = np.dtype(
    [
        ("sequence", "<u8"),
        ("offset", "<u4"),
        ("nbytes", "<u4"),
        ("namespace", "<u4"),
        ("depth", "<u4"),
        ("count", "<u2"),
        ("kind", "u1"),
        ("digest_nbytes", "u1"),
        ("parent_nbytes", "u1"),
        ("mark_nbytes", "u1"),
        ("reserved", "<u2"),
        ("digest", "V32"),
        ("parent", "V32"),
        ("mark", "V24"),
    ]
)
_ENTRY = struct.Struct("<QIIIIHBBBBH32s32s24s")
assert _ENTRY.size == ENTRY.itemsize == 120

Entries = npt.NDArray[Any]  # of ENTRY


# -- places


def place(number: int, offset: int) -> int:
    """Where a record is, in one int of at most 63 bits: segment ``number``, byte ``offset``."""
    return number << 24 | offset // ALIGN


def number_of(place: int) -> int:
    return place >> 24


def offset_of(place: int) -> int:
    return (place & 0xFFFFFF) * ALIGN


# -- the segment's header


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """number: of the segment, 0..MAX_NUMBER. store: id of the directory, 16 random bytes, a secret: who knows
    it could store bytes that pass for records where a damaged file is searched for more."""

    number: int
    store: bytes


def segment_header(number: int, store: bytes) -> bytes:
    """The first SEGMENT_HEADER_NBYTES of a file. Raises HckvError."""
    if not 0 <= number <= MAX_NUMBER or len(store) != STORE_ID_NBYTES:
        broken("number", f"segment {number} of a store with an id of {len(store)} bytes")
    head = _SEGMENT.pack(_SEGMENT_MAGIC, VERSION, CRC32, number, store)
    head += bytes(SEGMENT_HEADER_NBYTES - _CRC.size - len(head))
    return head + _CRC.pack(checksum(memoryview(head)))


def parse_segment_header(head: bytes) -> SegmentHeader:
    """Raises HckvError unless ``head`` begins with the header of a segment that this version can read."""
    if len(head) < SEGMENT_HEADER_NBYTES:
        broken("truncated", f"{len(head)} bytes, a segment's header has {SEGMENT_HEADER_NBYTES}")
    magic, version, algorithm, number, store = _SEGMENT.unpack_from(head)
    if magic != _SEGMENT_MAGIC:
        broken("segment-magic", "this is no .hckv segment")
    if version != VERSION:
        broken("version", f"segment version {version}, known here is {VERSION}: newer HyperCache, or damaged")
    if algorithm != CRC32:
        broken("checksum-algorithm", f"checksum algorithm {algorithm}, known here is {CRC32} (CRC-32)")
    if not header_fits(head):
        broken("segment-crc", "the segment header's checksum does not fit its bytes")
    if number > MAX_NUMBER:
        broken("number", f"segment {number}, the last is {MAX_NUMBER}")
    if segment_header(number, store) != head[:SEGMENT_HEADER_NBYTES]:
        broken("reserved", "the segment's header has bytes that no version has given a meaning")
    return SegmentHeader(number, store)


def header_fits(head: bytes) -> bool:
    """Whether a segment's header has the checksum of its bytes, whatever its version."""
    body = head[: SEGMENT_HEADER_NBYTES - _CRC.size]
    return _CRC.unpack_from(head, len(body)) == (checksum(memoryview(body)),)


# -- what a segment holds


class Contents:
    """The records of one segment, in order: made record by record, or read from a footer.

    namespaces: of its blocks, as ``entries["namespace"]`` counts them.
    """

    __slots__ = ("_entries", "_numbers", "_removed", "end", "namespaces", "sequence")

    def __init__(self) -> None:
        self.namespaces: list[NamespaceInfo] = []
        self.sequence = 0  # of the last record
        self.end = SEGMENT_HEADER_NBYTES  # of the last record
        self._numbers: dict[bytes, int] = {}  # of namespaces, by digest
        self._entries = bytearray()
        self._removed = bytearray()

    def __len__(self) -> int:
        return len(self._entries) // ENTRY.itemsize

    def add(self, offset: int, record: Record) -> None:
        """As the following two, of a record that was read."""
        if record.info is None:
            removed = record.removed if record.kind is Kind.REMOVE else None
            self.add_removal(offset, record.namespace, removed, record.sequence)
        else:
            at = record.depth, record.mark
            self.add_block(offset, record.info, record.sequence, record.digest, record.parent, *at)

    def add_block(
        self,
        offset: int,
        info: NamespaceInfo,
        sequence: int,
        digest: bytes,
        parent: bytes,
        depth: int,
        mark: bytes,
    ) -> None:
        """A block's record lies at ``offset``, behind all others. Raises HckvError."""
        number = self._numbers.get(info.digest)
        if number is None:
            number = self._numbers[info.digest] = len(self.namespaces)
            self.namespaces.append(info)
        elif self.namespaces[number] is not info and self.namespaces[number] != info:
            broken("namespace", f"{info.label!r} differs from what this segment has under its digest")
        nbytes = block_nbytes(info)
        self._enter(
            offset, nbytes, sequence, number, depth, 0, Kind.BLOCK, digest=digest, parent=parent, mark=mark
        )

    def add_removal(
        self, offset: int, namespace: bytes, digests: Sequence[bytes] | None, sequence: int
    ) -> None:
        """A tombstone lies at ``offset``, behind all others; None: a CLEAR. Raises HckvError."""
        kind = Kind.CLEAR if digests is None else Kind.REMOVE
        removed = digests or ()
        nbytes = removal_nbytes(len(removed))
        self._enter(offset, nbytes, sequence, NO_NAMESPACE, 0, len(removed), kind, digest=namespace)
        for digest in removed:
            self._removed += struct.pack("<B32s", len(digest), digest)

    def _enter(
        self,
        offset: int,
        nbytes: int,
        sequence: int,
        namespace: int,
        depth: int,
        count: int,
        kind: Kind,
        *,
        digest: bytes,
        parent: bytes = b"",
        mark: bytes = b"",
    ) -> None:
        if offset % ALIGN or offset < self.end or offset + nbytes > MAX_SEGMENT_NBYTES:
            broken("offset", f"a record at {offset}, where the one before ends at {self.end}")
        if not self.sequence < sequence <= MAX_SEQUENCE:
            broken("sequence", f"sequence {sequence} after {self.sequence}")
        self._entries += _ENTRY.pack(
            *(sequence, offset // ALIGN, nbytes // ALIGN, namespace, depth, count, kind),
            *(len(digest), len(parent), len(mark), 0, digest, parent, mark),
        )
        self.sequence, self.end = sequence, offset + nbytes

    @property
    def entries(self) -> Entries:
        """An ENTRY for each record, read-only."""
        return np.frombuffer(bytes(self._entries), ENTRY)

    def removed(self) -> list[bytes]:
        """The digests that all REMOVEs name, in order: ``entries["count"]`` for each."""
        return _names(np.frombuffer(bytes(self._removed), _REMOVED), "digest", "nbytes")

    def footer_nbytes(self) -> int:
        """How long :meth:`footer` is now."""
        table = sum(_TABLE.size + len(geometry(info)) for info in self.namespaces)
        return aligned(len(self._entries) + len(self._removed) + table + LOCATOR_NBYTES)

    def footer(self, number: int) -> bytes:
        """What is written behind the last record when segment ``number`` is sealed; whole units of ALIGN.

        Raises HckvError where it would be longer than MAX_FOOTER_NBYTES: the segment stays without.
        """
        table = bytearray()
        for info in self.namespaces:
            section = geometry(info)
            table += _TABLE.pack(len(section), len(info.digest), info.digest) + section
        body = self._entries + self._removed + table
        nbytes = aligned(len(body) + LOCATOR_NBYTES)
        if nbytes > MAX_FOOTER_NBYTES:
            broken("footer-length", f"a footer of {nbytes} bytes, at most {MAX_FOOTER_NBYTES} are read")
        body += bytes(nbytes - LOCATOR_NBYTES - len(body))
        counts = len(self), len(self._removed) // _REMOVED.itemsize, len(self.namespaces), len(table)
        locator = _pack_locator(number, nbytes, counts, checksum(memoryview(body)))
        return bytes(body + locator)

    @classmethod
    def read(cls, footer: bytes, file_nbytes: int, number: int) -> Contents:
        """From the whole footer of segment ``number``, whose file has ``file_nbytes``. Raises HckvError."""
        found = cls()
        at = _read_locator(footer[-LOCATOR_NBYTES:], file_nbytes)
        if len(footer) != at.nbytes:
            broken("truncated", f"{len(footer)} bytes of a footer of {at.nbytes}")
        if at.number != number:
            broken("number", f"the footer of segment {at.number} in segment {number}")
        body = memoryview(footer)[:-LOCATOR_NBYTES]
        if checksum(body) != at.crc:
            broken("footer-crc", "the footer's checksum does not fit its bytes")
        removed_at = at.entries * ENTRY.itemsize
        table_at = removed_at + at.removed * _REMOVED.itemsize
        if bytes(body[table_at + at.table_nbytes :]).strip(b"\0"):
            broken("padding", "the footer's padding is not zero")
        found._entries += body[:removed_at]
        found._removed += body[removed_at:table_at]
        table = bytes(body[table_at : table_at + at.table_nbytes])
        for digest, section in _read_table(table, at.namespaces):
            if digest in found._numbers:
                broken("namespace", "the footer has a namespace twice")
            found._numbers[digest] = len(found.namespaces)
            found.namespaces.append(read_geometry(digest, section))
        entries = found.entries
        _check_entries(entries, found.namespaces, file_nbytes - at.nbytes)
        if int(entries["count"].sum(dtype=np.int64)) != at.removed:
            broken("count", f"{at.removed} removed digests, the entries name another number")
        removed = np.frombuffer(bytes(found._removed), _REMOVED)
        _check_names(removed, "digest", "nbytes", (16, 32))
        if len(entries):
            last = entries[-1]
            found.sequence = int(last["sequence"])
            found.end = (int(last["offset"]) + int(last["nbytes"])) * ALIGN
        return found

    def names(self, field: str) -> list[bytes]:
        """Each entry's ``digest``, ``parent`` or ``mark``, without its padding."""
        return _names(self.entries, field, f"{field}_nbytes")


# -- the footer


@dataclass(frozen=True, slots=True)
class _Locator:
    number: int
    nbytes: int
    entries: int
    removed: int
    namespaces: int
    table_nbytes: int
    crc: int


def _pack_locator(number: int, nbytes: int, counts: tuple[int, int, int, int], crc: int) -> bytes:
    fields = _LOCATOR_MAGIC, VERSION, CRC32, number, nbytes, *counts, crc, bytes(16)
    head = _LOCATOR.pack(*fields, 0)[: -_CRC.size]
    return head + _CRC.pack(checksum(memoryview(head)))


def _read_locator(locator: bytes, file_nbytes: int) -> _Locator:
    if len(locator) < LOCATOR_NBYTES or locator[:4] != _LOCATOR_MAGIC:
        broken("footer-absent", "the file does not end with a footer")
    _, version, algorithm, number, nbytes, *counts, crc, reserved, own_crc = _LOCATOR.unpack(locator)
    if version != VERSION:
        broken("version", f"footer version {version}, known here is {VERSION}: newer HyperCache, or damaged")
    if algorithm != CRC32:
        broken("checksum-algorithm", f"checksum algorithm {algorithm}, known here is {CRC32} (CRC-32)")
    if checksum(memoryview(locator)[: -_CRC.size]) != own_crc:
        broken("footer-crc", "the footer locator's checksum does not fit its bytes")
    if any(reserved):
        broken("reserved", "bytes of the locator that no version has given a meaning are not zero")
    # What an entry says takes more room in its record, so a footer is never longer than the records.
    records = file_nbytes - SEGMENT_HEADER_NBYTES - nbytes
    if nbytes % ALIGN or not ALIGN <= nbytes <= min(records + ALIGN, MAX_FOOTER_NBYTES):
        broken("footer-length", f"a footer of {nbytes} bytes in a file of {file_nbytes}")
    entries, removed, namespaces, table_nbytes = counts
    need = entries * ENTRY.itemsize + removed * _REMOVED.itemsize + table_nbytes + LOCATOR_NBYTES
    if need > nbytes or nbytes - need >= ALIGN or namespaces * _TABLE.size > table_nbytes:
        broken(
            "footer-count", f"{entries} entries, {removed} digests, {namespaces} namespaces in {nbytes} bytes"
        )
    return _Locator(number, nbytes, entries, removed, namespaces, table_nbytes, crc)


def footer_nbytes(tail: bytes, file_nbytes: int) -> int:
    """How many of a file's last bytes are its footer, from its last 64 or more. Raises HckvError; its rule is
    "footer-absent" where the file was not sealed."""
    return _read_locator(tail[-LOCATOR_NBYTES:], file_nbytes).nbytes


def _read_table(table: bytes, count: int) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    for _ in range(count):
        if at + _TABLE.size > len(table):
            broken("footer-count", f"{count} namespaces do not fit their {len(table)} bytes")
        section, nbytes, field = _TABLE.unpack_from(table, at)
        at += _TABLE.size
        if not 16 <= nbytes <= 32 or any(field[nbytes:]) or at + section > len(table):
            broken("footer-count", f"a namespace with {nbytes} bytes of digest, {section} of geometry")
        yield field[:nbytes], table[at : at + section]
        at += section
    if at != len(table):
        broken("footer-count", f"{count} namespaces end before their {len(table)} bytes")


def _check_entries(entries: Entries, namespaces: Sequence[NamespaceInfo], end: int) -> None:
    """Every entry by itself, and that records follow each other before byte ``end``. All columns at once:
    there may be half a million."""
    if not len(entries):
        return
    kind, namespace, count = entries["kind"], entries["namespace"], entries["count"]
    offset, nbytes = entries["offset"].astype(np.int64), entries["nbytes"].astype(np.int64)
    ends = offset + nbytes
    if offset[0] < 1 or (ends[:-1] > offset[1:]).any() or ends[-1] > end // ALIGN:
        broken("offset", "footer entries overlap, are out of order, or lie outside the file")
    sequence = entries["sequence"]
    if sequence[0] < 1 or sequence[-1] > MAX_SEQUENCE or (sequence[:-1] >= sequence[1:]).any():
        broken("sequence", "the sequences of footer entries do not rise")
    block = kind == Kind.BLOCK
    if not (block | (kind == Kind.REMOVE) | (kind == Kind.CLEAR)).all():
        broken("kind", f"a footer entry of a kind that is none of 1..{len(Kind)}")
    if entries["reserved"].any():
        broken("reserved", "bytes of an entry that no version has given a meaning are not zero")
    if (np.where(block, namespace >= len(namespaces), namespace != NO_NAMESPACE)).any():
        broken("namespace", f"a footer entry of a namespace that is none of the {len(namespaces)}")
    if not ((count == 0) == (kind != Kind.REMOVE)).all() or (count > REMOVALS).any():
        broken("count", "a footer entry with a wrong number of removed digests")
    sizes = np.array([block_nbytes(info) for info in namespaces] or [0], np.int64)
    want = sizes[np.where(block, namespace, 0)]
    other = np.flatnonzero(~block)
    want[other] = [removal_nbytes(int(number)) for number in count[other]]
    if (want != nbytes * ALIGN).any():
        broken("length", "a footer entry of another length than its record has")
    depth = entries["depth"]
    if (depth > MAX_DEPTH).any() or ((depth > 0) != (entries["parent_nbytes"] > 0)).any():
        broken("parent", "a footer entry with a depth and no parent, or a parent and no depth")
    _check_names(entries, "digest", "digest_nbytes", (16, 32))
    _check_names(entries, "parent", "parent_nbytes", (16, 32), absent=True)
    _check_names(entries, "mark", "mark_nbytes", (MARK_NBYTES, MARK_NBYTES), absent=True)


def _check_names(
    rows: Entries, field: str, length: str, bounds: tuple[int, int], absent: bool = False
) -> None:
    for nbytes in np.flatnonzero(np.bincount(rows[length])).tolist():
        if not (bounds[0] <= nbytes <= bounds[1] or (absent and nbytes == 0)):
            broken("digest", f"the {field} of a footer entry has {nbytes} bytes")
        mine = rows[field] if _uniform(rows[length]) else rows[field][rows[length] == nbytes]
        if _bytes(mine)[:, nbytes:].any():
            broken("reserved", f"the {field} of a footer entry has bytes behind its end")


def _uniform(lengths: npt.NDArray[np.uint8]) -> bool:
    return len(lengths) > 0 and bool((lengths == lengths[0]).all())


def _bytes(column: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """A column of fixed-size fields as (rows, bytes)."""
    return np.ascontiguousarray(column).view(np.uint8).reshape(len(column), column.dtype.itemsize)


def _names(rows: Entries, field: str, length: str) -> list[bytes]:
    lengths = rows[length]
    if not len(rows):
        return []
    if not _uniform(lengths):
        return [name[:nbytes] for name, nbytes in zip(rows[field].tolist(), lengths.tolist(), strict=True)]
    nbytes = int(lengths[0])
    if nbytes == 0:
        return [b""] * len(rows)
    found: list[bytes] = (
        np.ascontiguousarray(_bytes(rows[field])[:, :nbytes]).view(f"V{nbytes}").ravel().tolist()
    )
    return found
