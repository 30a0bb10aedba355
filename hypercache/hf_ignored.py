"""Entries of a configuration that transformers ignores for its model type. Pure.

Believing one gives a specification of a model that nobody runs: keys rotated, or attention cut off, otherwise
than said. Another engine may obey it, so neither reading is right for both: such a configuration is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hypercache import hf_types

Config = Mapping[str, Any]

_SAME: dict[str, tuple[str, ...]] = {
    "num_kv_heads": ("num_key_value_heads",),
    "n_head_kv": ("num_key_value_heads",),
    "multi_query_group_num": ("num_key_value_heads",),
    "kv_channels": ("head_dim",),
    "attention_head_dim": ("head_dim",),
}
_WITHOUT_EFFECT: dict[str, Callable[[Any], bool]] = {
    "partial_rotary_factor": lambda value: value == 1,
    "rotary_pct": lambda value: value == 1,
    "no_rope_layers": lambda value: not isinstance(value, (list, tuple)) or all(value),
    "position_embedding_type": lambda value: value not in ("absolute", "learned", "alibi", "nope"),
}


def known(model: str) -> bool:
    """Whether it is known which entries the type obeys."""
    return model in hf_types.PLAIN or model in hf_types.FLAT


def ignored(text: Config, kinds: list[str], mla: bool) -> str:
    """Why ``text`` says something that its ``model_type`` does not obey; "" if it does not, or if that is not
    known. kinds: of each layer, as ``layer_types`` has them. mla: whether a latent is cached."""
    model = str(text.get("model_type"))
    if not known(model):
        return ""
    for key, types in hf_types.OBEYED.items():
        value = text.get(key)
        if model in types or value in (None, False, 0) or _WITHOUT_EFFECT.get(key, lambda _: False)(value):
            continue
        if any(text.get(other) == value for other in _SAME.get(key, ())) or (key in _LATENT and mla):
            continue
        return f"{key!r} ({value!r}), which this model_type ignores; remove it"
    return _rope(text, model) or _windows(text, model, kinds)


_LATENT = ("v_head_dim",)


def _rope(text: Config, model: str) -> str:
    found = {key: text.get(key) for key in ("rope_parameters", "rope_scaling")}
    maps = {key: value for key, value in found.items() if isinstance(value, Mapping) and value}
    if len(maps) == 2 and _plain(maps["rope_parameters"]) != _plain(maps["rope_scaling"]):
        return "'rope_parameters' and 'rope_scaling' that differ; keep the one that holds"
    for key, params in maps.items():
        nested = {kind: own for kind, own in params.items() if isinstance(own, Mapping)}
        if nested and model not in hf_types.NESTED_ROPE:
            return f"{key!r} by layer type, which this model_type ignores; give one for all layers"
        if not nested and key == "rope_parameters" and model == "gemma3_text":
            return f"{key!r} for all layers, which this model_type ignores; give one for each layer type"
        for own in (*nested.values(), params):
            share = own.get("partial_rotary_factor")
            kind = own.get("rope_type", own.get("type"))
            obeyed = model in hf_types.OBEYED["partial_rotary_factor"] or kind == "proportional"
            if share not in (None, 1) and not obeyed:
                return f"'partial_rotary_factor' ({share!r}), which this model_type ignores; remove it"
        if any(own.get("truncate") is False for own in nested.values()):
            return "'truncate' by layer type, which transformers reads for all layers only; remove it"
    return ""


def _plain(params: Config) -> dict[str, Any]:
    kept = {
        key: value for key, value in params.items() if key not in ("type", "rope_theta") and value is not None
    }
    return {**kept, "rope_type": params.get("rope_type", params.get("type", "default"))}


def _windows(text: Config, model: str, kinds: list[str]) -> str:
    given, window = text.get("layer_types") is not None, text.get("sliding_window")
    switch = text.get("use_sliding_window")
    sliding = kinds.count("sliding_attention")
    if "chunked_attention" in kinds and model not in hf_types.CHUNKED:
        return "'layer_types' with chunked_attention, which this model_type ignores"
    period = text.get("sliding_window_pattern")
    other = period not in (None, hf_types.PATTERN.get(model)) and model not in hf_types.PATTERNED
    if window and not given and other:
        return "'sliding_window_pattern', which this model_type ignores; give 'layer_types'"
    if model in hf_types.SWITCHED:
        if sliding and not switch:
            return "'layer_types' that slide while 'use_sliding_window' is not set; set it, or let none slide"
        if model in hf_types.EVERY_LAYER and switch and text.get("max_window_layers"):
            return "'max_window_layers', which this model_type ignores; remove it"
    elif window and (switch is False or (switch and text.get("max_window_layers"))):
        return (
            "'use_sliding_window', which this model_type ignores; set 'sliding_window' to null, or remove it"
        )
    if model in hf_types.EVERY_LAYER:
        holds = window and (model not in hf_types.SWITCHED or switch)
        if given and sliding != (len(kinds) if holds else 0):
            return "'layer_types', which this model_type ignores: a window holds in every layer; remove it"
    elif sliding and model not in hf_types.BY_LAYER:
        return "'layer_types' with sliding_attention, which this model_type ignores; remove it"
    return ""
