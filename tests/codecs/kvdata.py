"""Data, conversions and float64 oracles for the codec tests. Independent of the code under test."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from hypercache import codecs
from hypercache.model import KVDtype, KVLayout, Part

FLOATS = (KVDtype.BF16, KVDtype.FP16, KVDtype.FP32)
SCALED = ("fp8", "int8", "int4", "int4-plain")
TOP = {"fp8": 448.0, "int8": 127.0, "int4": 7.0, "int4-plain": 7.0}


def split(heads, k, v=None, dtype=KVDtype.BF16):
    return KVLayout("split", heads, (Part("k", k), Part("v", k if v is None else v)), dtype)


def mla(latent=512, rope=64, dtype=KVDtype.BF16):
    return KVLayout("mla", 1, (Part("latent", latent), Part("rope", rope)), dtype)


def to_bf16(x):
    """float32 -> bf16 as uint16, nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), (bits >> 16 | 0x40).astype(np.uint16), rounded)


def store(x, dtype):
    """float32 values -> an engine buffer of ``dtype``."""
    if dtype is KVDtype.BF16:
        return to_bf16(x)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x, dtype.storage)


def load(array, dtype):
    """An engine buffer -> float64 values."""
    if dtype is KVDtype.BF16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return array.astype(np.float64)


def gaussian(layout, tokens, seed=0):
    """One engine buffer per part."""
    random = np.random.default_rng(seed)
    return [
        store(random.standard_normal((layout.heads, tokens, part.dim), np.float32), layout.dtype)
        for part in layout.parts
    ]


def encode(name, layout, parts, blocks):
    """Encoded chunks, in a buffer poisoned twice: every byte must have been written."""
    codec = codecs.get(name)
    tokens = parts[0].shape[1] // blocks
    results = []
    for poison in (0x00, 0xFF):
        out = np.full((blocks, codec.chunk_nbytes(layout, tokens)), poison, np.uint8)
        codec.encode(layout, parts, out)
        results.append(out)
    assert np.array_equal(*results), "some output bytes were not written"
    return results[0]


def decode(name, layout, chunks, tokens):
    """Decoded parts, poisoned twice likewise."""
    codec = codecs.get(name)
    results = []
    for poison in (0x00, 0xFF):
        parts = []
        for part in layout.parts:
            array = np.empty((layout.heads, tokens, part.dim), layout.dtype.storage)
            array.view(np.uint8)[:] = poison
            parts.append(array)
        codec.decode(layout, chunks, parts)
        results.append(parts)
    for one, other in zip(*results, strict=True):
        assert one.tobytes() == other.tobytes(), "some output bytes were not written"
    return results[0]


def row(name, values, dtype=KVDtype.FP32):
    """One token of one head with K = ``values`` and V = 0: ``(scale, code bytes, decoded float64 K)``."""
    values = np.asarray(values, np.float32)
    layout = split(1, values.size, 1, dtype)
    parts = [store(values.reshape(1, 1, -1), dtype), np.zeros((1, 1, 1), dtype.storage)]
    chunk = encode(name, layout, parts, 1)
    back = decode(name, layout, chunk, 1)[0]
    nbytes = codecs.get(name).row_nbytes(values.size)
    return float(chunk[0, :2].view("<f2")[0]), chunk[0, 2 : 2 + nbytes], load(back, dtype)[0, 0]


def scale_bound(amax, name):
    """What :mod:`hypercache.codecs.scaled` promises of a row's scale, as float64."""
    return amax / TOP[name] * (1 + 2.0**-10) + 2.0**-24


def output_rounding(values, dtype):
    """Half a unit in the last place of the output dtype, at most."""
    mantissa = {KVDtype.BF16: 8, KVDtype.FP16: 11, KVDtype.FP32: 24}[dtype]
    smallest = {KVDtype.BF16: 2.0**-134, KVDtype.FP16: 2.0**-25, KVDtype.FP32: 2.0**-150}[dtype]
    return np.maximum(np.abs(values) * 2.0**-mantissa, smallest)


def e4m3_values():
    """The 256 values of OFP8 E4M3 from its definition."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(
        exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent.astype(float) - 7)
    )
    value[code & 0x7F == 0x7F] = np.nan
    return np.where(code & 0x80, -value, value)


def e4m3_round(x):
    """float64 -> the nearest E4M3 code by search, ties to the even code, saturating. Finite input."""
    positive = e4m3_values()[:0x7F]
    a = np.minimum(np.abs(x), 448.0)
    above = np.clip(np.searchsorted(positive, a), 1, 0x7E)
    low, high = positive[above - 1], positive[above]
    up = (a - low > high - a) | ((a - low == high - a) & (above % 2 == 0))
    return (above - ~up) | np.where(np.signbit(x), 0x80, 0)


@st.composite
def places(draw, shape, dtype):
    """How an array lies in foreign memory: any order, direction and gaps of the outer axes, any alignment.

    The result makes one in memory filled with a given byte: ``(memory, array)``.
    """
    gap, shift = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    swap, steps = draw(st.booleans()), draw(st.tuples(*[st.sampled_from([1, -1])] * 2))

    def make(fill):
        first, second = (shape[1], shape[0]) if swap else shape[:2]
        memory = np.full(shift + first * second * (shape[2] + gap) * dtype.itemsize, fill, np.uint8)
        array = memory[shift:].view(dtype).reshape(first, second, -1)[:, :, : shape[2]]
        array = array.transpose(1, 0, 2) if swap else array
        return memory, array[:: steps[0], :: steps[1]]

    return make
