"""What the tests of `.hckv` share: small segments, and files that break the law one rule at a time.

The attack files lie in tests/data/hckv. ``python -m tests.store.hckv_kit`` writes them again; they are the
same bytes every time, and the tests compare.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypercache import codecs
from hypercache.model import KVDtype, KVLayout, Part
from hypercache.store import hckv
from hypercache.store.hckv_file import LOCATOR_NBYTES, SEGMENT_HEADER_NBYTES, Contents, segment_header
from hypercache.store.namespace import NamespaceInfo

DATA = Path(__file__).parents[1] / "data" / "hckv"
STORE = bytes(range(16))
SEGMENT = 7
BLOCK_SIZE = 4
FIRST = SEGMENT_HEADER_NBYTES  # where the first record lies
# Where a record's fields are, by the table in docs/hckv.md.
VERSION, CHECKSUM, DIGEST_ALGORITHM, KIND, HEADER_NBYTES = 4, 5, 6, 7, 8
GEOMETRY_NBYTES, SEQUENCE, NBYTES, PAYLOAD_NBYTES, PAYLOAD_CRC, DEPTH, COUNT = 12, 16, 24, 32, 40, 44, 48
LENGTHS, DIGEST, PARENT, MARK, NAMESPACE, OWNER, RESERVED = 52, 56, 88, 120, 144, 176, 192
GEOMETRY = 208
LAYERS, SHAPES, RUNS, WIRE, BELOW, LABEL_NBYTES, LABEL = 212, 214, 216, 218, 219, 220, 224
SHAPE = 480  # the first; each has 32 bytes


def name(text: str, nbytes: int = 16) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=nbytes).digest()


def layout(heads: int, dim: int) -> KVLayout:
    return KVLayout("split", heads, (Part("k", dim), Part("v", dim)), KVDtype.BF16)


def info(label: str = "tiny", wire: str = "int8", below: str = "int4") -> NamespaceInfo:
    """Three layers of two shapes."""
    layouts = (layout(1, 8), layout(1, 8), layout(2, 16))
    chunks = tuple(codecs.get(wire).chunk_nbytes(one, BLOCK_SIZE) for one in layouts)
    return NamespaceInfo(name(label), chunks, BLOCK_SIZE, wire, label, layouts, below)


def payload_of(space: NamespaceInfo, digest: bytes) -> bytes:
    """Bytes that say whose they are."""
    nbytes = sum(space.below_nbytes)
    return b"".join(name(f"{digest.hex()}/{i}", 64) for i in range(nbytes // 64 + 1))[:nbytes]


def crcs_of(space: NamespaceInfo, payload: bytes) -> list[int]:
    found, start = [], 0
    for nbytes in space.below_nbytes:
        found.append(zlib.crc32(payload[start : start + nbytes]))
        start += nbytes
    return found


def block(
    space: NamespaceInfo,
    sequence: int,
    digest: bytes,
    parent: bytes = b"",
    depth: int = 0,
    mark: bytes = b"",
    payload: bytes | None = None,
) -> bytearray:
    """A whole record."""
    payload = payload_of(space, digest) if payload is None else payload
    out = bytearray(b"\xa5" * hckv.block_nbytes(space))
    start = hckv.payload_offset(space)
    out[start : start + len(payload)] = payload
    hckv.write_block(
        memoryview(out),
        space,
        store=STORE,
        sequence=sequence,
        digest=digest,
        parent=parent,
        depth=depth,
        mark=mark,
        crcs=crcs_of(space, payload),
    )
    return out


SPACE = info()
DIGESTS = tuple(name(f"block {i}") for i in range(3))
PAYLOAD = hckv.payload_offset(SPACE)


def records(space: NamespaceInfo = SPACE) -> list[bytearray]:
    """A prompt of three blocks; the second has a mark."""
    return [
        block(
            space,
            11 + i,
            digest,
            DIGESTS[i - 1] if i else b"",
            i,
            name("mark", 24) if i == 1 else b"",
        )
        for i, digest in enumerate(DIGESTS)
    ]


def segment(parts: Sequence[bytes | bytearray], sealed: bool = True) -> bytearray:
    """A file of these records; with a footer, if they are intact."""
    out = bytearray(segment_header(SEGMENT, STORE))
    contents = Contents()
    for part in parts:
        if sealed:
            contents.add(len(out), hckv.parse(part, STORE))
        out += part
    return out + contents.footer(SEGMENT) if sealed else out


def sealed_anew(record: bytearray) -> bytearray:
    """A record whose header was changed, with the checksum and the marker that fit it now."""
    (nbytes,) = struct.unpack_from("<I", record, HEADER_NBYTES)
    if not 4 <= nbytes <= len(record):
        return record
    crc = zlib.crc32(record[: nbytes - 4])
    struct.pack_into("<I", record, nbytes - 4, crc)
    struct.pack_into("<4sI", record, len(record) - 16, b"HCKC", crc)
    record[-8:] = record[SEQUENCE : SEQUENCE + 8]
    return record


def forged(record: bytearray, offset: int, form: str, *values: object) -> bytearray:
    """The record with other values at ``offset``, and checksums that fit."""
    out = bytearray(record)
    struct.pack_into("<" + form, out, offset, *values)
    return sealed_anew(out)


@dataclass(frozen=True)
class Attack:
    """data: the file. rules: what it breaks. found: digests of the blocks that are served
    nevertheless. stem: the file's name in a directory of segments, where that matters."""

    data: bytes
    rules: tuple[str, ...]
    found: tuple[bytes, ...] = (DIGESTS[0], DIGESTS[2])
    stem: str = ""


