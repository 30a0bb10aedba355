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
# One layer in so many is not sliding.
PATTERN = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}
# A window without ``layer_types`` holds in every layer.
ALL_SLIDING = _words("mistral mixtral ministral ministral3 phi3 starcoder2 qwen2 qwen2_moe qwen3 qwen3_moe")
ROTATE_ONLY_SLIDING = _words("cohere2 cohere2_moe exaone4")
