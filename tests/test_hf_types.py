"""Each model type on the allow-list: a small model of it caches what its spec says, by transformers' code.

One token repeated has, before rotation, the same key at each position: attention over equal values gives
that value. So the cached keys show rotation alone, in all layers: base, share of the head and pairing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is an extra: pip install 'hypercache-llm[transformers]'")
transformers = pytest.importorskip("transformers", reason="transformers is an extra")

from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer  # noqa: E402

from hypercache import hf_types  # noqa: E402
from hypercache.engines.reference import rope_angles, rotate  # noqa: E402
from hypercache.model import KVDtype, ModelSpec  # noqa: E402

TOKENS = 6
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "intermediate_size", "ffn_dim"), 64),
    **dict.fromkeys(("n_inner", "intermediate_size_mlp"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_key_value_heads"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank"), 32),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    "shared_intermediate_size": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEAD = {"head_dim": 16}
DEFAULT_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
OWN: dict[str, dict[str, Any]] = {
    "apertus": DEFAULT_ROPE,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma4_text": {
        **HEAD,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    },
    "gpt_oss": {**HEAD, **DEFAULT_ROPE},
    "ministral": HEAD,
    "ministral3": {
        "rope_parameters": DEFAULT_ROPE["rope_parameters"]
        | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 256}
    },
    "nemotron": {**HEAD, "num_key_value_heads": 2},
    "qwen2_vl_text": MROPE,
    "qwen2_5_vl_text": MROPE,
    "qwen3_vl_text": {**HEAD, "rope_parameters": MROPE["rope_parameters"]},
    "qwen3_vl_moe_text": {**HEAD, "rope_parameters": MROPE["rope_parameters"]},
}


def small(model_type: str) -> Any:
    kind = transformers.CONFIG_MAPPING[model_type]
    default = kind().to_dict()
    fixed = {key for key in ("head_dim",) if isinstance(getattr(kind, key, None), property)}
    sizes = {key: n for key, n in SIZES.items() if isinstance(default.get(key), int)}
    if isinstance(default.get("head_dim"), int) and "kv_lora_rank" not in default:
        sizes |= HEAD
    chosen = {**sizes, **OWN.get(model_type, {})}
    return kind(**{key: item for key, item in chosen.items() if key not in fixed})


def run(model: Any, ids: list[int]) -> Any:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=True).past_key_values


@pytest.mark.parametrize("model_type", sorted(hf_types.PLAIN))
def test_the_cache_is_what_the_spec_says(model_type: str) -> None:
    torch.manual_seed(0)
    config = small(model_type)
    model = transformers.AutoModel.from_config(config, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):  # they take a share of attention that depends on the position
            weight.data.fill_(-1e4)
        elif weight.ndim > 1:
            weight.data.normal_(0, 0.05)
        else:  # gains that differ would show if they were applied after the rotation
            weight.data.add_(torch.randn_like(weight) * 0.3)
    spec = ModelSpec.from_hf_config(model.config, weights=b"w" * 32, dtype=KVDtype.FP32)

    one, other = (run(model, [3, 9, 4, 11, 5, last]) for last in (6, 20))  # no key depends on a later token
    for a, b in zip(one.layers, other.layers, strict=True):
        for x, y in ((a.keys, b.keys), (a.values, b.values)):
            np.testing.assert_allclose(x[:, :, :-1], y[:, :, :-1], atol=1e-5)

    cache = run(model, [7] * TOKENS)
    assert type(cache) is transformers.DynamicCache
    assert len(cache.layers) == spec.num_layers == 4
    for i, layer in enumerate(cache.layers):
        group, layout = spec.group_of(i), spec.layout(i)
        assert type(layer) is (DynamicLayer if group.window is None else DynamicSlidingWindowLayer)
        shapes = [(1, layout.heads, TOKENS, part.dim) for part in layout.parts]
        assert [tuple(layer.keys.shape), tuple(layer.values.shape)] == shapes
        rotated, plain = (layer.keys, layer.values) if layout.kind == "split" else (layer.values, layer.keys)
        if model_type in hf_types.NO_ROPE:
            assert group.rope.kind == "none"
            continue  # learned positions are in everything
        np.testing.assert_allclose(plain[:, :, :1].expand_as(plain), plain, rtol=1e-3, atol=1e-4)
        keys = rotated[0].double().numpy()
        scale = np.abs(keys).max()
        want = np.repeat(keys[:, :1], TOKENS, axis=1)
        if group.rope.kind != "none":
            assert group.rope.kind in ("default", "mrope")  # of text, both are the same
            angles = rope_angles(group.rope, np.arange(TOKENS), "float64")
            want = rotate(want, angles, group.rope.interleaved)
            assert np.abs(keys - keys[:, :1]).max() > 0.1 * scale
        np.testing.assert_allclose(keys, want, atol=1e-4 * scale)


@pytest.mark.parametrize("model_type", sorted(hf_types.PLAIN))
def test_the_first_layer_attends_as_far_back_as_the_spec_says(model_type: str) -> None:
    """What layer 1 keeps of the last token knows of the first one if layer 0 attends to it, and only then."""
    torch.manual_seed(0)
    config = small(model_type)
    if model_type in hf_types.SWITCHED:
        fields = {key: item for key, item in config.to_dict().items() if key != "layer_types"}
        config = type(config)(
            **fields | {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8}
        )
        if model_type == "qwen2_moe":  # whose default is another in each engine
            config = type(config)(
                **config.to_dict() | {"layer_types": ["sliding_attention", "full_attention"] * 2}
            )
    model = transformers.AutoModel.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.05)
    spec = ModelSpec.from_hf_config(model.config, weights=b"w" * 32, dtype=KVDtype.FP32)
    one, other = (run(model, [first, *range(3, 26)]) for first in (1, 2))
    (a, b), (c, d) = ((x.layers[1].keys, x.layers[1].values) for x in (one, other))
    assert spec.group_of(0).window in (None, 8)
    same = torch.equal(a[:, :, -1], c[:, :, -1]) and torch.equal(b[:, :, -1], d[:, :, -1])
    assert same == (spec.group_of(0).window is not None)
