"""Transformers models layer by layer, over any tokens of a prompt: what :mod:`hypercache.blend` runs on.

The decoder layers are taken apart by their public submodules, for the architectures named here. That this
is what the model itself computes is not believed but checked, on a few tokens, when the engine is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from hypercache.blend import Shape
from hypercache.engines import LayerReady
from hypercache.engines.selfcheck import check_layers, check_modules, check_shift, check_windows
from hypercache.engines.transformers import TransformersEngine
from hypercache.errors import SpecError
from hypercache.kv import KVBuffers

Array = npt.NDArray[Any]

SUPPORTED = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
)
_QUERIES = 256  # attended at a time, which bounds mask and scores to heads x 256 x tokens


F = TypeVar("F", bound=Callable[..., Any])


def _inference(method: F) -> F:
    return cast("F", torch.inference_mode()(method))


class Rows(NamedTuple):
    """Tokens between two layers: ascending positions ``(n,)``, their rotary cos and sin ``(n, dim)`` for each
    kind of layer, hidden states ``(n, hidden)``; between ``project`` and ``attend`` also q
    ``(heads, n, dim)``, k and v ``(kv_heads, n, dim)``."""

    positions: torch.Tensor
    angles: dict[str, tuple[torch.Tensor, torch.Tensor]]
    x: torch.Tensor
    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None

    @property
    def projected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert self.q is not None and self.k is not None and self.v is not None, "call project first"
        return self.q, self.k, self.v


class LayeredTransformer:
    """A model of one of the classes in ``SUPPORTED``: a :class:`hypercache.blend.Layered`, and an engine for
    :func:`hypercache.engines.cached.prefill`.

    model: a loaded one, with ``options`` as TransformersEngine takes them; or a TransformersEngine.

    Raises SpecError for other classes, by name, for a model that computes something else than its class says,
    and as TransformersEngine does.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        made = isinstance(model, TransformersEngine) and not options
        self.engine = engine = model if made else TransformersEngine(model, **options)
        self.model, self.spec = engine.model, engine.spec
        name = type(self.model).__name__
        if name not in SUPPORTED:
            raise SpecError(
                f"{name} cannot be run layer by layer; supported are {', '.join(SUPPORTED)}. "
                "Exact reuse works: use TransformersEngine"
            )
        check_modules(self.model)
        config = self.model.config
        layout = self.spec.layout(0)
        self.shape = Shape(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=layout.heads,
            head_dim=layout.parts[0].dim,
            mlp=config.intermediate_size,
            windows=tuple(self.spec.group_of(i).window for i in range(config.num_hidden_layers)),
        )
        self.vocab = int(self.model.model.embed_tokens.num_embeddings)
        self._layers = list(self.model.model.layers)
        # Gemma 3 has another theta where it slides; others have one kind of layer as far as RoPE goes.
        by_layer = "layer_type" in inspect.signature(self.model.model.rotary_emb.forward).parameters
        self._kinds = list(config.layer_types) if by_layer else [""] * config.num_hidden_layers
        self._cap = config.final_logit_softcapping if name == "Gemma3ForCausalLM" else None
        check_windows(self.model, self.spec)
        check_layers(self)
        check_shift(self)

    def run(
        self, ids: Sequence[int] | Array, kv: KVBuffers, start: int, layer_ready: LayerReady | None = None
    ) -> Array:
        """:meth:`TransformersEngine.run`."""
        return self.engine.run(ids, kv, start, layer_ready)

    @_inference
    def embed(self, ids: Array, positions: Array) -> Rows:
        check_modules(self.model)  # a hook may have come since
        at = torch.from_numpy(np.array(positions, np.int64))
        x = self.model.model.embed_tokens(torch.from_numpy(np.array(ids, np.int64)))
        angles = {}
        for kind in set(self._kinds):
            cos, sin = self.model.model.rotary_emb(x[None], at[None], *filter(None, [kind]))
            angles[kind] = cos[0], sin[0]
        return Rows(at, angles, x)

    @_inference
    def project(self, layer: int, rows: Rows) -> Rows:
        block = self._layers[layer]
        attention = block.self_attn
        x = block.input_layernorm(rows.x)
        q, k, v = (
            part(x).view(len(x), -1, self.shape.head_dim)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):  # Qwen 3, Gemma 3
            q, k = attention.q_norm(q), attention.k_norm(k)
        cos, sin = rows.angles[self._kinds[layer]]
        q, k = (_rotate(part.transpose(0, 1), cos, sin) for part in (q, k))
        return rows._replace(q=q, k=k, v=v.transpose(0, 1))

    @_inference
    def take(self, rows: Rows, which: Array) -> Rows:
        at = torch.from_numpy(np.array(which, np.int64))
        projected = [None if part is None else part[:, at] for part in (rows.q, rows.k, rows.v)]
        angles = {kind: (cos[at], sin[at]) for kind, (cos, sin) in rows.angles.items()}
        return Rows(rows.positions[at], angles, rows.x[at], *projected)

    @_inference
    def deviation(self, layer: int, rows: Rows, kv: KVBuffers) -> Array:
        differences = [
            (fresh.float() - held[:, rows.positions].float()).norm(dim=-1).T
            for held, fresh in zip(_held(kv, layer), rows.projected[1:], strict=True)
        ]
        out: Array = torch.stack(differences, dim=-1).numpy()
        return out

    @_inference
    def keep(self, layer: int, rows: Rows, kv: KVBuffers) -> None:
        for held, fresh in zip(_held(kv, layer), rows.projected[1:], strict=True):
            held.index_copy_(1, rows.positions, fresh.to(held.dtype))

    @_inference
    def mass(self, layer: int, rows: Rows, kv: KVBuffers, first: Array, stop: Array) -> Array:
        scale = self._layers[layer].self_attn.scaling
        begin, end = (torch.from_numpy(np.array(bound, np.int64))[:, None] for bound in (first, stop))
        out = torch.empty(len(rows.x), self.shape.heads)
        for part, q, keys, _, at, seen in self._queries(layer, rows, kv):
            # The scale before the product, all in float32: fp16 ends at 65,504.
            scores = (q.float() * scale) @ keys.float().mT
            weights = scores.masked_fill_(~seen, -torch.inf).softmax(-1)
            on = ((at >= begin[part]) & (at < end[part])).repeat(self._groups, 1)
            out[part] = (weights * on).sum(-1).view(self.shape.heads, -1).T
        if not bool(out.isfinite().all()):
            raise SpecError(
                f"layer {layer}: attention is NaN, since queries or keys are not finite in "
                f"{self.model.dtype}; load the model in bfloat16 or float32"
            )
        shares: Array = out.numpy()
        return shares

    @_inference
    def attention(self, layer: int, rows: Rows, kv: KVBuffers) -> torch.Tensor:
        """What the attention of ``layer`` gives, ``(n, hidden)``, before anything is added to it."""
        block, n = self._layers[layer], len(rows.x)
        out = torch.empty(self.shape.heads, n, self.shape.head_dim, dtype=rows.x.dtype)
        for part, q, keys, values, _, seen in self._queries(layer, rows, kv):
            some = functional.scaled_dot_product_attention(
                q[None], keys[None], values[None], attn_mask=seen[None, None], scale=block.self_attn.scaling
            )
            out[:, part] = some.view(self.shape.heads, -1, self.shape.head_dim)
        mixed: torch.Tensor = block.self_attn.o_proj(out.transpose(0, 1).reshape(n, -1))
        return mixed

    @_inference
    def attend(self, layer: int, rows: Rows, kv: KVBuffers) -> Rows:
        block, mixed = self._layers[layer], self.attention(layer, rows, kv)
        if hasattr(block, "pre_feedforward_layernorm"):  # Gemma 3: norms before and behind each half
            x = rows.x + block.post_attention_layernorm(mixed)
            x = x + block.post_feedforward_layernorm(block.mlp(block.pre_feedforward_layernorm(x)))
        else:
            x = rows.x + mixed
            x = x + block.mlp(block.post_attention_layernorm(x))
        return Rows(rows.positions, rows.angles, x)

    @property
    def _groups(self) -> int:
        return self.shape.heads // self.shape.kv_heads

    def _queries(
        self, layer: int, rows: Rows, kv: KVBuffers
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Some rows at a time: which, their queries ``(kv_heads, groups * rows, dim)`` (so no K/V head is
        repeated), the keys and values that any of them may see, where those stand, and who sees which."""
        queries = rows.projected[0]
        keys, values = _held(kv, layer)
        window = self.shape.windows[layer]
        for start in range(0, len(rows.x), _QUERIES):
            part = slice(start, min(start + _QUERIES, len(rows.x)))
            at = rows.positions[part]
            first, stop = 0 if window is None else max(0, int(at[0]) - window + 1), int(at[-1]) + 1
            q = queries[:, part].reshape(self.shape.kv_heads, -1, self.shape.head_dim)
            key_at = torch.arange(first, stop)
            seen = key_at <= at[:, None]
            if window is not None:
                seen &= key_at > at[:, None] - window
            seen = seen.repeat(self._groups, 1)
            yield part, q, keys[:, first:stop], values[:, first:stop], key_at, seen

    @_inference
    def hidden(self, rows: Rows) -> Array:
        out: Array = self.model.model.norm(rows.x).float().numpy()
        return out

    @_inference
    def logits(self, hidden: Array) -> Array:
        rows = torch.from_numpy(np.atleast_2d(hidden)).to(self.model.dtype)  # some linears take no vector
        scores = self.model.lm_head(rows)
        if self._cap is not None:  # Gemma 3
            scores = torch.tanh(scores / self._cap) * self._cap
        out: Array = scores.float().numpy().reshape(*hidden.shape[:-1], -1)
        return out


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE with half-split pairs on ``(heads, n, dim)``, in the model's own dtype and order of operations."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _held(kv: KVBuffers, layer: int) -> list[torch.Tensor]:
    """K and V of one layer ``(kv_heads, tokens, dim)`` where they lie."""
    tensors = [torch.from_numpy(part) for part in kv.layer(layer)]
    return [part.view(torch.bfloat16) if part.dtype is torch.uint16 else part for part in tensors]
