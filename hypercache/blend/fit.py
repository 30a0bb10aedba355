"""Learning a selector: logistic regression that tells the tokens that matter most from the rest. NumPy alone.

By Newton's method, so that the result depends on the rows alone, not on a seed or on their order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from hypercache.errors import SpecError

Array = npt.NDArray[Any]

RIDGE = 1e-3  # of the squared weights, a row
_STEPS = 25


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


def stakes(influence: Array) -> Array:
    """Float64 ``(n,)``: how much it counts whether each token of a prompt is told right. Influence has a long
    tail, and the few that it is about must not be outvoted; yet those without any must be told, too."""
    size = np.abs(influence)
    out: Array = 0.3 + np.sqrt(size / max(size.mean(), np.finfo(np.float64).tiny))
    return out


def fit(x: Array, matters: Array, counts: Array) -> tuple[Array, float]:
    """Weights ``(columns,)`` and bias: ``x @ weights + bias`` is the logit of ``matters``, at the least log
    loss.

    x: ``(n, columns)`` of about unit variance. matters: bool ``(n,)``. counts: floats ``(n,)`` >= 0, how much
    each row counts. Raises SpecError for rows that are not finite, or all of one kind.
    """
    x, y, w = np.asarray(x, np.float64), np.asarray(matters, np.float64), np.asarray(counts, np.float64)
    if x.ndim != 2 or not y.shape == w.shape == x.shape[:1]:
        raise SpecError(f"fit needs one label and count a row, got {x.shape}, {y.shape} and {w.shape}")
    if not (np.isfinite(x).all() and np.isfinite(w).all()):
        raise SpecError("fit needs finite numbers: the model gave NaN or infinite attention, K/V or logits")
    if not 0 < y.mean() < 1:
        raise SpecError(f"fit needs tokens that matter and tokens that do not, got {len(y)} of one kind")
    x = np.hstack([x, np.ones((len(x), 1))])
    penalty = np.full(x.shape[1], RIDGE * len(x))
    penalty[-1] = 1e-9 * len(x)  # the bias goes free
    weights, w = np.zeros(x.shape[1]), w / w.mean()
    for _ in range(_STEPS):
        p = 0.5 * (1 + np.tanh(0.5 * (x @ weights)))
        gradient = x.T @ (w * (p - y)) + penalty * weights
        curvature = (x * (w * p * (1 - p))[:, None]).T @ x + np.diag(penalty)
        step = np.linalg.solve(curvature, gradient)
        weights -= step * min(1.0, 4.0 / max(np.abs(x @ step).max(), 1e-9))  # no further than it can see
        if np.abs(step).max() < 1e-10:
            break
    return weights[:-1], float(weights[-1])
