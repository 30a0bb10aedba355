"""Layouts, strides, head ranges, and what is refused before a byte is written (cases J01 to J05, J11)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvdata import FLOATS, SCALED, decode, encode, gaussian, load, mla, places, split

from hypercache import codecs
from hypercache.errors import SpecError
from hypercache.model import KVDtype, KVLayout

LAYOUTS = [
    split(1, 64),
    split(2, 96, 64),
    split(8, 128),
    split(40, 80),
    split(16, 256),  # J02: Gemma alternates these two
    split(4, 512),
    split(3, 5, 17),
    split(2, 1, 130),
    mla(),
    mla(512, 1),
]
BLOCKS = [(16, 1), (16, 3), (64, 2), (1, 5)]


def with_dtype(layout, dtype):
    return KVLayout(layout.kind, layout.heads, layout.parts, dtype)


def noise(layout, tokens, seed=0):
    """Every bit pattern, NaN payloads included."""
    random = np.random.default_rng(seed)
    return [
        random.integers(0, 256, (layout.heads, tokens, p.dim * layout.dtype.itemsize), np.uint8).view(
            layout.dtype.storage
        )
        for p in layout.parts
    ]


def ids(layout):
    return f"{layout.kind}{layout.heads}x{'+'.join(str(part.dim) for part in layout.parts)}"


@pytest.mark.parametrize(("tokens", "blocks"), BLOCKS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=ids)
@pytest.mark.parametrize("dtype", list(KVDtype))
def test_j01_j03_raw_is_bit_equal_for_every_dtype(layout, dtype, tokens, blocks):
    layout = with_dtype(layout, dtype)
    parts = noise(layout, tokens * blocks)
    chunks = encode("raw", layout, parts, blocks)
    assert chunks.shape == (blocks, layout.chunk_nbytes(tokens))
    for block in range(blocks):
        span = slice(block * tokens, (block + 1) * tokens)
        want = b"".join(part[head, span].tobytes() for head in range(layout.heads) for part in parts)
        assert chunks[block].tobytes() == want
    for part, back in zip(parts, decode("raw", layout, chunks, tokens * blocks), strict=True):
        assert part.tobytes() == back.tobytes()


@pytest.mark.parametrize(("tokens", "blocks"), BLOCKS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=ids)
@pytest.mark.parametrize("name", SCALED)
def test_j01_j03_every_layout_round_trips_within_the_codecs_error(name, layout, tokens, blocks):
    parts = gaussian(layout, tokens * blocks)
    chunks = encode(name, layout, parts, blocks)
    most = {"fp8": 0.06, "int8": 0.02}.get(name, 0.25)
    for part, back in zip(parts, decode(name, layout, chunks, tokens * blocks), strict=True):
        truth, found = load(part, layout.dtype), load(back, layout.dtype)
        assert np.linalg.norm(found - truth) <= most * np.linalg.norm(truth)
        assert np.abs(found - truth).max() <= most * 2.5 * np.abs(truth).max()


@pytest.mark.parametrize("name", codecs.names())
@pytest.mark.parametrize("layout", LAYOUTS, ids=ids)
def test_a_head_range_alone_is_the_slice_of_the_whole(name, layout):
    """So that ranks of another tensor-parallel degree read their share."""
    parts = gaussian(layout, 32)
    whole = encode(name, layout, parts, 2)
    one = whole.shape[1] // layout.heads
    for first, stop in {(0, 1), (layout.heads // 2, layout.heads), (0, layout.heads)}:
        share = KVLayout(layout.kind, stop - first, layout.parts, layout.dtype)
        alone = encode(name, share, [part[first:stop] for part in parts], 2)
        assert np.array_equal(alone, whole[:, first * one : stop * one])
        back = decode(name, share, whole[:, first * one : stop * one], 32)
        full = decode(name, layout, whole, 32)
        assert all(np.array_equal(b, f[first:stop]) for b, f in zip(back, full, strict=True))


@pytest.mark.parametrize("name", codecs.names())
def test_a_run_of_blocks_is_its_blocks(name):
    layout = split(3, 64, 80)
    parts = gaussian(layout, 64)
    run = encode(name, layout, parts, 4)
    for block in range(4):
        alone = encode(name, layout, [part[:, block * 16 : block * 16 + 16] for part in parts], 1)
        assert np.array_equal(run[block], alone[0])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", codecs.names())
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_strides_and_alignment_are_free(name, dtype, data):
    """As in paged engine memory. Nothing between the rows is touched."""
    heads, blocks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    dims = data.draw(st.tuples(st.sampled_from([1, 5, 64, 128]), st.sampled_from([2, 64, 96])))
    layout = split(heads, *dims, dtype)
    codec = codecs.get(name)
    tokens = 16 * blocks
    plain = gaussian(layout, tokens)
    want = encode(name, layout, plain, blocks)
    makers = [data.draw(places((heads, tokens, dim), dtype.storage)) for dim in dims]

    sources = [make(0x5A)[1] for make in makers]
    for source, part in zip(sources, plain, strict=True):
        source[:] = part
    wide = np.full((blocks * 2, want.shape[1] + 3), 0x5A, np.uint8)
    rows = wide[::2, 1:-2]
    codec.encode(layout, sources, rows)
    assert np.array_equal(rows, want)
    assert (wide[1::2] == 0x5A).all() and (wide[:, 0] == 0x5A).all() and (wide[:, -2:] == 0x5A).all()

    zeros, ones = [make(0x00) for make in makers], [make(0xFF) for make in makers]
    for targets in (zeros, ones):
        codec.decode(layout, rows, [array for _, array in targets])
        for (_, array), part in zip(targets, decode(name, layout, want, tokens), strict=True):
            assert array.tobytes() == part.tobytes()
    for (low, array), (high, _) in zip(zeros, ones, strict=True):
        untouched = (low == 0x00) & (high == 0xFF)
        assert np.count_nonzero(untouched) == low.size - array.nbytes


@pytest.mark.parametrize("name", codecs.names())
def test_read_only_input_is_fine_and_read_only_output_is_refused(name):
    layout = split(2, 64)
    codec = codecs.get(name)
    parts = gaussian(layout, 16)
    for part in parts:
        part.flags.writeable = False
    chunks = encode(name, layout, parts, 1)
    chunks.flags.writeable = False
    decode(name, layout, chunks, 16)
    with pytest.raises(SpecError, match="part 'k' is read-only"):
        codec.decode(layout, chunks, parts)
    with pytest.raises(SpecError, match="out is read-only"):
        codec.encode(layout, parts, chunks)


def refusals(layout, codec):
    """Label -> (parts, rows, a word of the message); all but one thing right."""
    parts = gaussian(layout, 32)
    size = codec.chunk_nbytes(layout, 16)
    rows = np.zeros((2, size), np.uint8)
    return {
        "a part missing": (parts[:1], rows, "2 parts"),
        "parts swapped": (parts[::-1], rows, "'k'"),
        "another dtype": ([parts[0], parts[1].view(np.int16)], rows, "'v'"),
        "another byte order": ([parts[0].byteswap().view(">u2"), parts[1]], rows, "'k'"),
        "one head less": ([part[1:] for part in parts], rows, "shape"),
        "packed K and V (J04)": ([np.concatenate(parts, axis=2)] * 2, rows, "shape"),
        "token-major (J04)": ([part.transpose(1, 0, 2) for part in parts], rows, "shape"),
        "transposed keys (J04)": (
            [np.ascontiguousarray(parts[0].transpose(0, 2, 1)).transpose(0, 2, 1), parts[1]],
            rows,
            "innermost",
        ),
        "two axes": ([part[0] for part in parts], rows, "tokens"),
        "a block and a half": (parts, np.zeros((3, size), np.uint8), "whole blocks"),
        "no blocks": (parts, rows[:0], "whole blocks"),
        "no tokens": ([part[:, :0] for part in parts], rows, "whole blocks"),
        "short rows (J05)": (parts, rows[:, :-1], str(size)),
        "long rows (J05)": (parts, np.zeros((2, size + 1), np.uint8), str(size)),
        "rows of another type": (parts, rows.view(np.int8), "uint8"),
        "gaps in rows": (parts, np.zeros((2, 2 * size), np.uint8)[:, ::2], "contiguous"),
        "flat rows": (parts, rows.reshape(-1), "uint8"),
    }


@pytest.mark.parametrize("name", codecs.names())
@pytest.mark.parametrize("label", refusals(split(4, 64, 96), codecs.get("raw")))
def test_j04_j05_j11_any_disagreement_is_refused_before_a_byte_is_written(name, label):
    layout = split(4, 64, 96)
    codec = codecs.get(name)
    parts, rows, word = refusals(layout, codec)[label]
    before = [part.copy() for part in parts]
    with pytest.raises(SpecError, match=word):
        codec.encode(layout, parts, rows)
    with pytest.raises(SpecError, match=word):
        codec.decode(layout, rows, parts)
    assert not rows.any()
    assert all(np.array_equal(a, b) for a, b in zip(parts, before, strict=True))


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("dtype", [KVDtype.FP8_E4M3, KVDtype.FP8_E5M2])
def test_fp8_engines_are_sent_to_raw(name, dtype):
    layout = split(2, 64, dtype=dtype)
    codec = codecs.get(name)
    assert not codec.supports(dtype) and codecs.get("raw").supports(dtype)
    rows = np.zeros((1, codec.chunk_nbytes(layout, 16)), np.uint8)
    with pytest.raises(SpecError, match="raw"):
        codec.encode(layout, [np.zeros((2, 16, 64), np.uint8)] * 2, rows)
