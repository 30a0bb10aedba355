"""What a prefill costs, counted from the model's shape: two FLOPs for each multiplication with addition.

Per token and layer, for a gated MLP and grouped-query attention over ``t`` keys (its own included; where the
layer has a sliding window, at most as many as that):

    q, k and v      2 * hidden * (heads + 2 * kv_heads) * head_dim
    attention       4 * heads * head_dim * t          scores, then the weighted sum of values
    output, MLP     2 * heads * head_dim * hidden + 6 * hidden * mlp

Norms, softmax, rotations and other work of one operation per element are left out, as is usual, and so are
the logits: one token's in either case.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Shape(NamedTuple):
    """Sizes of a model. mlp: inner width of its gated MLP. windows: the sliding window of each layer in
    tokens, None where it has none; empty: no layer has."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    windows: tuple[int | None, ...] = ()

    def project(self, tokens: int) -> int:
        """q, k and v of one layer."""
        return 2 * self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim * tokens

    def score(self, layer: int, positions: Array) -> int:
        """Attention scores of ``layer`` alone, for queries at ``positions``."""
        window = self.windows[layer] if self.windows else None
        keys = positions + 1 if window is None else np.minimum(positions + 1, window)
        return 2 * self.heads * self.head_dim * int(np.sum(keys, dtype=np.int64))

    def attend(self, layer: int, positions: Array) -> int:
        """The rest of ``layer`` behind its projections, for tokens at ``positions``."""
        each = 2 * self.heads * self.head_dim * self.hidden + 6 * self.hidden * self.mlp
        return 2 * self.score(layer, positions) + each * len(positions)

    def prefill(self, positions: Array) -> int:
        """All layers for tokens at ``positions``, all tokens before them being there."""
        attended = sum(self.attend(layer, positions) for layer in range(self.layers))
        return self.layers * self.project(len(positions)) + attended
