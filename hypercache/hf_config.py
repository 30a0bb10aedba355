"""Hugging Face model configurations -> layer groups and a digest of the rest. Pure, no transformers needed.

Reads what transformers 4 and 5 write (``rope_theta`` + ``rope_scaling``, or ``rope_parameters``, flat or
per layer type) into one form, so both give one identity. Everything else that a configuration says
reaches :func:`numerics`: a norm epsilon, an activation or a multiplier changes K/V as surely as theta does,
and no list of such keys can be complete. Left out are only the keys of ``_LABELS`` (names, token ids,
training and sampling settings), dropout rates, keys that begin with an underscore, and values that are
None or false: a switch that a later transformers adds is off for checkpoints that do not know it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypercache import hf_ignored, hf_types
from hypercache.errors import SpecError
from hypercache.identity import Value, canonical, commit
from hypercache.model import KVDtype, KVLayout, LayerGroup, Part, RopeSpec

Config = Mapping[str, Any]

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Entries that tell of layers which keep something else, or more, than K/V per token: recurrent states,
# missing or linear attention, K/V of an image, an indexer's keys. Refused whatever the model type says.
_NOT_PLAIN = _words(
    """attn_layer_period attn_type_list block_configs block_types cross_attention_layers
    hybrid_override_pattern index_topk layers_block_type state_size"""
)
_RECURRENT_PREFIXES = ("conv_", "mamba_", "ssm_", "linear_")

_ROPE_ALIAS = {"su": "longrope"}

# Keys that layer_groups turns into fields of a LayerGroup.
_PARSED = _words(
    """num_hidden_layers n_layer n_layers num_layers num_key_value_heads num_kv_heads n_head_kv
    multi_query_group_num head_dim attention_head_dim kv_channels global_head_dim
    num_global_key_value_heads v_head_dim per_layer_config rope_theta rope_parameters rope_scaling
    rope_local_base_freq rotary_emb_base partial_rotary_factor rotary_pct rotary_dim no_rope_layers
    no_rope_layer_interval layer_types sliding_window use_sliding_window max_window_layers
    sliding_window_pattern original_max_position_embeddings"""
)
# Keys that say nothing about the K/V of given tokens.
_LABELS = _words(
    """architectures auto_map transformers_version tokenizer_class name_or_path torch_dtype dtype use_cache
    return_dict return_dict_in_generate output_attentions output_hidden_states output_scores
    output_router_logits id2label label2id num_labels problem_type finetuning_task task_specific_params
    tie_word_embeddings tie_encoder_decoder tf_legacy_loss torchscript use_bfloat16 pruned_heads
    gradient_checkpointing initializer_range initializer_factor router_aux_loss_coef pretraining_tp
    chunk_size_feed_forward is_decoder add_cross_attention cross_attention_hidden_size
    max_position_embeddings n_positions n_ctx seq_length final_logit_softcapping num_nextn_predict_layers
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature
    top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens prefix"""
)
_LABEL_SUFFIXES = ("_token_id", "dropout", "_pdrop", "layerdrop")

_DTYPES = {
    "bfloat16": KVDtype.BF16,
    "float16": KVDtype.FP16,
    "half": KVDtype.FP16,
    "float32": KVDtype.FP32,
    "float": KVDtype.FP32,
}


def as_mapping(config: Config | Any) -> Config:
    """The configuration as a mapping; SpecError for anything that is neither one nor has ``to_dict``."""
    raw = config if isinstance(config, Mapping) else getattr(config, "to_dict", lambda: None)()
    if not isinstance(raw, Mapping):
        raise SpecError(
            f"a model config must be a mapping as in config.json or a transformers config, "
            f"got {type(config).__name__}"
        )
    return raw


def label(config: Config) -> str:
    """A name for people: the config's path or model type, never part of an identity."""
    return str(config.get("_name_or_path") or config.get("model_type") or "")


def numerics(config: Config) -> bytes:
    """32 bytes that commit to everything in ``config`` that may change K/V and is in no layer group."""
    wrappers: list[Value] = []
    text = config
    while (nested := _nested(text)) is not None:
        wrappers.append(_meaningful({key: item for key, item in text.items() if key not in _NESTED}))
        text = nested
    own = {key: item for key, item in text.items() if key not in _PARSED}
    layers = {
        str(layer): rest
        for layer, values in _overrides(text).items()
        if (rest := _meaningful({key: item for key, item in values.items() if key not in _PARSED}))
    }
    fields: dict[str, Value] = {"text": _meaningful(own), "wrappers": wrappers, "layers": layers}
    return commit("hypercache.numerics.v1", fields)


