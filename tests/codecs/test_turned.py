"""Decoding that moves keys on the way: decode to float32, rotate, round once, and touch nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvdata import FLOATS, decode, encode, gaussian, load, mla, output_rounding, places, split, store

from hypercache import codecs
from hypercache.errors import SpecError
from hypercache.model import KVDtype, KVLayout, RopeSpec
from hypercache.rope import Turn, frequencies, rerotate, turn

ROOT = Path(__file__).parents[2]
NAMES = codecs.names()


def rope(dim, interleaved=False):
    return RopeSpec("default", 10000.0, dim, interleaved)


def pairs(x, spec):
    """Views of the first and of the second elements of all pairs."""
    dim = spec.rotary_dim
    if spec.interleaved:
        return x[..., :dim:2], x[..., 1:dim:2]
    return x[..., : dim // 2], x[..., dim // 2 : dim]


def turned(x, spec, delta):
    """float64 rotation of float64 values."""
    angle, out = delta * frequencies(spec), x.copy()
    (a, b), (to_a, to_b) = pairs(x, spec), pairs(out, spec)
    to_a[:], to_b[:] = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
    return out


def turned32(x, spec, move):
    """The same in float32, operation by operation: the very bits, on any machine."""
    out = x.copy()
    (a, b), (to_a, to_b) = pairs(x, spec), pairs(out, spec)
    to_a[:], to_b[:] = a * move.cos - b * move.sin, b * move.cos + a * move.sin
    return out


def floats(name, layout, chunks, tokens):
    """What the chunks decode to in float32, before the rounding to the engine's dtype."""
    if name == "raw":
        return [load(part, layout.dtype).astype(np.float32) for part in decode(name, layout, chunks, tokens)]
    return decode(name, KVLayout(layout.kind, layout.heads, layout.parts, KVDtype.FP32), chunks, tokens)


