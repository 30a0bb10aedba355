"""Hugging Face configurations, as transformers 4 and 5 write them, cut down to what is read."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hypercache.errors import SpecError
from hypercache.model import KVDtype, ModelSpec

Config = dict[str, Any]
W = b"w" * 32


def build(config: Any, **given: Any) -> ModelSpec:
    return ModelSpec.from_hf_config(config, weights=W, **({"dtype": KVDtype.BF16} | given))


def summary(config: Any, **given: Any) -> list[tuple[Any, ...]]:
    """(number of layers, KV heads, dims, rope kind, theta, rotary dims, window) of each group."""
    return [
        (
            len(group.layers),
            group.layout.heads,
            *(part.dim for part in group.layout.parts),
            group.rope.kind,
            group.rope.theta,
            group.rope.rotary_dim,
            group.window,
        )
        for group in build(config, **given).groups
    ]


def base(model_type: str, **more: Any) -> Config:
    common = {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 4, "rms_norm_eps": 1e-5}
    return {"model_type": model_type, "torch_dtype": "bfloat16", **common, **more}


LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
LLAMA_4 = base(
    "llama",
    num_key_value_heads=8,
    rope_theta=5e5,
    rope_scaling={**LLAMA3, "rope_type": "llama3"},
    hidden_act="silu",
)
LLAMA_5 = base(
    "llama",
    num_key_value_heads=8,
    head_dim=64,
    hidden_act="silu",
    mlp_bias=False,
    rope_parameters={**LLAMA3, "rope_type": "llama3", "rope_theta": 500000},
)
SLIDE, FULL = "sliding_attention", "full_attention"
GEMMA_4 = base(
    "gemma3_text",
    num_key_value_heads=4,
    num_hidden_layers=7,
    head_dim=256,
    sliding_window=512,
    sliding_window_pattern=6,
    rope_theta=1e6,
    rope_local_base_freq=1e4,
    rope_scaling={"rope_type": "linear", "factor": 8.0},
)
GEMMA_5 = base(
    "gemma3_text",
    num_key_value_heads=4,
    num_hidden_layers=7,
    head_dim=256,
    sliding_window=512,
    layer_types=[SLIDE] * 5 + [FULL, SLIDE],
    rope_parameters={
        SLIDE: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    },
)
NEOX_4 = base("gpt_neox", rotary_pct=0.25, rotary_emb_base=10000)
NEOX_5 = base(
    "gpt_neox", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_type": "default"}
)
YARN = {"factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK_4 = base(
    "deepseek_v3",
    num_key_value_heads=16,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    rope_theta=10000,
    rope_scaling={**YARN, "type": "yarn", "original_max_position_embeddings": 4096},
)
DEEPSEEK_5 = base(
    "deepseek_v3",
    num_key_value_heads=16,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    head_dim=64,
    rope_parameters={
        **YARN,
        "rope_type": "yarn",
        "original_max_position_embeddings": 4096,
        "rope_theta": 1e4,
        "attention_factor": None,
    },
)
GEMMA4_RAW = base(
    "gemma4_text",
    num_key_value_heads=4,
    head_dim=256,
    global_head_dim=512,
    num_global_key_value_heads=2,
    attention_k_eq_v=True,
    sliding_window=512,
    layer_types=[SLIDE, SLIDE, SLIDE, FULL],
    rope_parameters={
        SLIDE: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
)
GEMMA4_OBJECT = {key: item for key, item in GEMMA4_RAW.items() if "global" not in key} | {
    "per_layer_config": {"03": {"head_dim": 512, "num_key_value_heads": 2}}
}
SMOLLM3 = base("smollm3", num_key_value_heads=4, rope_theta=2e6, no_rope_layers=[1, 1, 1, 0])


@pytest.mark.parametrize(
    ("old", "new", "groups"),
    [
        (LLAMA_4, LLAMA_5, [(4, 8, 64, 64, "llama3", 5e5, 64, None)]),
        (
            GEMMA_4,
            GEMMA_5,
            [(6, 4, 256, 256, "default", 1e4, 256, 512), (1, 4, 256, 256, "linear", 1e6, 256, None)],
        ),
        (NEOX_4, NEOX_5, [(4, 16, 64, 64, "default", 1e4, 16, None)]),
        (DEEPSEEK_4, DEEPSEEK_5, [(4, 1, 512, 64, "yarn", 1e4, 64, None)]),
        (
            GEMMA4_RAW,
            GEMMA4_OBJECT,
            [(3, 4, 256, 256, "default", 1e4, 256, 512), (1, 2, 512, 512, "proportional", 1e6, 512, None)],
        ),
        (
            SMOLLM3,
            {key: item for key, item in SMOLLM3.items() if key != "no_rope_layers"}
            | {"no_rope_layer_interval": 4},
            [(3, 4, 64, 64, "default", 2e6, 64, None), (1, 4, 64, 64, "none", 0.0, 0, None)],
        ),
    ],
    ids=["llama", "gemma3", "gpt_neox", "deepseek_v3", "gemma4", "smollm3"],
)
def test_both_generations_mean_the_same(old: Config, new: Config, groups: list[tuple[Any, ...]]) -> None:
    assert summary(old) == summary(new) == groups
    assert build(old).fingerprint() == build(new).fingerprint()


def test_scaling_parameters_are_kept_by_name() -> None:
    assert dict(build(LLAMA_4).groups[0].rope.scaling) == LLAMA3
    assert dict(build(DEEPSEEK_5).groups[0].rope.scaling) == {
        **YARN,
        "original_max_position_embeddings": 4096,
    }
    longrope = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    phi3 = base(
        "phi3", rope_scaling=longrope, max_position_embeddings=131072, original_max_position_embeddings=4096
    )
    rope = build(phi3).groups[0].rope
    assert (rope.kind, dict(rope.scaling)["long_factor"]) == ("longrope", (2.0,) * 4)
    # Its table depends on both lengths.
    for key in ("max_position_embeddings", "original_max_position_embeddings"):
        assert build(phi3 | {key: 8192}).fingerprint() != build(phi3).fingerprint()
    qwen_vl = base("qwen2_vl", rope_theta=1e6, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]})
    assert build(qwen_vl).groups[0].rope.kind == "mrope"


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (base("llama"), [(4, 16, 64, 64, "default", 1e4, 64, None)]),  # multi-head, theta from Llama 1's days
        (
            base("qwen3", rope_theta=1e6, num_key_value_heads=2, head_dim=128),
            [(4, 2, 128, 128, "default", 1e6, 128, None)],
        ),
        (base("falcon", multi_query=True), [(4, 1, 64, 64, "default", 1e4, 64, None)]),
        (
            base("falcon", multi_query=True, new_decoder_architecture=True, num_kv_heads=8),
            [(4, 8, 64, 64, "default", 1e4, 64, None)],
        ),
        (base("falcon", multi_query=True, alibi=True), [(4, 1, 64, 64, "none", 0.0, 0, None)]),
        (base("mistral", rope_theta=1e4, sliding_window=4096), [(4, 16, 64, 64, "default", 1e4, 64, 4096)]),
        (base("mistral", rope_theta=1e4, sliding_window=None), [(4, 16, 64, 64, "default", 1e4, 64, None)]),
        (
            base("qwen2", rope_theta=1e6, sliding_window=4096, use_sliding_window=False),
            [(4, 16, 64, 64, "default", 1e6, 64, None)],
        ),
        (
            base("qwen2", rope_theta=1e6, sliding_window=4096, use_sliding_window=True, max_window_layers=3),
            [(3, 16, 64, 64, "default", 1e6, 64, None), (1, 16, 64, 64, "default", 1e6, 64, 4096)],
        ),
        (
            base("phi", rope_theta=1e4, partial_rotary_factor=0.4, hidden_size=1280),
            [(4, 16, 80, 80, "default", 1e4, 32, None)],
        ),
        (
            base("gemma2", rope_theta=1e4, sliding_window=4096, head_dim=256),
            [
                (2, 16, 256, 256, "default", 1e4, 256, 4096),
                (2, 16, 256, 256, "default", 1e4, 256, None),
            ],
        ),
        (
            base("cohere2", rope_theta=5e4, sliding_window=4096, sliding_window_pattern=4),
            [(3, 16, 64, 64, "default", 5e4, 64, 4096), (1, 16, 64, 64, "none", 0.0, 0, None)],
        ),
        (
            base(
                "llama4_text",
                rope_theta=5e5,
                attention_chunk_size=8192,
                no_rope_layers=[1, 1, 1, 0],
                layer_types=["chunked_attention"] * 3 + [FULL],
            ),
            [(3, 16, 64, 64, "default", 5e5, 64, 8192), (1, 16, 64, 64, "none", 0.0, 0, None)],
        ),
        (
            base("mimo", rope_theta=1e4, head_dim=192, v_head_dim=128),
            [(4, 16, 192, 128, "default", 1e4, 192, None)],
        ),
        (
            base("gemma3n_text", rope_theta=1e4, num_kv_shared_layers=1),
            [(3, 16, 64, 64, "default", 1e4, 64, None)],
        ),
        (
            base("openelm", rope_theta=1e4, num_kv_heads=[2, 2, 4, 4]),
            [
                (2, 2, 64, 64, "default", 1e4, 64, None),
                (2, 4, 64, 64, "default", 1e4, 64, None),
            ],
        ),
    ],
)
def test_geometries(config: Config, groups: list[tuple[Any, ...]]) -> None:
    unlisted = config["model_type"] in ("mimo", "gemma3n_text", "openelm")
    assert summary(config, assume_standard=unlisted) == groups


def test_gpt_names_of_the_same_things() -> None:
    gptj = {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "rotary_dim": 64}
    assert summary(gptj) == [(28, 16, 256, 256, "default", 1e4, 64, None)]
    assert build(gptj).groups[0].rope.interleaved
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12}
    assert summary(gpt2) == [(12, 12, 64, 64, "none", 0.0, 0, None)]
    bigcode = {**gpt2, "model_type": "gpt_bigcode", "multi_query": True}
    assert summary(bigcode) == [(12, 1, 64, 64, "none", 0.0, 0, None)]


def test_pairing_of_rotated_elements() -> None:
    """By transformers' modelling code; MLA as it lies in its cache."""
    for model, interleaved in {"llama": False, "cohere": True, "glm4": True, "gpt_neox": False}.items():
        assert build(base(model, rope_theta=1e4)).groups[0].rope.interleaved is interleaved
    assert not build(DEEPSEEK_5).groups[0].rope.interleaved
    assert build(DEEPSEEK_5 | {"model_type": "deepseek_v2"}).groups[0].rope.interleaved