def layer_groups(
    config: Config, dtype: KVDtype | None, *, assume_standard: bool = False
) -> tuple[LayerGroup, ...]:
    """The model's layers that keep K/V, grouped by cache shape, rotary setting and window.

    Model types that :mod:`hypercache.hf_types` does not know are refused unless ``assume_standard``.

    Layers that reuse an earlier layer's K/V (``num_kv_shared_layers``, always the last ones) have none.
    MLA's rope part is described as transformers caches it: half-split for DeepSeek-V3, interleaved for
    DeepSeek-V2. An engine that caches it otherwise replaces ``RopeSpec.interleaved``.
    """
    wrappers: list[Config] = []
    text = config
    while (nested := _nested(text)) is not None:
        wrappers.append(text)
        text = nested
    _refuse_unsupported(config, text)
    if not assume_standard:
        for wrapper in wrappers:
            _refuse_unknown(wrapper, hf_types.WRAPPERS)
        _refuse_unknown(text, hf_types.PLAIN if wrappers else hf_types.PLAIN | hf_types.FLAT)
    dtype = dtype if dtype is not None else _dtype(text, config)
    total = _int(text, _LAYERS)
    kinds = _layer_types(text, total)
    if why := hf_ignored.ignored(text, kinds, mla=text.get("kv_lora_rank") is not None):
        raise SpecError(f"{_where(text)} has {why}")
    overrides = _overrides(text)
    grouped: dict[tuple[KVLayout, RopeSpec, int | None], list[int]] = {}
    for layer in range(total - _int(text, ("num_kv_shared_layers",), default=0, least=0)):
        own = {**_global_overrides(text, kinds[layer]), **overrides.get(layer, {})}
        merged = _pick_layer({**text, **own}, layer, total)
        layout = _layout(merged, dtype)
        keys = layout.parts[1 if layout.kind == "mla" else 0].dim
        window = _window(merged, kinds[layer])
        rope = _rope(merged, kinds[layer], layer, keys, mla=layout.kind == "mla")
        grouped.setdefault((layout, rope, window), []).append(layer)
    return tuple(LayerGroup(tuple(layers), *key) for key, layers in grouped.items())


def _nested(config: Config) -> Config | None:
    for key in _NESTED:
        if isinstance(config.get(key), Mapping) and config[key]:
            found: Config = config[key]
            return found
    return None


def _meaningful(config: Config) -> Value:
    """``config`` without labels, absent and switched-off entries, at every depth."""
    kept: dict[str, Any] = {}
    for key, item in config.items():
        name = str(key)
        if (
            name.startswith("_")
            or name in _LABELS
            or name.endswith(_LABEL_SUFFIXES)
            or item is None
            or item is False
        ):
            continue
        kept[name] = _meaningful(item) if isinstance(item, Mapping) else item
    try:
        return canonical(kept)
    except TypeError as error:
        raise SpecError(f"model config {label(config)!r}: {error}; pass the config's to_dict()") from None


def _where(text: Config) -> str:
    return f"model config {label(text)!r} (model_type {text.get('model_type')!r})"


def _first(text: Config, names: Sequence[str]) -> Any:
    return next((text[name] for name in names if text.get(name) is not None), None)


