"""A small causal transformer in NumPy: the engine that every other part is checked against.

Llama's shape (RMSNorm, grouped-query attention, RoPE, SwiGLU) at any depth and width, with seeded random
weights, so that it needs no model and no framework. It works layer by layer and keeps K/V in
:class:`hypercache.kv.KVBuffers`, in place: the cache fills the head of the buffers, :meth:`forward` the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hypercache.blend.flops import Shape
from hypercache.engines import LayerReady
from hypercache.errors import SpecError
from hypercache.identity import commit
from hypercache.kv import KVBuffers
from hypercache.model import KVDtype, KVLayout, LayerGroup, ModelSpec, Part, RopeSpec

Array = npt.NDArray[Any]
_QUERIES = 256  # attended at a time, which bounds the scores to heads x 256 x tokens


@dataclass(frozen=True, slots=True)
class ReferenceConfig:
    """Shape of a reference model.

    ``kv_dtype`` is what K/V are rounded to before anyone attends to them, as in engines whose cache is
    narrower than their arithmetic (``dtype``: "float32" or "float64").
    """

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    mlp: int = 160
    vocab: int = 512
    theta: float = 10000.0
    rotary_dim: int | None = None  # None: the whole head
    interleaved: bool = False
    dtype: str = "float32"
    kv_dtype: KVDtype = KVDtype.FP32
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "mlp", "vocab"):
            if getattr(self, name) < 1:
                raise SpecError(f"ReferenceConfig.{name} must be >= 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise SpecError(
                f"ReferenceConfig: {self.heads} heads cannot share {self.kv_heads} K/V heads evenly"
            )
        if self.rotary % 2 or not 0 < self.rotary <= self.head_dim:
            raise SpecError(
                f"ReferenceConfig.rotary_dim must be even, in 2..{self.head_dim}, got {self.rotary}"
            )
        if self.dtype not in ("float32", "float64"):
            raise SpecError(f"ReferenceConfig.dtype must be 'float32' or 'float64', got {self.dtype!r}")
        if self.kv_dtype.is_fp8:
            raise SpecError(
                "ReferenceConfig.kv_dtype: the reference engine keeps no fp8 K/V; use fp32, fp16 or bf16"
            )

    @property
    def rotary(self) -> int:
        return self.head_dim if self.rotary_dim is None else self.rotary_dim


class Layer(NamedTuple):
    """Weights of one layer, each ``(inputs, outputs)``; gains are vectors."""

    attention_gain: Array
    q: Array
    k: Array
    v: Array
    o: Array
    mlp_gain: Array
    gate: Array
    up: Array
    down: Array


class Rows(NamedTuple):
    """Tokens between two layers: ascending positions ``(n,)``, their rotary angles, hidden states
    ``(n, hidden)``; between ``project`` and ``attend`` also q ``(heads, n, dim)``, k and v
    ``(kv_heads, n, dim)``."""

    positions: Array
    angles: tuple[Array, Array]
    x: Array
    q: Array | None = None
    k: Array | None = None
    v: Array | None = None

    @property
    def projected(self) -> tuple[Array, Array, Array]:
        assert self.q is not None and self.k is not None and self.v is not None, "call project first"
        return self.q, self.k, self.v


class ReferenceModel:
    """A model made of ``config`` and ``seed``: the same two give the same weights on every machine."""

    def __init__(self, config: ReferenceConfig | None = None, seed: int = 0) -> None:
        self.config = config = config or ReferenceConfig()
        rng = np.random.Generator(np.random.PCG64(seed))

        def matrix(rows: int, columns: int) -> Array:
            drawn: Array = rng.standard_normal((rows, columns), np.float32) * rows**-0.5
            return drawn.astype(config.dtype)

        def gain() -> Array:
            return (1 + 0.1 * rng.standard_normal(config.hidden, np.float32)).astype(config.dtype)

        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.embedding = rng.standard_normal((config.vocab, config.hidden), np.float32).astype(config.dtype)
        self.layers = [
            Layer(
                attention_gain=gain(),
                q=matrix(config.hidden, wide),
                k=matrix(config.hidden, narrow),
                v=matrix(config.hidden, narrow),
                o=matrix(wide, config.hidden),
                mlp_gain=gain(),
                gate=matrix(config.hidden, config.mlp),
                up=matrix(config.hidden, config.mlp),
                down=matrix(config.mlp, config.hidden),
            )
            for _ in range(config.layers)
        ]
        self.final_gain = gain()
        self.head = matrix(config.hidden, config.vocab)
        self.spec = self._spec()

    def _spec(self) -> ModelSpec:
        config = self.config
        digest = hashlib.blake2b(digest_size=32)
        for array in (
            self.embedding,
            *(w for layer in self.layers for w in layer),
            self.final_gain,
            self.head,
        ):
            digest.update(commit("reference.array", {"shape": array.shape, "dtype": str(array.dtype)}))
            digest.update(np.ascontiguousarray(array).data)
        digest.update(commit("reference.norm", {"eps": config.eps}))
        layout = KVLayout(
            "split",
            config.kv_heads,
            (Part("k", config.head_dim), Part("v", config.head_dim)),
            config.kv_dtype,
        )
        rope = RopeSpec("default", config.theta, config.rotary, config.interleaved)
        group = LayerGroup(tuple(range(config.layers)), layout, rope)
        return ModelSpec(digest.digest(), (group,), name="reference")

    def run(
        self, ids: Sequence[int] | Array, kv: KVBuffers, start: int, layer_ready: LayerReady | None = None
    ) -> Array:
        """Logits ``(vocab,)`` after ``ids`` at positions ``start..``; :meth:`forward` of one sequence's tail.

        Raises SpecError where nothing is left to compute: a cache holds no logits.
        """
        new = np.asarray(ids)
        if len(new) == 0:
            raise SpecError("no token to compute; leave at least the prompt's last one out of the past")
        return self.logits(self.forward(new, kv, start, layer_ready)[-1])

    def forward(self, ids: Array, kv: KVBuffers, start: int, layer_ready: LayerReady | None = None) -> Array:
        """Hidden states ``(len(ids), hidden)`` of positions ``start..``; writes their K/V into ``kv``."""
        if kv.spec != self.spec:
            raise SpecError(
                f"these K/V belong to another model ({kv.spec.name!r}; theirs, this engine's: "
                f"{kv.spec.differences(self.spec)}); allocate them with engine.spec"
            )
        if kv.tokens < start + len(ids):
            raise SpecError(
                f"K/V with room for {kv.tokens} tokens cannot take positions {start}..{start + len(ids)}"
            )
        rows = self.embed(ids, np.arange(start, start + len(ids)))
        for i in range(self.config.layers):
            rows = self.project(i, rows)
            if layer_ready is not None:
                layer_ready(i)
            self.keep(i, rows, kv)
            rows = self.attend(i, rows, kv)
        return self.hidden(rows)

    # --- layer by layer, over any rows: hypercache.blend.Layered

    @property
    def shape(self) -> Shape:
        config = self.config
        return Shape(
            config.layers,
            config.hidden,
            config.heads,
            config.kv_heads,
            config.head_dim,
            config.mlp,
        )

    @property
    def vocab(self) -> int:
        """Token ids are below it."""
        return self.config.vocab

    def embed(self, ids: Array, positions: Array) -> Rows:
        """Rows of tokens ``ids`` at ascending ``positions``, before layer 0."""
        if len(ids) and not (ids.dtype.kind in "iu" and ids.min() >= 0 and ids.max() < self.config.vocab):
            raise SpecError(f"token ids must be integers in 0..{self.config.vocab - 1}")
        angles = rope_angles(self.spec.groups[0].rope, positions, self.config.dtype)
        return Rows(positions.astype(np.intp), angles, self.embedding[ids.astype(np.intp)])

    def project(self, i: int, rows: Rows) -> Rows:
        """The rows with q, k and v of layer ``i``; q and k are rotated."""
        config, layer = self.config, self.layers[i]
        normed = rms_norm(rows.x, layer.attention_gain, config.eps)
        q = _split_heads(normed @ layer.q, config.heads)
        k = _split_heads(normed @ layer.k, config.kv_heads)
        v = _split_heads(normed @ layer.v, config.kv_heads)
        q, k = (rotate(part, rows.angles, config.interleaved) for part in (q, k))
        return rows._replace(q=q, k=k, v=v)

    def keep(self, i: int, rows: Rows, kv: KVBuffers) -> None:
        """Round new K/V of layer ``i`` to the cache's dtype and put them at their rows' positions."""
        for target, new in zip(kv.layer(i), rows.projected[1:], strict=True):
            target[:, rows.positions] = to_storage(new, self.config.kv_dtype)

    def take(self, rows: Rows, which: Array) -> Rows:
        """Some of the rows, in order."""
        projected = [None if part is None else part[:, which] for part in (rows.q, rows.k, rows.v)]
        cos, sin = rows.angles
        return Rows(rows.positions[which], (cos[which], sin[which]), rows.x[which], *projected)

    def deviation(self, i: int, rows: Rows, kv: KVBuffers) -> Array:
        """How far the rows' K and V of layer ``i`` are from those in ``kv``: :meth:`Layered.deviation`."""
        out = np.empty((len(rows.positions), self.config.kv_heads, 2), np.float32)
        for part, (held, fresh) in enumerate(zip(kv.layer(i), rows.projected[1:], strict=True)):
            cached = from_storage(held[:, rows.positions], self.config.kv_dtype, self.config.dtype)
            out[..., part] = np.linalg.norm(fresh - cached, axis=-1).T
        return out

    def mass(self, i: int, rows: Rows, kv: KVBuffers, first: Array, stop: Array) -> Array:
        """Share of the rows' attention in layer ``i`` that falls on ``first..stop``: :meth:`Layered.mass`."""
        n, heads = len(rows.positions), self.config.heads
        out = np.empty((n, heads), np.float32)
        for part, weights, _ in self._weights(i, rows, kv):
            at = np.arange(weights.shape[-1])
            on = (at >= first[part, None]) & (at < stop[part, None])
            share = np.where(on, weights, 0).sum(axis=-1)
            out[part] = share.reshape(heads, -1).T
        return out

    def attend(self, i: int, rows: Rows, kv: KVBuffers) -> Rows:
        """The rows after layer ``i``: attention over all in ``kv`` up to each row's own position, and MLP."""
        config, n = self.config, len(rows.positions)
        out = np.empty((config.kv_heads, config.heads // config.kv_heads, n, config.head_dim), config.dtype)
        for part, weights, values in self._weights(i, rows, kv):
            out[:, :, part] = weights @ values
        by_token = out.reshape(config.heads, n, config.head_dim).swapaxes(0, 1)
        x = rows.x + by_token.reshape(n, config.heads * config.head_dim) @ self.layers[i].o
        return Rows(rows.positions, rows.angles, x + self.mlp(i, x))

    def _weights(self, i: int, rows: Rows, kv: KVBuffers) -> Iterator[tuple[slice, Array, Array]]:
        """Causal attention of layer ``i``, some rows at a time: which, weights
        ``(kv_heads, heads / kv_heads, rows, seen)``, and the values that they weigh."""
        config, n = self.config, len(rows.positions)
        if n == 0:
            return
        keys, values = (
            from_storage(part[:, : rows.positions[-1] + 1], config.kv_dtype, config.dtype)
            for part in kv.layer(i)
        )
        grouped = rows.projected[0].reshape(config.kv_heads, -1, n, config.head_dim)
        for at in range(0, n, _QUERIES):
            part = slice(at, min(at + _QUERIES, n))
            seen = int(rows.positions[part.stop - 1]) + 1
            scores = grouped[:, :, part] @ keys[:, None, :seen].swapaxes(-1, -2) * config.head_dim**-0.5
            scores[..., np.arange(seen) > rows.positions[part, None]] = -np.inf
            yield part, _softmax(scores), values[:, None, :seen]

    def mlp(self, i: int, x: Array) -> Array:
        """SwiGLU (Shazeer 2020, arXiv:2002.05202) of layer ``i``: ``(n, hidden)``."""
        layer = self.layers[i]
        normed = rms_norm(x, layer.mlp_gain, self.config.eps)
        gate = normed @ layer.gate
        out: Array = (gate / (1 + np.exp(-gate)) * (normed @ layer.up)) @ layer.down
        return out

    def hidden(self, rows: Rows) -> Array:
        """Final hidden states ``(n, hidden)``, after the last norm."""
        return rms_norm(rows.x, self.final_gain, self.config.eps)

    def logits(self, hidden: Array) -> Array:
        """``(..., vocab)`` from final hidden states."""
        out: Array = hidden @ self.head
        return out


def rms_norm(x: Array, gain: Array, eps: float) -> Array:
    """Root mean square norm over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    scale: Array = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return x / scale * gain


def rope_angles(rope: RopeSpec, positions: Array, dtype: str) -> tuple[Array, Array]:
    """cos and sin, each ``(n, rotary_dim / 2)``. Angles are formed in float64: float32 ones are off by 1e-4
    at positions of a few thousand."""
    rates = rope.theta ** (-np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim)
    angles = positions.astype(np.float64)[:, None] * rates
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def rotate(x: Array, angles: tuple[Array, Array], interleaved: bool) -> Array:
    """Apply RoPE to the first ``rotary_dim`` elements of ``(heads, n, dim)``; pairs are ``(j, j + half)``, or
    ``(2j, 2j + 1)`` when interleaved."""
    cos, sin = angles
    half = cos.shape[1]
    out = x.copy()
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def to_storage(x: Array, dtype: KVDtype) -> Array:
    """Floats rounded to ``dtype`` (to nearest, ties to even), as the storage dtype that carries its bits."""
    if dtype is not KVDtype.BF16:
        return x.astype(dtype.storage)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def from_storage(x: Array, dtype: KVDtype, compute: str) -> Array:
    """The reverse; without a copy where the dtypes agree."""
    if dtype is KVDtype.BF16:
        x = (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(compute, copy=False)


def _split_heads(x: Array, heads: int) -> Array:
    return x.reshape(x.shape[0], heads, x.shape[1] // heads).swapaxes(0, 1)


def _softmax(scores: Array) -> Array:
    scores = scores - scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores
