"""How far decoded K/V may be from the truth: float64 bounds and figures (case J06)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvdata import (
    FLOATS,
    SCALED,
    TOP,
    decode,
    e4m3_round,
    e4m3_values,
    encode,
    gaussian,
    load,
    output_rounding,
    row,
    scale_bound,
    split,
    store,
)

from hypercache import codecs
from hypercache.model import KVDtype

DIMS = st.sampled_from([1, 2, 3, 5, 16, 48, 64, 80, 96, 128, 130, 192, 256, 576])


@st.composite
def rows(draw, dtype):
    """Tokens of one head: magnitudes over the dtype's whole range, outliers, zeros, denormals."""
    dim = draw(DIMS)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = random.standard_normal((8, dim))
    spread = draw(st.sampled_from([0.0, 1.0, 4.0, 12.0]))
    values *= 2.0 ** random.normal(0, spread, values.shape)
    largest = {KVDtype.FP16: 4, KVDtype.BF16: 16, KVDtype.FP32: 16}[dtype]
    values *= 2.0 ** draw(st.integers(-30, largest))
    values[random.random(values.shape) < draw(st.sampled_from([0.0, 0.2, 0.9]))] = 0.0
    values *= 2.0 ** random.integers(-20, 1, (8, 1))
    return store(np.clip(values, -60000, 60000).astype(np.float32)[None], dtype)


