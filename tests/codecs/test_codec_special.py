"""Zero rows, NaN, infinities, denormals, saturation, and scales that no encoder writes (case J09)."""

from __future__ import annotations

import numpy as np
import pytest
from kvdata import FLOATS, SCALED, TOP, decode, encode, gaussian, load, mla, row, split, store

from hypercache import codecs
from hypercache.errors import CodecError, SpecError
from hypercache.model import KVDtype

INF, NAN = np.inf, np.nan
TINY = 2.0**-24


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("dim", [1, 7, 64, 128])
def test_j09_all_zero_rows_have_scale_zero_and_come_back_as_zeros(name, dtype, dim):
    values = np.zeros(dim)
    values[::2] = -0.0
    scale, stored, back = row(name, values, dtype)
    assert scale == 0.0
    assert not stored.any()
    assert not back.any() and not np.signbit(back).any()


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("value", [1e-45, 1e-40, 2.0**-24, 1e-6, -1e-10])
def test_any_other_row_has_a_positive_scale(name, value):
    for dim in (1, 64, 128, 130):
        values = np.zeros(dim)
        values[dim // 2] = value
        scale, _, back = row(name, values)
        assert scale >= TINY
        bound = abs(value) * 2.0**-4 + scale * 2.0**-10 if name == "fp8" else scale * np.sqrt(dim) / 2
        assert np.abs(back - values.astype(np.float32)).max() <= bound


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", SCALED)
def test_denormals_are_values_like_any_other(name, dtype):
    smallest = {KVDtype.BF16: 2.0**-133, KVDtype.FP16: 2.0**-24, KVDtype.FP32: 2.0**-149}[dtype]
    values = smallest * np.arange(-32, 32)
    scale, _, back = row(name, values, dtype)
    assert scale == TINY or dtype is KVDtype.FP16
    bound = {"fp8": smallest * 2 + scale * 2.0**-10, "int4": scale * 4}.get(name, scale / 2)
    assert np.abs(back - values).max() <= bound


def test_fp16_denormals_are_widened_and_narrowed_exactly():
    """127 steps of 2**-24 with the smallest scale: every code is its own value."""
    values = np.arange(-127, 128) * TINY
    scale, stored, back = row("int8", values, KVDtype.FP16)
    assert scale == TINY
    assert back.tolist() == values.tolist()
    assert stored.view(np.int8).tolist() == list(range(-127, 128))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("dim", [5, 64, 128])
def test_j09_infinities_become_the_largest_finite_magnitude(name, dtype, dim):
    values = np.ones(dim)
    values[[0, 1, 2]] = [3.0, INF, -INF]
    same = values.copy()
    same[[1, 2]] = [3.0, -3.0]
    scale, stored, back = row(name, values, dtype)
    wanted = row(name, same, dtype)
    assert (scale, stored.tolist(), back.tolist()) == (wanted[0], wanted[1].tolist(), wanted[2].tolist())


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("values", [[INF, 0.0], [INF, -INF], [-INF]])
def test_j09_infinities_in_a_row_with_nothing_finite_become_zero(name, values):
    scale, stored, back = row(name, values)
    assert scale == 0.0 and not stored.any() and not back.any()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["int8", "int4", "int4-plain"])
@pytest.mark.parametrize("dim", [5, 64, 128])
def test_j09_nan_becomes_zero_in_integer_codes(name, dtype, dim):
    values = np.linspace(-2, 2, dim)
    values[1] = NAN
    same = values.copy()
    same[1] = 0.0
    assert row(name, values, dtype)[2].tolist() == row(name, same, dtype)[2].tolist()
    assert row(name, [NAN, NAN], dtype)[0] == 0.0


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [5, 64, 128])
def test_j09_nan_stays_nan_in_fp8_and_harms_nothing_else(dtype, dim):
    values = np.linspace(-2, 2, dim)
    same = values.copy()
    values[1], same[1] = NAN, 0.0
    scale, stored, back = row("fp8", values, dtype)
    assert stored[1] & 0x7F == 0x7F and np.isnan(back[1])
    same_scale, _, same_back = row("fp8", same, dtype)
    assert scale == same_scale
    assert np.delete(back, 1).tolist() == np.delete(same_back, 1).tolist()


def test_j09_a_row_of_nothing_but_nan_in_fp8_is_valid():
    scale, stored, back = row("fp8", [NAN, 0.0, -INF])
    assert scale == TINY and stored[0] & 0x7F == 0x7F
    assert np.isnan(back[0]) and not back[1:].any()


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("dim", [3, 64, 128])
def test_j09_more_than_the_largest_scale_can_hold_saturates(name, dim):
    limit = TOP[name] * 65504
    values = np.zeros(dim)
    values[[0, 1]] = [3e38, -limit * 2]
    scale, _, back = row(name, values)
    assert np.isfinite(back).all()
    if name != "int4" or dim == 3:
        assert scale == 65504.0
        assert back[:2].tolist() == [limit, -limit]
    else:
        assert np.abs(back - np.clip(values, -limit, limit)).max() <= np.sqrt(dim) * scale / 2