def test_multimodal_configs_are_read_through() -> None:
    vision = {"hidden_size": 512, "num_hidden_layers": 2, "dtype": "float32", "image_size": 896}
    text = {key: item for key, item in GEMMA_5.items() if key != "torch_dtype"}
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": vision, "dtype": "float16"}
    assert summary(whole) == summary(GEMMA_5)
    assert build(whole, dtype=None).groups[0].layout.dtype is KVDtype.FP16
    resized = whole | {"vision_config": vision | {"image_size": 448}}
    assert build(resized).fingerprint() != build(whole).fingerprint()
    omni = {"model_type": "omni", "thinker_config": {"text_config": text}}
    assert summary(omni, assume_standard=True) == summary(GEMMA_5)
    with pytest.raises(SpecError, match=r"'omni'.*assume_standard=True"):
        build(omni)  # what stands around the decoder counts too


def test_config_objects_and_labels() -> None:
    class Object:
        def to_dict(self) -> Config:
            return LLAMA_5 | {"_name_or_path": "/models/llama"}

    assert build(Object()).name == "/models/llama"
    assert build(Object(), name="mine").name == "mine"
    assert build(LLAMA_5).name == "llama"
    assert build(Object()).fingerprint() == build(LLAMA_5).fingerprint()
    for bad in (None, 7, "llama", [LLAMA_5]):
        with pytest.raises(SpecError, match=r"must be a mapping as in config\.json or a transformers config"):
            build(bad)


