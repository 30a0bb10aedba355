"""The `.hckv` record: how one block lies in L3. Bytes in, facts out; no I/O. The law is docs/hckv.md.

::

    head (208 bytes) | geometry | a CRC-32 for each layer | zeros | header CRC
    payload: the chunks of all layers, without gaps | zeros | commit marker (16 bytes)

and of a tombstone ``head | removed digests | zeros | header CRC | zeros | commit marker``. The header is a
multiple of 64 bytes, the record one of 4096, and both have one size for all blocks of a namespace. Nothing in
a header is believed before its CRC fits, and every field is checked again then: a CRC is no proof of sense.
"""

from __future__ import annotations

import enum
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from hypercache.checksum import checksum
from hypercache.errors import SpecError
from hypercache.store.hckv_geometry import HckvError, broken, check_sizes, geometry, read_geometry
from hypercache.store.joined import joined
from hypercache.store.namespace import MAX_LAYERS, NamespaceInfo

ALIGN: Final = 4096  # of records, and of what follows the last of them
VERSION: Final = 1
CRC32: Final = 1  # checksum algorithms: hypercache.checksum
KEYED_BLAKE2B: Final = 1  # digest algorithms: hypercache.keys
MAX_HEADER_NBYTES: Final = 64 << 10
MAX_SEGMENT_NBYTES: Final = 1 << 32
MAX_NUMBER: Final = (1 << 39) - 1  # of a segment: a place has 63 bits, 24 of them for the offset
MAX_SEQUENCE: Final = (1 << 63) - 1
MAX_DEPTH: Final = (1 << 31) - 1
MARK_NBYTES: Final = 24  # fingerprint (8), modular digest (16)
STORE_ID_NBYTES: Final = 16
REMOVALS: Final = 1024  # digests that one REMOVE can name
MARKER_NBYTES: Final = 16

_MAGIC = b"HCKR"
_MARKER_MAGIC = b"HCKC"
_LEAST_DIGEST, _MOST_DIGEST = 16, 32
_START = struct.Struct("<4sBBBBI")  # magic, version, checksum, digest algorithm, kind, header bytes
# The above; geometry bytes, sequence, record bytes, payload bytes, payload CRC, depth, count (layers or
# removed digests), lengths of digest, parent, mark and namespace digest, then these, zero-padded, and last
# the store's id.
_HEAD = struct.Struct("<4sBBBBI I QQQ II I BBBB 32s32s24s32s 16s 16s")
_RESERVED = bytes(16)
_CRC = struct.Struct("<I")
_MARKER = struct.Struct("<4sIQ")  # magic, header CRC, sequence
_REMOVED = struct.Struct("<B32s")


class Kind(enum.IntEnum):
    """What a record is. Numbers are never reused."""

    BLOCK = 1
    REMOVE = 2  # the named blocks of a namespace are gone
    CLEAR = 3  # all blocks of a namespace are gone


