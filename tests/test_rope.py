"""Keys at another position, against rotations formed in float64 from the positions themselves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hypercache.errors import SpecError
from hypercache.model import KVDtype, KVLayout, LayerGroup, ModelSpec, Part, RopeSpec
from hypercache.rope import Turn, frequencies, refusal, rerotate, rotated_part, turn

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}


def rope(
    kind: str = "default", dim: int = 64, interleaved: bool = False, theta: float = 1e4, **more: Any
) -> RopeSpec:
    return RopeSpec(kind, theta, dim, interleaved, tuple(more.items()))


def layout(dim: int = 64, heads: int = 2, dtype: KVDtype = KVDtype.FP32) -> KVLayout:
    return KVLayout("split", heads, (Part("k", dim), Part("v", dim)), dtype)


def model(*ropes: RopeSpec, dtype: KVDtype = KVDtype.FP32) -> ModelSpec:
    """One layer of head dim 64 for each of ``ropes``."""
    groups = tuple(LayerGroup((i,), layout(dtype=dtype), one) for i, one in enumerate(ropes))
    scales = ((1.0, 1.0),) * len(ropes) if dtype.is_fp8 else None
    return ModelSpec(b"w" * 32, groups, kv_scales=scales)


def at(keys: np.ndarray, positions: Any, spec: RopeSpec) -> np.ndarray:
    """float64 ``(heads, tokens, dim)`` before rotation -> rotated at ``positions``, float64 throughout."""
    dim = spec.rotary_dim
    rates = np.array([spec.theta ** (-2.0 * i / dim) for i in range(dim // 2)])
    if spec.kind == "linear":
        rates = rates / dict(spec.scaling)["factor"]
    angle = np.asarray(positions, np.float64)[:, None] * rates
    rotated = keys.astype(np.float64).copy()
    for i in range(dim // 2):
        a, b = (2 * i, 2 * i + 1) if spec.interleaved else (i, i + dim // 2)
        z = (keys[..., a] + 1j * keys[..., b]) * np.exp(1j * angle[:, i])
        rotated[..., a], rotated[..., b] = z.real, z.imag
    return rotated


def stored(seed: int, spec: RopeSpec, first: int, tokens: int = 32, dim: int = 64) -> tuple[Any, ...]:
    """Keys before rotation (float64), and float32 K/V as an engine caches them from position ``first`` on."""
    random = np.random.default_rng(seed)
    keys = random.standard_normal((2, tokens, dim))
    values = random.standard_normal((2, tokens, dim)).astype(np.float32)
    return keys, at(keys, range(first, first + tokens), spec).astype(np.float32), values


def off(found: np.ndarray, truth: np.ndarray) -> float:
    """The largest error of an element, relative to the largest element."""
    return float(np.abs(found - truth).max() / np.abs(truth).max())


PAIRINGS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])


@PAIRINGS
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("source", "target", "most"),
    [
        (1024, 8192, 5e-7),
        (8192, 1024, 5e-7),
        (0, 1_000_000, 2e-6),
        (1_000_000, 0, 2e-6),
        (131_072, 131_073, 5e-7),
    ],
)
def test_a_moved_key_is_the_key_computed_there(source, target, most, seed, interleaved):
    spec = rope(dim=128, interleaved=interleaved, theta=[1e4, 5e5][seed % 2])
    keys, k, v = stored(seed, spec, source, dim=128)
    rerotate(layout(128), [k, v], turn(spec, target - source))
    assert off(k, at(keys, range(target, target + 32), spec)) <= most


def test_k01_linear_scaling_moves_by_scaled_angles():
    spec = rope("linear", factor=4.0)
    keys, k, v = stored(1, spec, 10)
    rerotate(layout(), [k, v], turn(spec, 131_000))
    assert off(k, at(keys, range(131_010, 131_042), spec)) < 1e-6


@PAIRINGS
def test_k03_of_80_elements_only_the_32_rotary_ones_change(interleaved):
    spec = rope(dim=32, interleaved=interleaved)
    keys, k, v = stored(2, spec, 100, dim=80)
    before = k.copy()
    rerotate(layout(80), [k, v], turn(spec, 4000))
    assert k[..., 32:].tobytes() == before[..., 32:].tobytes()
    assert off(k, at(keys, range(4100, 4132), spec)) < 5e-7
    assert off(before, k) > 0.5


@PAIRINGS
def test_k05_a_thousand_moves_from_the_original_are_one_move(interleaved):
    """And moves of the moved copy drift, but slowly: nothing breaks should someone chain a few."""
    spec = rope(interleaved=interleaved)
    keys, original, v = stored(3, spec, 0)
    steps = np.random.default_rng(3).integers(-500, 700, 1000)
    chained, position = original.copy(), 0
    for step in steps:
        position += int(step)
        k = original.copy()
        rerotate(layout(), [k, v], turn(spec, position))
        rerotate(layout(), [chained, v], turn(spec, int(step)))
    once = original.copy()
    rerotate(layout(), [once, v], turn(spec, position))
    truth = at(keys, range(position, position + 32), spec)
    assert position > 50_000
    assert k.tobytes() == once.tobytes() and off(once, truth) < 5e-7
    assert off(once, truth) < off(chained, truth) < 1e-4


@PAIRINGS
@pytest.mark.parametrize(("source", "target"), [(0, 1000), (0, 100_000), (100_000, 1000), (37, 5)])
def test_k07_a_block_is_used_where_it_is_asked_for_and_its_values_are_bit_equal(source, target, interleaved):
    spec = rope(interleaved=interleaved)
    keys, k, v = stored(4, spec, source)
    values = v.tobytes()
    rerotate(layout(), [k, v], turn(spec, target - source))
    assert v.tobytes() == values
    assert off(k, at(keys, range(target, target + 32), spec)) < 5e-7


def test_k02_each_layer_type_moves_by_its_own_theta():
    """Gemma 3: theta 1e4 in sliding layers, 1e6 in full ones."""
    spec = ModelSpec.from_hf_config(
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "hidden_size": 64,
            "sliding_window": 512,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        weights=b"w" * 32,
        dtype="fp32",
    )
    assert refusal(spec) == ""
    ropes = [spec.group_of(layer).rope for layer in (0, 5)]
    assert [one.theta for one in ropes] == [1e4, 1e6]
    for own, others in (ropes, ropes[::-1]):
        keys, k, v = stored(5, own, 7)
        wrong, truth = k.copy(), at(keys, range(3007, 3039), own)
        rerotate(layout(), [k, v], turn(own, 3000))
        rerotate(layout(), [wrong, v], turn(others, 3000))
        assert off(k, truth) < 5e-7 and off(wrong, truth) > 0.1


def test_mla_moves_its_rope_part_and_nothing_else():
    shape = KVLayout("mla", 1, (Part("latent", 96), Part("rope", 64)), KVDtype.FP32)
    spec = rope()
    keys, k, _ = stored(6, spec, 11)
    latent = np.random.default_rng(6).standard_normal((1, 32, 96)).astype(np.float32)
    before = latent.tobytes()
    parts = [latent, k[:1]]
    assert rotated_part(shape) == 1 and rotated_part(layout()) == 0
    rerotate(shape, parts, turn(spec, 900))
    assert latent.tobytes() == before
    assert off(parts[1], at(keys[:1], range(911, 943), spec)) < 5e-7


# ---------------------------------------------------------------------------------------- no move


def test_nothing_is_done_where_nothing_moves():
    _, k, v = stored(7, rope(), 3)
    before = k.tobytes()
    for still in (turn(rope(), 0), turn(RopeSpec("none", 0.0, 0), 500)):
        assert still is None
        rerotate(layout(), [k, v], still)
    assert k.tobytes() == before
    rerotate(layout(), [k[:, :0], v[:, :0]], turn(rope(), 5))


def test_a_view_is_moved_alone():
    """So that each span of a prompt moves by its own difference."""
    spec = rope()
    keys, k, v = stored(8, spec, 0)
    before = k.copy()
    rerotate(layout(), [k[:, 10:20], v[:, 10:20]], turn(spec, 77))
    assert off(k[:, 10:20], at(keys[:, 10:20], range(87, 97), spec)) < 5e-7
    k[:, 10:20] = before[:, 10:20]
    assert k.tobytes() == before.tobytes()


# ---------------------------------------------------------------------------------------- refusals

LONG = {"short_factor": (1.0,) * 32, "long_factor": (2.0,) * 32, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (rope("dynamic", factor=2.0), ("'dynamic'", "length")),
        (rope("longrope", **LONG), ("'longrope'", "length")),
        (rope("mrope", mrope_section=(8, 12, 12)), ("'mrope'", "triples")),
        (rope("xpos"), ("'xpos'", "default, linear, llama3, yarn")),
        (rope("default", rotary_percentage=0.5), ("'default'", "'rotary_percentage'")),
        (rope("yarn", **YARN, gamma=2.0), ("'yarn'", "'gamma'")),
        (rope("linear"), ("'linear'", "'factor' None")),
        (rope("linear", factor=0.0), ("'factor' 0.0",)),
        (rope("linear", factor="4"), ("'factor' '4'",)),
        (rope("linear", factor=True), ("'factor' True",)),
        (rope("linear", factor=math.inf), ("'factor' inf",)),
        (rope("llama3", **(LLAMA3 | {"high_freq_factor": 1.0})), ("'llama3'", "'high_freq_factor'")),
        (rope("yarn", factor=4.0), ("'original_max_position_embeddings' None",)),
        (rope("yarn", **YARN, truncate=1), ("'truncate' 1",)),
        (rope("yarn", theta=1.0, **YARN), ("theta 1.0",)),
        (rope("proportional"), ("'partial_rotary_factor' None",)),
    ],
)
def test_k01_k02_what_is_not_known_is_refused_with_its_reason(spec, words):
    reason = refusal(model(rope(), spec))
    assert reason.startswith("layer 1 has ")
    for word in words:
        assert word in reason
    for call in (lambda: frequencies(spec), lambda: turn(spec, 16)):
        with pytest.raises(SpecError) as caught:
            call()
        assert all(word in str(caught.value) for word in words)


def test_layers_without_rotation_are_fine_among_others_but_not_alone():
    none = RopeSpec("none", 0.0, 0)
    assert refusal(model(none, rope(), none)) == ""
    assert "no layer has a rotary embedding" in refusal(model(none, none))
    with pytest.raises(SpecError, match="'none'"):
        frequencies(none)


@pytest.mark.parametrize("dtype", [KVDtype.FP8_E4M3, KVDtype.FP8_E5M2])
def test_keys_kept_in_fp8_are_refused(dtype):
    assert dtype.value in refusal(model(rope(), dtype=dtype))
    parts = [np.zeros((2, 16, 64), np.uint8) for _ in "kv"]
    with pytest.raises(SpecError, match=dtype.value):
        rerotate(layout(dtype=dtype), parts, turn(rope(), 5))


@pytest.mark.parametrize(
    "spec",
    [
        rope(),
        rope(llama_4_scaling_beta=0.1, original_max_position_embeddings=8192),
        rope("linear", factor=2),
        rope("llama3", **LLAMA3),
        rope("yarn", **YARN, mscale=1.0, mscale_all_dim=0.0, beta_fast=32.0, beta_slow=1.0, truncate=False),
        rope("proportional", partial_rotary_factor=0.25),
    ],
    ids=lambda spec: spec.kind,
)
def test_known_kinds_are_not_refused(spec):
    assert refusal(model(spec)) == ""
    found = frequencies(spec)
    assert found.dtype == np.float64 and found.shape == (32,) and 0 < found[0] <= 1
    assert (np.diff(found) <= 0).all() and (found >= 0).all()


@pytest.mark.parametrize("delta", [1.5, "7", None, True])
def test_a_difference_that_is_no_integer_is_refused(delta):
    with pytest.raises(SpecError, match="delta"):
        turn(rope(), delta)
    assert turn(rope(), np.int64(-7)) is not None


@pytest.mark.parametrize(
    "cos",
    [np.ones(31, np.float32), np.ones(32), np.ones(64, np.float32)[::2], [1.0] * 32, np.ones((1, 32), "f4")],
)
def test_a_turn_of_another_shape_is_refused(cos):
    with pytest.raises(SpecError, match=r"Turn\.cos"):
        Turn(cos, np.zeros(32, np.float32), 64, False)


def test_what_does_not_fit_is_refused_before_anything_moves():
    _, k, v = stored(9, rope(), 0)
    before, move = k.tobytes(), turn(rope(), 5)
    with pytest.raises(SpecError, match="another layer group"):
        rerotate(layout(), [k, v], turn(rope(dim=128), 5))
    for parts in ([k], [k, v, v], [k[0], v], [k[:1], v], [k, v[:, :3]], [k.astype(np.float64), v]):
        with pytest.raises(SpecError):
            rerotate(layout(), parts, move)
    frozen = k.view()
    frozen.flags.writeable = False
    with pytest.raises(SpecError, match="'k' is read-only"):
        rerotate(layout(), [frozen, v], move)
    assert k.tobytes() == before