def in_the_middle(change: Callable[[bytearray], bytearray], *rules: str) -> Attack:
    """The second of three records is damaged; the others are to be found."""
    parts = records()
    parts[1] = change(parts[1])
    return Attack(bytes(segment(parts, sealed=False)), rules)


def forge(offset: int, form: str, *values: object) -> Callable[[bytearray], bytearray]:
    return lambda record: forged(record, offset, form, *values)


def flip(offset: int) -> Callable[[bytearray], bytearray]:
    def change(record: bytearray) -> bytearray:
        record[offset] ^= 0x10
        return record

    return change


def put(offset: int, data: bytes) -> Callable[[bytearray], bytearray]:
    def change(record: bytearray) -> bytearray:
        at = offset % len(record)
        record[at : at + len(data)] = data
        return record

    return change


def tombstone(count: int | None) -> bytearray:
    digests = None if count is None else [name(f"gone {i}") for i in range(count)]
    return hckv.write_removal(SPACE.digest, digests, store=STORE, sequence=12)


def replaced(record: bytearray, *rules: str) -> Attack:
    """In place of the second of three records."""
    return in_the_middle(lambda _: record, *rules)


def footer_attack(change: Callable[[bytearray], None], rule: str, crc: bool = True) -> Attack:
    """``change`` gets the footer; the blocks are found by a scan."""
    parts = [*records(), hckv.write_removal(SPACE.digest, [name("gone")], store=STORE, sequence=20)]
    whole = segment(parts)
    start = FIRST + sum(map(len, parts))
    footer = whole[start:]
    change(footer)
    if crc:
        struct.pack_into("<I", footer, len(footer) - 24, zlib.crc32(footer[:-LOCATOR_NBYTES]))
        struct.pack_into("<I", footer, len(footer) - 4, zlib.crc32(footer[-LOCATOR_NBYTES:-4]))
    return Attack(bytes(whole[:start] + footer), (rule,), DIGESTS)


def footer_forge(offset: int, form: str, *values: object) -> Callable[[bytearray], None]:
    """``offset`` < 0: from the end, as in the locator."""
    return lambda footer: struct.pack_into("<" + form, footer, offset % len(footer), *values)