def round_trip(name, part, dtype):
    layout = split(1, part.shape[2], 1, dtype)
    parts = [part, np.zeros((1, part.shape[1], 1), dtype.storage)]
    return load(decode(name, layout, encode(name, layout, parts, 1), part.shape[1])[0], dtype)[0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["int8", "int4-plain"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_j06_integer_codes_stay_within_half_a_scale(name, dtype, data):
    part = data.draw(rows(dtype))
    truth, found = load(part, dtype)[0], round_trip(name, part, dtype)
    scale = scale_bound(np.abs(truth).max(axis=1, keepdims=True), name)
    bound = scale / 2 * (1 + 2.0**-15) + output_rounding(np.abs(truth) + scale, dtype)
    assert (np.abs(found - truth) <= bound).all()


@pytest.mark.parametrize("dtype", FLOATS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_j06_fp8_stays_within_a_sixteenth_and_its_absolute_bound_below(dtype, data):
    part = data.draw(rows(dtype))
    truth, found = load(part, dtype)[0], round_trip("fp8", part, dtype)
    scale = scale_bound(np.abs(truth).max(axis=1, keepdims=True), "fp8")
    rounding = output_rounding(truth * (1 + 2.0**-4), dtype)
    normal = np.abs(truth) >= scale * 2.0**-6
    bound = np.where(normal, np.abs(truth) * 2.0**-4, scale * 2.0**-10) * (1 + 2.0**-20)
    assert (np.abs(found - truth) <= bound + rounding).all()


@pytest.mark.parametrize("dtype", FLOATS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_j06_rotated_int4_keeps_its_euclidean_bound(dtype, data):
    part = data.draw(rows(dtype))
    dim = part.shape[2]
    block = dim & -dim
    truth, found = load(part, dtype)[0], round_trip("int4", part, dtype)
    pieces = truth.reshape(8, dim // block, block)
    # No rotated element exceeds the norm of its block, and one scale serves the row.
    scale = scale_bound(np.linalg.norm(pieces, axis=2).max(axis=1) * (1 + 2.0**-20), "int4")[:, None]
    error = np.linalg.norm((found - truth).reshape(pieces.shape), axis=2)
    rounding = np.linalg.norm(output_rounding(np.abs(pieces) + scale[:, :, None] * block, dtype), axis=2)
    assert (error <= np.sqrt(block) * scale / 2 * (1 + 2.0**-12) + rounding).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_fp8_codes_are_the_nearest_e4m3_values(dtype):
    """Against a search over the 256 values of the standard, in float64."""
    table = e4m3_values()
    random = np.random.default_rng(1)
    for power in (-12, -3, 0, 5):
        values = (random.standard_normal(512) * 2.0 ** random.integers(-18, 1, 512) * 2.0**power).astype("f4")
        values = load(store(values, dtype), dtype).astype(np.float32)
        scale, stored, back = row("fp8", values, dtype)
        scaled = values * (np.float32(1) / np.float32(scale))
        assert np.array_equal(stored, e4m3_round(scaled.astype(np.float64)))
        exact = table[stored] * scale
        assert (np.abs(back - exact) <= output_rounding(exact, dtype)).all()


def test_fp8_ties_go_to_even_and_subnormals_are_exact():
    """With amax 448 the scale is 1, so that values and codes can be written down."""
    values = [
        448,
        17,
        19,
        -17,
        -19,
        2.0**-9,
        2.0**-10,
        3 * 2.0**-10,
        7 * 2.0**-9,
        2.0**-6,
        15 * 2.0**-10,
        -0.0,
    ]
    scale, stored, back = row("fp8", values)
    assert scale == 1.0
    want = [448, 16, 20, -16, -20, 2.0**-9, 0, 2.0**-8, 7 * 2.0**-9, 2.0**-6, 2.0**-6, -0.0]
    assert back.tolist() == want
    assert stored[-1] == 0x80 and np.signbit(back[-1])


def test_integer_ties_go_to_even():
    assert row("int8", [127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5])[2].tolist() == [127, 0, 2, 2, 0, -2, -126]
    assert row("int4-plain", [7, 0.5, 1.5, 2.5, -0.5, -1.5, -6.5])[2].tolist() == [7, 0, 2, 2, 0, -2, -6]


def test_int4_packs_halves_of_a_row_into_nibbles():
    scale, stored, _ = row("int4-plain", [1, -2, 3, 7, -7])
    assert scale == 1.0
    assert stored.tolist() == [0x71, 0x9E, 0x03]  # elements 0 and 3, 1 and 4, 2 and nothing


def test_int4_rotates_by_the_orthonormal_walsh_hadamard_matrix():
    """Code 7 in one rotated channel is one row of the matrix in Sylvester's order."""
    hadamard = np.ones((1, 1))
    while len(hadamard) < 64:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    for channel in (0, 1, 5, 31, 32, 63):
        scale, stored, back = row("int4", hadamard[channel] * 7 / 8)
        codes = np.concatenate([stored & 15, stored >> 4])
        assert codes[channel] == 7 and np.count_nonzero(codes) == 1
        assert scale == 1.0
        assert back.tolist() == (hadamard[channel] * 7 / 8).tolist()


def figures(name, layout, tokens=2048, factor=None):
    random = np.random.default_rng(3)
    truth = [random.standard_normal((layout.heads, tokens, p.dim), np.float32) for p in layout.parts]
    if factor:
        for part in truth:
            part[:, :, :: part.shape[2] // 4] *= factor
    parts = [store(part, layout.dtype) for part in truth]
    back = decode(name, layout, encode(name, layout, parts, tokens // 16), tokens)
    a = np.concatenate([part.astype(np.float64).ravel() for part in truth])
    b = np.concatenate([load(part, layout.dtype).ravel() for part in back])
    return a @ b / np.sqrt((a @ a) * (b @ b)), np.linalg.norm(a - b) / np.linalg.norm(a)


@pytest.mark.parametrize("dtype", FLOATS)
def test_j06_documented_figures_on_gaussian_data(dtype):
    """Cosine against float32 at head dim 128. E4M3 has 3 mantissa bits: 0.9997 is what it can do."""
    layout = split(4, 128, dtype=dtype)
    cosine = {name: figures(name, layout)[0] for name in SCALED}
    assert cosine["int8"] >= 0.9999
    assert 0.9995 <= cosine["fp8"] < 0.9999
    assert cosine["int4"] >= 0.993
    assert cosine["int4-plain"] >= 0.993


def test_j06_fp8_has_several_times_the_error_of_int8_at_equal_size():
    layout = split(4, 128)
    assert figures("fp8", layout)[1] > 3 * figures("int8", layout)[1]
    assert codecs.get("fp8").chunk_nbytes(layout, 16) == codecs.get("int8").chunk_nbytes(layout, 16)


@pytest.mark.parametrize("dim", [64, 128, 96, 576])
def test_rotation_pays_on_outlier_channels(dim):
    layout = split(2, dim)
    assert figures("int4", layout, factor=30.0)[1] < 0.75 * figures("int4-plain", layout, factor=30.0)[1]


def test_j06_encoding_decoded_integers_again_changes_nothing():
    """A chunk that goes through an engine and back does not drift further."""
    layout = split(2, 64, dtype=KVDtype.FP32)
    for name in ("int8", "int4-plain"):
        once = encode(name, layout, gaussian(layout, 64), 4)
        again = encode(name, layout, decode(name, layout, once, 64), 4)
        assert np.array_equal(decode(name, layout, once, 64), decode(name, layout, again, 64))


def test_sizes_are_those_of_the_reference_description():
    layout = split(8, 128)
    plain = layout.chunk_nbytes(16)
    ratio = {name: plain / codecs.get(name).chunk_nbytes(layout, 16) for name in codecs.names()}
    assert ratio["raw"] == 1.0
    assert ratio["fp8"] == ratio["int8"] == pytest.approx(1.97, abs=0.005)
    assert ratio["int4"] == ratio["int4-plain"] == pytest.approx(3.88, abs=0.005)


assert set(TOP) == set(SCALED)
