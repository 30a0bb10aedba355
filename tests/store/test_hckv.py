"""The record: what is written is read, and nothing else is."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypercache import codecs
from hypercache.model import KVDtype, KVLayout, Part
from hypercache.store import hckv
from hypercache.store.hckv import HckvError, Kind
from hypercache.store.joined import joined
from hypercache.store.namespace import NamespaceInfo

from .hckv_kit import (
    DATA,
    DIGESTS,
    PAYLOAD,
    SPACE,
    STORE,
    attacks,
    block,
    crcs_of,
    layout,
    name,
    payload_of,
    records,
)

ROOT = Path(__file__).parents[2]
LAYERS = st.integers(1, 12)
DIMS = st.sampled_from([1, 2, 8, 13, 64, 128])


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    dtype = draw(st.sampled_from(KVDtype))
    if draw(st.booleans()):
        return KVLayout(
            "split", draw(st.integers(1, 9)), (Part("k", draw(DIMS)), Part("v", draw(DIMS))), dtype
        )
    return KVLayout("mla", 1, (Part("latent", draw(DIMS)), Part("rope", draw(DIMS))), dtype)


@st.composite
def infos(draw: st.DrawFn) -> NamespaceInfo:
    """Any namespace that can be written: layers of few layouts or of unknown ones, any pair of codecs."""
    digest = draw(st.binary(min_size=16, max_size=32))
    label = draw(st.text(max_size=100))
    tokens = draw(st.integers(1, 20))
    wire = draw(st.sampled_from(codecs.names()))
    if draw(st.booleans()):
        sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=12))
        return NamespaceInfo(digest, tuple(sizes), tokens, wire, label, (), draw(st.sampled_from(["", wire])))
    known = draw(st.lists(layouts(), min_size=1, max_size=3))
    each = tuple(draw(st.lists(st.sampled_from(known), min_size=1, max_size=12)))
    able = [c for c in codecs.names() if all(codecs.get(c).supports(one.dtype) for one in each)]
    wire, below = draw(st.sampled_from(able)), draw(st.sampled_from(["", *able]))
    sizes = [codecs.get(wire).chunk_nbytes(one, tokens) for one in each]
    return NamespaceInfo(digest, tuple(sizes), tokens, wire, label, each, below)


def whole(record: bytes | bytearray, store: bytes = STORE) -> hckv.Record:
    """Every check there is."""
    found = hckv.parse(record, store)
    view = memoryview(record)
    hckv.check_commit(found, view[found.payload + found.payload_nbytes : found.nbytes])
    hckv.check_payload(found, view[found.payload : found.payload + found.payload_nbytes])
    return found


@settings(max_examples=200, deadline=None)
@given(
    infos(),
    st.integers(1, hckv.MAX_SEQUENCE),
    st.binary(min_size=16, max_size=32),
    st.none() | st.tuples(st.binary(min_size=16, max_size=32), st.integers(1, hckv.MAX_DEPTH)),
    st.sampled_from([b"", bytes(range(24))]),
)
def test_a_record_reads_back_as_it_was_written(
    space: NamespaceInfo, sequence: int, digest: bytes, before: tuple[bytes, int] | None, mark: bytes
) -> None:
    parent, depth = before or (b"", 0)
    record = block(space, sequence, digest, parent, depth, mark)
    found = whole(record)
    assert found.info == space
    assert found.info.label == space.label
    assert (found.kind, found.sequence, found.namespace) == (Kind.BLOCK, sequence, space.digest)
    assert (found.digest, found.parent, found.depth, found.mark) == (digest, parent, depth, mark)
    assert found.nbytes == len(record) == hckv.block_nbytes(space)
    assert found.payload == hckv.payload_offset(space)
    assert found.chunk_nbytes == space.below_nbytes
    assert list(found.crcs) == crcs_of(space, payload_of(space, digest))
    assert not found.nbytes % 4096
    assert not found.payload % 64


def test_any_bit_that_changes_is_noticed() -> None:
    record = records()[1]
    assert whole(record).digest == DIGESTS[1]
    missed = []
    for bit in range(8 * len(record)):
        record[bit >> 3] ^= 1 << (bit & 7)
        try:
            whole(record)
        except HckvError:
            pass
        else:
            missed.append(bit)
        record[bit >> 3] ^= 1 << (bit & 7)
    assert missed == []


def test_any_bit_of_a_tombstone_that_changes_is_noticed() -> None:
    record = hckv.write_removal(SPACE.digest, [name("gone"), name("too", 32)], store=STORE, sequence=3)
    for bit in range(8 * len(record)):
        record[bit >> 3] ^= 1 << (bit & 7)
        with pytest.raises(HckvError):
            whole(record)
        record[bit >> 3] ^= 1 << (bit & 7)


@pytest.mark.parametrize("cut", [0, 1, 15, 16, 207, 208, PAYLOAD - 1])
def test_a_header_that_ends_too_early_is_truncated(cut: int) -> None:
    with pytest.raises(HckvError) as caught:
        hckv.parse(bytes(records()[0][:cut]), STORE)
    assert caught.value.rule == "truncated"


def test_the_header_alone_is_enough_to_parse() -> None:
    record = bytes(records()[0])
    assert hckv.header_nbytes(record[:16]) == PAYLOAD
    assert hckv.parse(record[:PAYLOAD], STORE) == hckv.parse(record + b"more", STORE)


def test_the_marker_alone_commits_and_a_longer_tail_may_reach_into_the_payload() -> None:
    record = records()[0]
    found = hckv.parse(record, STORE)
    for nbytes in (16, 17, 4096 - PAYLOAD):
        hckv.check_commit(found, record[-nbytes:])
    with pytest.raises(HckvError, match="truncated"):
        hckv.check_commit(found, record[-15:])
    with pytest.raises(HckvError, match="truncated"):
        hckv.check_payload(found, memoryview(record)[PAYLOAD:-1])


def test_a_record_of_another_store_is_none() -> None:
    with pytest.raises(HckvError) as caught:
        hckv.parse(records()[0], name("another"))
    assert caught.value.rule == "store"
    assert hckv.parse(records()[0]).digest == DIGESTS[0]


def test_all_records_of_a_namespace_have_one_size_whatever_it_is_called() -> None:
    sizes = set()
    for label in ("", "x", "ä" * 300, "a much longer label than that"):
        space = NamespaceInfo(
            SPACE.digest, SPACE.chunk_nbytes, SPACE.block_size, SPACE.codec, label, SPACE.layouts, SPACE.below
        )
        record = block(space, 1, name(label, 32), name("p", 32), 3, name("m", 24))
        found = whole(record)
        assert found.info is not None
        assert found.info.label == label.encode()[:256].decode("utf-8", "ignore")
        sizes.add((len(record), found.payload))
    assert sizes == {(hckv.block_nbytes(SPACE), PAYLOAD)}


def test_a_label_is_cut_between_characters() -> None:
    space = NamespaceInfo(name("l"), (100,), 16, "raw", "x" + "ä" * 200)
    found = whole(block(space, 1, name("d")))
    assert found.info is not None
    assert found.info.label == "x" + "ä" * 127


def test_as_many_layers_and_shapes_as_the_law_allows_fit_a_header() -> None:
    sizes = [1 + i % hckv_shapes() for i in range(4096)]
    space = NamespaceInfo(name("deep"), tuple(sizes), 16, "raw", "ü" * 128)
    record = block(space, 1, name("d"))
    assert whole(record).info == space
    assert hckv.payload_offset(space) <= hckv.MAX_HEADER_NBYTES
    space = NamespaceInfo(name("deeper"), tuple(range(1, hckv_shapes() + 2)), 16, "raw", "")
    with pytest.raises(HckvError) as caught:
        hckv.block_nbytes(space)
    assert caught.value.rule == "shapes"


def hckv_shapes() -> int:
    from hypercache.store.hckv_geometry import MAX_SHAPES

    return MAX_SHAPES


@pytest.mark.parametrize(
    ("space", "rule"),
    [
        (NamespaceInfo(name("a"), (100,), 16, "zip", "no such codec"), "codec"),
        (NamespaceInfo(name("b"), (100,), 1 << 32, "raw", "block size"), "geometry"),
        (NamespaceInfo(name("d"), (100,), 16, "int8", "size", (layout(1, 64),)), "chunk-size"),
        (NamespaceInfo(name("f"), (1 << 33,), 16, "raw", "larger than a segment"), "length"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.label,
)
def test_a_namespace_without_a_form_is_refused(space: NamespaceInfo, rule: str) -> None:
    with pytest.raises(HckvError) as caught:
        hckv.block_nbytes(space)
    assert caught.value.rule == rule


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"digest": b"short"}, "digest"),
        ({"digest": bytes(33)}, "digest"),
        ({"parent": b"short", "depth": 1}, "digest"),
        ({"depth": 1}, "parent"),
        ({"parent": bytes(16)}, "parent"),
        ({"depth": -1}, "depth"),
        ({"depth": 2**31, "parent": bytes(16)}, "depth"),
        ({"sequence": 0}, "sequence"),
        ({"sequence": 2**63}, "sequence"),
        ({"mark": bytes(8)}, "mark"),
        ({"store": b"id"}, "store"),
        ({"crcs": [1, 2]}, "count"),
    ],
    ids=str,
)
def test_what_the_law_forbids_is_not_written(changes: dict[str, object], rule: str) -> None:
    out = memoryview(bytearray(hckv.block_nbytes(SPACE)))
    fields = {"store": STORE, "sequence": 1, "digest": DIGESTS[0], "parent": b"", "depth": 0, "mark": b""}
    with pytest.raises(HckvError) as caught:
        hckv.write_block(out, SPACE, **({**fields, "crcs": [1, 2, 3]} | changes))  # type: ignore[arg-type]
    assert caught.value.rule == rule
    assert not any(out)  # found out before a byte is written


def test_tombstones_read_back() -> None:
    gone = [name(f"gone {i}", 16 + i % 17) for i in range(hckv.REMOVALS)]
    for digests in (gone, gone[:1], None):
        record = hckv.write_removal(SPACE.digest, digests, store=STORE, sequence=5)
        found = whole(record)
        assert found.kind is (Kind.CLEAR if digests is None else Kind.REMOVE)
        assert (found.sequence, found.namespace, found.removed) == (5, SPACE.digest, tuple(digests or ()))
        assert len(record) == found.nbytes == hckv.removal_nbytes(len(digests or ()))
        assert found.info is None
    for wrong in ([], [*gone, gone[0]], [b"short"]):
        with pytest.raises(HckvError):
            hckv.write_removal(SPACE.digest, wrong, store=STORE, sequence=5)


def test_digests_are_not_shown_in_full() -> None:
    """A digest in clear is the right to read."""
    found = hckv.parse(records()[0], STORE)
    assert DIGESTS[0].hex()[:12] in repr(found)
    assert DIGESTS[0].hex()[:13] not in repr(found)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=5000), st.integers(0, 400))
def test_garbage_is_refused_by_rule(data: bytes, kept: int) -> None:
    """Also behind a beginning that looks well, and with a CRC that fits."""
    for head in (data, bytes(records()[0][:kept]) + data):
        with pytest.raises(HckvError):
            whole(head)
    forged = bytearray(records()[0])
    forged[208 : PAYLOAD - 4] = (data + bytes(PAYLOAD))[: PAYLOAD - 212]
    struct.pack_into("<I", forged, PAYLOAD - 4, zlib.crc32(forged[: PAYLOAD - 4]))
    with pytest.raises(HckvError):
        whole(forged)


@given(st.lists(st.binary(max_size=300) | st.integers(0, 5000).map(bytes), max_size=8))
def test_a_joined_checksum_is_that_of_the_whole(parts: list[bytes]) -> None:
    crcs, lengths = [zlib.crc32(part) for part in parts], [len(part) for part in parts]
    assert joined(crcs, lengths) == zlib.crc32(b"".join(parts))


def test_the_page_of_law_is_enough_to_read_a_record() -> None:
    """A second reader, from docs/hckv.md alone, of the intact segment kept in the attack folder."""
    data = (DATA / "intact.hckv").read_bytes()
    assert data[:10] == b"HCKV\r\n\x1a\n\x01\x01"
    number, store = struct.unpack_from("<Q16s", data, 16)
    assert struct.unpack_from("<I", data, 4092) == (zlib.crc32(data[:4092]),)
    assert (number, store) == (7, STORE)
    before = b""
    for index in range(3):
        record = data[4096 * (index + 1) : 4096 * (index + 2)]
        magic, version, checksum, algorithm, kind, header = struct.unpack_from("<4sBBBBI", record)
        assert (magic, version, checksum, algorithm, kind) == (b"HCKR", 1, 1, 1, 1)
        assert struct.unpack_from("<I", record, header - 4) == (zlib.crc32(record[: header - 4]),)
        geometry, sequence, nbytes, payload_nbytes, payload_crc, depth, count = struct.unpack_from(
            "<IQQQIII", record, 12
        )
        assert (sequence, nbytes, depth, count) == (11 + index, 4096, index, 3)
        assert record[52:56] == bytes([16, 16 * (index > 0), 24 * (index == 1), 16])
        assert record[56:88] == DIGESTS[index] + bytes(16)
        assert record[88:120] == (before or bytes(16)) + bytes(16)
        assert record[144:176] == SPACE.digest + bytes(16)
        assert record[176:192] == store
        tokens, layers, shapes, runs, wire, below, label = struct.unpack_from("<IHHHBBH", record, 208)
        assert (tokens, layers, shapes, runs, wire, below, label) == (4, 3, 2, 2, 2, 3, 4)
        assert record[224:228] == b"tiny"
        at = 208 + 16 + 256
        table = [struct.unpack_from("<QQBBHIII", record, at + 32 * i) for i in range(shapes)]
        order = [struct.unpack_from("<HH", record, at + 32 * shapes + 4 * i) for i in range(runs)]
        assert at + 32 * shapes + 4 * runs == 208 + geometry
        payload = record[header : header + payload_nbytes]
        start = 0
        crcs = struct.unpack_from(f"<{count}I", record, 208 + geometry)
        for crc, shape in zip(crcs, [s for s, n in order for _ in range(n)], strict=True):
            wire_nbytes, nbytes, kind, dtype, parts, heads, k, v = table[shape]
            assert (kind, dtype, parts) == (1, 1, 2)
            assert wire_nbytes == heads * tokens * (2 + k + 2 + v)
            assert nbytes == heads * tokens * (2 + k // 2 + 2 + v // 2)
            assert zlib.crc32(payload[start : start + nbytes]) == crc
            start += nbytes
        assert (start, zlib.crc32(payload)) == (payload_nbytes, payload_crc)
        assert record[-16:] == b"HCKC" + record[header - 4 : header] + sequence.to_bytes(8, "little")
        assert not any(record[header + payload_nbytes : -16])
        before = DIGESTS[index]


def test_every_rule_stands_on_the_page_of_law_and_is_attacked() -> None:
    sources = [*(ROOT / "hypercache" / "store").glob("hckv*.py"), ROOT / "hypercache/cli/inspect.py"]
    raised = {
        rule
        for path in sources
        for rule in re.findall(r'(?:broken|HckvError)\(\s*"([a-z0-9-]+)"', path.read_text())
    } | {"footer-records", "segment-length"}
    page = (ROOT / "docs" / "hckv.md").read_text()
    named = set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)*)`", page))
    assert raised <= named
    attacked = {rule for attack in attacks().values() for rule in attack.rules}
    # What only a writer can break, what is no fault, and what would be a file of 4 GiB.
    assert raised - attacked == {"shapes", "footer-absent", "segment-length"}
