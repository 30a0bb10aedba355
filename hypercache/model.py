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

from hypercache.checks import count, tuple_of, typed
from hypercache.errors import SpecError
from hypercache.identity import Value, canonical, commit


class KVDtype(enum.Enum):
    """Element type of K/V in engine memory. ``storage`` is the NumPy dtype that carries its bits."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"

    @classmethod
    def of(cls, name: object) -> KVDtype:
        """The dtype that ``name`` names: "bf16", "bfloat16", ``torch.bfloat16``, ``np.float16``, ...

        Raises SpecError, listing the names, for anything else: also for "fp8", which could be either.
        """
        if isinstance(name, KVDtype):
            return name
        word = str(name).removeprefix("<class '").removesuffix("'>").rpartition(".")[2].lower()
        found = None if isinstance(name, bytes) else _NAMES.get(word)
        if found is None:
            raise SpecError(f"{name!r} names no K/V dtype; use one of {', '.join(_NAMES)}")
        return cls(found)

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


_NAMES = {
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("fp32", "float32", "float"), "fp32"),
    **dict.fromkeys(("fp8_e4m3", "float8_e4m3fn"), "fp8_e4m3"),
    **dict.fromkeys(("fp8_e5m2", "float8_e5m2"), "fp8_e5m2"),
}
_STORAGE = {"bf16": "<u2", "fp16": "<f2", "fp32": "<f4", "fp8_e4m3": "u1", "fp8_e5m2": "u1"}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) as applied to cached keys.

    ``kind`` is Hugging Face's ``rope_type`` ("default", "linear", "llama3", "yarn", ...) or "none" (then
    the other fields mean nothing and are not part of the identity). ``scaling`` holds its further
    parameters, sorted by name. The first ``rotary_dim`` elements of a head (or of MLA's rope part) are
    rotated, pairs ``(i, i + rotary_dim/2)``, or ``(2i, 2i + 1)`` if ``interleaved``: as the engine's cached
    bytes have it, which may differ from how the checkpoint's weights are ordered.
    """

    kind: str
    theta: float
    rotary_dim: int
    interleaved: bool = False
    scaling: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        _set = object.__setattr__
        _set(self, "rotary_dim", count("RopeSpec.rotary_dim", self.rotary_dim, 0))
        typed("RopeSpec.kind", self.kind, str, "give the config's rope_type, or 'none'")
        typed("RopeSpec.interleaved", self.interleaved, (bool, np.bool_))
        try:
            scaling = dict(self.scaling)
            canonical(scaling)
            _set(self, "scaling", tuple(sorted(scaling.items())))
        except (TypeError, ValueError):
            raise SpecError(
                "RopeSpec.scaling must be pairs of a name and a number, string or sequence, "
                f"got {self.scaling!r}"
            ) from None
        if self.kind == "none":
            return
        typed("RopeSpec.theta", self.theta, (int, float, np.integer, np.floating))
        if not self.kind:
            raise SpecError("RopeSpec.kind is empty; use 'none' for a model without rotary embedding")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise SpecError(f"RopeSpec.rotary_dim must be even and >= 2, got {self.rotary_dim}")
        if not (np.isfinite(self.theta) and self.theta > 0):
            raise SpecError(f"RopeSpec.theta must be finite and > 0, got {self.theta}")

    def fields(self) -> dict[str, Value]:
        if self.kind == "none":
            return {"kind": "none"}
        return {
            "kind": self.kind,
            "theta": canonical(self.theta),
            "rotary_dim": self.rotary_dim,
            "interleaved": bool(self.interleaved),
            "scaling": canonical(dict(self.scaling)),
        }


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a layer's cache: ``dim`` elements per head and token."""

    name: str
    dim: int

    def __post_init__(self) -> None:
        typed("Part.name", self.name, str)
        object.__setattr__(self, "dim", count(f"KVLayout part {self.name!r}: dim", self.dim, 1))


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
        typed("KVLayout.kind", self.kind, str, "use 'split' or 'mla'")
        remedy = "for example (Part('k', 128), Part('v', 128))"
        object.__setattr__(self, "parts", tuple_of("KVLayout.parts", self.parts, Part, remedy))
        typed("KVLayout.dtype", self.dtype, KVDtype, "use KVDtype.of(name), for example KVDtype.of('bf16')")
        want = {"split": ("k", "v"), "mla": ("latent", "rope")}.get(self.kind)
        if want is None:
            raise SpecError(f"KVLayout.kind={self.kind!r} is unknown; use 'split' or 'mla'")
        if tuple(part.name for part in self.parts) != want:
            raise SpecError(f"KVLayout {self.kind!r} needs parts {want}, got {[p.name for p in self.parts]}")
        object.__setattr__(self, "heads", count("KVLayout.heads", self.heads, 1))
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


