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


def fit(x: Array, matters: Array) -> tuple[Array, float]:
    """Weights ``(features,)`` and bias: ``x @ weights + bias`` is the logit of ``matters``, at the least log
    loss.

    x: standardised features ``(n, features)``. matters: bool ``(n,)``. Raises SpecError for rows that are not
    finite, or all of one kind.
    """
    x, y = np.asarray(x, np.float64), np.asarray(matters, np.float64)
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise SpecError(f"fit needs rows (n, features) and one label a row, got {x.shape} and {y.shape}")
    if not np.isfinite(x).all():
        raise SpecError("fit needs finite features: the model gave NaN or infinite attention or K/V")
    if not 0 < y.mean() < 1:
        raise SpecError(f"fit needs tokens that matter and tokens that do not, got {len(y)} of one kind")
    x = np.hstack([x, np.ones((len(x), 1))])
    penalty = np.full(x.shape[1], RIDGE * len(x))
    penalty[-1] = 1e-9 * len(x)  # the bias goes free
    weights = np.zeros(x.shape[1])
    for _ in range(_STEPS):
        p = 0.5 * (1 + np.tanh(0.5 * (x @ weights)))
        gradient = x.T @ (p - y) + penalty * weights
        curvature = (x * (p * (1 - p))[:, None]).T @ x + np.diag(penalty)
        step = np.linalg.solve(curvature, gradient)
        weights -= step * min(1.0, 4.0 / max(np.abs(x @ step).max(), 1e-9))  # no further than it can see
        if np.abs(step).max() < 1e-10:
            break
    return weights[:-1], float(weights[-1])
