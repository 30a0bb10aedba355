"""The segment: its header, its footer, and the search for records; and the folder of attack files."""

from __future__ import annotations

import struct
import sys
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypercache.store import hckv, hckv_file
from hypercache.store.hckv import ALIGN, HckvError, Kind, Record
from hypercache.store.hckv_file import Contents, footer_nbytes, parse_segment_header, segment_header
from hypercache.store.hckv_scan import Bad, scan
from hypercache.store.namespace import NamespaceInfo

from .hckv_kit import (
    DATA,
    DIGESTS,
    FIRST,
    PAYLOAD,
    SEGMENT,
    SPACE,
    STORE,
    Attack,
    attacks,
    block,
    info,
    name,
    records,
    segment,
)

ATTACKS = attacks()


class Bytes:
    """A file in memory that counts what is asked of it."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.most = 0

    def read(self, offset: int, nbytes: int) -> bytes:
        assert offset >= 0
        assert nbytes > 0
        self.most = max(self.most, nbytes)
        return self.data[offset : offset + nbytes]


def found_in(
    data: bytes, end: int | None = None, store: bytes | None = STORE
) -> tuple[list[tuple[int, Record]], list[Bad]]:
    items = list(scan(Bytes(data).read, len(data) if end is None else end, store))
    return [i for i in items if not isinstance(i, Bad)], [i for i in items if isinstance(i, Bad)]


def footer_of(data: bytes) -> Contents:
    nbytes = footer_nbytes(data[-ALIGN:], len(data))
    return Contents.read(data[len(data) - nbytes :], len(data), SEGMENT)


# -- attacks


def read_as_a_store_does(data: bytes, stem: str) -> tuple[list[bytes], set[str]]:
    """Digests of the blocks that would be served, and the rules that were broken on the way."""
    rules: set[str] = set()
    store, number, end = None, SEGMENT, len(data)
    try:
        header = parse_segment_header(data)
        store, number = header.store, header.number
        if stem and int(stem, 16) != number:
            rules.add("number")
    except HckvError as error:
        rules.add(error.rule)
        if error.rule in ("truncated", "segment-magic"):
            return [], rules
    try:
        nbytes = footer_nbytes(data[-64:], len(data))
        Contents.read(data[-nbytes:], len(data), number)
        end -= nbytes
    except HckvError as error:
        if error.rule != "footer-absent":
            rules.add(error.rule)
    served: list[bytes] = []
    reader = Bytes(data)
    for item in scan(reader.read, end, store):
        if isinstance(item, Bad):
            rules.add(item.error.rule)
            continue
        offset, record = item
        try:
            start = offset + record.payload
            hckv.check_payload(record, memoryview(data)[start : start + record.payload_nbytes])
        except HckvError as error:
            rules.add(error.rule)
            continue
        if record.kind is Kind.BLOCK:
            served.append(record.digest)
    assert reader.most <= 1 << 20  # however large a count claims to be
    return served, rules


@pytest.mark.parametrize("stem", ATTACKS)
def test_attack(stem: str) -> None:
    """What breaks a rule is refused by its name, and keeps nothing else from being served."""
    attack = ATTACKS[stem]
    data = (DATA / f"{stem}.hckv").read_bytes()
    tracemalloc.start()
    try:
        served, rules = read_as_a_store_does(data, attack.stem)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert tuple(served) == attack.found
    # That a footer does not say what the records say is found out by comparing them: hypercache inspect does.
    known = set(attack.rules) - {"footer-records"}
    assert known <= rules
    assert rules <= known | {"magic"}  # a damaged footer is no record either
    assert peak < 8 << 20


def test_the_attack_files_are_those_that_the_code_makes() -> None:
    """Also: the format has not changed under the version's number."""
    assert {path.stem for path in DATA.glob("*.hckv")} == set(ATTACKS)
    differing = [s for s, attack in ATTACKS.items() if (DATA / f"{s}.hckv").read_bytes() != attack.data]
    assert differing == []


@pytest.mark.parametrize("stem", [s for s, a in ATTACKS.items() if s.startswith("footer-")])
def test_a_footer_that_breaks_a_rule_is_refused_whole(stem: str) -> None:
    attack: Attack = ATTACKS[stem]
    if attack.rules == ("footer-records",):
        assert footer_of(attack.data).names("digest")[0] != DIGESTS[0]  # it is well-formed: reads must verify
        return
    with pytest.raises(HckvError) as caught:
        footer_of(attack.data)
    assert caught.value.rule in attack.rules


# -- truncation and flips