_DIGEST = "bytes.fromhex(...) of a hex digest, or hypercache.engines.weights.{}_fingerprint(path)"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA or other adapter. ``digest`` of its content is the identity; ``name`` is a label."""

    name: str
    digest: bytes

    def __post_init__(self) -> None:
        typed("Adapter.name", self.name, str)
        typed("Adapter.digest", self.digest, bytes, _DIGEST.format("adapter"))
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

    def __post_init__(self) -> None:
        layers = tuple_of("LayerGroup.layers", self.layers, (int, np.integer), "give the layers' numbers")
        object.__setattr__(self, "layers", tuple(map(int, layers)))
        typed("LayerGroup.layout", self.layout, KVLayout)
        typed("LayerGroup.rope", self.rope, RopeSpec, "RopeSpec('none', 0.0, 0) for keys without rotation")
        if self.window is not None:
            object.__setattr__(self, "window", count("LayerGroup.window", self.window, 1))
        keys = self.layout.parts[-1 if self.layout.kind == "mla" else 0]
        if self.rope.kind != "none" and self.rope.rotary_dim > keys.dim:
            raise SpecError(
                f"rotary_dim {self.rope.rotary_dim} exceeds the {keys.dim} elements of part {keys.name!r}"
            )

    def fields(self) -> dict[str, Value]:
        return {"layout": self.layout.fields(), "rope": self.rope.fields(), "window": self.window}


@dataclass(frozen=True)
class ModelSpec:
    """Everything a model's K/V depend on beside the tokens.

    weights: digest (>= 16 bytes) of the checkpoint's content. Two directories with the same files share;
        two files with the same name and other weights do not.
    groups: cover each layer 0..num_layers-1 exactly once.
    kv_scales: (k_scale, v_scale) per layer of an engine that keeps fp8 K/V; required there, None elsewhere.
    numerics: digest of whatever else of the model's configuration changes K/V (norm epsilon, activation,
        multipliers, ...); :meth:`from_hf_config` fills it.
    name: label for logs and messages; not part of the identity.
    """

    weights: bytes
    groups: tuple[LayerGroup, ...]
    tp_rank: int = 0
    tp_size: int = 1
    adapter: Adapter | None = None
    kv_scales: tuple[tuple[float, float], ...] | None = None
    numerics: bytes = b""
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        typed("ModelSpec.name", self.name, str)
        typed("ModelSpec.weights", self.weights, bytes, _DIGEST.format("weights"))
        typed("ModelSpec.numerics", self.numerics, bytes, "b'' or a digest; from_hf_config fills it")
        typed("ModelSpec.adapter", self.adapter, (Adapter, type(None)), "Adapter(name, digest)")
        groups = tuple_of("ModelSpec.groups", self.groups, LayerGroup, "LayerGroup(layers, layout, rope)")
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "tp_size", count(f"model {self.name!r}: tp_size", self.tp_size, 1))
        object.__setattr__(self, "tp_rank", count(f"model {self.name!r}: tp_rank", self.tp_rank, 0))
        if len(self.weights) < 16:
            raise SpecError(
                f"model {self.name!r}: the weights fingerprint must have >= 16 bytes, "
                f"got {len(self.weights)}; hash the checkpoint's content, a name or path is not an identity"
            )
        seen = sorted(layer for group in self.groups for layer in group.layers)
        if not seen or seen != list(range(len(seen))):
            raise SpecError(f"model {self.name!r}: layer groups must cover 0..n-1 once each, got {seen}")
        if self.tp_rank >= self.tp_size:
            raise SpecError(f"model {self.name!r}: tp_rank {self.tp_rank} is not in 0..{self.tp_size - 1}")
        for group in self.groups:
            self._head_range(group)
        fp8 = any(group.layout.dtype.is_fp8 for group in self.groups)
        if fp8 != (self.kv_scales is not None):
            raise SpecError(
                f"model {self.name!r}: kv_scales must be given exactly when K/V are kept in fp8 "
                f"(fp8: {fp8}, scales given: {self.kv_scales is not None}); a missing scale is not 1.0"
            )
        if self.kv_scales is not None:
            pairs = tuple_of(
                "ModelSpec.kv_scales", self.kv_scales, (tuple, list), "(k_scale, v_scale) a layer"
            )
            numbers = (int, float, np.integer, np.floating)
            scales = tuple(
                tuple_of(f"ModelSpec.kv_scales[{i}]", pair, numbers) for i, pair in enumerate(pairs)
            )
            object.__setattr__(self, "kv_scales", scales)
            if len(self.kv_scales) != len(seen):
                raise SpecError(
                    f"model {self.name!r}: {len(self.kv_scales)} kv_scales for {len(seen)} layers"
                )
            for layer, pair in enumerate(self.kv_scales):
                if len(pair) != 2 or not all(np.isfinite(scale) and scale > 0 for scale in pair):
                    raise SpecError(
                        f"model {self.name!r}: kv_scales[{layer}]={pair} must be two finite values > 0"
                    )

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
        first, stop = self._head_range(group)
        whole = group.layout
        return KVLayout(whole.kind, stop - first, whole.parts, whole.dtype)

    def head_range(self, layer: int) -> tuple[int, int]:
        """``(first, stop)``: the model's KV heads in ``layer`` that this rank holds, a contiguous run.

        With fewer heads than ranks, neighbouring ranks hold the same head; every rank holds MLA's latent.
        ``head_slice(tokens, *spec.head_range(layer))`` of the whole model's chunk is this rank's chunk.
        """
        return self._head_range(self.group_of(layer))

    def _head_range(self, group: LayerGroup) -> tuple[int, int]:
        heads = group.layout.heads
        if group.layout.kind == "mla":
            return 0, 1
        if heads % self.tp_size == 0:
            share = heads // self.tp_size
            return self.tp_rank * share, (self.tp_rank + 1) * share
        if self.tp_size % heads == 0:
            head = self.tp_rank // (self.tp_size // heads)
            return head, head + 1
        raise SpecError(f"model {self.name!r}: {heads} KV heads cannot be split over tp_size={self.tp_size}")

    def token_nbytes(self) -> int:
        """Unencoded bytes per token over all layers on this rank."""
        return sum(self.layout(group.layers[0]).chunk_nbytes(1) * len(group.layers) for group in self.groups)

    def fields(self) -> dict[str, Value]:
        # Layer by layer, so that the order of groups and how they were cut are no part of the identity.
        by_layer = {layer: group.fields() for group in self.groups for layer in group.layers}
        return {
            "weights": self.weights,
            "layers": [by_layer[layer] for layer in range(self.num_layers)],
            "tp_rank": self.tp_rank,
            "tp_size": self.tp_size,
            "adapter": None if self.adapter is None else self.adapter.digest,
            "kv_scales": canonical(self.kv_scales),
            "numerics": self.numerics,
        }

    def differences(self, other: ModelSpec) -> str:
        """For messages: which fields of ``other`` differ, as "field: own value, other's value; ..."."""
        mine, theirs = self.fields(), other.fields()
        found = []
        for key in mine:
            if mine[key] == theirs[key]:
                continue
            if key != "layers":
                found.append(f"{key}: {_shown(mine[key])}, {_shown(theirs[key])}")
            elif self.num_layers != other.num_layers:
                found.append(f"layers: {self.num_layers}, {other.num_layers}")
            else:
                found += self._layer_differences(other)
        return "; ".join(found)

    def _layer_differences(self, other: ModelSpec) -> list[str]:
        """Those of the first layer that differs."""
        for layer in range(self.num_layers):
            mine, theirs = (_flat(spec.group_of(layer).fields()) for spec in (self, other))
            differing = [key for key in mine | theirs if mine.get(key) != theirs.get(key)]
            if differing:
                shown = [f"{key}: {_shown(mine.get(key))}, {_shown(theirs.get(key))}" for key in differing]
                return [f"layer {layer} {one}" for one in shown]
        return []

    def fingerprint(self) -> bytes:
        """32 bytes that commit to every field but ``name``, tagged and length-prefixed."""
        return commit("hypercache.model.v1", self.fields())

    @classmethod
    def from_hf_config(
        cls,
        config: Mapping[str, Any] | Any,
        *,
        weights: bytes,
        dtype: KVDtype | Any = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        adapter: Adapter | None = None,
        kv_scales: tuple[tuple[float, float], ...] | None = None,
        name: str | None = None,
        assume_standard: bool = False,
    ) -> ModelSpec:
        """Build from a Hugging Face config: an object with ``to_dict``, or a mapping as in ``config.json``.

        dtype: element type of the engine's K/V, a KVDtype or what :meth:`KVDtype.of` takes; None takes the
            config's ``dtype`` / ``torch_dtype``.
        assume_standard: the caller knows that a model whose ``model_type`` is unknown here keeps plain keys
            and values after RoPE in every layer. Wrong K/V are served if that is not so.
        name: label; None takes the config's own. What is read, and what is no part of the identity, is
        told in :mod:`hypercache.hf_config`. Raises SpecError, naming the key, for a config that is unknown
        or says too little.
        """
        from hypercache import hf_config  # it builds this module's types

        raw = hf_config.as_mapping(config)
        return cls(
            weights=weights,
            groups=hf_config.layer_groups(
                raw, None if dtype is None else KVDtype.of(dtype), assume_standard=assume_standard
            ),
            tp_rank=tp_rank,
            tp_size=tp_size,
            adapter=adapter,
            kv_scales=kv_scales,
            numerics=hf_config.numerics(raw),
            name=hf_config.label(raw) if name is None else name,
        )


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in fields.items():
        flat |= _flat(item, f"{prefix}{key}.") if isinstance(item, Mapping) else {prefix + key: item}
    return flat


def _shown(value: object) -> str:
    if isinstance(value, bytes):
        return f"{value[:8].hex()}..." if len(value) > 8 else value.hex() or "none"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
