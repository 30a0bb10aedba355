"""Makes records at the head of L3: of blocks in memory, of removals, and of records that lie elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from hypercache.checksum import checksum
from hypercache.errors import SpecError
from hypercache.store import hckv
from hypercache.store.disk_files import Damaged
from hypercache.store.disk_head import Head
from hypercache.store.disk_read import Reader
from hypercache.store.hckv import Record
from hypercache.store.hckv_file import Contents
from hypercache.store.namespace import NamespaceInfo

_LARGE_NBYTES: Final = 16 << 10  # chunks from this size on are written from where they lie
_Names = tuple[bytes, bytes, int, bytes]  # digest, parent, depth, mark


@dataclass(frozen=True, slots=True)
class Write:
    """A block to be written.

    parent, depth, mark: as hckv.Record has them.
    chunks: each layer's, in the wire codec; crcs: CRC-32 of each.
    """

    info: NamespaceInfo
    digest: bytes
    parent: bytes
    depth: int
    mark: bytes
    crcs: Sequence[int]
    chunks: Sequence[memoryview]


def put(head: Head, item: Write) -> int:
    """The block's place. Raises HyperCacheError for one that cannot be written, OSError."""
    info = item.info
    if not head.takes(info):
        raise SpecError(f"blocks of {info.label!r} are larger than a segment of L3")
    nbytes, start = hckv.block_nbytes(info), hckv.payload_offset(info)
    out = head.room(nbytes, info)
    names = item.digest, item.parent, item.depth, item.mark
    if info.transcoded:
        from hypercache.store import transcode  # brings a compiler; who writes no such block does without

        crcs = transcode.down(info, item.chunks, item.crcs, out[start : start + sum(info.below_nbytes)])
        return _made(head, out, info, names, crcs)
    _check(item)
    if sum(info.chunk_nbytes) >= _LARGE_NBYTES * len(item.chunks):
        return _made(head, out, info, names, item.crcs, item.chunks)
    for chunk in item.chunks:
        end = start + chunk.nbytes
        out[start:end] = chunk
        start = end
    return _made(head, out, info, names, item.crcs)


def put_again(head: Head, reader: Reader, place: int, left: int) -> tuple[int, int]:
    """The new place of a record, -1 if it does not fit ``left`` bytes; and how many it takes of them. Raises
    HyperCacheError for one that is damaged, OSError."""
    cost, out = 0, memoryview(b"")

    def room(record: Record) -> memoryview | None:
        nonlocal cost, out
        if record.info is None or not head.takes(record.info):
            raise Damaged("no block that can be moved")
        cost = head.cost(record.info)
        if cost > left:
            return None
        out = head.room(record.nbytes, record.info)
        return out

    record = reader.copy(place, room)
    if record is None or record.info is None:
        return -1, 0
    names = record.digest, record.parent, record.depth, record.mark
    return _made(head, out, record.info, names, record.crcs), cost


def put_removal(head: Head, namespace: bytes, digests: Sequence[bytes] | None) -> None:
    """Raises HckvError, OSError."""
    count = len(digests or ())
    out = head.room(hckv.removal_nbytes(count), None, count)
    out[:] = hckv.write_removal(namespace, digests, store=head.store, sequence=head.sequence)

    def enter(into: Contents, offset: int, sequence: int) -> None:
        into.add_removal(offset, namespace, digests, sequence)

    head.made(out.nbytes, enter)


def _made(
    head: Head,
    out: memoryview,
    info: NamespaceInfo,
    names: _Names,
    crcs: Sequence[int],
    payload: Sequence[memoryview] = (),
) -> int:
    digest, parent, depth, mark = names
    hckv.write_block(
        out,
        info,
        store=head.store,
        sequence=head.sequence,
        digest=digest,
        parent=parent,
        depth=depth,
        mark=mark,
        crcs=crcs,
    )
    return head.made(out.nbytes, partial(_enter, info, names), hckv.payload_offset(info), payload)


def _enter(info: NamespaceInfo, names: _Names, into: Contents, offset: int, sequence: int) -> None:
    into.add_block(offset, info, sequence, *names)


def _check(item: Write) -> None:
    """Raises HyperCacheError unless the chunks are what was stored."""
    info = item.info
    found = tuple(chunk.nbytes for chunk in item.chunks)
    if found != info.chunk_nbytes or len(item.crcs) != len(found):
        raise SpecError(f"namespace {info.label!r}: chunks of other sizes than it has, or without a CRC")
    for layer, (chunk, crc) in enumerate(zip(item.chunks, item.crcs, strict=True)):
        if checksum(chunk) != crc:
            raise Damaged(f"the chunk of layer {layer} changed in memory since it was stored")