def borders() -> list[int]:
    """Where something ends in a sealed segment of three records, and a byte before and behind."""
    parts = records()
    found = {0, 8, 24, 4092, FIRST}
    for index in range(3):
        start = FIRST + index * len(parts[0])
        found |= {start + at for at in (4, 16, 208, 480, PAYLOAD - 4, PAYLOAD, PAYLOAD + 48, 4080, 4096)}
    footer = FIRST + 3 * len(parts[0])
    found |= {footer + at for at in (120, 240, 360, 4032, 4092, 4096)}
    return sorted({at + step for at in found for step in (-1, 0, 1)} & set(range(footer + 4096)))


def test_cut_anywhere_what_is_whole_is_found() -> None:
    data = bytes(segment(records()))
    for cut in borders():
        served, _ = read_as_a_store_does(data[:cut], "")
        # A record that is whole lies before the cut with all of its 4096 bytes.
        assert tuple(served) == DIGESTS[: max(0, (cut - FIRST) // 4096)], cut


def test_any_bit_of_a_footer_that_changes_is_noticed() -> None:
    data = bytes(segment(records()))
    footer = bytearray(data[-ALIGN:])
    missed = []
    for bit in range(8 * ALIGN):
        footer[bit >> 3] ^= 1 << (bit & 7)
        try:
            nbytes = footer_nbytes(bytes(footer[-64:]), len(data))
            Contents.read(bytes(footer[-nbytes:]), len(data), SEGMENT)
            missed.append(bit)
        except HckvError:
            pass
        footer[bit >> 3] ^= 1 << (bit & 7)
    assert missed == []


def test_any_bit_of_a_segment_header_that_changes_is_noticed() -> None:
    header = bytearray(segment_header(SEGMENT, STORE))
    assert parse_segment_header(bytes(header)) == hckv_file.SegmentHeader(SEGMENT, STORE)
    for bit in range(8 * len(header)):
        header[bit >> 3] ^= 1 << (bit & 7)
        with pytest.raises(HckvError):
            parse_segment_header(bytes(header))
        header[bit >> 3] ^= 1 << (bit & 7)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(FIRST, FIRST + 3 * ALIGN - 1), st.integers(1, 255)), max_size=6))
def test_damage_costs_the_records_it_hits_and_no_other(changes: list[tuple[int, int]]) -> None:
    data = bytearray(segment(records(), sealed=False))
    for at, bits in changes:
        data[at] ^= bits
    intact = bytes(segment(records(), sealed=False))
    want = [
        digest
        for i, digest in enumerate(DIGESTS)
        if data[FIRST + i * ALIGN : FIRST + (i + 1) * ALIGN]
        == intact[FIRST + i * ALIGN : FIRST + (i + 1) * ALIGN]
    ]
    assert read_as_a_store_does(bytes(data), "")[0] == want


# -- the header


@pytest.mark.parametrize(("number", "store"), [(-1, STORE), (1 << 39, STORE), (1, b"short")])
def test_a_segment_header_has_bounds(number: int, store: bytes) -> None:
    with pytest.raises(HckvError, match="number"):
        segment_header(number, store)


@given(st.integers(0, hckv.MAX_NUMBER), st.integers(0, (1 << 20) - 1))
def test_a_place_is_one_int_that_says_where(number: int, unit: int) -> None:
    place = hckv_file.place(number, unit * ALIGN)
    assert 0 <= place < 1 << 63
    assert (hckv_file.number_of(place), hckv_file.offset_of(place)) == (number, unit * ALIGN)


# -- the footer

NAMES = st.binary(min_size=16, max_size=32)


@st.composite
def contents(draw: st.DrawFn) -> tuple[Contents, list[tuple[Any, ...]]]:
    """What a segment may hold, and the same as plain tuples."""
    spaces = [SPACE, info("other", "fp8", ""), NamespaceInfo(bytes(32), (9, 7), 16, "raw", "third")]
    made, plain = Contents(), []
    offset, sequence = FIRST, 0
    for _ in range(draw(st.integers(0, 12))):
        offset += ALIGN * draw(st.sampled_from([0, 0, 1, 5]))  # damaged records leave gaps
        sequence += draw(st.integers(1, 1 << 50))
        if draw(st.integers(0, 3)):
            space = draw(st.sampled_from(spaces))
            before = draw(st.none() | NAMES)
            depth = draw(st.integers(1, hckv.MAX_DEPTH)) if before else 0
            row = (sequence, draw(NAMES), before or b"", depth, draw(st.sampled_from([b"", bytes(24)])))
            made.add_block(offset, space, *row)
            plain.append((Kind.BLOCK, offset, hckv.block_nbytes(space), space, *row, ()))
            offset += hckv.block_nbytes(space)
        else:
            gone = draw(st.none() | st.lists(NAMES, min_size=1, max_size=4))
            space = draw(NAMES)
            made.add_removal(offset, space, gone, sequence)
            kind, nbytes = (Kind.CLEAR, ALIGN) if gone is None else (Kind.REMOVE, ALIGN)
            plain.append((kind, offset, nbytes, None, sequence, space, b"", 0, b"", tuple(gone or ())))
            offset += nbytes
    return made, plain


