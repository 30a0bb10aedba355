"""What a Hugging Face ``model_type`` says that its configuration does not. Tables only.

PLAIN is an allow-list, since what a cache holds cannot be told from a configuration's keys: layers that
convolve or keep a recurrent state, an indexer's second cache or cross-attention all look like attention
there. ``tests/test_hf_types.py`` runs a small model of each type and compares what it caches with its spec.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Model types whose positions are learned or ALiBi: nothing is rotated.
NO_ROPE = _words("gpt2 gpt_bigcode opt bloom mpt biogpt")

# Decoders that keep, in every layer, keys and values (MLA: latent and rope part) of each token as they are
# attended to: after norm and rotation, and dependent on no token that follows.
PLAIN = NO_ROPE | _words(
    """apertus arcee aria_text bitnet codegen cohere cohere2 cohere2_moe deepseek_v2 deepseek_v3 dots1
    ernie4_5 ernie4_5_moe exaone exaone4 falcon flex_olmo gemma gemma2 gemma3_text gemma4_text glm glm4
    glm4_moe gpt_neox gpt_oss gptj granite granitemoe granitemoeshared helium internlm3 llama llama4_text
    minimax_m2 ministral ministral3 mistral mixtral nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phimoe
    qwen2 qwen2_moe qwen2_vl_text qwen2_5_vl_text qwen3 qwen3_moe qwen3_vl_text qwen3_vl_moe_text seed_oss
    smollm3 solar_open stablelm starcoder2"""
)

# Models around such a decoder that put image or sound embeddings in the place of tokens, and do no more.
WRAPPERS = _words(
    """aria aya_vision cohere2_vision gemma3 gemma4 idefics3 internvl llama4 llava llava_next llava_onevision
    mistral3 qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe smolvlm"""
)
# Their older configurations, in which the decoder's entries are the wrapper's own.
FLAT = _words("qwen2_vl qwen2_5_vl")

# Cached keys pair neighbours (2i, 2i+1).
INTERLEAVED = _words(
    """gptj codegen cohere cohere2 cohere2_moe deepseek_v2 ernie4_5 ernie4_5_moe glm glm4
    helium llama4_text chatglm"""
)
# config.json may leave theta out: transformers' default is 10000 for each of these.
THETA_10000 = _words(
    """llama mistral gpt_neox gptj codegen phi phi3 falcon qwen2 gemma gemma2 stablelm persimmon
    deepseek_v2 deepseek_v3"""
)
# The share of a head that is rotated, where config.json does not say it.
PARTIAL = dict.fromkeys(("phi", "persimmon", "glm", "glm4", "glm4_moe", "nemotron"), 0.5) | {
    "gpt_neox": 0.25,
    "stablelm": 0.25,
}
# Which types obey an entry that others carry along without effect, by transformers' modelling code. An engine
# that obeys it where transformers does not computes other K/V, so it is refused for all types but these.
OBEYED: dict[str, frozenset[str]] = {
    "partial_rotary_factor": _words(
        """glm glm4 glm4_moe gpt_neox minimax_m2 nemotron persimmon phi phi3 solar_open stablelm"""
    ),
    "rotary_pct": _words("gpt_neox"),
    "rotary_emb_base": _words("gpt_neox"),
    "v_head_dim": frozenset(),
    "rotary_dim": _words("gptj codegen minimax_m2"),
    "rope_local_base_freq": _words("gemma3_text"),
    "no_rope_layers": _words("smollm3 llama4_text"),
    "no_rope_layer_interval": _words("smollm3 llama4_text"),
    "alibi": _words("falcon bloom mpt"),
    "position_embedding_type": NO_ROPE,
    "multi_query": _words("falcon gpt_bigcode"),
    "num_kv_heads": _words("falcon"),
    "n_head_kv": _words("falcon"),
    "multi_query_group_num": frozenset(),
    "kv_channels": frozenset(),
    "attention_head_dim": frozenset(),
    "num_kv_shared_layers": _words("gemma4_text"),
}
# Rotary parameters of their own for each type of layer, in ``rope_parameters``.
NESTED_ROPE = _words("gemma3_text gemma4_text olmo3")
# Layers without RoPE where the configuration does not say which: one in so many.
NO_ROPE_INTERVAL = {"smollm3": 4, "llama4_text": 4}

# One layer in so many is not sliding.
PATTERN = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}
# An entry ``sliding_window_pattern`` may say another number.
PATTERNED = _words("gemma3_text cohere2 exaone4")
# Windows hold in the layers that ``layer_types`` names.
BY_LAYER = _words(
    """cohere2 cohere2_moe dots1 exaone4 gemma2 gemma3_text gemma4_text gpt_oss ministral olmo3 qwen2
    qwen2_5_vl qwen2_5_vl_text qwen2_moe qwen2_vl qwen2_vl_text qwen3 smollm3"""
)
# They hold in every layer, whatever else the configuration says. In all others there is none.
EVERY_LAYER = _words("ministral3 mistral mixtral phi3 phimoe qwen3_moe starcoder2")
# There is none unless ``use_sliding_window`` is set; others do not look at it.
SWITCHED = _words("qwen2 qwen2_5_vl qwen2_5_vl_text qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_moe smollm3")
# Without ``layer_types``, every layer from ``max_window_layers`` on, and that if it is not given either.
FROM_LAYER = {"qwen2": 28, "qwen3": 28} | dict.fromkeys(
    ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), 80
)
CHUNKED = _words("llama4_text")
ROTATE_ONLY_SLIDING = _words("cohere2 cohere2_moe exaone4")