def test_a_rotated_row_beyond_the_largest_scale_saturates_instead_of_wrapping():
    """64 equal values rotate into one that is 8 times as large."""
    scale, _, back = row("int4", np.full(64, 400000.0))
    assert scale == 65504.0
    assert back == pytest.approx(np.full(64, 7 * 65504 / 8))


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("dim", [2, 64, 128])
def test_the_largest_fp16_value_does_not_come_back_as_infinity(name, dim):
    values = np.zeros(dim)
    values[[0, 1]] = [65504, -65504]
    scale, _, back = row(name, values, KVDtype.FP16)
    assert np.isfinite(back).all()
    assert np.abs(back - values).max() <= np.sqrt(dim) * scale / 2 + 32


def test_values_above_448_scale_down_to_fit_fp8():
    scale, stored, back = row("fp8", [1000.0, -448.0, 1.0])
    assert stored[0] == 0x7E and scale == pytest.approx(1000 / 448, rel=2.0**-10)
    assert back == pytest.approx([1000, -448, 1], rel=2.0**-4)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_wild_row_leaves_its_neighbours_alone(name, dtype):
    layout = split(2, 64, 128, dtype)
    parts = gaussian(layout, 32)
    clean = [load(part, dtype) for part in decode(name, layout, encode(name, layout, parts, 2), 32)]
    parts[0][1, 5, :3] = store(np.array([NAN, INF, -INF], np.float32), dtype)
    wild = [load(part, dtype) for part in decode(name, layout, encode(name, layout, parts, 2), 32)]
    clean[0][1, 5] = wild[0][1, 5] = 0
    assert np.array_equal(clean[0], wild[0]) and np.array_equal(clean[1], wild[1])


# ------------------------------------------------------------------------------- bytes no encoder writes

BAD = {
    "NaN": 0x7E00,
    "signalling NaN": 0x7C01,
    "infinity": 0x7C00,
    "minus infinity": 0xFC00,
    "negative": 0xBC00,
    "negative denormal": 0x8001,
    "minus zero": 0x8000,
    "zero": 0x0000,
}


@pytest.mark.parametrize("bits", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize(("head", "part", "block", "token"), [(0, 0, 0, 0), (2, 1, 1, 15), (1, 0, 1, 3)])
def test_j09_a_scale_that_no_encoder_writes_is_refused_by_position(name, bits, head, part, block, token):
    layout = split(3, 64, 80)
    codec = codecs.get(name)
    chunks = encode(name, layout, gaussian(layout, 32), 2)
    head_nbytes = chunks.shape[1] // 3
    at = head * head_nbytes + part * 16 * (2 + codec.row_nbytes(64)) + 2 * token
    chunks[block, at : at + 2] = np.frombuffer(np.uint16(bits).tobytes(), np.uint8)
    outs = [np.empty((3, 32, p.dim), np.uint16) for p in layout.parts]
    with pytest.raises(CodecError) as caught:
        codec.decode(layout, chunks, outs)
    for text in (
        f"block {block}",
        f"head {head}",
        f"part {'kv'[part]!r}",
        f"token {token}",
        f"byte {at}",
        name,
    ):
        assert text in str(caught.value)


@pytest.mark.parametrize("name", SCALED)
def test_j09_a_chunk_without_its_scales_is_refused_by_size(name):
    layout = mla()
    codec = codecs.get(name)
    chunks = encode(name, layout, gaussian(layout, 16), 1)
    outs = [np.zeros((1, 16, part.dim), np.uint16) for part in layout.parts]
    with pytest.raises(SpecError, match=str(chunks.shape[1])):
        codec.decode(layout, chunks[:, 32:], outs)
    assert not any(out.any() for out in outs)


@pytest.mark.parametrize("name", SCALED)
def test_random_bytes_decode_or_are_refused_and_never_write_outside(name):
    """Every code is defined, so damage that leaves the scales valid shows in the checksum, not here."""
    random = np.random.default_rng(5)
    layout = split(2, 33, 64)
    codec = codecs.get(name)
    size = codec.chunk_nbytes(layout, 16)
    whole = np.full((2, 2 + 32 + 2, 64), 0xABCD, np.uint16)
    outs = [np.empty((2, 32, 33), np.uint16), whole[:, 2:-2]]
    refused = 0
    for _ in range(50):
        chunks = random.integers(0, 256, (2, size), np.uint8)
        if random.random() < 0.5:  # valid scales
            for head in range(2):
                start = head * size // 2
                for at in (start, start + 16 * (2 + codec.row_nbytes(33))):
                    chunks[:, at + 1 : at + 32 : 2] &= 0x3F
        try:
            codec.decode(layout, chunks, outs)
        except CodecError:
            refused += 1
    assert 0 < refused < 50
    assert (whole[:, :2] == 0xABCD).all() and (whole[:, -2:] == 0xABCD).all()
