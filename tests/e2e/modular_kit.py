"""Prompts made of documents, and what their K/V must be where they land."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import hypercache
from hypercache import KVBuffers
from hypercache.client.plan import ModularSpan

from .conftest import fill

TINY: dict[str, Any] = {"layers": 1, "heads": 1, "dim": 8}
Ids = npt.NDArray[Any]


def prompt_of(*parts: Ids | int) -> Ids:
    """Parts end to end; a number stands for so many tokens that nobody else has."""
    made = [
        1_000_000 + np.random.default_rng([index, part]).integers(0, 1 << 30, part)
        if isinstance(part, int)
        else part
        for index, part in enumerate(parts)
    ]
    return np.concatenate(made).astype(np.int64)


async def stored(client: hypercache.Client, tokens: Ids, seed: int = 1) -> KVBuffers:
    kv = fill(KVBuffers.allocate(client.model, len(tokens)), seed)
    assert (await client.store(tokens, kv)).stored == len(tokens) // client.block_size
    return kv


def turned(keys: npt.NDArray[Any], delta: int, theta: float = 10000.0) -> npt.NDArray[np.float64]:
    """Keys ``(heads, tokens, dim)`` moved by ``delta``: half-split pairs, in float64."""
    low, high = np.split(keys.astype(np.float64), 2, axis=-1)
    pairs = low.shape[-1]
    angle = delta * theta ** (-np.arange(pairs) / pairs)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def landed(into: KVBuffers, kv: KVBuffers, span: ModularSpan, rounding: float) -> bool:
    """Whether ``into`` has, at the span, what ``kv`` has at its source: values bit for bit, keys turned."""
    source = slice(span.source, span.source + span.stop - span.start)
    for layer in range(kv.spec.num_layers):
        (k, v), (k0, v0) = into.layer(layer), kv.layer(layer)
        want = turned(k0[:, source], span.delta)
        if not np.array_equal(v[:, span.start : span.stop], v0[:, source]):
            return False
        if np.abs(k[:, span.start : span.stop] - want).max() > rounding * np.abs(want).max():
            return False
    return True
