"""Hugging Face Transformers as an engine: any causal LM with RoPE, on the CPU.

Only the public cache API is used: a ``DynamicCache`` whose layers keep their K/V in
:class:`hypercache.kv.KVBuffers`. What the cache fetched is attended to where it lies, what the model
computes is written next to it, and storing it needs no copy. (A plain ``DynamicLayer`` copies the whole
past for each step, since it grows by concatenation.)
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hypercache.engines import LayerReady
from hypercache.engines.loaded import check_buffers, check_place, check_run, reason
from hypercache.engines.weights import weights_fingerprint
from hypercache.errors import SpecError
from hypercache.identity import commit
from hypercache.kv import KVBuffers
from hypercache.model import Adapter, KVDtype, ModelSpec

Array = npt.NDArray[Any]

_DTYPES = {torch.float32: KVDtype.FP32, torch.float16: KVDtype.FP16, torch.bfloat16: KVDtype.BF16}


class TransformersEngine:
    """One loaded model.

    weights: digest (>= 16 bytes) or checkpoint path: the identity of the K/V. None hashes the parameters in
        memory (about a second per GB), which is right whatever was done to them after loading.
    adapter: required with ``weights`` when the model carries adapter layers, since they change the K/V.
    assume_standard: as in :meth:`ModelSpec.from_hf_config`, for a ``model_type`` that it does not know.
    Raises SpecError that names what the cache cannot carry: what is no causal LM, encoder-decoders, models
    without RoPE or with one that depends on the prompt's length, recurrent or otherwise unknown cache layers,
    models in training mode, other dtypes, devices other than the CPU; and a model that is not what its
    config says: rotary frequencies that a cast rounded, K/V of another shape (one token is run).
    """

    def __init__(
        self,
        model: Any,
        *,
        weights: bytes | str | Path | None = None,
        adapter: Adapter | None = None,
        assume_standard: bool = False,
    ) -> None:
        name = type(model).__name__
        if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
            raise SpecError(
                f"TransformersEngine needs a loaded model, got {name}; "
                "load it with transformers.AutoModelForCausalLM.from_pretrained(...)"
            )
        if not isinstance(weights, (bytes, str, Path, type(None))):
            raise SpecError(
                f"weights must be a digest in bytes, a path or None, got {type(weights).__name__}"
            )
        config = model.config
        if getattr(config, "is_encoder_decoder", False):
            raise SpecError(f"{name} is an encoder-decoder; only decoder-only causal models are supported")
        if not getattr(model, "can_generate", lambda: False)():
            raise SpecError(f"{name} has no logits; load it with transformers.AutoModelForCausalLM")
        _refuse_training(model, *model.modules())
        check_place(model)
        if model.dtype not in _DTYPES:
            raise SpecError(f"{name} computes in {model.dtype}; supported: {', '.join(map(str, _DTYPES))}")
        if weights is not None and adapter is None and hasattr(model, "peft_config"):
            raise SpecError(
                f"{name} carries adapter layers: pass adapter=Adapter(name, digest), or weights=None"
            )
        # Layers with a sliding window are kept whole here: the model masks what lies outside of it.
        try:
            kept = DynamicCache(config=config)
        except Exception as error:  # windows and layer types that contradict each other
            raise SpecError(f"{name}: its config allows for no cache: {reason(error)}") from error
        _check_cache_layers(name, kept, DynamicLayer, DynamicSlidingWindowLayer)
        if weights is None:
            digest = _parameters_digest(model)
        else:
            digest = weights if isinstance(weights, bytes) else weights_fingerprint(Path(weights))
        self.model = model
        self.spec = ModelSpec.from_hf_config(
            config,
            weights=digest,
            dtype=_DTYPES[model.dtype],
            adapter=adapter,
            name=name,
            assume_standard=assume_standard,
        )
        self._check_rope()
        if more := check_buffers(model, self.spec):
            both = commit("transformers.weights", {"weights": digest, "buffers": more})
            self.spec = dataclasses.replace(self.spec, weights=both)
        check_run(model, self.spec)
        self._last_only = (
            {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        )

    def _check_rope(self) -> None:
        name = type(self.model).__name__
        for group in self.spec.groups:
            if group.rope.kind == "none":
                raise SpecError(f"{name} has no rotary position embedding; only RoPE models are supported")
            if group.rope.kind in ("dynamic", "longrope"):
                raise SpecError(
                    f"{name} rotates by {group.rope.kind!r} RoPE: here a prefix's keys depend on the "
                    "whole prompt's length, so they cannot be shared; set another rope_type in its config"
                )

    def run(
        self, ids: Sequence[int] | Array, kv: KVBuffers, start: int, layer_ready: LayerReady | None = None
    ) -> Array:
        """Logits ``(vocab,)``, float32, after ``ids`` at positions ``start..``; their K/V go into ``kv``."""
        new = torch.from_numpy(np.array(ids, np.int64))[None]
        if new.shape[1] == 0:
            raise SpecError("no token to compute; leave at least the prompt's last one out of the past")
        if kv.tokens < start + new.shape[1]:
            raise SpecError(
                f"K/V with room for {kv.tokens} tokens cannot take positions {start}..{start + new.shape[1]}"
            )
        _refuse_training(self.model)
        cache = self.inject(kv, start, layer_ready)
        with torch.inference_mode():
            logits = self.model(input_ids=new, cache=cache, use_cache=True, **self._last_only).logits
        out: Array = logits[0, -1].float().numpy()
        return out

    def inject(self, kv: KVBuffers, tokens: int, layer_ready: LayerReady | None = None) -> Any:
        """A ``DynamicCache`` over ``kv`` whose first ``tokens`` positions are filled; for ``run`` and for the
        model's own ``generate``. New K/V go into ``kv`` while there is room, then into memory of the cache.
        """
        if kv.spec != self.spec:
            raise SpecError(
                f"these K/V belong to another model ({kv.spec.name!r}; theirs, this engine's: "
                f"{kv.spec.differences(self.spec)}); allocate them with engine.spec"
            )
        if not 0 <= tokens <= kv.tokens:
            raise SpecError(f"{tokens} filled tokens are outside the 0..{kv.tokens} that these K/V hold")
        cache = DynamicCache(config=self.model.config)
        cache.layers = []
        for i in range(self.spec.num_layers):
            keys, values = map(_to_torch, kv.layer(i))
            cache.layers.append(
                _HostLayer(keys, values, tokens, partial(layer_ready, i) if layer_ready else None)
            )
        return cache

    def extract(self, cache: Any, tokens: int | None = None) -> KVBuffers:
        """The first ``tokens`` positions (default all) of a one-sequence ``DynamicCache``, as views.

        Raises SpecError that names the layer: batches, unknown cache layers, K/V that do not fit ``spec``.
        """
        _check_cache_layers(type(self.model).__name__, cache, DynamicLayer, _HostLayer)
        layers = []
        for i, layer in enumerate(cache.layers):
            if not layer.is_initialized:
                raise SpecError(f"layer {i} of the cache is empty; run the model with use_cache=True first")
            if layer.keys.shape[0] != 1:
                raise SpecError(
                    f"layer {i}: the cache holds a batch of {layer.keys.shape[0]}; hand over one sequence"
                )
            layers.append([_to_numpy(i, tensor[0]) for tensor in (layer.keys, layer.values)])
        kv = KVBuffers.wrap(self.spec, layers)
        return kv if tokens is None else kv.window(0, tokens)


class _HostLayer(DynamicLayer):  # type: ignore[misc]
    """A ``DynamicLayer`` in memory allocated once: ``[1, heads, room, dim]``, ``filled`` tokens in use."""

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, filled: int, arrived: Callable[[], object] | None
    ) -> None:
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self._room = (keys, values)
        self._arrived = arrived
        self.keys, self.values = keys[:, :, :filled], values[:, :, :filled]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._arrived is not None:
            arrived, self._arrived = self._arrived, None
            arrived()
        start = self.keys.shape[-2]
        stop = start + key_states.shape[-2]
        # Beam search replaces ``keys`` by copies; those no longer lie in the room.
        at_home = self.keys.untyped_storage().data_ptr() == self._room[0].untyped_storage().data_ptr()
        if not at_home or key_states.shape[0] != 1 or stop > self._room[0].shape[-2]:
            grown: tuple[torch.Tensor, torch.Tensor] = super().update(
                key_states, value_states, *args, **kwargs
            )
            return grown
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, start:stop] = new
        self.keys, self.values = (room[:, :, :stop] for room in self._room)
        return self.keys, self.values


def _refuse_training(*modules: Any) -> None:
    if any(module.training for module in modules):
        raise SpecError(
            f"{type(modules[0]).__name__} is in training mode: dropout makes K/V random; call model.eval()"
        )


def _check_cache_layers(name: str, cache: Any, *known: type) -> None:
    if not isinstance(cache, DynamicCache):
        raise SpecError(f"{name}: the cache is a {type(cache).__name__}; only DynamicCache is supported")
    for i, layer in enumerate(cache.layers):
        if type(layer) not in known:
            raise SpecError(
                f"{name}: layer {i} keeps a {type(layer).__name__}; supported here: "
                + ", ".join(one.__name__.lstrip("_") for one in known)
            )


def _to_torch(array: Array) -> torch.Tensor:
    tensor = torch.from_numpy(array)[None]
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def _to_numpy(layer: int, tensor: torch.Tensor) -> Array:
    if tensor.device.type != "cpu":
        raise SpecError(f"layer {layer} is on {tensor.device}; move the cache to host memory first")
    tensor = tensor.detach()
    out: Array = (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return out


def _parameters_digest(model: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor) or tensor.is_quantized:
            raise SpecError(
                f"{type(model).__name__}: {name} is quantised or packed, which cannot be hashed; "
                "pass weights= a digest of these very weights, or load the model without quantising it"
            )
        fields = {"name": name, "dtype": str(tensor.dtype), "shape": tuple(tensor.shape)}
        digest.update(commit("transformers.parameter", fields))
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()
