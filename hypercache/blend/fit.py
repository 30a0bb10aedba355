"""Learning a selector: a classifier of tokens into those that matter most and the rest. NumPy alone.

Two forms, both fitted to log loss: linear (by Newton's method, so that the result depends on the rows alone)
and with one layer of ReLU units between (by Adam, arXiv:1412.6980, on batches drawn from a seed).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from hypercache.blend.selector import Layer
from hypercache.errors import SpecError

Array = npt.NDArray[Any]

RIDGE = 1e-3  # of the squared weights, a row
_NEWTON_STEPS = 25
_BATCH, _STEPS, _RATE = 512, 1500, 5e-3
_FIRST, _SECOND, _TINY = 0.9, 0.999, 1e-8  # Adam's


def top_share(influence: Array, ratio: float) -> Array:
    """Bool ``(n,)``: the ``ceil(ratio * n)`` tokens of highest influence. Ties go to the earlier token."""
    count = math.ceil(ratio * len(influence) - 1e-9)
    out = np.zeros(len(influence), bool)
    out[np.argsort(-influence, kind="stable")[:count]] = True
    return out


def scaling(x: Array) -> tuple[Array, Array]:
    """Mean and scale ``(features,)`` of rows ``(n, features)``; a feature that never varies has scale 1."""
    deviation = x.std(axis=0)
    return x.mean(axis=0), np.where(deviation > 1e-6 * (1 + np.abs(x).max(axis=0)), deviation, 1.0)


def fit(x: Array, matters: Array, units: int = 0, seed: int = 0) -> tuple[Layer, ...]:
    """A classifier of standardised features ``(n, features)`` into ``matters`` ``(n,)``, bool.

    units: of the layer between, 0 for a linear one. The same rows and seed give the same result, up to the
    rounding of the machine's BLAS. Raises SpecError for rows that are not finite, or all of one kind.
    """
    x, y = np.asarray(x, np.float64), np.asarray(matters, np.float64)
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise SpecError(f"fit needs rows (n, features) and one label a row, got {x.shape} and {y.shape}")
    if not np.isfinite(x).all():
        raise SpecError("fit needs finite features: the model gave NaN or infinite attention or K/V")
    if not 0 < y.mean() < 1:
        raise SpecError(f"fit needs tokens that matter and tokens that do not, got {len(y)} of one kind")
    return _network(x, y, units, np.random.Generator(np.random.PCG64(seed))) if units else _linear(x, y)


def log_loss(scores: Array, matters: Array) -> float:
    """Mean of ``-log p(label)`` in nats, for logits ``(n,)``."""
    return float(np.mean(np.logaddexp(0.0, scores) - np.where(matters, scores, 0.0)))


def _linear(x: Array, y: Array) -> tuple[Layer, ...]:
    x = np.hstack([x, np.ones((len(x), 1))])
    penalty = np.full(x.shape[1], RIDGE * len(x))
    penalty[-1] = 1e-9 * len(x)  # the bias goes free
    weights = np.zeros(x.shape[1])
    for _ in range(_NEWTON_STEPS):
        p = _sigmoid(x @ weights)
        gradient = x.T @ (p - y) + penalty * weights
        curvature = (x * (p * (1 - p))[:, None]).T @ x + np.diag(penalty)
        step = np.linalg.solve(curvature, gradient)
        weights -= step * min(1.0, 4.0 / (np.abs(x @ step).max() + _TINY))  # no step beyond what it can see
        if np.abs(step).max() < 1e-10:
            break
    return (_layer(weights[None, :-1], weights[-1:]),)


def _network(x: Array, y: Array, units: int, rng: np.random.Generator) -> tuple[Layer, ...]:
    features = x.shape[1]
    values = [
        rng.normal(0, math.sqrt(2 / features), (units, features)),
        np.zeros(units),
        rng.normal(0, math.sqrt(1 / units), (1, units)),
        np.array([math.log(y.mean() / (1 - y.mean()))]),
    ]
    first, second = ([np.zeros_like(value) for value in values] for _ in range(2))
    for step in range(1, _STEPS + 1):
        rows = rng.integers(0, len(x), _BATCH)
        rate = _RATE * 0.5 * (1 + math.cos(math.pi * step / _STEPS))
        for i, gradient in enumerate(_gradients(x[rows], y[rows], values)):
            first[i] = _FIRST * first[i] + (1 - _FIRST) * gradient
            second[i] = _SECOND * second[i] + (1 - _SECOND) * gradient**2
            mean, square = first[i] / (1 - _FIRST**step), second[i] / (1 - _SECOND**step)
            values[i] = values[i] - rate * mean / (np.sqrt(square) + _TINY)
    return _layer(values[0], values[1]), _layer(values[2], values[3])


def _gradients(x: Array, y: Array, values: list[Array]) -> list[Array]:
    """Of the mean log loss with ridge, for each of ``values``."""
    inner, inner_bias, outer, outer_bias = values
    z = x @ inner.T + inner_bias
    h = np.maximum(z, 0.0)
    error = (_sigmoid((h @ outer.T + outer_bias)[:, 0]) - y)[:, None] / len(x)
    back = (error @ outer) * (z > 0)
    return [
        back.T @ x + RIDGE * inner,
        back.sum(axis=0),
        error.T @ h + RIDGE * outer,
        error.sum(axis=0),
    ]


def _layer(weights: Array, bias: Array) -> Layer:
    return Layer(tuple(tuple(row) for row in weights.tolist()), tuple(bias.tolist()))


def _sigmoid(z: Array) -> Array:
    out: Array = 0.5 * (1 + np.tanh(0.5 * z))
    return out
