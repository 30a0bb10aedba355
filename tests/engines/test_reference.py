"""The reference engine: cached K/V give what a full prefill gives, and a failed layer spoils nothing."""

from __future__ import annotations

import numpy as np
import pytest

from hypercache.engines.reference import (
    ReferenceConfig,
    ReferenceModel,
    from_storage,
    rope_angles,
    rotate,
    to_storage,
)
from hypercache.errors import SpecError
from hypercache.kv import KVBuffers
from hypercache.model import KVDtype, RopeSpec

VARIANTS = {
    "gqa": ReferenceConfig(dtype="float64"),
    "mha": ReferenceConfig(kv_heads=4, dtype="float64"),
    "mqa": ReferenceConfig(kv_heads=1, dtype="float64"),
    "partial rotary": ReferenceConfig(rotary_dim=8, dtype="float64"),
    "interleaved": ReferenceConfig(interleaved=True, dtype="float64"),
    "interleaved partial": ReferenceConfig(interleaved=True, rotary_dim=4, dtype="float64"),
    "one layer": ReferenceConfig(layers=1, dtype="float64"),
    "bf16 cache": ReferenceConfig(kv_dtype=KVDtype.BF16, dtype="float64"),
    "fp16 cache": ReferenceConfig(kv_dtype=KVDtype.FP16, dtype="float64"),
}
IDS = np.random.default_rng(5).integers(0, 512, 70)


def full(model: ReferenceModel, ids: np.ndarray = IDS) -> tuple[np.ndarray, KVBuffers]:
    kv = KVBuffers.allocate(model.spec, len(ids))
    return model.forward(ids, kv, 0), kv


def half_filled(kv: KVBuffers, tokens: int, rest: float = 6e4) -> KVBuffers:
    """Another engine's memory: the first ``tokens`` as if fetched, poison behind them."""
    copy = KVBuffers.allocate(kv.spec, kv.tokens)
    for i in range(kv.spec.num_layers):
        for target, source in zip(copy.layer(i), kv.layer(i), strict=True):
            target[:] = to_storage(np.full(target.shape, rest), kv.spec.layout(i).dtype)
            target[:, :tokens] = source[:, :tokens]
    return copy


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("past", [16, 48, 69])
def test_a_prefix_from_the_cache_gives_the_logits_of_a_full_prefill(
    config: ReferenceConfig, past: int
) -> None:
    model = ReferenceModel(config, seed=3)
    hidden, kv = full(model)
    reused = half_filled(kv, past)
    suffix = model.forward(IDS[past:], reused, past)
    # Rounding K/V to the cache's dtype may fall the other way where sums were taken in another order.
    ulp = {KVDtype.FP32: 1e-6, KVDtype.FP16: 1e-2, KVDtype.BF16: 5e-2}[config.kv_dtype]
    assert np.abs(model.logits(suffix) - model.logits(hidden[past:])).max() <= ulp
    for i in range(config.layers):
        for ours, theirs in zip(reused.layer(i), kv.layer(i), strict=True):
            ours, theirs = (from_storage(part, config.kv_dtype, "float64") for part in (ours, theirs))
            np.testing.assert_allclose(ours, theirs, atol=ulp, rtol=ulp)


def test_float32_gives_identical_tokens() -> None:
    model = ReferenceModel(seed=1)
    _, kv = full(model)
    room = KVBuffers.allocate(model.spec, 110)
    for i in range(4):
        for target, source in zip(room.layer(i), kv.layer(i), strict=True):
            target[:, :64] = source[:, :64]
    logits, got, want = model.run(IDS[64:], room, 64), [], []
    ids = IDS
    for position in range(70, 102):
        want.append(int(model.logits(full(model, ids)[0][-1]).argmax()))
        got.append(int(logits.argmax()))
        logits = model.run(got[-1:], room, position)
        ids = np.append(ids, want[-1])
    assert got == want and len(set(got)) > 8


def test_the_past_is_read_only_after_its_layer_is_ready_and_in_order() -> None:
    model = ReferenceModel(ReferenceConfig(dtype="float64"), seed=3)
    hidden, kv = full(model)
    arriving = half_filled(kv, 0)
    seen: list[int] = []

    def layer_ready(i: int) -> None:
        seen.append(i)
        for target, source in zip(arriving.layer(i), kv.layer(i), strict=True):
            target[:, :48] = source[:, :48]

    suffix = model.forward(IDS[48:], arriving, 48, layer_ready)
    assert seen == [0, 1, 2, 3]
    assert np.abs(suffix - hidden[48:]).max() < 1e-6


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_e09_a_refusal_at_layer_k_is_healed_by_recomputing_all_layers(failing: int) -> None:
    model = ReferenceModel(ReferenceConfig(dtype="float64"), seed=3)
    hidden, kv = full(model)
    broken = half_filled(kv, 48)
    for i in range(failing, 4):  # what never came
        for part in broken.layer(i):
            part[:, :48] = np.nan

    class Refused(Exception):
        pass

    def layer_ready(i: int) -> None:
        if i == failing:
            raise Refused

    with pytest.raises(Refused):
        model.forward(IDS[48:], broken, 48, layer_ready)
    again = model.forward(IDS, broken, 0)
    np.testing.assert_array_equal(again, hidden)


