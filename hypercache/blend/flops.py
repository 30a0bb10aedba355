"""What a prefill costs, counted from the model's shape: two FLOPs for each multiplication with addition.

Per token and layer, for a gated MLP and grouped-query attention over ``t`` keys (its own included):

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
    """Sizes of a model: ``mlp`` is the inner width of its gated MLP."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int

    def project(self, tokens: int) -> int:
        """q, k and v of one layer."""
        return 2 * self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim * tokens

    def score(self, positions: Array) -> int:
        """Attention scores of one layer alone, for queries at ``positions``."""
        return 2 * self.heads * self.head_dim * int(np.sum(positions + 1, dtype=np.int64))

    def attend(self, positions: Array) -> int:
        """The rest of one layer behind its projections, for tokens at ``positions``."""
        each = 2 * self.heads * self.head_dim * self.hidden + 6 * self.hidden * self.mlp
        return 2 * self.score(positions) + each * len(positions)

    def prefill(self, positions: Array) -> int:
        """All layers for tokens at ``positions``, all tokens before them being there."""
        return self.layers * (self.project(len(positions)) + self.attend(positions))
