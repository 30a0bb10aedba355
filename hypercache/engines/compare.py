"""How far two results of a model are apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def log_softmax(logits: Array) -> Array:
    """Over the last axis, float64."""
    shifted: Array = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def kl(true: Array, other: Array) -> Array:
    """KL(true || other) in nats of the distributions of logits ``(..., vocab)``: ``(...)``, float64."""
    p, q = log_softmax(true), log_softmax(other)
    out: Array = (np.exp(p) * (p - q)).sum(axis=-1)
    return out


def cosine(a: Array, b: Array) -> float:
    """Of two vectors, in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))