def record_attacks() -> dict[str, Attack]:
    geometry_end = SHAPE + 2 * 32 + 2 * 4
    crc_end = geometry_end + 4 * 3
    parts = records()
    swapped = [bytearray(part) for part in parts]
    end = PAYLOAD + sum(SPACE.below_nbytes)
    swapped[0][PAYLOAD:end], swapped[2][PAYLOAD:end] = parts[2][PAYLOAD:end], parts[0][PAYLOAD:end]
    one, two = SPACE.below_nbytes[:2]
    chunks = parts[1][PAYLOAD + one : PAYLOAD + one + two] + parts[1][PAYLOAD : PAYLOAD + one]
    stranger = block(SPACE, 12, DIGESTS[1], DIGESTS[0], 1)
    stranger = forged(stranger, OWNER, "16s", name("another store"))
    raw = info("hostile", "raw", "")
    hidden = forged(block(SPACE, 99, name("hidden")), OWNER, "16s", bytes(16))
    hostile = NamespaceInfo(name("hostile"), (3 * 4096,), BLOCK_SIZE, "raw", raw.label)
    payload = (bytes(4096 - hckv.payload_offset(hostile)) + hidden + bytes(3 * 4096))[: 3 * 4096]
    carrier = block(hostile, 12, DIGESTS[1], DIGESTS[0], 1, payload=payload)
    carrier[0] = 0
    return {
        "header-crc": in_the_middle(flip(DIGEST), "header-crc"),
        "payload-crc": in_the_middle(flip(PAYLOAD + 5), "payload-crc"),
        "payload-crc-field": in_the_middle(forge(PAYLOAD_CRC, "I", 1), "payload-crc"),
        "payloads-swapped": Attack(bytes(segment(swapped, sealed=False)), ("payload-crc",), (DIGESTS[1],)),
        "chunks-swapped": in_the_middle(put(PAYLOAD, bytes(chunks)), "payload-crc"),
        "magic": in_the_middle(put(0, b"HCKX"), "magic"),
        "version-future": in_the_middle(forge(VERSION, "B", 2), "version"),
        "checksum-algorithm": in_the_middle(forge(CHECKSUM, "B", 2), "checksum-algorithm"),
        "digest-algorithm": in_the_middle(forge(DIGEST_ALGORITHM, "B", 9), "digest-algorithm"),
        "kind": in_the_middle(forge(KIND, "B", 4), "kind"),
        "codec-wire": in_the_middle(forge(WIRE, "B", 77), "codec"),
        "codec-below": in_the_middle(forge(BELOW, "B", 254), "codec"),
        "header-length-huge": in_the_middle(forge(HEADER_NBYTES, "I", 2**32 - 1), "header-length"),
        "header-length-zero": in_the_middle(forge(HEADER_NBYTES, "I", 0), "header-length"),
        "header-length-unit": in_the_middle(forge(HEADER_NBYTES, "I", PAYLOAD + 1), "header-length"),
        "header-length-longer": in_the_middle(forge(HEADER_NBYTES, "I", PAYLOAD + 64), "length"),
        "header-length-shorter": in_the_middle(forge(HEADER_NBYTES, "I", 256), "count"),
        "geometry-length-huge": in_the_middle(forge(GEOMETRY_NBYTES, "I", 2**32 - 1), "count"),
        "geometry-length-zero": in_the_middle(forge(GEOMETRY_NBYTES, "I", 0), "geometry"),
        "count-huge": in_the_middle(forge(COUNT, "I", 2**32 - 1), "count"),
        "count-less": in_the_middle(forge(COUNT, "I", 2), "count"),
        "layers-huge": in_the_middle(forge(LAYERS, "H", 65535), "geometry"),
        "layers-more": in_the_middle(forge(LAYERS, "H", 4), "geometry"),
        "shapes-huge": in_the_middle(forge(SHAPES, "H", 65535), "geometry"),
        "runs-huge": in_the_middle(forge(RUNS, "H", 65535), "geometry"),
        "run-shape": in_the_middle(forge(geometry_end - 8, "H", 9), "geometry"),
        "runs-not-joined": in_the_middle(forge(geometry_end - 8, "HHHH", 0, 1, 0, 2), "geometry"),
        "block-size-zero": in_the_middle(forge(GEOMETRY, "I", 0), "geometry"),
        "label-length": in_the_middle(forge(LABEL_NBYTES, "H", 65535), "geometry"),
        "label-not-utf8": in_the_middle(forge(LABEL, "4s", b"\xff\xfe\xff\xfe"), "geometry"),
        "label-tail": in_the_middle(forge(LABEL + 200, "B", 1), "geometry"),
        "layout-kind": in_the_middle(forge(SHAPE + 16, "B", 200), "layout"),
        "layout-dtype": in_the_middle(forge(SHAPE + 17, "B", 0), "layout"),
        "layout-heads-zero": in_the_middle(forge(SHAPE + 20, "I", 0), "layout"),
        "layout-dim-huge": in_the_middle(forge(SHAPE + 24, "I", 2**32 - 1), "chunk-size"),
        "chunk-size-below": in_the_middle(forge(SHAPE + 8, "Q", 56), "geometry"),
        "chunk-size-wire-huge": in_the_middle(forge(SHAPE, "Q", 2**64 - 1), "geometry"),
        "chunk-size-wire": in_the_middle(forge(SHAPE, "Q", 81), "chunk-size"),
        "record-length-huge": in_the_middle(forge(NBYTES, "Q", 2**63), "length"),
        "record-length-zero": in_the_middle(forge(NBYTES, "Q", 0), "length"),
        "record-length-overlap": in_the_middle(forge(NBYTES, "Q", 2 * 4096), "length"),
        "payload-length-overlap": in_the_middle(forge(PAYLOAD_NBYTES, "Q", 4096), "length"),
        "digest-length-huge": in_the_middle(forge(LENGTHS, "B", 255), "digest"),
        "digest-length-short": in_the_middle(
            forge(LENGTHS, "4B32s", 8, 16, 24, 16, DIGESTS[1][:8]), "digest"
        ),
        "digest-absent": in_the_middle(forge(LENGTHS, "4B32s", 0, 16, 24, 16, b""), "digest"),
        "digest-tail": in_the_middle(forge(DIGEST + 20, "B", 1), "digest"),
        "namespace-length": in_the_middle(forge(LENGTHS + 3, "B", 33), "digest"),
        "mark-length": in_the_middle(forge(LENGTHS + 2, "B", 23), "digest"),
        "mark-short": in_the_middle(
            forge(LENGTHS, "4B32s32s24s", 16, 16, 8, 16, *DIGESTS[1::-1], name("mark", 8)), "mark"
        ),
        "parent-absent": in_the_middle(forge(DEPTH, "I", 0), "parent"),
        "depth-huge": in_the_middle(forge(DEPTH, "I", 2**32 - 1), "depth"),
        "sequence-zero": in_the_middle(forge(SEQUENCE, "Q", 0), "sequence"),
        "sequence-huge": in_the_middle(forge(SEQUENCE, "Q", 2**64 - 1), "sequence"),
        "record-duplicated": Attack(
            bytes(segment([parts[0], parts[0], parts[2]], sealed=False)), ("sequence",)
        ),
        "reserved": in_the_middle(forge(RESERVED + 3, "B", 1), "reserved"),
        "header-padding": in_the_middle(forge(crc_end, "B", 1), "padding"),
        "padding": in_the_middle(flip(PAYLOAD + sum(SPACE.below_nbytes) + 100), "padding"),
        "marker-missing": in_the_middle(put(-16, bytes(16)), "marker"),
        "marker-other-sequence": in_the_middle(put(-8, struct.pack("<Q", 11)), "marker"),
        "marker-other-record": in_the_middle(put(-16, bytes(parts[0][-16:])), "marker"),
        "store-other": replaced(stranger, "store"),
        "record-in-payload": replaced(carrier, "magic", "store"),
        "remove-count-huge": replaced(forged(tombstone(2), COUNT, "I", 2**32 - 1), "count"),
        "remove-count-more": replaced(forged(tombstone(2), COUNT, "I", 3), "digest"),
        "remove-none": replaced(forged(tombstone(2), COUNT, "I", 0), "tombstone"),
        "remove-digest-length": replaced(forged(tombstone(2), GEOMETRY, "B", 200), "digest"),
        "clear-with-digests": replaced(forged(tombstone(2), KIND, "B", 3), "tombstone"),
        "clear-with-digest": replaced(
            forged(tombstone(None), LENGTHS, "4B32s", 16, 0, 0, 16, DIGESTS[0]), "digest"
        ),
        "clear-with-mark": replaced(forged(tombstone(None), LENGTHS + 2, "B", 24), "tombstone"),
    }


