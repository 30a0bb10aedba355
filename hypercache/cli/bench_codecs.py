"""What the benchmark measures of the codecs: size, error, and speed against memcpy on one thread.

Speed is that of calls on 1 MiB of bf16 K/V each, the size of a frame, out of 64 MiB, which no cache holds;
``_64k`` in a key says that the calls were that small, where the cost of a call from Python shows, and
``_fp32`` that the K/V were float32. In each round memcpy, encode, decode and a decode that moves the keys run
one after the other, so a busy machine slows all four. Figures are medians over the rounds, a ratio is the
median of the rounds' ratios.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import numpy.typing as npt

from hypercache import codecs
from hypercache.codecs import Codec
from hypercache.model import KVDtype, KVLayout, Part, RopeSpec
from hypercache.rope import turn

HEADS, TOKENS = 8, 16
BUFFER_BYTES = 64 << 20
RUNS = {  # key suffix -> element type, bytes of the K/V of one call
    "": (KVDtype.BF16, 1 << 20),
    "_64k": (KVDtype.BF16, 64 << 10),
    "_fp32": (KVDtype.FP32, 1 << 20),
}
MIN_ROUNDS = 3

F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]


def measure(
    seconds_budget: float, dims: tuple[int, ...] = (64, 128)
) -> dict[str, dict[str, dict[str, float]]]:
    """Result: codec name -> head dim (as text) -> figures. bf16 in and out, 8 heads, blocks of 16 tokens.

    ratio: bf16 bytes / encoded bytes.
    cosine, relative_error: of decoded bf16 K/V against float32 ones, Gaussian; the error is the L2 norm of
        the difference / that of the truth, so rounding the input to bf16 is in it, which is all of it for a
        lossless codec. cosine_outliers, relative_error_outliers: with outlier channels.
    same_values, same_values_outliers: share of the bf16 values that come back bit for bit; 1 is lossless.
    encode_gbps, decode_gbps, turned_gbps, memcpy_gbps: 1e9 bytes of K/V per second; "turned" decodes and
        moves the keys, which are half of the bytes, in the same pass (the whole head, half-split pairs).
    encode_to_memcpy, decode_to_memcpy, turned_to_memcpy: ratios of those.
    """
    names = codecs.names()
    share = seconds_budget / (len(names) * len(dims))
    result: dict[str, dict[str, dict[str, float]]] = {name: {} for name in names}
    for dim in dims:
        layout = _layout(dim, KVDtype.BF16)
        gauss, outliers = _data(dim)
        for name in names:
            codec = codecs.get(name)
            codecs.warm(codec, [layout])
            figures = {"ratio": layout.chunk_nbytes(TOKENS) / codec.chunk_nbytes(layout, TOKENS)}
            for suffix, data in (("", gauss), ("_outliers", outliers)):
                found = _error(codec, layout, data)
                figures |= {f"{key}{suffix}": value for key, value in found.items()}
            figures |= _speed(codec, dim, gauss, share)
            result[name][str(dim)] = figures
    return result


def _layout(dim: int, dtype: KVDtype) -> KVLayout:
    return KVLayout("split", HEADS, (Part("k", dim), Part("v", dim)), dtype)


def _data(dim: int) -> tuple[F32, F32]:
    """Gaussian K/V of 1,024 tokens, (2, heads, tokens, dim); the same with some channels of K 30x larger."""
    random = np.random.default_rng(dim)
    gauss = random.standard_normal((2, HEADS, 1024, dim), np.float32)
    outliers = gauss.copy()
    for head in range(HEADS):
        outliers[0, head][:, random.choice(dim, max(1, dim // 32), replace=False)] *= 30.0
    return gauss, outliers


def _to_bf16(x: F32) -> U16:
    """Nearest even; finite input."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _error(codec: Codec, layout: KVLayout, truth: F32) -> dict[str, float]:
    parts = list(_to_bf16(truth))
    chunks = np.empty((truth.shape[2] // TOKENS, codec.chunk_nbytes(layout, TOKENS)), np.uint8)
    codec.encode(layout, parts, chunks)
    back = [np.empty_like(part) for part in parts]
    codec.decode(layout, chunks, back)
    a = truth.astype(np.float64).ravel()
    b = (np.stack(back).astype(np.uint32) << 16).view(np.float32).astype(np.float64).ravel()
    return {
        "cosine": float(a @ b / np.sqrt((a @ a) * (b @ b))),
        "relative_error": float(np.linalg.norm(a - b) / np.linalg.norm(a)),
        "same_values": float(np.mean(np.stack(parts) == np.stack(back))),
    }


def _speed(codec: Codec, dim: int, gauss: F32, seconds: float) -> dict[str, float]:
    figures: dict[str, float] = {}
    for suffix, (dtype, run) in RUNS.items():
        layout = _layout(dim, dtype)
        codecs.warm(codec, [layout])
        nbytes, works = _passes(codec, layout, gauss, run)
        copy, *others = _rounds(works, seconds / len(RUNS))
        figures[f"memcpy_gbps{suffix}"] = nbytes / 1e9 / median(copy)
        for name, times in zip(("encode", "decode", "turned"), others, strict=True):
            figures[f"{name}_gbps{suffix}"] = nbytes / 1e9 / median(times)
            figures[f"{name}_to_memcpy{suffix}"] = median(a / b for a, b in zip(copy, times, strict=True))
    return figures


def _rounds(works: Sequence[Callable[[], None]], seconds: float) -> list[list[float]]:
    """Times of each work, alternating, until ``seconds`` have passed."""
    for work in works:
        work()  # page faults belong to no one
    times: list[list[float]] = [[] for _ in works]
    end = time.perf_counter() + seconds
    while len(times[0]) < MIN_ROUNDS or (time.perf_counter() < end and len(times[0]) < 200):
        for work, found in zip(works, times, strict=True):
            start = time.perf_counter()
            work()
            found.append(time.perf_counter() - start)
    return times


def _passes(
    codec: Codec, layout: KVLayout, gauss: F32, run: int
) -> tuple[int, tuple[Callable[[], None], ...]]:
    """The bytes of a buffer, and what copies, encodes, decodes and turns it in calls of ``run`` bytes."""
    blocks = run // layout.chunk_nbytes(TOKENS)
    tokens, call_bytes = blocks * TOKENS, blocks * layout.chunk_nbytes(TOKENS)
    calls = BUFFER_BYTES // call_bytes
    dim = layout.parts[0].dim
    source = np.empty((calls, 2, HEADS, tokens, dim), layout.dtype.storage)
    values = gauss[:, :, np.arange(tokens) % gauss.shape[2]]
    source[:] = _to_bf16(values) if layout.dtype is KVDtype.BF16 else values
    target = np.empty_like(source)
    chunks = np.empty((calls, blocks, codec.chunk_nbytes(layout, TOKENS)), np.uint8)

    def copy() -> None:
        for i in range(calls):
            np.copyto(target[i], source[i])

    def encode() -> None:
        for i in range(calls):
            codec.encode(layout, source[i], chunks[i])

    def decode() -> None:
        for i in range(calls):
            codec.decode(layout, chunks[i], target[i])

    moved = turn(RopeSpec("default", 10000.0, dim), 1000)

    def turned() -> None:
        for i in range(calls):
            codec.decode(layout, chunks[i], target[i], moved)

    return calls * call_bytes, (copy, encode, decode, turned)
