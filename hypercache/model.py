"""What the bytes mean: the model, the layout of its K/V, and its rotary embedding.

A :class:`ModelSpec` commits to everything that K/V depend on beside tokens, block size, codec and
tenant. Names are labels for people; identity is the fingerprint. Nothing here does I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hypercache.errors import SpecError
from hypercache.identity import Value, commit


class KVDtype(enum.Enum):
    """Element type of K/V in engine memory. ``storage`` is the NumPy dtype that carries its bits."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"

    @property
    def storage(self) -> np.dtype[Any]:
        """bf16 is carried as uint16 and fp8 as uint8, since NumPy has neither."""
        return np.dtype(_STORAGE[self.value])

    @property
    def itemsize(self) -> int:
        return self.storage.itemsize

    @property
    def is_fp8(self) -> bool:
        return self in (KVDtype.FP8_E4M3, KVDtype.FP8_E5M2)


_STORAGE = {"bf16": "<u2", "fp16": "<f2", "fp32": "<f4", "fp8_e4m3": "u1", "fp8_e5m2": "u1"}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) as applied to cached keys.

    ``kind`` is Hugging Face's ``rope_type`` ("default", "linear", "llama3", "yarn", ...) or "none".
    ``scaling`` holds its further parameters, sorted by name.
    """

    kind: str
    theta: float
    rotary_dim: int
    interleaved: bool = False
    scaling: tuple[tuple[str, Any], ...] = ()

    def fields(self) -> dict[str, Value]:
        return {
            "kind": self.kind,
            "theta": float(self.theta),
            "rotary_dim": self.rotary_dim,
            "interleaved": self.interleaved,
            "scaling": dict(self.scaling),
        }


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a layer's cache: ``dim`` elements per head and token."""

    name: str
    dim: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How one layer chunk (one block, one layer, one rank) lies in memory.

    A chunk is C-ordered ``[head][part][token][dim]``: all parts of one head lie together, so a range of
    heads is one contiguous slice (:meth:`head_slice`), which lets ranks of another tensor-parallel
    degree read their share. ``kind`` is "split" (parts ``k`` and ``v``) or "mla" (one head, parts
    ``latent`` and ``rope``: DeepSeek-V2, arXiv:2405.04434).
    """

    kind: str
    heads: int
    parts: tuple[Part, ...]
    dtype: KVDtype

    def __post_init__(self) -> None:
        want = {"split": ("k", "v"), "mla": ("latent", "rope")}.get(self.kind)
        if want is None:
            raise SpecError(f"KVLayout.kind={self.kind!r} is unknown; use 'split' or 'mla'")
        if tuple(part.name for part in self.parts) != want:
            raise SpecError(f"KVLayout {self.kind!r} needs parts {want}, got {[p.name for p in self.parts]}")
        if self.heads < 1 or any(part.dim < 1 for part in self.parts):
            raise SpecError(f"KVLayout needs heads and dims >= 1, got {self.heads} heads, {self.parts}")
        if self.kind == "mla" and self.heads != 1:
            raise SpecError(f"KVLayout 'mla' has exactly one latent head, got {self.heads}")

    @property
    def head_elements(self) -> int:
        """Elements per head and token, all parts."""
        return sum(part.dim for part in self.parts)

    def chunk_nbytes(self, tokens: int) -> int:
        """Bytes of an unencoded chunk of ``tokens`` tokens."""
        return self.heads * tokens * self.head_elements * self.dtype.itemsize

    def head_slice(self, tokens: int, first: int, stop: int) -> slice:
        """Byte range of heads ``first..stop`` in an unencoded chunk."""
        if not 0 <= first < stop <= self.heads:
            raise SpecError(f"heads {first}..{stop} are outside 0..{self.heads}")
        one = tokens * self.head_elements * self.dtype.itemsize
        return slice(first * one, stop * one)

    def fields(self) -> dict[str, Value]:
        return {
            "kind": self.kind,
            "order": "head,part,token,dim",
            "heads": self.heads,
            "parts": [(part.name, part.dim) for part in self.parts],
            "dtype": self.dtype.value,
        }


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA or other adapter. ``digest`` of its content is the identity; ``name`` is a label."""

    name: str
    digest: bytes

    def __post_init__(self) -> None:
        if len(self.digest) < 16:
            raise SpecError(
                f"adapter {self.name!r} needs a content digest of >= 16 bytes, got {len(self.digest)}: "
                "a name alone is not an identity"
            )


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one cache shape and one rotary setting.

    ``layout.heads`` are the heads of the whole model; :meth:`ModelSpec.layout` gives one rank's share.
    ``window`` is the sliding attention window in tokens, None for full attention.
    """

    layers: tuple[int, ...]
    layout: KVLayout
    rope: RopeSpec
    window: int | None = None

    def fields(self) -> dict[str, Value]:
        return {
            "layers": list(self.layers),
            "layout": self.layout.fields(),
            "rope": self.rope.fields(),
            "window": self.window,
        }


@dataclass(frozen=True)
class ModelSpec:
    """Everything a model's K/V depend on beside the tokens.

    weights: digest (>= 16 bytes) of the checkpoint's content. Two directories with the same files share;
        two files with the same name and other weights do not.
    groups: cover each layer 0..num_layers-1 exactly once.
    kv_scales: (k_scale, v_scale) per layer of an engine that keeps fp8 K/V; required there, None elsewhere.
    name: label for logs and messages; not part of the identity.
    """

    weights: bytes
    groups: tuple[LayerGroup, ...]
    tp_rank: int = 0
    tp_size: int = 1
    adapter: Adapter | None = None
    kv_scales: tuple[tuple[float, float], ...] | None = None
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if len(self.weights) < 16:
            raise SpecError(
                f"model {self.name!r}: the weights fingerprint must have >= 16 bytes, got {len(self.weights)}; "
                "hash the checkpoint's content, a name or path is not an identity"
            )
        seen = sorted(layer for group in self.groups for layer in group.layers)
        if not seen or seen != list(range(len(seen))):
            raise SpecError(f"model {self.name!r}: layer groups must cover 0..n-1 once each, got {seen}")
        if not (self.tp_size >= 1 and 0 <= self.tp_rank < self.tp_size):
            raise SpecError(f"model {self.name!r}: tp_rank {self.tp_rank} is not in 0..{self.tp_size - 1}")
        for group in self.groups:
            self._local_heads(group)
        fp8 = any(group.layout.dtype.is_fp8 for group in self.groups)
        if fp8 != (self.kv_scales is not None):
            raise SpecError(
                f"model {self.name!r}: kv_scales must be given exactly when K/V are kept in fp8 "
                f"(fp8: {fp8}, scales given: {self.kv_scales is not None}); a missing scale is not 1.0"
            )
        if self.kv_scales is not None:
            if len(self.kv_scales) != len(seen):
                raise SpecError(f"model {self.name!r}: {len(self.kv_scales)} kv_scales for {len(seen)} layers")
            for layer, pair in enumerate(self.kv_scales):
                if len(pair) != 2 or not all(np.isfinite(scale) and scale > 0 for scale in pair):
                    raise SpecError(f"model {self.name!r}: kv_scales[{layer}]={pair} must be two finite values > 0")

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    def group_of(self, layer: int) -> LayerGroup:
        for group in self.groups:
            if layer in group.layers:
                return group
        raise SpecError(f"model {self.name!r} has layers 0..{self.num_layers - 1}, asked for {layer}")

    def layout(self, layer: int) -> KVLayout:
        """Layout of one layer chunk on this rank."""
        group = self.group_of(layer)
        whole = group.layout
        return KVLayout(whole.kind, self._local_heads(group), whole.parts, whole.dtype)

    def _local_heads(self, group: LayerGroup) -> int:
        heads = group.layout.heads
        if group.layout.kind == "mla":
            return 1  # the latent is replicated on every rank
        if heads % self.tp_size == 0:
            return heads // self.tp_size
        if self.tp_size % heads == 0:
            return 1  # fewer heads than ranks: engines replicate them
        raise SpecError(f"model {self.name!r}: {heads} KV heads cannot be split over tp_size={self.tp_size}")

    def token_nbytes(self) -> int:
        """Unencoded bytes per token over all layers on this rank."""
        return sum(self.layout(group.layers[0]).chunk_nbytes(1) * len(group.layers) for group in self.groups)

    def fields(self) -> dict[str, Value]:
        return {
            "weights": self.weights,
            "groups": [group.fields() for group in self.groups],
            "tp_rank": self.tp_rank,
            "tp_size": self.tp_size,
            "adapter": None if self.adapter is None else self.adapter.digest,
            "kv_scales": self.kv_scales,
        }

    def fingerprint(self) -> bytes:
        """32 bytes that commit to every field but ``name``, tagged and length-prefixed."""
        return commit("hypercache.model.v1", self.fields())

    @classmethod
    def from_hf_config(
        cls,
        config: Mapping[str, Any] | Any,
        *,
        weights: bytes,
        dtype: KVDtype | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        adapter: Adapter | None = None,
        kv_scales: tuple[tuple[float, float], ...] | None = None,
        name: str | None = None,
    ) -> ModelSpec:
        """Build from a Hugging Face config (object with ``to_dict`` or plain mapping)."""
        raise SpecError("from_hf_config is not available")