def _int(text: Config, names: Sequence[str], *, default: int | None = None, least: int = 1) -> int:
    value = _first(text, names)
    if value is None:
        value = default
    if value is None:
        raise SpecError(
            f"{_where(text)} lacks {names[0]!r}; pass the whole config of a decoder with attention"
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(f"{_where(text)}: {names[0]!r} must be an integer >= {least}, got {value!r}")
    return value


def _number(text: Config, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SpecError(f"{_where(text)}: {key!r} must be a number, got {value!r}")
    return float(value)


def _refuse_unsupported(config: Config, text: Config) -> None:
    if config.get("is_encoder_decoder") or text.get("is_encoder_decoder"):
        raise SpecError(f"{_where(text)}: 'is_encoder_decoder' is set; only decoder-only models are cached")
    for key, item in text.items():
        if item and (key in _NOT_PLAIN or str(key).startswith(_RECURRENT_PREFIXES)):
            raise SpecError(
                f"{_where(text)}: {key!r} tells of layers that keep something else than K/V per token "
                "(a recurrent state, an image's K/V, an index); such models cannot be cached by blocks"
            )
    # An image's tokens may see each other: they are one unit of content.
    if text.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise SpecError(
            f"{_where(text)}: 'use_bidirectional_attention' makes K/V depend on the tokens that follow; "
            "only causal models are cached"
        )


def _refuse_unknown(part: Config, known: frozenset[str]) -> None:
    if str(part.get("model_type")) not in known:
        raise SpecError(
            f"{_where(part)}: this model_type's cache is not known to be keys and values after RoPE in each "
            "layer. If it is, pass assume_standard=True to from_hf_config; else build the ModelSpec by hand, "
            "one LayerGroup per kind of layer, if each layer keeps K/V per token at all"
        )


def _dtype(text: Config, config: Config) -> KVDtype:
    value = _first(text, ("dtype", "torch_dtype")) or _first(config, ("dtype", "torch_dtype"))
    found = _DTYPES.get(str(value).removeprefix("torch."))
    if found is None:
        raise SpecError(
            f"{_where(text)}: 'dtype' is {value!r}; pass dtype=KVDtype... as the engine keeps its K/V "
            f"(understood here: {', '.join(_DTYPES)})"
        )
    return found


def _overrides(text: Config) -> dict[int, Config]:
    """``per_layer_config`` with its keys ("05", "5" or 5) as layer numbers."""
    raw = text.get("per_layer_config") or {}
    try:
        return {int(layer): dict(values) for layer, values in raw.items()}
    except (AttributeError, TypeError, ValueError):
        raise SpecError(f"{_where(text)}: 'per_layer_config' must map layer numbers to mappings") from None


def _global_overrides(text: Config, kind: str) -> dict[str, Any]:
    """Gemma 4's older form: full-attention layers with a head dim (and KV heads) of their own."""
    if kind != "full_attention" or text.get("per_layer_config"):
        return {}
    found = {"head_dim": text.get("global_head_dim")}
    if text.get("attention_k_eq_v", True):
        found["num_key_value_heads"] = text.get("num_global_key_value_heads")
    return {key: value for key, value in found.items() if value is not None}


def _pick_layer(text: Config, layer: int, total: int) -> Config:
    """Heads and dims given as one list entry per layer become this layer's."""
    picked = dict(text)
    for key in (*_KV_HEADS, *_HEAD_DIM, "v_head_dim"):
        value = text.get(key)
        if isinstance(value, (list, tuple)):
            if len(value) != total:
                raise SpecError(f"{_where(text)}: {key!r} has {len(value)} entries for {total} layers")
            picked[key] = value[layer]
    return picked


def _layout(text: Config, dtype: KVDtype) -> KVLayout:
    if text.get("kv_lora_rank") is not None:
        latent, rope = _int(text, ("kv_lora_rank",)), _int(text, ("qk_rope_head_dim",))
        return KVLayout("mla", 1, (Part("latent", latent), Part("rope", rope)), dtype)
    heads = _int(text, _HEADS)
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        kv_heads = 1
    else:
        kv_heads = _int(text, _KV_HEADS, default=heads)
    if heads % kv_heads:
        raise SpecError(
            f"{_where(text)}: 'num_key_value_heads'={kv_heads} does not divide {heads} attention heads"
        )
    if _first(text, _HEAD_DIM) is None and _int(text, _HIDDEN) % heads:
        raise SpecError(f"{_where(text)} lacks 'head_dim', and {heads} heads do not divide the hidden size")
    dim = _int(text, _HEAD_DIM, default=_int(text, _HIDDEN) // heads)
    return KVLayout(
        "split", kv_heads, (Part("k", dim), Part("v", _int(text, ("v_head_dim",), default=dim))), dtype
    )


def _layer_types(text: Config, total: int) -> list[str]:
    kinds = text.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, (list, tuple)) or len(kinds) != total:
            raise SpecError(f"{_where(text)}: 'layer_types' must name each of the {total} layers")
        return list(kinds)
    model = str(text.get("model_type"))
    if model in hf_types.CHUNKED and text.get("attention_chunk_size"):
        rotated = [not _unrotated(text, model, "", layer) for layer in range(total)]
        return ["chunked_attention" if each else "full_attention" for each in rotated]
    switched = model in hf_types.SWITCHED and not text.get("use_sliding_window")
    if not text.get("sliding_window") or switched or text.get("use_sliding_window") is False:
        return ["full_attention"] * total
    period = _first(text, ("sliding_window_pattern", "_sliding_window_pattern")) or hf_types.PATTERN.get(
        model
    )
    if period is not None:
        every = _int({**text, "sliding_window_pattern": period}, ("sliding_window_pattern",))
        return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(total)]
    if model in hf_types.EVERY_LAYER or model == "ministral":
        return ["sliding_attention"] * total
    if model not in hf_types.FROM_LAYER:
        raise SpecError(
            f"{_where(text)} has 'sliding_window' but no 'layer_types': it must say which layers it holds for"
        )
    full = _int(text, ("max_window_layers",), default=hf_types.FROM_LAYER[model], least=0)
    return ["full_attention" if layer < full else "sliding_attention" for layer in range(total)]


def _window(text: Config, kind: str) -> int | None:
    match kind:
        case "full_attention":
            return None
        case "sliding_attention":
            return _int(text, ("sliding_window",))
        case "chunked_attention":  # a chunk never reaches further back than its own length
            return _int(text, ("attention_chunk_size",))
    raise SpecError(
        f"{_where(text)}: 'layer_types' has {kind!r}; "
        "known are full_attention, sliding_attention and chunked_attention"
    )


def _rope(text: Config, kind: str, layer: int, key_dim: int, *, mla: bool) -> RopeSpec:
    model = str(text.get("model_type"))
    params = _rope_params(text, kind)
    if _unrotated(text, model, kind, layer):
        return RopeSpec("none", 0.0, 0)
    theta = _first(params, ("rope_theta",))
    if theta is None:
        theta = _first(text, ("rope_theta", "rotary_emb_base"))
    if theta is None and model in hf_types.THETA_10000:
        theta = 10000.0
    if theta is None:
        raise SpecError(f"{_where(text)} lacks 'rope_theta' (or 'rope_parameters'); add it to the config")
    rope_type = str(_first(params, ("rope_type", "type")) or "default")
    rope_type = _ROPE_ALIAS.get(rope_type, rope_type)
    factor = _first(params, ("partial_rotary_factor",))
    if factor is None:
        factor = _first(text, ("partial_rotary_factor", "rotary_pct"))
    share = _number(
        text, "partial_rotary_factor", hf_types.PARTIAL.get(model, 1.0) if factor is None else factor
    )
    scaling = {
        key: item
        for key, item in params.items()
        if key not in ("rope_type", "type", "rope_theta", "partial_rotary_factor") and item is not None
    }
    if rope_type == "proportional":  # spans the whole head; a share of its frequencies is not zero
        scaling["partial_rotary_factor"], share = share, 1.0
    if "mrope_section" in scaling:  # transformers 5 calls it "default", but positions are triples
        rope_type = "mrope"
    if rope_type in ("llama3", "yarn", "longrope"):
        original = _first(text, ("original_max_position_embeddings",))
        if original is not None or "original_max_position_embeddings" not in scaling:
            original = original or _int(text, ("max_position_embeddings",))
            scaling["original_max_position_embeddings"] = original
    if rope_type in ("dynamic", "longrope"):  # their tables depend on the length
        scaling.setdefault("max_position_embeddings", _int(text, ("max_position_embeddings",)))
    dim = key_dim if mla else _int(text, ("rotary_dim",), default=int(key_dim * share), least=0)
    return RopeSpec(
        kind=rope_type,
        theta=_number(text, "rope_theta", theta),
        rotary_dim=dim,
        interleaved=model in hf_types.INTERLEAVED,
        scaling=tuple((key, _hashable(scaling[key])) for key in sorted(scaling)),
    )


def _unrotated(text: Config, model: str, kind: str, layer: int) -> bool:
    if text.get("alibi") or model in hf_types.NO_ROPE:
        return True
    if text.get("position_embedding_type") in ("absolute", "learned", "alibi", "nope"):
        return True
    if model in hf_types.ROTATE_ONLY_SLIDING and text.get("sliding_window") and kind == "full_attention":
        return True
    rotated = text.get("no_rope_layers")  # despite its name, 1 marks a layer that is rotated
    if isinstance(rotated, (list, tuple)) and rotated:
        if layer >= len(rotated):
            raise SpecError(
                f"{_where(text)}: 'no_rope_layers' has {len(rotated)} entries, asked for layer {layer}"
            )
        return not rotated[layer]
    every = hf_types.NO_ROPE_INTERVAL.get(model, 0)
    interval = _int(text, ("no_rope_layer_interval",), default=every, least=0)
    return interval > 0 and (layer + 1) % interval == 0


def _rope_params(text: Config, kind: str) -> Config:
    """The rotary parameters that hold for layers of ``kind``."""
    params = _first(text, ("rope_parameters", "rope_scaling")) or {}
    if not isinstance(params, Mapping):
        raise SpecError(f"{_where(text)}: 'rope_parameters' must be a mapping, got {type(params).__name__}")
    if any(isinstance(item, Mapping) for item in params.values()):
        own = params.get(kind)
        if not isinstance(own, Mapping):
            raise SpecError(f"{_where(text)}: 'rope_parameters' has no entry for {kind!r} layers")
        return own
    local = text.get("rope_local_base_freq")
    if local is None and text.get("model_type") == "gemma3_text":
        local = 10000.0
    if local is not None and kind == "sliding_attention":  # Gemma 3: scaling is for global layers only
        return {"rope_theta": local}
    return params


def _hashable(value: Any) -> Any:
    return tuple(_hashable(item) for item in value) if isinstance(value, (list, tuple)) else value