def file_attacks() -> dict[str, Attack]:
    whole, parts = segment(records()), records()
    unsealed = segment(parts, sealed=False)
    last = FIRST + 2 * len(parts[0])
    header = bytearray(whole)
    header[8] = 2
    damaged = bytearray(whole)
    damaged[20] ^= 1
    odd = bytearray(unsealed)
    odd[64] = 1
    struct.pack_into("<I", odd, 4092, zlib.crc32(odd[:4092]))
    number = bytearray(unsealed)
    struct.pack_into("<Q", number, 16, 2**40)
    struct.pack_into("<I", number, 4092, zlib.crc32(number[:4092]))
    escapes = info("\x1b]0;owned\x07 \u202e\n[31m")
    pickled = (
        b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x94\x8c\x02id\x85R."
    )
    return {
        "intact": Attack(bytes(whole), (), DIGESTS),
        "intact-unsealed": Attack(bytes(unsealed), (), DIGESTS),
        "intact-unused-space": Attack(bytes(unsealed) + bytes(8192), (), DIGESTS),
        "intact-empty": Attack(bytes(segment([])), (), ()),
        "label-escapes": Attack(bytes(segment(records(escapes))), (), DIGESTS),
        "empty": Attack(b"", ("truncated",), ()),
        "one-byte": Attack(b"H", ("truncated",), ()),
        "json": Attack(json.dumps({"records": [{"digest": "00"}] * 400}).encode(), ("segment-magic",), ()),
        "pickle": Attack(pickled * 200, ("segment-magic",), ()),
        "segment-version": Attack(bytes(header), ("version",), DIGESTS),
        "segment-crc": Attack(bytes(damaged), ("segment-crc",), DIGESTS),
        "segment-reserved": Attack(bytes(odd), ("reserved",), DIGESTS),
        "segment-number-huge": Attack(bytes(number), ("number",), DIGESTS),
        "segment-number": Attack(bytes(whole), ("number",), DIGESTS, f"{SEGMENT + 1:016x}"),
        "truncated-in-header": Attack(bytes(unsealed[: last + 100]), ("truncated",), DIGESTS[:2]),
        "truncated-in-payload": Attack(bytes(unsealed[: last + PAYLOAD + 10]), ("truncated",), DIGESTS[:2]),
        "truncated-marker": Attack(bytes(unsealed[:-1]), ("truncated",), DIGESTS[:2]),
        "truncated-footer": Attack(bytes(whole[:-1]), ("magic",), DIGESTS),
    }