def test_rope_is_a_rotation_that_depends_on_distance_only() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 16))
    for interleaved in (False, True):
        rope = RopeSpec("default", 10000.0, 8, interleaved)

        def at(x: np.ndarray, position: int, rope: RopeSpec = rope, flag: bool = interleaved) -> np.ndarray:
            return rotate(x, rope_angles(rope, np.array([position]), "float64"), flag)

        assert abs((at(q, 700) * at(k, 650)).sum() - (at(q, 50) * at(k, 0)).sum()) < 1e-11
        assert abs(np.linalg.norm(at(k, 999)) - np.linalg.norm(k)) < 1e-12
        np.testing.assert_array_equal(at(k, 12)[..., 8:], k[..., 8:])
        np.testing.assert_array_equal(at(k, 0), k)
        if interleaved:
            want = k[..., 0] * np.cos(3) - k[..., 1] * np.sin(3)
        else:
            want = k[..., 0] * np.cos(3) - k[..., 4] * np.sin(3)
        np.testing.assert_allclose(at(k, 3)[..., 0], want)


def test_storage_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5, 3.3895314e38, 0.0, 1e-40])
    bf16 = to_storage(values, KVDtype.BF16)
    assert bf16.dtype == np.uint16
    back = from_storage(bf16, KVDtype.BF16, "float64")
    np.testing.assert_array_equal(back[:4], [1.0, 1.0, 1.015625, -2.5])  # ties go to the even mantissa
    assert back[4] > 3.3e38 and np.isfinite(back[4]) and back[5] == 0
    small = np.float32([0.1, 2, 3])
    assert from_storage(small, KVDtype.FP32, "float32") is small


def test_seeds_and_shapes_make_different_models_and_the_same_ones_agree() -> None:
    same = ReferenceModel(ReferenceConfig(), 1).spec
    assert same == ReferenceModel(ReferenceConfig(), 1).spec
    others = [
        ReferenceModel(ReferenceConfig(), 2),
        ReferenceModel(ReferenceConfig(eps=1e-5), 1),
        ReferenceModel(ReferenceConfig(theta=5000.0), 1),
        ReferenceModel(ReferenceConfig(dtype="float64"), 1),
        ReferenceModel(ReferenceConfig(kv_dtype=KVDtype.FP16), 1),
    ]
    prints = {same.fingerprint(), *(model.spec.fingerprint() for model in others)}
    assert len(prints) == 6


def test_l05_nothing_to_compute() -> None:
    model = ReferenceModel()
    _, kv = full(model)
    before = kv.layer(0)[0].copy()
    assert model.forward(IDS[:0], kv, 70).shape == (0, 64)
    np.testing.assert_array_equal(kv.layer(0)[0], before)
    with pytest.raises(SpecError, match="last one out of the past"):
        model.run([], kv, 70)


def test_bad_input_is_refused_by_name() -> None:
    model = ReferenceModel()
    with pytest.raises(SpecError, match=r"room for 8 tokens cannot take positions 0\.\.70"):
        model.run(IDS, KVBuffers.allocate(model.spec, 8), 0)
    with pytest.raises(SpecError, match="another model"):
        model.run(IDS, KVBuffers.allocate(ReferenceModel(seed=9).spec, 70), 0)
    for ids in ([512], [-1], [0.5]):
        with pytest.raises(SpecError, match=r"integers in 0\.\.511"):
            model.run(ids, KVBuffers.allocate(model.spec, 8), 0)  # type: ignore[arg-type]
    for bad, message in (
        ({"layers": 0}, "layers must be >= 1"),
        ({"kv_heads": 3}, "cannot share 3"),
        ({"rotary_dim": 5}, "must be even"),
        ({"rotary_dim": 32}, "must be even"),
        ({"dtype": "float16"}, "'float32' or 'float64'"),
        ({"kv_dtype": KVDtype.FP8_E4M3}, "no fp8"),
    ):
        with pytest.raises(SpecError, match=message):
            ReferenceConfig(**bad)  # type: ignore[arg-type]
