"""The selector and its file, and what is learned by fitting: planted rules, refusals, round trips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from blend_kit import SPANS, SYSTEM, Case, case

from hypercache.blend import Blend, Seen, run
from hypercache.blend.fit import fit, scaling, stakes, top_share
from hypercache.blend.selector import MAX_NBYTES, Selector, Trained, decode, names, table
from hypercache.engines import selectors
from hypercache.engines.reference import ReferenceConfig, ReferenceModel
from hypercache.errors import SpecError, TooLarge

MODEL = ReferenceModel(ReferenceConfig(layers=4))
TRAINED = Trained(prompts=3, rows=200, source="ab", layers=(2, 3))


def selector(**changes: Any) -> Selector:
    fields: dict[str, Any] = {
        "model": MODEL.spec.fingerprint().hex(),
        "features": ("mass.0.1", "k.0", "place"),
        "mean": (0.25, 1.0, 3.0),
        "scale": (0.5, 2.0, 1.0),
        "weights": (1.0, -2.0, 0.5),
        "squares": (0.0, 0.25, -0.5),
        "bias": 0.1,
        "ratio": 0.15,
        "check_layer": 1,
        "trained": TRAINED,
    }
    return Selector(**{**fields, **changes})


def seen(n: int = 5, seed: int = 0) -> Seen:
    rng = np.random.default_rng(seed)
    place = np.arange(n)
    return Seen(
        positions=place + 7,
        place=place,
        segment=np.zeros(n, int),
        segments=1,
        deviation=rng.random((n, 2, 2)).astype(np.float32),
        mass={layer: rng.random((n, 4)).astype(np.float32) for layer in (0, 1)},
    )


def test_scores_weigh_standardised_features_and_their_squares() -> None:
    shown = seen()
    columns = [shown.mass[0][:, 1].astype(float), shown.deviation[:, 0, 0].astype(float)]
    columns.append(np.log2(1 + shown.place))
    a, b, c = (columns[0] - 0.25) / 0.5, (columns[1] - 1) / 2, columns[2] - 3
    want = a - 2 * b + 0.25 * b**2 + 0.5 * c - 0.5 * c**2 + 0.1
    np.testing.assert_allclose(selector().scores(shown), want, rtol=1e-12)
    assert selector().mass_layers == (0,)


def test_a_feature_far_outside_what_was_learned_says_no_more() -> None:
    far, farther = (seen() for _ in range(2))
    far.deviation[:, 0, 0], farther.deviation[:, 0, 0] = 9.0, 1e6
    np.testing.assert_array_equal(selector().scores(far), selector().scores(farther))


def test_file_round_trip_is_exact_and_the_same_bytes(tmp_path: Path) -> None:
    made = selector(mean=(1 / 3, 1e-17, -2.5e300))
    path = tmp_path / "deep" / "selector.json"
    selectors.save(made, path)
    assert selectors.load(path, MODEL.spec) == made
    assert path.read_bytes() == made.encode() == selectors.load(path).encode()
    assert json.loads(path.read_bytes())["version"] == 1
    assert [file.name for file in path.parent.iterdir()] == ["selector.json"], "no temporary file is left"


def test_found_by_the_models_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERCACHE_HOME", str(tmp_path))
    assert selectors.find(MODEL.spec) is None
    path = selectors.path_of(MODEL.spec)
    assert path is not None
    selectors.save(selector(), path)
    assert selectors.find(MODEL.spec) == selector()
    assert selectors.find(ReferenceModel(ReferenceConfig(layers=4), seed=1).spec) is None


def test_another_models_selector_is_refused() -> None:
    other = ReferenceModel(ReferenceConfig(layers=4), seed=1).spec
    with pytest.raises(
        SpecError, match=r"here\.json was calibrated for the model .* run hypercache calibrate"
    ):
        decode(selector().encode(), "here.json", other)


def changed(**changes: Any) -> bytes:
    found = json.loads(selector().encode())
    return json.dumps({**found, **changes}).encode()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no selector"),
        (b"[]", "no selector"),
        (b"\x80\x04K\x01.", "no selector"),
        (b"[" * 100_000, "no selector"),
        (changed(format="other"), "no selector"),
        (changed(version=2), "version 2, this is for version 1"),
        (changed(extra=1), "unknown field `extra`"),
        (changed(features=["mass.0.1", "k.0", "shoe.size"]), "shoe.size"),
        (changed(features=["k.0", "k.0", "place"]), "each once"),
        (changed(mean=[0.0, 1.0]), "mean must hold 3"),
        (changed(scale=[0.5, 0.0, 1.0]), "scale must hold numbers > 0"),
        (changed(mean=["a", 1.0, 1.0]), "mean"),
        (changed(weights=[1.0]), "weights must hold 3"),
        (changed(squares=[]), "squares must hold 3"),
        (changed(bias="x"), "bias"),
        (changed(ratio=0), "ratio"),
        (changed(ratio=1.5), "ratio"),
        (changed(check_layer=0), "check_layer"),
        (selector().encode().replace(b"0.25", b"NaN"), "no selector"),
        (selector().encode().replace(b"0.25", b"1e999"), "no selector"),
        (selector().encode()[:-20], "no selector"),
    ],
)
def test_files_that_are_no_selector_are_refused_by_name(data: bytes, why: str) -> None:
    with pytest.raises(SpecError, match=r"here\.json") as caught:
        decode(data, "here.json")
    assert why in str(caught.value)
    assert "hypercache calibrate" in str(caught.value)


def test_numbers_that_are_not_finite_are_refused_when_made() -> None:
    with pytest.raises(SpecError, match="finite"):
        selector(mean=(float("nan"), 1.0, 1.0))
    with pytest.raises(SpecError, match="finite"):
        selector(weights=(1.0, float("inf"), 0.0))
    with pytest.raises(SpecError, match="finite"):
        selector(bias=float("nan"))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    path.write_bytes(b" " * (MAX_NBYTES + 1))
    with pytest.raises(TooLarge, match=r"big\.json"):
        selectors.load(path)
    with pytest.raises(SpecError, match="cannot be read"):
        selectors.load(tmp_path)


def last_segment_first(made: Case) -> Selector:
    """Ranks the tokens of the last segment first, in their order."""
    features = names(made.model.spec, made.model.shape.heads)
    weights = tuple({"segment": 9.0, "place": -0.1}.get(name, 0.0) for name in features)
    return selector(
        model=made.model.spec.fingerprint().hex(),
        features=features,
        mean=(0.0,) * len(features),
        scale=(1.0,) * len(features),
        weights=weights,
        squares=(0.0,) * len(features),
        bias=0.0,
    )


def test_it_is_what_a_blend_ranks_by() -> None:
    made = case(ReferenceConfig(layers=4))
    settings = Blend(0.1, selector=last_segment_first(made), lead=0, narrow=0.0)
    done = run(made.model, made.ids, made.reused(), SYSTEM, SPANS, settings)
    assert done.report.policy == "selector"
    first = SPANS[1].start
    assert done.report.chosen.tolist() == list(range(first, first + 10))


def test_a_narrowing_blend_drops_what_it_ranked_last() -> None:
    made = case(ReferenceConfig(layers=5))
    kv, before = made.reused(), made.reused()
    settings = Blend(0.1, selector=last_segment_first(made), lead=0, narrow=1.0)
    report = run(made.model, made.ids, kv, SYSTEM, SPANS, settings).report
    assert report.by_layer[1] > report.by_layer[2] > 0
    for layer in (3, 4):
        fresh = np.any(kv.layer(layer)[1] != before.layer(layer)[1], axis=(0, 2))[SYSTEM : SPANS[1].stop]
        left = report.by_layer[layer - 1]
        first = SPANS[1].start - SYSTEM
        assert np.flatnonzero(fresh).tolist() == list(range(first, first + left))


def test_features_of_unknown_heads_are_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"mass\.0\.9"):
        table(seen(), ("mass.0.9",))


# --- learning ----------------------------------------------------------------------------------------


def test_the_fit_recovers_a_planted_rule() -> None:
    rng = np.random.default_rng(3)
    rule = np.array([2.0, -1.0, 0.0, 0.5])
    x = rng.normal(size=(20_000, 4))
    matters = rng.random(20_000) < 1 / (1 + np.exp(-(x @ rule - 1.5)))
    weights, bias = fit(x, matters, np.ones(len(x)))
    np.testing.assert_allclose(weights, rule, atol=0.1)
    assert bias == pytest.approx(-1.5, abs=0.1)
    again, _ = fit(x, matters, np.ones(len(x)))
    assert np.array_equal(weights, again)
    turned, _ = fit(x[::-1], matters[::-1], np.full(len(x), 7.0))
    np.testing.assert_allclose(turned, weights, rtol=1e-9)


def test_separable_rows_have_a_finite_rule() -> None:
    x = np.linspace(-1, 1, 101)[:, None]
    weights, bias = fit(x, x[:, 0] > 0.3, np.ones(101))
    assert np.isfinite(weights).all()
    assert np.mean((x @ weights + bias > 0) == (x[:, 0] > 0.3)) > 0.95


def test_rows_that_teach_nothing_are_refused() -> None:
    x = np.zeros((4, 2))
    with pytest.raises(SpecError, match="of one kind"):
        fit(x, np.ones(4, bool), np.ones(4))
    with pytest.raises(SpecError, match="finite"):
        fit(np.full((4, 2), np.nan), np.array([True, False, True, False]), np.ones(4))
    with pytest.raises(SpecError, match="one label and count a row"):
        fit(x, np.ones(3, bool), np.ones(4))


def test_what_counts_more_is_told_right_first() -> None:
    x = np.array([[1.0], [1.0], [-1.0], [-1.0]])
    matters = np.array([True, False, False, True])
    for heavy, sign in ((0, 1), (1, -1)):
        counts = np.ones(4)
        counts[heavy] = 10
        assert np.sign(fit(x, matters, counts)[0][0]) == sign


def test_stakes_follow_influence_and_are_never_nothing() -> None:
    found = stakes(np.array([0.0, 4.0, -4.0, 0.0]))
    np.testing.assert_allclose(found, [0.3, 0.3 + 2**0.5, 0.3 + 2**0.5, 0.3])
    assert np.all(stakes(np.zeros(3)) == 0.3)


def test_top_share_rounds_up_and_prefers_the_earlier() -> None:
    assert top_share(np.array([1.0, 3.0, 3.0, 0.0]), 0.26).tolist() == [False, True, True, False]
    assert top_share(np.array([2.0, 2.0, 2.0, 2.0]), 0.25).tolist() == [True, False, False, False]
    assert top_share(np.zeros(20), 0.15).sum() == 3


def test_a_feature_that_never_varies_is_left_alone() -> None:
    mean, scale = scaling(np.array([[1.0, 5.0], [3.0, 5.0]]))
    assert mean.tolist() == [2.0, 5.0]
    assert scale.tolist() == [1.0, 1.0]


def test_the_file_is_plain_json_of_numbers_and_names() -> None:
    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(item) for key, item in value.items())
        return all(map(plain, value)) if isinstance(value, list) else isinstance(value, (str, int, float))

    assert plain(msgspec.json.decode(selector().encode()))