def as_rows(found: Contents) -> list[tuple[Any, ...]]:
    entries = found.entries
    removed = iter(found.removed())
    names = (found.names(field) for field in ("digest", "parent", "mark"))
    rows = []
    for entry, digest, parent, mark in zip(entries, *names, strict=True):
        block = entry["kind"] == Kind.BLOCK
        space = found.namespaces[entry["namespace"]] if block else None
        gone = tuple(next(removed) for _ in range(entry["count"]))
        at, nbytes = int(entry["offset"]) * ALIGN, int(entry["nbytes"]) * ALIGN
        rows.append(
            (entry["kind"], at, nbytes, space, entry["sequence"], digest, parent, entry["depth"], mark, gone)
        )
    assert list(removed) == []
    return rows


@settings(max_examples=150, deadline=None)
@given(contents())
def test_a_footer_reads_back_as_it_was_written(pair: tuple[Contents, list[tuple[Any, ...]]]) -> None:
    made, plain = pair
    assert as_rows(made) == plain
    footer = made.footer(SEGMENT)
    assert len(footer) == made.footer_nbytes() == footer_nbytes(footer[-64:], made.end + len(footer))
    found = Contents.read(footer, made.end + len(footer), SEGMENT)
    assert as_rows(found) == plain
    assert (found.sequence, found.end, len(found)) == (made.sequence, made.end, len(plain))
    assert found.footer(SEGMENT) == footer
    # It can be gone on with.
    found.add_block(found.end, SPACE, found.sequence + 1, DIGESTS[0], b"", 0, b"")
    assert len(found.namespaces) == len({i.digest for i in [*made.namespaces, SPACE]})


def test_a_footer_says_what_a_scan_finds() -> None:
    tomb = hckv.write_removal(SPACE.digest, [name("gone")], store=STORE, sequence=50)
    clear = hckv.write_removal(name("elsewhere"), None, store=STORE, sequence=60)
    data = bytes(segment([*records(), block(info("other"), 40, name("o")), tomb, clear]))
    made = Contents()
    found, bad = found_in(data, footer_of(data).end)
    for offset, record in found:
        made.add(offset, record)
    assert bad == []
    assert as_rows(made) == as_rows(footer_of(data))


def test_entries_must_follow_each_other() -> None:
    made = Contents()
    made.add_block(FIRST, SPACE, 5, DIGESTS[0], b"", 0, b"")
    for offset, sequence, rule in (
        (FIRST, 6, "offset"),
        (FIRST + ALIGN + 1, 6, "offset"),
        (hckv.MAX_SEGMENT_NBYTES, 6, "offset"),
        (FIRST + ALIGN, 5, "sequence"),
        (FIRST + ALIGN, 1 << 63, "sequence"),
    ):
        with pytest.raises(HckvError) as caught:
            made.add_block(offset, SPACE, sequence, DIGESTS[1], b"", 0, b"")
        assert caught.value.rule == rule
    twin = NamespaceInfo(SPACE.digest, (100,), 16, "raw", "twin")
    with pytest.raises(HckvError) as caught:
        made.add_block(FIRST + ALIGN, twin, 6, DIGESTS[1], b"", 0, b"")
    assert caught.value.rule == "namespace"
    assert len(made) == 1


def test_a_namespace_that_a_footer_has_twice_is_refused() -> None:
    made = Contents()
    made.add_block(FIRST, SPACE, 1, DIGESTS[0], b"", 0, b"")
    made.namespaces.append(SPACE)
    footer = made.footer(SEGMENT)
    with pytest.raises(HckvError) as caught:
        Contents.read(footer, made.end + len(footer), SEGMENT)
    assert caught.value.rule == "namespace"