def moved(name, layout, chunks, tokens, move):
    """Decoded with ``move``, into memory poisoned twice."""
    results = []
    for poison in (0x00, 0xFF):
        parts = [np.empty((layout.heads, tokens, part.dim), layout.dtype.storage) for part in layout.parts]
        for part in parts:
            part.view(np.uint8)[:] = poison
        codecs.get(name).decode(layout, chunks, parts, move)
        results.append(parts)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(*results, strict=True))
    return results[0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_it_is_decoding_then_rotating_for_every_codec_dtype_and_stride(name, dtype, data):
    heads, blocks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    dims = data.draw(st.tuples(st.sampled_from([2, 33, 64, 80, 96, 128]), st.sampled_from([1, 64])))
    spec = rope(2 * data.draw(st.integers(1, dims[0] // 2)), data.draw(st.booleans()))
    delta = data.draw(st.integers(-1_000_000, 1_000_000).filter(bool))
    layout, tokens, move = split(heads, *dims, dtype), 16 * blocks, turn(spec, delta)
    parts = gaussian(layout, tokens, data.draw(st.integers(0, 99)))
    chunks = encode(name, layout, parts, blocks)
    makers = [data.draw(places((heads, tokens, dim), dtype.storage)) for dim in dims]
    zeros, ones = [make(0x00) for make in makers], [make(0xFF) for make in makers]
    for targets in (zeros, ones):
        codecs.get(name).decode(layout, chunks, [array for _, array in targets], move)
    for (low, array), (high, _) in zip(zeros, ones, strict=True):
        assert np.count_nonzero((low == 0x00) & (high == 0xFF)) == low.size - array.nbytes
    keys, values = (np.ascontiguousarray(array) for _, array in zeros)

    plain, exact = decode(name, layout, chunks, tokens), floats(name, layout, chunks, tokens)[0]
    assert values.tobytes() == plain[1].tobytes()
    assert keys[..., spec.rotary_dim :].tobytes() == plain[0][..., spec.rotary_dim :].tobytes()
    assert keys.tobytes() == store(turned32(exact, spec, move), dtype).tobytes()
    truth = turned(exact.astype(np.float64), spec, delta)
    in_float32 = 6 * 2.0**-24 * np.abs(exact).max()
    assert (
        np.abs(load(keys, dtype) - truth) <= in_float32 + output_rounding(np.abs(truth) + 1e-3, dtype)
    ).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_k03_of_80_elements_48_come_out_as_without_a_move(name, dtype, interleaved):
    layout, spec = split(2, 80, dtype=dtype), rope(32, interleaved)
    chunks = encode(name, layout, gaussian(layout, 48), 3)
    plain, found = decode(name, layout, chunks, 48), moved(name, layout, chunks, 48, turn(spec, 4000))
    assert found[0][..., 32:].tobytes() == plain[0][..., 32:].tobytes()
    assert found[1].tobytes() == plain[1].tobytes()
    error = np.abs(load(found[0], dtype) - turned(load(plain[0], dtype), spec, 4000)).max()
    assert error < {KVDtype.BF16: 0.03, KVDtype.FP16: 0.004, KVDtype.FP32: 2e-6}[dtype]
    assert np.abs(load(found[0], dtype) - load(plain[0], dtype)).max() > 1


@pytest.mark.parametrize("name", NAMES)
def test_mla_turns_its_rope_part(name):
    layout, spec = mla(), rope(64)
    chunks = encode(name, layout, gaussian(layout, 32), 2)
    plain, found = decode(name, layout, chunks, 32), moved(name, layout, chunks, 32, turn(spec, -500))
    assert found[0].tobytes() == plain[0].tobytes()
    truth = turned(floats(name, layout, chunks, 32)[1].astype(np.float64), spec, -500)
    np.testing.assert_allclose(load(found[1], layout.dtype), truth, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rotary_dim", [6, 32, 64, 128])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rerotating_decoded_keys_gives_the_bits_of_raw_moved_on_the_way(dtype, rotary_dim, interleaved):
    layout, move = split(3, 128, dtype=dtype), turn(rope(rotary_dim, interleaved), 777)
    parts = gaussian(layout, 32)
    found = moved("raw", layout, encode("raw", layout, parts, 2), 32, move)
    rerotate(layout, parts, move)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(parts, found, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_no_move_is_plain_decoding(name):
    layout = split(2, 64)
    chunks = encode(name, layout, gaussian(layout, 32), 2)
    plain, still = decode(name, layout, chunks, 32), moved(name, layout, chunks, 32, turn(rope(64), 0))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(plain, still, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_wild_keys_stay_in_their_pairs(dtype, interleaved):
    """`raw` keeps any bit pattern: NaN and infinities spoil their own pair, and a NaN stays one."""
    layout, spec = split(1, 64, dtype=dtype), rope(64, interleaved)
    parts = gaussian(layout, 16)
    chunks = encode("raw", layout, parts, 1)
    move = turn(spec, 3)
    clean = load(moved("raw", layout, chunks, 16, move)[0], dtype)
    patterns = {KVDtype.BF16: 0x7FFF, KVDtype.FP16: 0x7FFF, KVDtype.FP32: 0x7FFFFFFF}
    bits = parts[0].view({2: np.uint16, 4: np.uint32}[dtype.itemsize])
    a, b = pairs(np.arange(64), spec)
    bits[0, 4, a[3]] = patterns[dtype]  # NaN with every payload bit
    bits[0, 9, b[5]] = store(np.array([np.inf], np.float32), dtype).view(bits.dtype)[0]
    wild = load(moved("raw", layout, encode("raw", layout, parts, 1), 16, move)[0], dtype)
    assert np.isnan(wild[0, 4, [a[3], b[3]]]).all()
    lost = wild[0, 9, [a[5], b[5]]]
    assert ((np.abs(lost) == 65504) if dtype is KVDtype.FP16 else np.isinf(lost)).all()
    for token, pair in ((4, 3), (9, 5)):
        clean[0, token, [a[pair], b[pair]]] = wild[0, token, [a[pair], b[pair]]] = 0
    assert np.array_equal(clean, wild)


@pytest.mark.parametrize("dtype", [KVDtype.FP8_E4M3, KVDtype.FP8_E5M2])
def test_fp8_keys_are_not_moved(dtype):
    layout = split(2, 64, dtype=dtype)
    parts = gaussian(split(2, 64), 16)
    parts = [np.zeros(part.shape, np.uint8) for part in parts]
    chunks = encode("raw", layout, parts, 1)
    with pytest.raises(SpecError, match=f"{dtype.value}.*exact hits"):
        codecs.get("raw").decode(layout, chunks, parts, turn(rope(64), 5))


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_of_another_layer_group_is_refused_before_a_byte_is_written(name):
    layout = split(2, 64)
    parts = gaussian(layout, 16)
    chunks = encode(name, layout, parts, 1)
    before = [part.tobytes() for part in parts]
    with pytest.raises(SpecError, match="rotates 128 elements, part 'k' has 64"):
        codecs.get(name).decode(layout, chunks, parts, turn(rope(128), 5))
    assert [part.tobytes() for part in parts] == before


@pytest.mark.parametrize("name", NAMES)
def test_warm_compiles_all_that_a_move_needs(name):
    """Else the first moved key of a process would wait for the compiler."""
    code = f"""
from hypercache import codecs
from hypercache.codecs import kernels
from hypercache.rope import turn
from test_turned import encode, gaussian, moved, rope, split
from hypercache.model import KVDtype

def compiled():
    used = *kernels._DECODE.values(), *kernels._TURN.values(), kernels.copy_rows
    return [len(kernel.signatures) for kernel in used]

layouts = [split(2, 128), split(1, 1), split(2, 33)]
fp8 = [split(2, 64, dtype=KVDtype.FP8_E5M2)] if {name!r} == "raw" else []
codecs.warm(codecs.get({name!r}), layouts + fp8)
ready = compiled()
assert 0 < sum(ready)
for layout in layouts[::2]:
    chunks = encode({name!r}, layout, gaussian(layout, 32), 2)
    for dim in (2, 32, 64, 128):
        if dim <= layout.parts[0].dim:
            moved({name!r}, layout, chunks, 32, turn(rope(dim, dim == 32), 5))
assert compiled() == ready
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(Path(__file__).parent)))}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=100)


def test_a_turn_keeps_its_arrays():
    move = turn(rope(64), 5)
    assert isinstance(move, Turn) and move.cos.base is None and move.sin.base is None