_KIND_OF = {int(kind): kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Record:
    """A header that has been verified.

    kind; sequence: rises over the whole directory; nbytes: of the whole record.
    info: of a BLOCK, None of others; namespace: its digest.
    digest, parent: causal; ``parent`` is b"" at the start of a prompt. depth: blocks before it, so its
        tokens begin at ``depth * info.block_size``. mark: 24 bytes (fingerprint, modular digest) or b"".
    crcs: array("I"), CRC-32 of each layer's chunk as it lies in the payload; chunk_nbytes: its length.
    payload: where the payload begins, also the header's length; payload_nbytes: how long it is.
    removed: digests that a REMOVE names.
    """

    kind: Kind
    sequence: int
    nbytes: int
    info: NamespaceInfo | None
    namespace: bytes
    digest: bytes
    parent: bytes
    depth: int
    mark: bytes
    crcs: array[int]
    chunk_nbytes: tuple[int, ...]
    payload: int
    payload_nbytes: int
    header_crc: int
    removed: tuple[bytes, ...]

    def __repr__(self) -> str:
        return f"<{self.kind.name} {self.sequence} {(self.digest or self.namespace).hex()[:12]}>"


# -- sizes


def aligned(nbytes: int, unit: int = ALIGN) -> int:
    """``nbytes``, rounded up to whole units."""
    return -(-nbytes // unit) * unit


def _header_nbytes(body: int) -> int:
    return aligned(_HEAD.size + body + _CRC.size, 64)


class _Form:
    """What the records of one namespace have in common."""

    __slots__ = ("chunk_nbytes", "geometry", "info", "nbytes", "payload", "payload_nbytes")

    def __init__(self, info: NamespaceInfo) -> None:
        check_sizes(info)
        self.info = info
        self.geometry = geometry(info)
        self.chunk_nbytes = info.below_nbytes
        self.payload = _header_nbytes(len(self.geometry) + 4 * len(self.chunk_nbytes))
        self.payload_nbytes = sum(self.chunk_nbytes)
        self.nbytes = aligned(self.payload + self.payload_nbytes + MARKER_NBYTES)
        if self.nbytes > MAX_SEGMENT_NBYTES:
            broken("length", f"a record of {self.nbytes} bytes, the largest has {MAX_SEGMENT_NBYTES}")


# By namespace digest, because hashing a whole info takes longer than writing a header.
_forms: dict[bytes, _Form] = {}
_MOST_FORMS = 1024


def _form(info: NamespaceInfo) -> _Form:
    form = _forms.get(info.digest)
    if form is None or (form.info is not info and form.info != info):
        if len(_forms) >= _MOST_FORMS:
            _forms.clear()
        form = _forms[info.digest] = _Form(info)
    return form


def block_nbytes(info: NamespaceInfo) -> int:
    """Bytes of a block's record. Raises HckvError for a namespace whose blocks cannot be written."""
    return _form(info).nbytes


def payload_offset(info: NamespaceInfo) -> int:
    """Where the payload begins in a block's record; a multiple of 64. Raises as :func:`block_nbytes`."""
    return _form(info).payload


def removal_nbytes(digests: int) -> int:
    """Bytes of a REMOVE that names so many digests; of a CLEAR for 0."""
    return aligned(_header_nbytes(_REMOVED.size * digests) + MARKER_NBYTES)


@lru_cache(256)
def _read_form(namespace: bytes, section: bytes) -> _Form:
    return _Form(read_geometry(namespace, section))


# -- writing


def write_block(
    out: memoryview,
    info: NamespaceInfo,
    *,
    store: bytes,
    sequence: int,
    digest: bytes,
    parent: bytes,
    depth: int,
    mark: bytes,
    crcs: Sequence[int],
) -> None:
    """Make a record of ``out`` (``block_nbytes(info)`` bytes, writable), where the payload lies already: its
    header, the zeros and the commit marker around it are written.

    store: the directory's id (16 bytes), as in its segments' headers.
    crcs: CRC-32 of each chunk of the payload, which is not read here.
    Raises HckvError for fields that the law forbids, SpecError for an ``out`` of another size.
    """
    form = _form(info)
    if out.nbytes != form.nbytes:
        raise SpecError(f"a record of {info.label!r} has {form.nbytes} bytes, the buffer has {out.nbytes}")
    if len(crcs) != len(form.chunk_nbytes):
        broken("count", f"{len(crcs)} checksums for {len(form.chunk_nbytes)} layers")
    _check_numbers(sequence, depth, parent)
    header = bytearray(form.payload)
    _HEAD.pack_into(
        header,
        0,
        *(_MAGIC, VERSION, CRC32, KEYED_BLAKE2B, Kind.BLOCK, form.payload),
        *(len(form.geometry), sequence, form.nbytes, form.payload_nbytes),
        *(joined(crcs, form.chunk_nbytes), depth, len(crcs)),
        *_names(digest, parent, mark, info.digest),
        *(_store_id(store), _RESERVED),
    )
    end = _HEAD.size + len(form.geometry)
    header[_HEAD.size : end] = form.geometry if info.label == form.info.label else geometry(info)
    struct.pack_into(f"<{len(crcs)}I", header, end, *crcs)
    out[: form.payload] = header
    _seal(out, form.payload, form.payload + form.payload_nbytes, sequence)


def write_removal(
    namespace: bytes, digests: Sequence[bytes] | None, *, store: bytes, sequence: int
) -> bytearray:
    """A whole REMOVE record of 1..REMOVALS digests, or with None a CLEAR. Raises HckvError."""
    kind = Kind.CLEAR if digests is None else Kind.REMOVE
    removed = digests or ()
    if digests is not None and not 1 <= len(digests) <= REMOVALS:
        broken("count", f"{len(digests)} digests in one REMOVE, it has 1..{REMOVALS}")
    for digest in removed:
        _check_digest("a removed digest", digest)
    _check_numbers(sequence, 0, b"")
    out = bytearray(removal_nbytes(len(removed)))
    payload = _header_nbytes(_REMOVED.size * len(removed))
    _HEAD.pack_into(
        out,
        0,
        *(_MAGIC, VERSION, CRC32, KEYED_BLAKE2B, kind, payload),
        *(0, sequence, len(out), 0, 0, 0, len(removed)),
        *_names(b"", b"", b"", namespace),
        *(_store_id(store), _RESERVED),
    )
    for number, digest in enumerate(removed):
        _REMOVED.pack_into(out, _HEAD.size + number * _REMOVED.size, len(digest), digest)
    _seal(memoryview(out), payload, payload, sequence)
    return out


def _seal(out: memoryview, header: int, end: int, sequence: int) -> None:
    """Header CRC, zeros behind the payload, marker."""
    crc = checksum(out[: header - _CRC.size])
    _CRC.pack_into(out, header - _CRC.size, crc)
    last = out.nbytes - MARKER_NBYTES
    out[end:last] = bytes(last - end)
    _MARKER.pack_into(out, last, _MARKER_MAGIC, crc, sequence)


def _names(digest: bytes, parent: bytes, mark: bytes, namespace: bytes) -> tuple[int | bytes, ...]:
    _check_names(digest, parent, mark, namespace)
    return len(digest), len(parent), len(mark), len(namespace), digest, parent, mark, namespace


def _check_names(digest: bytes, parent: bytes, mark: bytes, namespace: bytes) -> None:
    if digest:
        _check_digest("the digest", digest)
    if parent:
        _check_digest("the parent's digest", parent)
    _check_digest("the namespace's digest", namespace)
    if len(mark) not in (0, MARK_NBYTES):
        broken("mark", f"a mark of {len(mark)} bytes, it has {MARK_NBYTES} or none")


def _check_digest(what: str, digest: bytes) -> None:
    if not _LEAST_DIGEST <= len(digest) <= _MOST_DIGEST:
        broken("digest", f"{what} has {len(digest)} bytes, must have {_LEAST_DIGEST}..{_MOST_DIGEST}")


def _store_id(store: bytes) -> bytes:
    if len(store) != STORE_ID_NBYTES:
        broken("store", f"a store's id of {len(store)} bytes, it has {STORE_ID_NBYTES}")
    return store


def _check_numbers(sequence: int, depth: int, parent: bytes) -> None:
    if not 1 <= sequence <= MAX_SEQUENCE:
        broken("sequence", f"sequence {sequence}, must be 1..{MAX_SEQUENCE}")
    if not 0 <= depth <= MAX_DEPTH:
        broken("depth", f"depth {depth}, must be 0..{MAX_DEPTH}")
    if bool(parent) != bool(depth):
        broken("parent", f"depth {depth} {'with' if parent else 'without'} a parent")


# -- reading


def header_nbytes(first: bytes | memoryview) -> int:
    """How many bytes :func:`parse` needs, from the first 16 or more. Raises HckvError where no record begins
    that this version can read."""
    if len(first) < _START.size:
        broken("truncated", f"{len(first)} bytes where a record's header begins")
    magic, version, algorithm, _, _, nbytes = _START.unpack_from(first)
    if magic != _MAGIC:
        broken("magic", "no record begins here")
    if version != VERSION:
        broken("version", f"record version {version}, known here is {VERSION}: newer HyperCache, or damaged")
    if algorithm != CRC32:
        broken("checksum-algorithm", f"checksum algorithm {algorithm}, known here is {CRC32} (CRC-32)")
    if not _HEAD.size + _CRC.size <= nbytes <= MAX_HEADER_NBYTES or nbytes % 64:
        broken("header-length", f"a header of {nbytes} bytes, up to {MAX_HEADER_NBYTES} in units of 64")
    return int(nbytes)


def parse(head: bytes | memoryview, store: bytes | None = None) -> Record:
    """The record whose header ``head`` begins with; more bytes may follow it.

    store: the id that it must have. Without it, anything that a client stored may pass for a record, where
    reading resumes inside a damaged one's payload.
    Raises HckvError. What says yes here is to be followed by :func:`check_commit`, and by
    :func:`check_payload` before a byte of the payload is used.
    """
    payload = header_nbytes(head)
    if len(head) < payload:
        broken("truncated", f"{len(head)} bytes of a header of {payload}")
    view = memoryview(head)[:payload].cast("B")
    (crc,) = _CRC.unpack_from(view, payload - _CRC.size)
    if checksum(view[: -_CRC.size]) != crc:
        broken("header-crc", "the header's checksum does not fit its bytes")
    fields = _HEAD.unpack_from(view)
    _, _, _, algorithm, number, _, section_nbytes, sequence, nbytes, payload_nbytes, payload_crc = fields[:11]
    depth, count, *lengths = fields[11:17]
    owner, reserved = fields[21:]
    if algorithm != KEYED_BLAKE2B:
        broken("digest-algorithm", f"digest algorithm {algorithm}, known here is {KEYED_BLAKE2B}")
    if (kind := _KIND_OF.get(number)) is None:
        broken("kind", f"a record of kind {number}, known are 1..{len(Kind)}")
    if store is not None and owner != store:
        broken("store", "a record of another store, or bytes that were made to look like one")
    digest, parent, mark, namespace = map(_field, fields[17:21], lengths)
    if (kind is Kind.BLOCK) != bool(digest):
        broken("digest", f"a {kind.name} with a digest of {len(digest)} bytes")
    _check_names(digest, parent, mark, namespace)
    _check_numbers(sequence, depth, parent)
    if any(reserved):
        broken("reserved", "bytes that no version has given a meaning are not zero")
    info: NamespaceInfo | None = None
    sizes: tuple[int, ...] = ()
    crcs = array("I")
    removed: tuple[bytes, ...] = ()
    end = _HEAD.size + section_nbytes
    if kind is Kind.BLOCK:
        if end + 4 * count + _CRC.size > payload or not 1 <= count <= MAX_LAYERS:
            broken("count", f"{count} layers and {section_nbytes} bytes of geometry in a header of {payload}")
        form = _read_form(namespace, bytes(view[_HEAD.size : end]))
        info, sizes = form.info, form.chunk_nbytes
        crcs.frombytes(view[end : end + 4 * count])
        if count != len(form.chunk_nbytes):
            broken("count", f"{count} checksums for {len(form.chunk_nbytes)} layers")
        end += 4 * count
        want = form.payload, form.payload_nbytes, form.nbytes
        if payload_crc != joined(crcs, form.chunk_nbytes):
            broken("payload-crc", "the payload's checksum is not that of its chunks, one after the other")
    else:
        if section_nbytes or parent or mark or payload_crc or (count == 0) != (kind is Kind.CLEAR):
            broken("tombstone", f"a {kind.name} with what only a BLOCK has, or of {count} digests")
        if count > REMOVALS or end + count * _REMOVED.size + _CRC.size > payload:
            broken("count", f"{count} removed digests in a header of {payload} bytes, it has 1..{REMOVALS}")
        removed = tuple(_read_removed(view[end : end + count * _REMOVED.size]))
        end += count * _REMOVED.size
        want = _header_nbytes(count * _REMOVED.size), 0, removal_nbytes(count)
    if (payload, payload_nbytes, nbytes) != want:
        broken("length", f"header, payload, record of {(payload, payload_nbytes, nbytes)} bytes, not {want}")
    if not _zero(view[end : payload - _CRC.size]):
        broken("padding", "the header's padding is not zero")
    return Record(
        kind,
        sequence,
        nbytes,
        info,
        namespace,
        digest,
        parent,
        depth,
        mark,
        crcs,
        sizes,
        payload,
        payload_nbytes,
        crc,
        removed,
    )


def _zero(view: memoryview) -> bool:
    return view == bytes(view.nbytes)


def _field(field: bytes, nbytes: int) -> bytes:
    """The first ``nbytes`` of a zero-padded field."""
    if nbytes > len(field) or any(field[nbytes:]):
        broken("digest", f"{nbytes} bytes in a field of {len(field)}, or others than zeros behind them")
    return field[:nbytes]


def _read_removed(view: memoryview) -> list[bytes]:
    found = [_field(field, nbytes) for nbytes, field in _REMOVED.iter_unpack(view)]
    for digest in found:
        _check_digest("a removed digest", digest)
    return found


def check_commit(record: Record, tail: bytes | memoryview) -> None:
    """Raises HckvError unless the record was written to its end: "truncated", "marker" or "padding".

    tail: its last bytes, MARKER_NBYTES or more; what of them lies behind the payload is looked at.
    """
    if len(tail) < MARKER_NBYTES:
        broken("truncated", f"{len(tail)} bytes where the commit marker has {MARKER_NBYTES}")
    view = memoryview(tail).cast("B")
    if view[-MARKER_NBYTES:] != _MARKER.pack(_MARKER_MAGIC, record.header_crc, record.sequence):
        broken("marker", f"the commit marker of {record!r} is missing or another record's")
    gap = record.nbytes - record.payload - record.payload_nbytes
    if not _zero(view[max(0, view.nbytes - gap) : -MARKER_NBYTES]):
        broken("padding", f"the padding of {record!r} is not zero")


def check_payload(record: Record, payload: memoryview) -> None:
    """Raises HckvError unless each chunk is the one that was written: "truncated" or "payload-crc"."""
    if payload.nbytes != record.payload_nbytes:
        broken("truncated", f"{payload.nbytes} bytes of a payload of {record.payload_nbytes}")
    start = 0
    for layer, (nbytes, crc) in enumerate(zip(record.chunk_nbytes, record.crcs, strict=True)):
        if checksum(payload[start : start + nbytes]) != crc:
            broken("payload-crc", f"the chunk of layer {layer} of {record!r} is damaged")
        start += nbytes


__all__ = ["HckvError", "Kind", "Record"]