def test_a_footer_of_a_hundred_thousand_blocks_is_read_without_a_step_for_each() -> None:
    """Calls are counted, not seconds."""
    count, nbytes = 100_000, hckv.block_nbytes(SPACE)
    made = Contents()
    table = made._entries
    made.add_block(FIRST, SPACE, 1, DIGESTS[0], b"", 0, b"")
    rows = np.tile(np.frombuffer(bytes(table), hckv_file.ENTRY), count)
    rows["sequence"] = np.arange(1, count + 1)
    rows["offset"] = 1 + np.arange(count) * (nbytes // ALIGN)
    table[:] = rows.tobytes()
    made.end = FIRST + count * nbytes
    footer = made.footer(SEGMENT)
    calls = 0

    def count_calls(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count_calls)
    try:
        found = Contents.read(footer, made.end + len(footer), SEGMENT)
        digests = found.names("digest")
    finally:
        sys.setprofile(None)
    assert len(found) == len(digests) == count
    assert calls < 2000


# -- the search


def test_a_search_goes_on_behind_damage_of_any_length() -> None:
    parts = records()
    hole = bytes(3 << 20)
    noise = bytes(range(256)) * 16 * 300
    data = bytes(segment([parts[0]], sealed=False)) + hole + parts[1] + noise + parts[2]
    found, bad = found_in(data)
    assert [record.digest for _, record in found] == list(DIGESTS)
    assert [(b.nbytes, b.error.rule) for b in bad] == [(len(hole), "magic"), (len(noise), "magic")]


def test_a_search_skips_holes_of_a_sparse_file() -> None:
    data = bytes(segment(records()[:1], sealed=False))
    end = 1 << 40
    reader = Bytes(data)
    items = list(scan(reader.read, end, STORE, data=lambda offset: offset if offset < len(data) else end))
    assert len(items) == 2
    assert isinstance(items[1], Bad)
    assert items[1].nbytes == end - len(data)


def test_without_the_stores_id_a_search_does_not_go_on() -> None:
    """What follows could be the payload of a block, made by a client to look like a record."""
    parts = records()
    parts[1][0] = 0
    data = bytes(segment(parts, sealed=False))
    found, bad = found_in(data, store=None)
    assert [record.digest for _, record in found] == [DIGESTS[0]]
    assert [(b.offset, b.nbytes) for b in bad] == [(FIRST + ALIGN, 2 * ALIGN)]


def test_a_record_that_a_client_hid_in_its_payload_is_never_found() -> None:
    """The attack: a raw block whose payload is a whole record of another tenant's namespace, valid in all but
    the store's id, which no client knows; then the outer record is damaged."""
    data = ATTACKS["record-in-payload"].data
    inner = data.index(b"HCKR", FIRST + ALIGN)
    forged = hckv.parse(data[inner : inner + ALIGN])  # without the id it passes
    assert forged.digest == name("hidden")
    found, _ = found_in(data)
    assert [record.digest for _, record in found] == [DIGESTS[0], DIGESTS[2]]


def test_a_torn_record_is_not_found_even_if_its_header_is_whole() -> None:
    parts = records()
    torn = bytes(segment(parts[:2], sealed=False)) + bytes(parts[2][:-16]) + bytes(16)
    found, bad = found_in(torn)
    assert [record.digest for _, record in found] == list(DIGESTS[:2])
    assert [b.error.rule for b in bad] == ["marker"]


def test_a_search_reads_headers_longer_than_a_page() -> None:
    deep = NamespaceInfo(name("deep"), tuple(1 + i % 7 for i in range(4096)), 16, "raw", "deep")
    assert hckv.payload_offset(deep) > 2 * ALIGN
    data = bytes(segment([block(deep, 1, DIGESTS[0]), block(deep, 2, DIGESTS[1])], sealed=False))
    found, bad = found_in(data)
    assert [record.digest for _, record in found] == list(DIGESTS[:2])
    assert bad == []
    cut = data[: FIRST + ALIGN + 100]
    assert [b.error.rule for b in found_in(cut)[1]] == ["truncated"]


def test_a_checksum_that_fits_is_no_proof_of_sense() -> None:
    """Every number of the header set to extremes, with checksums that fit: refused, or what it was."""
    original, payload_nbytes = records()[1], sum(SPACE.below_nbytes)
    sizes = {1: "B", 2: "H", 4: "I", 8: "Q"}
    for at in range(4, 208):
        for nbytes, form in sizes.items():
            for value in (0, 1, (1 << 8 * nbytes) - 1, 1 << (8 * nbytes - 1)):
                forged = bytearray(original)
                struct.pack_into("<" + form, forged, at, value)
                crc = zlib.crc32(forged[: PAYLOAD - 4])
                struct.pack_into("<I", forged, PAYLOAD - 4, crc)
                try:
                    record = hckv.parse(forged, STORE)
                except HckvError:
                    continue
                # What remains are other identities of the same shape, never another geometry.
                assert (record.nbytes, record.payload, record.payload_nbytes) == (
                    ALIGN,
                    PAYLOAD,
                    payload_nbytes,
                )
                assert record.info is not None
                assert record.info.chunk_nbytes == SPACE.chunk_nbytes
