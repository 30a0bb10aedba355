"""Prompts [S, A, B, Q] stored and [S, B, A, Q] asked, on the reference engine: what the tests here run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hypercache.blend import Reused
from hypercache.engines.reference import ReferenceConfig, ReferenceModel, from_storage, to_storage
from hypercache.kv import KVBuffers
from hypercache.stitch import put

SYSTEM, A, B, Q = 12, 40, 56, 9
TOKENS = SYSTEM + A + B + Q
SPANS = (Reused(SYSTEM, SYSTEM + B), Reused(SYSTEM + B, SYSTEM + B + A))


@dataclass(frozen=True)
class Case:
    """ids: what is asked. full: the K/V of a full prefill of it, with its final hidden states."""

    model: ReferenceModel
    ids: np.ndarray
    stored: KVBuffers
    full: KVBuffers
    hidden: np.ndarray

    def reused(self, exact: bool = True, room: int = TOKENS) -> KVBuffers:
        """What a fetch leaves: S as it is, B and A rotated to their places, poison in all other tokens."""
        kv = KVBuffers.allocate(self.model.spec, room)
        for layer in range(self.model.config.layers):
            for target in kv.layer(layer):
                target[:] = to_storage(np.full(target.shape, np.nan), self.model.config.kv_dtype)
        if exact:
            put(self.stored, 0, kv, 0, SYSTEM)
        put(self.stored, SYSTEM + A, kv, SYSTEM, B)
        put(self.stored, SYSTEM, kv, SYSTEM + B, A)
        return kv


def case(config: ReferenceConfig | None = None, seed: int = 0) -> Case:
    model = ReferenceModel(config, seed)
    rng = np.random.default_rng(seed + 100)
    system, a, b, question = (rng.integers(0, model.config.vocab, n) for n in (SYSTEM, A, B, Q))
    stored, ids = np.concatenate([system, a, b, question]), np.concatenate([system, b, a, question])
    before, full = (KVBuffers.allocate(model.spec, TOKENS) for _ in range(2))
    model.forward(stored, before, 0)
    return Case(model, ids, before, full, model.forward(ids, full, 0))


def error(kv: KVBuffers, want: KVBuffers, tokens: slice = slice(None)) -> float:
    """Largest difference of any element of K or V, all layers."""
    return max(
        float(np.abs(_floats(kv, ours[:, tokens]) - _floats(kv, theirs[:, tokens])).max(initial=0))
        for layer in range(kv.spec.num_layers)
        for ours, theirs in zip(kv.layer(layer), want.layer(layer), strict=True)
    )


def same_bits(kv: KVBuffers, want: KVBuffers, tokens: Any) -> bool:
    return all(
        ours[:, tokens].tobytes() == theirs[:, tokens].tobytes()
        for layer in range(kv.spec.num_layers)
        for ours, theirs in zip(kv.layer(layer), want.layer(layer), strict=True)
    )


def _floats(kv: KVBuffers, part: np.ndarray) -> np.ndarray:
    return from_storage(part, kv.spec.layout(0).dtype, "float64")
