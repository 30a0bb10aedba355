"""From codec to codec in one pass: the bytes that decoding and encoding again give."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvdata import FLOATS, decode, encode, gaussian, mla, split, store

from hypercache import codecs
from hypercache.codecs import kernels
from hypercache.errors import CodecError, SpecError
from hypercache.model import KVDtype

PAIRS = list(itertools.permutations(codecs.names(), 2))
SPECIAL = [0.0, -0.0, 1.0, -3.5, 65504.0, -65504.0, 1e30, -1e30, 2.0**-24, 1e-40, np.inf, -np.inf, np.nan]


def recode(source, layout, chunks, target, tokens):
    """In a buffer poisoned twice: every byte must have been written."""
    results = []
    for poison in (0x00, 0xFF):
        out = np.full((len(chunks), codecs.get(target).chunk_nbytes(layout, tokens)), poison, np.uint8)
        codecs.recode(layout, tokens, codecs.get(source), chunks, codecs.get(target), out)
        results.append(out)
    assert np.array_equal(*results), "some output bytes were not written"
    return results[0]


def twice(source, layout, chunks, target, tokens):
    parts = decode(source, layout, chunks, tokens * len(chunks))
    return encode(target, layout, parts, len(chunks))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_it_is_what_two_passes_give(source, target, dtype):
    for layout in (
        split(3, 64, 128, dtype),
        split(2, 80, 33, dtype),
        mla(576, 64, dtype),
        split(1, 1, 7, dtype),
    ):
        for tokens, blocks in ((16, 3), (1, 2), (5, 1)):
            chunks = encode(source, layout, gaussian(layout, tokens * blocks), blocks)
            found = recode(source, layout, chunks, target, tokens)
            assert np.array_equal(found, twice(source, layout, chunks, target, tokens))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize(("source", "target"), PAIRS)
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_values_of_every_kind(source, target, dtype, data):
    """Rows of NaN, infinities, zeros of both signs, denormals and magnitudes beyond what scales reach."""
    dim = data.draw(st.sampled_from([1, 2, 33, 64, 128]))
    layout = split(1, dim, 2, dtype)
    seed = data.draw(st.integers(0, 2**32 - 1))
    few = data.draw(st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=4))
    random = np.random.default_rng(seed)
    values = random.choice([*few, random.standard_normal()], (1, 6, dim)).astype(np.float32)
    parts = [store(values, dtype), store(values[:, :, :1].repeat(2, 2), dtype)]
    chunks = encode(source, layout, parts, 2)
    assert np.array_equal(recode(source, layout, chunks, target, 3), twice(source, layout, chunks, target, 3))


@pytest.mark.parametrize(("source", "target"), PAIRS)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_any_bytes_give_what_two_passes_give_or_the_same_error(source, target, data):
    """Codes that no encoder writes, NaN of any payload, and scales that are refused."""
    dtype = data.draw(st.sampled_from(FLOATS))
    layout = split(2, data.draw(st.sampled_from([2, 33, 64])), None, dtype)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    chunks = random.integers(0, 256, (2, codecs.get(source).chunk_nbytes(layout, 2)), np.uint8)
    if data.draw(st.booleans()):
        chunks = encode(source, layout, gaussian(layout, 4), 2)
        chunks[random.integers(2), random.integers(chunks.shape[1])] = random.integers(256)
    try:
        wanted = twice(source, layout, chunks, target, 2)
    except CodecError as error:
        with pytest.raises(CodecError) as caught:
            recode(source, layout, chunks, target, 2)
        assert str(caught.value) == str(error)
    else:
        assert np.array_equal(recode(source, layout, chunks, target, 2), wanted)


@pytest.mark.parametrize(
    ("source", "target"), [("raw", "int4"), ("int8", "int4"), ("int4", "fp8"), ("int4", "raw")]
)
def test_rows_with_gaps_at_odd_addresses(source, target):
    layout, tokens = split(2, 64, 80), 4
    chunks = encode(source, layout, gaussian(layout, 3 * tokens), 3)
    want = twice(source, layout, chunks, target, tokens)
    wide = np.full((3, chunks.shape[1] + 9), 0xAA, np.uint8)
    data = wide[:, 3 : 3 + chunks.shape[1]]
    data[:] = chunks
    memory = np.full((3, want.shape[1] + 7), 0xAA, np.uint8)
    out = memory[:, 1 : 1 + want.shape[1]]
    codecs.recode(layout, tokens, codecs.get(source), data[::-1], codecs.get(target), out[::-1])
    assert np.array_equal(out, want)
    assert (memory[:, 0] == 0xAA).all() and (memory[:, 1 + want.shape[1] :] == 0xAA).all()


def test_what_does_not_fit_is_refused_before_a_byte_is_written():
    layout, int8, int4 = split(2, 64), codecs.get("int8"), codecs.get("int4")
    data = encode("int8", layout, gaussian(layout, 8), 2)
    out = np.full((2, int4.chunk_nbytes(layout, 4)), 7, np.uint8)
    with pytest.raises(SpecError, match="'int8' needs uint8"):
        codecs.recode(layout, 4, int8, data[:, :-1], int4, out)
    with pytest.raises(SpecError, match="'int4' needs uint8"):
        codecs.recode(layout, 4, int8, data, int4, out[0])
    with pytest.raises(SpecError, match="'int4' needs uint8"):
        codecs.recode(layout, 4, int8, data, int4, out.view(np.int8))
    with pytest.raises(SpecError, match="2 chunks cannot become 1"):
        codecs.recode(layout, 4, int8, data, int4, out[:1])
    with pytest.raises(SpecError, match="contiguous rows"):
        codecs.recode(layout, 4, int8, data, int4, np.repeat(out, 2, 1)[:, ::2])
    fixed = out.copy()
    fixed.flags.writeable = False
    with pytest.raises(SpecError, match="read-only"):
        codecs.recode(layout, 4, int8, data, int4, fixed)
    own = split(2, 64, dtype=KVDtype.FP8_E4M3)
    with pytest.raises(SpecError, match="fp8_e4m3"):
        codecs.recode(own, 4, codecs.get("raw"), data, int4, out)
    assert (out == 7).all()


def test_warm_leaves_nothing_to_compile():
    codecs.warm_recode([split(2, 64), split(2, 128), mla(512, 64), split(1, 8, dtype=KVDtype.FP8_E5M2)])
    kept = [kernels.recoder(dim) for dim in (64, 128, 512)]
    assert [len(kernel.signatures) for kernel in kept] == [1] * 3
    for dtype in FLOATS:
        for source, target in PAIRS:
            layout = split(1, 128, 512, dtype)
            recode(source, layout, encode(source, layout, gaussian(layout, 2), 1), target, 2)
    assert [len(kernel.signatures) for kernel in kept] == [1] * 3