def footer_attacks() -> dict[str, Attack]:
    entry, locator = 120, -LOCATOR_NBYTES
    removed = 4 * entry
    table = removed + 33

    def other(footer: bytearray) -> None:
        footer[32] ^= 1  # of the first entry's digest

    return {
        "footer-crc": footer_attack(footer_forge(40, "B", 1), "footer-crc", crc=False),
        "footer-locator-crc": footer_attack(footer_forge(locator + 8, "Q", 8), "footer-crc", crc=False),
        "footer-version": footer_attack(footer_forge(locator + 4, "B", 2), "version"),
        "footer-checksum": footer_attack(footer_forge(locator + 5, "B", 2), "checksum-algorithm"),
        "footer-reserved": footer_attack(footer_forge(locator + 50, "B", 2), "reserved"),
        "footer-other-segment": footer_attack(footer_forge(locator + 8, "Q", 8), "number"),
        "footer-outside": footer_attack(footer_forge(locator + 16, "Q", 2**40), "footer-length"),
        "footer-length-huge": footer_attack(footer_forge(locator + 16, "Q", 2**64 - 4096), "footer-length"),
        "footer-length-unit": footer_attack(footer_forge(locator + 16, "Q", 4097), "footer-length"),
        "footer-length-zero": footer_attack(footer_forge(locator + 16, "Q", 0), "footer-length"),
        "footer-count-huge": footer_attack(footer_forge(locator + 24, "I", 2**32 - 1), "footer-count"),
        "footer-count-less": footer_attack(footer_forge(locator + 24, "I", 3), "padding"),
        "footer-removed-huge": footer_attack(footer_forge(locator + 28, "I", 2**32 - 1), "footer-count"),
        "footer-namespaces-huge": footer_attack(footer_forge(locator + 32, "I", 2**32 - 1), "footer-count"),
        "footer-namespaces-more": footer_attack(footer_forge(locator + 32, "I", 2), "footer-count"),
        "footer-table-huge": footer_attack(footer_forge(locator + 36, "I", 2**32 - 1), "footer-count"),
        "footer-geometry-huge": footer_attack(footer_forge(table, "I", 2**32 - 1), "footer-count"),
        "footer-geometry-codec": footer_attack(footer_forge(table + 40 + 10, "B", 77), "codec"),
        "footer-entry-overlap": footer_attack(footer_forge(entry + 8, "I", 1), "offset"),
        "footer-entry-outside": footer_attack(footer_forge(3 * entry + 8, "I", 2**32 - 1), "offset"),
        "footer-entry-first": footer_attack(footer_forge(8, "I", 0), "offset"),
        "footer-entry-length": footer_attack(footer_forge(2 * entry + 12, "I", 0), "length"),
        "footer-entry-sequence": footer_attack(footer_forge(entry, "Q", 11), "sequence"),
        "footer-entry-sequence-huge": footer_attack(footer_forge(3 * entry, "Q", 2**64 - 1), "sequence"),
        "footer-entry-kind": footer_attack(footer_forge(26, "B", 0), "kind"),
        "footer-entry-namespace": footer_attack(footer_forge(16, "I", 1), "namespace"),
        "footer-entry-depth": footer_attack(footer_forge(20, "I", 1), "parent"),
        "footer-entry-count": footer_attack(footer_forge(24, "H", 1), "count"),
        "footer-entry-removed": footer_attack(footer_forge(3 * entry + 24, "H", 2), "count"),
        "footer-entry-digest-length": footer_attack(footer_forge(27, "B", 255), "digest"),
        "footer-entry-digest-tail": footer_attack(footer_forge(32 + 20, "B", 1), "reserved"),
        "footer-entry-mark-length": footer_attack(footer_forge(entry + 29, "B", 8), "digest"),
        "footer-entry-reserved": footer_attack(footer_forge(30, "H", 1), "reserved"),
        "footer-removed-length": footer_attack(footer_forge(removed, "B", 3), "digest"),
        "footer-padding": footer_attack(footer_forge(locator - 1, "B", 1), "padding"),
        "footer-disagrees": footer_attack(other, "footer-records"),
    }


def attacks() -> dict[str, Attack]:
    """By file name, without its suffix."""
    return record_attacks() | file_attacks() | footer_attacks()


if __name__ == "__main__":
    DATA.mkdir(parents=True, exist_ok=True)
    for old in DATA.glob("*.hckv"):
        old.unlink()
    for stem, attack in attacks().items():
        (DATA / f"{stem}.hckv").write_bytes(attack.data)
