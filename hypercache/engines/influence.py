"""How much it would repair the output to recompute a token: what a selector learns to predict.

For a prompt whose K/V are stale in part, the first-order effect of putting token ``t``'s K/V right is

    influence(t) = - sum over layers of <dL/dK[t], K_full[t] - K_stale[t]>
                                      + <dL/dV[t], V_full[t] - V_stale[t]>

where L is KL(full || stale) summed over the next-token distributions of what follows. L is flat at the full
K/V and saturated at the stale ones, so the gradient is taken half way between: the midpoint rule for the
integral along the straight line from one to the other (integrated gradients, Sundararajan et al. 2017,
arXiv:1703.01365), by which the influences of all tokens add up to L.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from hypercache.errors import SpecError
from hypercache.kv import KVBuffers

Array = npt.NDArray[Any]
HALF_WAY = 0.5


def influence(
    model: Any,
    full: KVBuffers,
    stale: KVBuffers,
    ids: Sequence[int] | Array,
    start: int,
    first: int | None = None,
    first_layer: int = 0,
    at: float = HALF_WAY,
) -> Array:
    """Float64 ``(start,)``: the influence of each token in front of ``start``, in nats.

    model: a Transformers causal LM in evaluation mode. full, stale: its K/V of positions ``0..start-1`` at
        least. ids: the prompt and what follows it. first: the distributions of what comes after each of
        ``ids[first:]`` are compared, None for all behind the prompt. first_layer: K/V of the layers before it
        are exact in any case, and are taken from ``full``. at: where on the way the gradient is taken, 0
        stale, 1 full.

    Raises SpecError if nothing follows the prompt, or the K/V hold fewer tokens or are another model's.
    """
    first = start if first is None else first
    if not 1 <= start <= first < len(ids):
        raise SpecError(
            f"start and first must be in 1..{len(ids) - 1}, behind the prompt and within ids, in this order; "
            f"got {start} and {first}"
        )
    rest = torch.from_numpy(np.array(ids, np.int64)[start:])[None]
    if full.spec != stale.spec or min(full.tokens, stale.tokens) < start:
        raise SpecError(f"influence needs two sets of K/V of one model, {start} tokens or more in each")
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in weights:
        parameter.requires_grad_(False)  # their gradients would cost as much again
    try:
        return _influence(model, full, stale, rest, start, first - start, first_layer, at)
    finally:
        for parameter in weights:
            parameter.requires_grad_(True)


def _influence(
    model: Any,
    full: KVBuffers,
    stale: KVBuffers,
    rest: torch.Tensor,
    start: int,
    skip: int,
    first_layer: int,
    at: float,
) -> Array:
    exact = [_tensors(full, layer, start) for layer in range(full.spec.num_layers)]
    between: list[tuple[torch.Tensor, ...]] = []
    steps: list[tuple[torch.Tensor, ...]] = []
    for layer, right in enumerate(exact):
        wrong = _tensors(stale, layer, start) if layer >= first_layer else right
        step = tuple(to - of for to, of in zip(right, wrong, strict=True))
        point = tuple(of + at * by for of, by in zip(wrong, step, strict=True))
        if layer >= first_layer:
            for tensor in point:
                tensor.requires_grad_(True)
        between.append(point)
        steps.append(step)
    with torch.no_grad():
        want = _distributions(model, exact, rest, start, skip)
    got = _distributions(model, between, rest, start, skip)
    loss = (want.exp() * (want - got)).sum()
    inputs = [tensor for pair in between[first_layer:] for tensor in pair]
    total = torch.zeros(start, dtype=torch.float64)
    if inputs:
        gradients = torch.autograd.grad(loss, inputs)
        for gradient, step in zip(
            gradients, [part for pair in steps[first_layer:] for part in pair], strict=True
        ):
            total -= (gradient.double() * step.double()).sum(dim=(0, 1, 3))
    out: Array = total.numpy()
    return out


def _distributions(
    model: Any, layers: Sequence[tuple[torch.Tensor, ...]], rest: torch.Tensor, start: int, skip: int
) -> torch.Tensor:
    """Log-probabilities ``(n, vocab)`` of what comes after each of the n tokens ``rest[skip:]``, float32."""
    cache = DynamicCache(config=model.config)
    for layer, (keys, values) in enumerate(layers):
        cache.update(keys, values, layer)
    at = torch.arange(start, start + rest.shape[1])[None]
    logits = model(input_ids=rest, position_ids=at, cache=cache, use_cache=True).logits
    out: torch.Tensor = logits[0, skip:].float().log_softmax(-1)
    return out


def _tensors(kv: KVBuffers, layer: int, tokens: int) -> tuple[torch.Tensor, ...]:
    """K and V ``(1, kv_heads, tokens, dim)`` as the model computes with them."""
    parts = (torch.from_numpy(part)[None, :, :tokens] for part in kv.layer(layer))
    return tuple(part.view(torch.bfloat16) if part.dtype is torch.uint16 else part for part in parts)
