"""Moved keys against Hugging Face's own rotary embeddings, formula by formula and model by model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is an extra: pip install 'hypercache-llm[transformers]'")
transformers = pytest.importorskip("transformers", reason="transformers is an extra")

from test_hf_types import small  # noqa: E402
from transformers import modeling_rope_utils  # noqa: E402
from transformers.models.gemma4 import modeling_gemma4  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

from hypercache import hf_types  # noqa: E402
from hypercache.model import KVDtype, KVLayout, ModelSpec, Part, RopeSpec  # noqa: E402
from hypercache.rope import frequencies, refusal, rerotate, turn  # noqa: E402

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "default, theta 5e5": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": YARN,
    "yarn, mscale": YARN
    | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, attention factor": YARN | {"attention_factor": 1.7},
    "yarn, not truncated": YARN | {"factor": 32.0, "truncate": False, "rope_theta": 150000.0},
    "yarn, original length above all wavelengths": YARN | {"original_max_position_embeddings": 1 << 20},
}
by_kind = pytest.mark.parametrize("kind", KINDS)


def llama(kind: str, head_dim: int = 64) -> Any:
    return transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=1 << 20,
        rope_parameters=dict(KINDS[kind]),
    )


def spec_of(config: Any) -> ModelSpec:
    return ModelSpec.from_hf_config(config, weights=b"w" * 32, dtype=KVDtype.FP32)


class _Doubled:
    """torch, but what asks for float32 gets float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's formulas for frequencies, in float64."""
    for module in (modeling_rope_utils, modeling_llama, modeling_gemma4):
        monkeypatch.setattr(module, "torch", _Doubled())


def hf_frequencies(config: Any) -> tuple[np.ndarray, float]:
    embedding = modeling_llama.LlamaRotaryEmbedding(config)
    return embedding.inv_freq.numpy(), float(embedding.attention_scaling)


# ---------------------------------------------------------------------------------------- formulas


@by_kind
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_frequencies_are_hugging_faces(kind: str, head_dim: int, doubled: None) -> None:
    config = llama(kind, head_dim)
    theirs, _ = hf_frequencies(config)
    assert theirs.dtype == np.float64
    np.testing.assert_allclose(frequencies(spec_of(config).groups[0].rope), theirs, rtol=1e-9)


@by_kind
def test_frequencies_are_those_that_run_in_float32(kind: str) -> None:
    """The same without the trick above, to what float32 can tell."""
    config = llama(kind)
    theirs, _ = hf_frequencies(config)
    assert theirs.dtype == np.float32
    np.testing.assert_allclose(frequencies(spec_of(config).groups[0].rope), theirs, rtol=2e-6)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("factor", [None, 8.0])
def test_proportional_frequencies_are_gemma_4s(share: float, factor: float | None, doubled: None) -> None:
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": share}
    if factor is not None:
        full["factor"] = factor
    config = gemma4(full)
    spec = spec_of(config)
    embedding = modeling_gemma4.Gemma4TextRotaryEmbedding(config)
    assert refusal(spec) == "" and spec.group_of(3).rope.kind == "proportional"
    for layer, kind in ((0, "sliding_attention"), (3, "full_attention")):
        theirs = getattr(embedding, f"{kind}_inv_freq").numpy()
        np.testing.assert_allclose(frequencies(spec.group_of(layer).rope), theirs, rtol=1e-9, atol=0)


def gemma4(full: dict[str, Any]) -> Any:
    config = small("gemma4_text").to_dict()
    config["rope_parameters"]["full_attention"] = full
    return transformers.CONFIG_MAPPING["gemma4_text"](**config)


@by_kind
@pytest.mark.parametrize(("source", "target"), [(0, 131_071), (131_071, 0), (4096, 100_000), (0, 1000)])
def test_k01_with_float64_angles_on_both_sides(kind: str, source: int, target: int, doubled: None) -> None:
    """The attention factor is in the key that is stored, and must not be applied again."""
    config = llama(kind)
    rates, factor = hf_frequencies(config)
    raw = np.random.default_rng(0).standard_normal((1, 16, 64))

    def computed(first: int) -> np.ndarray:
        angle = np.arange(first, first + 16)[:, None] * rates
        z = (raw[..., :32] + 1j * raw[..., 32:]) * np.exp(1j * angle) * factor
        return np.concatenate([z.real, z.imag], axis=-1)

    keys, truth = computed(source).astype(np.float32), computed(target)
    layout = KVLayout("split", 1, (Part("k", 64), Part("v", 64)), KVDtype.FP32)
    rerotate(layout, [keys, np.zeros_like(keys)], turn(spec_of(config).groups[0].rope, target - source))
    assert np.abs(keys - truth).max() <= 5e-7 * np.abs(truth).max()  # the case asks for 1e-4


# ---------------------------------------------------------------------------------------- models


