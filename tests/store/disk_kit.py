"""What the tests of L3's directory share: small blocks whose bytes follow from their names."""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path

import numpy as np

from hypercache import codecs
from hypercache.checksum import checksum
from hypercache.model import KVDtype, KVLayout, Part
from hypercache.store import hckv
from hypercache.store.disk import Damaged, Disk, Write
from hypercache.store.hckv import Kind
from hypercache.store.hckv_file import ALIGN, place
from hypercache.store.namespace import NamespaceInfo

KIB = 1 << 10
MIB = 1 << 20
SEGMENT = 128 * KIB
LAYOUT = KVLayout("split", 2, (Part("k", 32), Part("v", 32)), KVDtype.BF16)


def name(text: object, nbytes: int = 16) -> bytes:
    return hashlib.blake2b(str(text).encode(), digest_size=nbytes).digest()


def plain(label: str = "plain", nbytes: tuple[int, ...] = (700, 3000, 1)) -> NamespaceInfo:
    """Lies on disk as it came."""
    return NamespaceInfo(name(label), nbytes, 4, "raw", label)


def coded(label: str = "coded", layers: int = 3) -> NamespaceInfo:
    """int8 in memory, int4 on disk."""
    nbytes = codecs.get("int8").chunk_nbytes(LAYOUT, 4)
    return NamespaceInfo(name(label), (nbytes,) * layers, 4, "int8", label, (LAYOUT,) * layers, "int4")


def chunks_of(info: NamespaceInfo, digest: bytes) -> list[bytes]:
    """What a client stored under this name."""
    seed = int.from_bytes(name(info.digest + digest, 8), "big")
    random = np.random.default_rng(seed)
    if not info.transcoded:
        return [random.bytes(nbytes) for nbytes in info.chunk_nbytes]
    codec, found = codecs.get(info.codec), []
    for layout, nbytes in zip(info.layouts, info.chunk_nbytes, strict=True):
        shape = [(layout.heads, info.block_size, part.dim) for part in layout.parts]
        values = [random.standard_normal(one, np.float32) for one in shape]
        row = np.empty((1, nbytes), np.uint8)
        codec.encode(layout, [(one.view(np.uint32) >> 16).astype(np.uint16) for one in values], row)
        found.append(row.tobytes())
    return found


def item(info: NamespaceInfo, digest: bytes, parent: bytes = b"", depth: int = 0, mark: bytes = b"") -> Write:
    chunks = [memoryview(chunk) for chunk in chunks_of(info, digest)]
    return Write(info, digest, parent, depth, mark, array("I", map(checksum, chunks)), chunks)


def items(info: NamespaceInfo, first: int, count: int) -> list[Write]:
    return [item(info, name(i)) for i in range(first, first + count)]


def room(info: NamespaceInfo) -> list[memoryview]:
    return [memoryview(bytearray(nbytes)) for nbytes in info.chunk_nbytes]


def get(disk: Disk, info: NamespaceInfo, digest: bytes, where: int) -> list[bytes] | None:
    """The chunks, None if they are damaged."""
    into = room(info)
    try:
        crcs = disk.read(info, digest, where, into)
    except Damaged:
        return None
    assert list(crcs) == [checksum(chunk) for chunk in into]
    return [bytes(chunk) for chunk in into]


def expected(info: NamespaceInfo, digest: bytes) -> list[bytes]:
    """What comes back."""
    chunks = [memoryview(chunk) for chunk in chunks_of(info, digest)]
    if not info.transcoded:
        return [bytes(chunk) for chunk in chunks]
    from hypercache.store import transcode

    payload, into = memoryview(bytearray(sum(info.below_nbytes))), room(info)
    transcode.down(info, chunks, [checksum(chunk) for chunk in chunks], payload)
    transcode.up(info, payload, into)
    return [bytes(chunk) for chunk in into]


def restored(disk: Disk) -> dict[tuple[bytes, bytes], int]:
    """Namespace and digest of each live block, with its place, by the law of tombstones."""
    live: dict[tuple[bytes, bytes], int] = {}
    last = 0
    for number, contents in disk.restore():
        entries, digests, removed = contents.entries, contents.names("digest"), contents.removed()
        for entry, digest in zip(entries, digests, strict=True):
            assert int(entry["sequence"]) > last
            last = int(entry["sequence"])
            if entry["kind"] == Kind.BLOCK:
                space = contents.namespaces[int(entry["namespace"])].digest
                live[space, digest] = place(number, int(entry["offset"]) * ALIGN)
            elif entry["kind"] == Kind.CLEAR:
                live = {key: where for key, where in live.items() if key[0] != digest}
            else:
                count = int(entry["count"])
                for gone in removed[:count]:
                    live.pop((digest, gone), None)
                del removed[:count]
        assert not removed
    return live


def fresh(path: Path, capacity: int = 16 * MIB, segment: int = SEGMENT, **options: object) -> Disk:
    """A directory, opened and restored."""
    disk = Disk(path, capacity=capacity, segment_nbytes=segment, **options)  # type: ignore[arg-type]
    for _ in disk.restore():
        pass
    return disk


def du(path: Path) -> int:
    """Bytes of all files there, as they are."""
    return sum(file.lstat().st_size for file in path.iterdir())


def names_in(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def crash(disk: Disk) -> None:
    """What the end of a process does: descriptors are closed and nothing is written. A child would need
    seconds for the same."""
    if disk._head is not None:
        disk._head.abandon()
    disk._closed = True
    disk._files.close(purge=False)


def record_nbytes(info: NamespaceInfo) -> int:
    return hckv.block_nbytes(info)