def test_real_transformers_objects_equal_their_files(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is an extra")
    for config in (LLAMA_4, LLAMA_5, NEOX_4, NEOX_5, GEMMA_4, GEMMA_5, DEEPSEEK_4, GEMMA4_RAW, SMOLLM3):
        given = copy.deepcopy({key: item for key, item in config.items() if key != "model_type"})
        real = transformers.CONFIG_MAPPING[config["model_type"]](**given)
        assert summary(real) == summary(config)
        assert build(real, dtype=None).groups[0].layout.dtype is KVDtype.BF16
        real.save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert build(written).fingerprint() == build(real).fingerprint()


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("bfloat16", KVDtype.BF16),
        ("torch.bfloat16", KVDtype.BF16),
        ("float16", KVDtype.FP16),
        ("half", KVDtype.FP16),
        ("float32", KVDtype.FP32),
    ],
)
@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_dtype_of_the_config(key: str, given: str, dtype: KVDtype) -> None:
    config = {name: item for name, item in LLAMA_4.items() if name != "torch_dtype"} | {key: given}
    assert build(config, dtype=None).groups[0].layout.dtype is dtype
    assert build(config, dtype=KVDtype.FP32).groups[0].layout.dtype is KVDtype.FP32


# --- identity ----------------------------------------------------------------------------------------