def cached(model: Any, first: int, tokens: int = 12) -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys and values of each layer as the model caches them, its first token at position ``first``."""
    ids = torch.arange(3, 3 + tokens)[None]
    with torch.inference_mode():
        cache = model(
            input_ids=ids, position_ids=torch.arange(first, first + tokens)[None], use_cache=True
        ).past_key_values
    return [(layer.keys[0].numpy().copy(), layer.values[0].numpy().copy()) for layer in cache.layers]


def check_moves(config: Any, moves: list[tuple[int, int]], *, all_layers: bool = True) -> None:
    """Each layer's keys, moved, are those that the model computes at the target."""
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and not name.endswith("sinks"):
            weight.data.normal_(0, 0.1)
    spec = spec_of(model.config)
    assert refusal(spec) == ""
    for source, target in moves:
        angles = 2.0**-23 * (source + target + 12)  # Hugging Face forms them in float32
        pairs = zip(cached(model, source), cached(model, target), strict=True)
        for layer, ((k, v), (want_k, want_v)) in enumerate(pairs):
            if not all_layers and layer:
                continue
            group, layout = spec.group_of(layer), spec.layout(layer)
            move = turn(group.rope, target - source)
            # transformers keeps MLA's latent as keys and its rope part as values
            before = (k if layout.kind == "split" else v).copy()
            rerotate(layout, [k, v], move)
            for found, want in ((k, want_k), (v, want_v)):
                assert np.abs(found - want).max() <= (angles + 2e-5) * np.abs(want).max(), (layer, source)
            want = want_k if layout.kind == "split" else want_v
            if group.rope.kind == "none":
                assert move is None
            else:
                assert np.abs(before - want).max() > 0.05 * np.abs(want).max()


MOVABLE = sorted(
    hf_types.PLAIN
    - hf_types.NO_ROPE
    - {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"}
)


@pytest.mark.parametrize("model_type", MOVABLE)
def test_every_model_type_on_the_allow_list_moves(model_type: str) -> None:
    # Llama 4 scales queries of its unrotated layers by position: what deeper layers hold is not of the shift
    check_moves(small(model_type), [(0, 100), (150, 7)], all_layers=model_type != "llama4_text")


@by_kind
def test_llama_of_each_scaling_moves(kind: str) -> None:
    check_moves(llama(kind), [(0, 777), (100, 3100), (2000, 500)])


def test_k03_phi_2_rotates_32_of_80() -> None:
    config = transformers.PhiConfig(
        vocab_size=64,
        hidden_size=160,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        partial_rotary_factor=0.4,
    )
    spec = spec_of(config)
    assert (spec.groups[0].rope.rotary_dim, spec.layout(0).parts[0].dim) == (32, 80)
    check_moves(config, [(0, 1000), (1500, 20)])


@pytest.mark.parametrize("kind", ["default", "yarn", "yarn, mscale"])
@pytest.mark.parametrize("interleave", [True, False])
def test_deepseek_v3_moves_its_rope_part_half_split(kind: str, interleave: bool) -> None:
    """Whatever the order of its weights: transformers caches halves."""
    config = small("deepseek_v3").to_dict() | {
        "rope_parameters": dict(KINDS[kind]),
        "rope_interleave": interleave,
    }
    config["max_position_embeddings"] = 4096
    config = transformers.CONFIG_MAPPING["deepseek_v3"](**config)
    assert not spec_of(config).groups[0].rope.interleaved
    check_moves(config, [(0, 777), (2000, 500)])


def test_k02_gemma_3_moves_each_layer_type_by_its_own_theta() -> None:
    config = small("gemma3_text").to_dict()
    config["layer_types"] = ["sliding_attention"] * 3 + ["full_attention"]
    config["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    }
    config = transformers.CONFIG_MAPPING["gemma3_text"](**config)
    assert [spec_of(config).group_of(layer).rope.theta for layer in (0, 3)] == [1e4, 1e6]
    check_moves(config, [(0, 1000), (3000, 40)])


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_gemma_4_moves_proportional_keys(share: float) -> None:
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": share}
    check_moves(gemma4(full), [(0, 1000), (3000, 40)])


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("model_type", sorted(hf_types.NO_ROPE))
def test_models_with_positions_of_another_kind_are_refused(model_type: str) -> None:
    assert "no layer has a rotary embedding" in refusal(spec_of(small(model_type)))


@pytest.mark.parametrize("model_type", sorted(hf_types.PLAIN - hf_types.NO_ROPE - set(MOVABLE)))
def test_models_with_positions_in_three_dimensions_are_refused(model_type: str) -> None:
    assert "'mrope'" in refusal(spec_of(small(model_type)))


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 32,
            "long_factor": [2.0] * 32,
            "original_max_position_embeddings": 1024,
        },
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_k01_frequencies_that_follow_the_length_are_refused(parameters: dict[str, Any]) -> None:
    """As they must be: the very key at one position differs with the length of its prompt."""
    config = llama("default")
    config.rope_parameters = dict(parameters)
    config.max_position_embeddings = 1024
    reason = refusal(spec_of(config))
    assert repr(parameters["rope_type"]) in reason and "length" in reason
    embedding = modeling_llama.LlamaRotaryEmbedding(config)
    x = torch.zeros(1)
    short, long = (embedding(x, torch.arange(n)[None])[0][0, 900] for n in (1000, 3000))
    assert (short - long).abs().max() > 0.1


def test_k02_a_rope_parameter_of_a_later_transformers_is_refused() -> None:
    config = llama("yarn").to_dict()
    config["rope_parameters"]["ramp"] = "cubic"
    assert "'ramp'" in refusal(spec_of(config))
    config["rope_parameters"]["rope_type"] = "spiral"
    assert "'spiral'" in refusal(spec_of(config))
    assert isinstance(spec_of(config).groups[0].rope, RopeSpec)  # exact hits go on