def leaves(config: Config, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, item in config.items():
        if isinstance(item, dict):
            yield from leaves(item, (*path, key))
        else:
            yield (*path, key)


def mutated(config: Config, path: tuple[Any, ...]) -> Config:
    changed = copy.deepcopy(config)
    at = changed
    for key in path[:-1]:
        at = at[key]
    old = at[path[-1]]
    match old:
        case bool():
            at[path[-1]] = not old
        case int() | float():
            at[path[-1]] = old * 2
        case str():
            at[path[-1]] = {"linear": "default", SLIDE: FULL}.get(old, old + "x")
        case list():
            at[path[-1]] = [
                {FULL: SLIDE, SLIDE: FULL}.get(old[0], 1 - old[0] if old[0] in (0, 1) else 9),
                *old[1:],
            ]
    return changed


@pytest.mark.parametrize(
    "config",
    [
        LLAMA_4,
        LLAMA_5,
        GEMMA_4,
        GEMMA_5,
        NEOX_4,
        NEOX_5,
        DEEPSEEK_4,
        DEEPSEEK_5,
        GEMMA4_RAW,
        GEMMA4_OBJECT,
        SMOLLM3,
    ],
    ids=lambda config: f"{config['model_type']}-{len(config)}",
)
def test_every_entry_reaches_the_fingerprint_or_is_refused(config: Config) -> None:
    before = build(config).fingerprint()
    unread = {("torch_dtype",)}  # the caller's dtype holds
    if "kv_lora_rank" in config:  # the latent has neither KV heads nor a head dim
        unread |= {("num_key_value_heads",), ("head_dim",), ("v_head_dim",)}
    for path in set(leaves(config)) - unread:
        changed = mutated(config, path)
        if changed == config:
            continue
        try:
            after = build(changed).fingerprint()
        except SpecError:
            continue
        assert after != before, path


@pytest.mark.parametrize(
    "entry",
    [
        {"rms_norm_eps": 1e-6},
        {"hidden_act": "gelu"},
        {"attention_multiplier": 0.5},
        {"num_experts_per_tok": 4},
        {"quantization_config": {"bits": 4}},
        {"a_key_of_next_year": 1},
        {"nested": {"deep": {"eps": 1e-6}}},
    ],
    ids=str,
)
def test_what_no_shape_tells_counts_too(entry: Config) -> None:
    assert build(LLAMA_5 | entry).fingerprint() != build(LLAMA_5).fingerprint()


@pytest.mark.parametrize(
    "entry",
    [
        {"_name_or_path": "/b/y"},
        {"transformers_version": "4.40.0"},
        {"architectures": ["X"]},
        {"use_cache": False},
        {"eos_token_id": [1, 2]},
        {"attention_dropout": 0.1},
        {"id2label": {0: "LABEL_0"}},
        {"temperature": 0.6},
        {"a_switch_of_next_year": False},
        {"an_option_of_next_year": None},
        {"rms_norm_eps": 0.00001},
        {"max_position_embeddings": 4096},
    ],
    ids=str,
)
def test_b05_what_does_not_change_kv_does_not_count(entry: Config) -> None:
    assert build(LLAMA_5 | entry).fingerprint() == build(LLAMA_5).fingerprint()


# --- refusals ----------------------------------------------------------------------------------------


def without(config: Config, *keys: str) -> Config:
    return {key: item for key, item in config.items() if key not in keys}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama"}, "lacks 'num_hidden_layers'"),
        (without(LLAMA_5, "num_hidden_layers"), "lacks 'num_hidden_layers'"),
        (without(LLAMA_5, "num_attention_heads"), "lacks 'num_attention_heads'"),
        (without(LLAMA_4, "hidden_size"), "lacks 'hidden_size'"),
        (base("llama", num_attention_heads=15), "lacks 'head_dim', and 15 heads do not divide"),
        (LLAMA_5 | {"num_key_value_heads": 3}, "'num_key_value_heads'=3 does not divide 16"),
        (LLAMA_5 | {"num_key_value_heads": 0}, "'num_key_value_heads' must be an integer >= 1"),
        (LLAMA_5 | {"head_dim": "64"}, "'head_dim' must be an integer >= 1, got '64'"),
        (LLAMA_5 | {"head_dim": [64, 64]}, "'head_dim' has 2 entries for 4 layers"),
        (base("qwen3"), "lacks 'rope_theta'"),
        (LLAMA_5 | {"rope_parameters": {"rope_theta": "big"}}, "'rope_theta' must be a number, got 'big'"),
        (LLAMA_5 | {"rope_parameters": [1]}, "'rope_parameters' must be a mapping, got list"),
        (
            GEMMA_5 | {"rope_parameters": {FULL: {"rope_theta": 1e6}}},
            "no entry for 'sliding_attention' layers",
        ),
        (GEMMA_5 | {"layer_types": [FULL]}, "'layer_types' must name each of the 7 layers"),
        (
            GEMMA_5 | {"layer_types": ["linear_attention"] * 7},
            "'layer_types' has 'linear_attention'; known are",
        ),
        (without(GEMMA_5, "sliding_window"), "lacks 'sliding_window'"),
        (base("olmo3", rope_theta=1e4, sliding_window=64), "'sliding_window' but no 'layer_types'"),
        (without(DEEPSEEK_5, "qk_rope_head_dim"), "lacks 'qk_rope_head_dim'"),
        (base("jamba", attn_layer_period=8), "'attn_layer_period' tells of layers that"),
        (base("bamba", mamba_d_state=128), "'mamba_d_state' tells of"),
        (base("t5", is_encoder_decoder=True), "only decoder-only models"),
        (base("phi", rope_theta=1e4, partial_rotary_factor=0.33), "rotary_dim must be even"),
        (GEMMA4_OBJECT | {"per_layer_config": {"x": {}}}, "'per_layer_config' must map layer numbers"),
        (LLAMA_5 | {"odd": object()}, "cannot commit to a value of type object"),
        (SMOLLM3 | {"no_rope_layers": [1]}, "'no_rope_layers' has 1 entries, asked for layer 1"),
        (base("llama", rope_scaling={"type": "dynamic", "factor": 2.0}), "lacks 'max_position_embeddings'"),
    ],
)
def test_refusals_name_the_key(config: Config, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build(config)


YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("model_type", "entries", "key"),
    [
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("qwen2", {"rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("qwen3", {"rotary_pct": 0.5}, "rotary_pct"),
        ("llama", {"rotary_dim": 8}, "rotary_dim"),
        ("llama", {"rotary_emb_base": 5e5}, "rotary_emb_base"),
        ("mistral", {"rope_local_base_freq": 5e5}, "rope_local_base_freq"),
        ("mistral", {"rope_parameters": {FULL: PLAIN_ROPE, SLIDE: PLAIN_ROPE}}, "rope_parameters' by layer"),
        (
            "gemma3_text",
            {"rope_parameters": {FULL: YARN_ROPE | {"truncate": False}}, "layer_types": [FULL] * 4},
            "trunc",
        ),
        ("gemma3_text", {"rope_parameters": PLAIN_ROPE}, "rope_parameters' for all layers"),
        ("gemma3_text", {"rope_parameters": {FULL: PLAIN_ROPE | {"partial_rotary_factor": 0.5}}}, "partial"),
        (
            "llama",
            {"rope_parameters": PLAIN_ROPE, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "differ",
        ),
        ("llama", {"no_rope_layers": [0, 1, 1, 1]}, "no_rope_layers"),
        ("llama", {"no_rope_layer_interval": 2}, "no_rope_layer_interval"),
        ("qwen2", {"alibi": True}, "alibi"),
        ("mistral", {"position_embedding_type": "learned"}, "position_embedding_type"),
        ("llama", {"multi_query": True}, "multi_query"),
        ("llama", {"kv_channels": 32}, "kv_channels"),
        ("llama", {"n_head_kv": 4}, "n_head_kv"),
        ("llama", {"v_head_dim": 32}, "v_head_dim"),
        ("llama", {"num_kv_shared_layers": 1}, "num_kv_shared_layers"),
        ("llama", {"sliding_window": 50, "layer_types": [SLIDE, FULL] * 2}, "layer_types"),
        ("llama", {"attention_chunk_size": 50, "layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ("mistral", {"sliding_window": 50, "layer_types": [SLIDE, FULL] * 2}, "layer_types"),
        ("mistral", {"sliding_window": 50, "layer_types": [FULL] * 4}, "layer_types"),
        ("mistral", {"sliding_window": 50, "use_sliding_window": False}, "use_sliding_window"),
        (
            "phi3",
            {"sliding_window": 50, "use_sliding_window": True, "max_window_layers": 2},
            "use_sliding_window",
        ),
        ("mistral", {"sliding_window": 50, "sliding_window_pattern": 2}, "sliding_window_pattern"),
        ("gemma2", {"sliding_window": 50, "sliding_window_pattern": 4}, "sliding_window_pattern"),
        ("qwen2", {"sliding_window": 50, "layer_types": [SLIDE] * 4}, "use_sliding_window"),
        (
            "qwen3_moe",
            {"sliding_window": 50, "use_sliding_window": True, "max_window_layers": 2},
            "max_window",
        ),
        ("qwen2_moe", {"sliding_window": 50, "use_sliding_window": True}, "no 'layer_types'"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value.replace(" ", "_"),
)
def test_k02_entries_that_the_type_ignores_are_refused_by_name(
    model_type: str, entries: Config, key: str
) -> None:
    """Transformers computes something else than they say; another engine may obey them."""
    plain = base(model_type, rope_theta=1e4, head_dim=64, num_key_value_heads=8)
    build(plain)
    with pytest.raises(SpecError, match=key):
        build(plain | entries)


@pytest.mark.parametrize(
    "entries",
    [
        {"partial_rotary_factor": 1.0},
        {"rotary_pct": 1},
        {"multi_query": False, "alibi": False},
        {"no_rope_layers": [1, 1, 1, 1]},
        {"kv_channels": 64},
        {"rope_scaling": {"type": "default"}, "rope_parameters": PLAIN_ROPE},
        {"layer_types": [FULL] * 4, "sliding_window": 50},
    ],
    ids=str,
)
def test_entries_that_say_what_holds_anyway_are_taken(entries: Config) -> None:
    plain = base("llama", rope_theta=1e4, head_dim=64, num_key_value_heads=8)
    assert summary(plain | entries) == summary(plain)


def test_windows_and_layers_without_rope_where_the_config_leaves_them_to_the_type() -> None:
    on = {"rope_theta": 1e4, "sliding_window": 50, "use_sliding_window": True}
    windows = [row[-1] for row in summary(base("qwen2", num_hidden_layers=30, **on))]
    assert windows == [None, 50] and summary(base("qwen2", num_hidden_layers=30, **on))[0][0] == 28
    assert summary(base("qwen2", rope_theta=1e4, sliding_window=50))[0][-1] is None  # the switch is off
    assert summary(base("phimoe", rope_theta=1e4, sliding_window=50))[0][-1] == 50
    llama4 = base("llama4_text", rope_theta=5e5, attention_chunk_size=64, no_rope_layers=[])
    assert [(row[0], row[4], row[-1]) for row in summary(llama4)] == [(3, "default", 64), (1, "none", None)]
    gemma = base("gemma3_text", rope_theta=1e6, sliding_window=64, num_hidden_layers=6)
    assert [(row[5], row[-1]) for row in summary(gemma)] == [(1e4, 64), (1e6, None)]


# What these types keep beside, or instead of, K/V per token, as their configurations tell it.
NOT_PLAIN: dict[str, Config] = {
    "lfm2": {"conv_L_cache": 3, "layer_types": ["conv", FULL, "conv", FULL]},
    "minimax_text_01": {"attn_type_list": [0, 0, 0, 1]},
    "minimax": {"layer_types": ["linear_attention", FULL] * 2},
    "nemotron-nas": {"block_configs": [{"attention": {"no_op": True}}] * 4},
    "mllama_text_model": {"cross_attention_layers": [3]},
    "deepseek_v32": {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128},
    "mamba": {"state_size": 16, "conv_kernel": 4},
}


@pytest.mark.parametrize(
    "model_type", [*NOT_PLAIN, "longcat_flash", "rwkv", "of_next_year", "", None, 7, ["llama"]]
)
def test_only_types_whose_cache_is_known_are_taken(model_type: Any) -> None:
    config = LLAMA_5 | {"model_type": model_type}  # with all of Llama's keys
    for given in (
        config,
        {"model_type": "llava", "text_config": config},
        {"model_type": model_type} | config,
    ):
        with pytest.raises(SpecError, match=r"model_type.*pass assume_standard=True.*ModelSpec by hand"):
            build(given)
    with pytest.raises(SpecError, match=r"pass assume_standard=True"):
        build(without(LLAMA_5, "model_type"))
    with pytest.raises(SpecError, match=r"pass assume_standard=True"):
        build({"model_type": model_type, "text_config": LLAMA_5})
    # Only who knows the model can say so; the identity is no other for that.
    assert summary(config, assume_standard=True) == summary(LLAMA_5)
    assert build(LLAMA_5, assume_standard=True).fingerprint() == build(LLAMA_5).fingerprint()


@pytest.mark.parametrize("model_type", NOT_PLAIN)
def test_entries_of_other_caches_are_refused_whatever_the_type_says(model_type: str) -> None:
    for given, assume in ((model_type, True), ("llama", False)):
        with pytest.raises(SpecError, match=r"something else than K/V per token|'layer_types' has"):
            build(LLAMA_5 | NOT_PLAIN[model_type] | {"model_type": given}, assume_standard=assume)


def test_keys_that_depend_on_later_tokens_are_refused() -> None:
    for value in (True, "all"):
        with pytest.raises(SpecError, match=r"'use_bidirectional_attention'.*only causal"):
            build(GEMMA_5 | {"use_bidirectional_attention": value})
    for value in (False, None, "vision"):
        build(GEMMA_5 | {"use_bidirectional_attention": value})


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("bf16", KVDtype.BF16),
        ("bfloat16", KVDtype.BF16),
        ("torch.bfloat16", KVDtype.BF16),
        ("half", KVDtype.FP16),
        ("FP16", KVDtype.FP16),
        (np.float16, KVDtype.FP16),
        (np.dtype("float32"), KVDtype.FP32),
        ("fp8_e4m3", KVDtype.FP8_E4M3),
        ("torch.float8_e4m3fn", KVDtype.FP8_E4M3),
        ("float8_e5m2", KVDtype.FP8_E5M2),
    ],
    ids=str,
)
def test_the_callers_dtype_may_be_any_name_of_one(given: Any, dtype: KVDtype) -> None:
    scales = ((1.0, 1.0),) * 4 if dtype.is_fp8 else None
    assert build(LLAMA_5, dtype=given, kv_scales=scales).layout(0).dtype is dtype


def test_the_callers_dtype_may_be_torchs() -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra")
    for given, dtype in ((torch.bfloat16, KVDtype.BF16), (torch.float16, KVDtype.FP16)):
        assert build(LLAMA_5, dtype=given).layout(0).dtype is dtype


@pytest.mark.parametrize("given", ["fp8", "int8", "auto", "float64", "", 16, b"bf16", object()], ids=repr)
def test_a_dtype_that_names_none_is_refused(given: Any) -> None:
    with pytest.raises(SpecError, match=r"names no K/V dtype; use one of .*bf16.*fp8_e4m3"):
        build(LLAMA_5, dtype=given)


@pytest.mark.parametrize("given", [None, "float8_e4m3fn", "int8", "auto"])
def test_unclear_dtype_is_refused(given: str | None) -> None:
    with pytest.raises(SpecError, match=f"'dtype' is {given!r}; pass dtype=KVDtype"):
        build(LLAMA_5 | {"torch_dtype": given}, dtype=None)
