"""What a policy is asked, when, and what of its answer is taken: on the reference engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from blend_kit import SPANS, SYSTEM, A, B, case

from hypercache.blend import Blend, Seen, rehearse, run
from hypercache.engines.reference import ReferenceConfig
from hypercache.errors import SpecError

CASE = case(ReferenceConfig(dtype="float64", layers=5))
REUSED = A + B


class Given:
    """A policy of the caller's: remembers what it was shown, answers what it is told to."""

    name = "given"

    def __init__(
        self, answer: Callable[[Seen], Any], probes: bool = True, mass_layers: Any = (), **more: Any
    ) -> None:
        self.answer, self.probes, self.mass_layers = answer, probes, mass_layers
        self.shown: list[Seen] = []
        self.__dict__ |= more

    def scores(self, seen: Seen) -> Any:
        self.shown.append(seen)
        return self.answer(seen)


def blended(settings: Blend) -> Any:
    """The report."""
    return run(CASE.model, CASE.ids, CASE.reused(), SYSTEM, SPANS, settings).report


def last_first(seen: Seen) -> np.ndarray:
    return np.arange(len(seen.positions))


@pytest.mark.parametrize("probes", [True, False])
@pytest.mark.parametrize("ratio", [0.05, 0.5, 0.77, 0.8, 0.95])
def test_a_policy_is_asked_once_and_its_scores_decide_wherever_tokens_are_dropped(
    ratio: float, probes: bool
) -> None:
    """From 0.77 on, narrowed by 0.3, all are computed at the check layer: the first are dropped later."""
    kv, before = CASE.reused(), CASE.reused()
    policy = Given(last_first, probes)
    report = run(CASE.model, CASE.ids, kv, SYSTEM, SPANS, Blend(ratio, policy, lead=0)).report
    (seen,) = policy.shown
    assert len(seen.positions) == REUSED and seen.deviation.shape == (REUSED, 2 if probes else 0, 2)
    assert report.policy == "given"
    assert report.by_layer[3] < REUSED
    for layer in (2, 3, 4):  # K/V are computed in a layer for those that went through the one before
        fresh = np.any(kv.layer(layer)[1] != before.layer(layer)[1], axis=(0, 2))[SYSTEM : SYSTEM + REUSED]
        left = report.by_layer[layer - 1]
        assert np.flatnonzero(fresh).tolist() == list(range(REUSED - left, REUSED))


def test_a_policy_is_not_asked_where_nothing_is_dropped() -> None:
    for ratio in (0.0, 1.0):
        policy = Given(last_first)
        assert blended(Blend(ratio, policy)).policy == "" and policy.shown == []


@pytest.mark.parametrize(("policy", "parts"), [("k", [0]), ("v", [1]), ("kv", [0, 1])])
@pytest.mark.parametrize("ratio", [0.3, 0.8])
def test_a_deviation_narrows_by_its_own_parts(
    policy: str, parts: list[int], ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = case(ReferenceConfig(dtype="float64", layers=5))
    measured: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    deviation = made.model.deviation

    def watched(layer: int, rows: Any, kv: Any) -> np.ndarray:
        found = deviation(layer, rows, kv)
        measured[layer] = rows.positions, found
        return found

    monkeypatch.setattr(made.model, "deviation", watched)
    kv, before = made.reused(), made.reused()
    settings = Blend(ratio, policy, lead=0, narrow=0.9)
    report = run(made.model, made.ids, kv, SYSTEM, SPANS, settings).report
    assert list(measured) == [1, 2, 3]
    for layer, (positions, found) in measured.items():
        scores = np.square(found[:, :, parts].astype(float)).sum(axis=(1, 2))
        best = np.sort(positions[np.argsort(-scores)[: report.by_layer[layer]]])
        fresh = np.any(kv.layer(layer + 1)[1] != before.layer(layer + 1)[1], axis=(0, 2))
        assert np.flatnonzero(fresh[SYSTEM : SYSTEM + REUSED]).tolist() == (best - SYSTEM).tolist()


@pytest.mark.parametrize("dtype", ["u1", "u8", "i1", "i8", "f2", "f4", "f8", "longdouble", "bool", "list"])
def test_the_highest_win_in_any_type_of_real_numbers(dtype: str) -> None:
    def answer(seen: Seen) -> Any:
        scores = last_first(seen) >= REUSED - 10
        return scores.tolist() if dtype == "list" else scores.astype(dtype)

    chosen = blended(Blend(10 / REUSED, Given(answer), lead=0, narrow=0.0)).chosen
    assert chosen.tolist() == list(range(SYSTEM + REUSED - 10, SYSTEM + REUSED))


def _poked(seen: Seen, name: str) -> np.ndarray:
    getattr(seen, name)[:] = 0
    return last_first(seen)


ODD: dict[str, tuple[Callable[[Seen], Any], str]] = {
    "NaN": (lambda seen: np.where(seen.positions == 20, np.nan, 1), r"finite scores: 1 of 96 .* position 20"),
    "inf": (lambda seen: np.full(len(seen.positions), np.inf), "finite scores: 96 of 96"),
    "-inf": (lambda seen: np.full(len(seen.positions), -np.inf), "finite scores: 96 of 96"),
    "overflow": (lambda seen: np.full(len(seen.positions), np.longdouble("1e4000")), "finite|OverflowError"),
    "divided by 0": (lambda seen: np.ones(96) / np.zeros(96), "finite scores"),
    "None": (lambda seen: None, r"one score for each of 96 tokens, got shape \(\)"),
    "a number": (lambda seen: 0.0, r"one score for each of 96 tokens, got shape \(\)"),
    "too few": (lambda seen: np.zeros(3), r"one score for each of 96 tokens, got shape \(3,\)"),
    "a column": (lambda seen: np.zeros((96, 1)), r"got shape \(96, 1\)"),
    "text": (lambda seen: ["a"] * 96, "must give real numbers as scores, got <U1"),
    "objects": (lambda seen: [None] * 96, "must give real numbers as scores, got object"),
    "complex": (lambda seen: np.zeros(96, complex), "real numbers as scores, got complex128"),
    "times": (lambda seen: np.zeros(96, "M8[s]"), "real numbers as scores, got datetime64"),
    "ragged": (lambda seen: [[1], [1, 2]] * 48, "did not score the tokens: ValueError"),
    "raises": (lambda seen: 1 / 0, "did not score the tokens: ZeroDivisionError"),
    "a layer not asked for": (lambda seen: seen.mass[0], "did not score the tokens: KeyError: 0"),
    "writes": (lambda seen: _poked(seen, "positions"), "did not score the tokens: ValueError.*read-only"),
    "writes, place": (lambda seen: _poked(seen, "place"), "read-only"),
    "writes, segment": (lambda seen: _poked(seen, "segment"), "read-only"),
    "writes, deviation": (lambda seen: _poked(seen, "deviation"), "read-only"),
    "writes, mass": (lambda seen: seen.mass.clear(), "AttributeError"),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize(("answer", "message"), ODD.values(), ids=ODD.keys())
def test_an_answer_that_ranks_nothing_is_refused_by_the_policys_name(
    answer: Callable[[Seen], Any], message: str
) -> None:
    with pytest.raises(SpecError, match=rf"^policy 'given' .*({message})"):
        blended(Blend(0.3, Given(answer)))


def test_a_policy_that_does_not_look_is_shown_no_head() -> None:
    with pytest.raises(SpecError, match="policy 'given' did not score the tokens: IndexError"):
        blended(Blend(0.3, Given(lambda seen: seen.deviation[:, 0, 0], probes=False)))


def test_mass_is_to_be_had_up_to_the_check_layer() -> None:
    for layers, message in (
        ((2,), r"mass_layers of policy 'given' must be in 0\.\.1, the check layer, got \(2,\)"),
        ((-1,), r"must be in 0\.\.1"),
        (None, "mass_layers of policy 'given' must be tuple or list, got NoneType"),
        (("1",), r"mass_layers of policy 'given'\[0\] must be int"),
    ):
        with pytest.raises(SpecError, match=message):
            Blend(0.3, Given(last_first, mass_layers=layers))
        with pytest.raises(SpecError, match=message):
            Blend(0.3, selector=Given(last_first, mass_layers=layers))
    with pytest.raises(SpecError, match=r"must be \(\): it does not probe"):
        Blend(0.3, Given(last_first, probes=False, mass_layers=(0,)))
    policy = Given(last_first, mass_layers=(0, 2))
    assert blended(Blend(0.3, policy, check_layer=2)).policy == "given"
    assert sorted(policy.shown[0].mass) == [0, 2]


def test_a_policy_with_a_check_layer_of_its_own_is_asked_there() -> None:
    for named in ("policy", "selector"):
        given: dict[str, Any] = {named: Given(last_first, check_layer=2), "narrow": 0.0}
        settings = Blend(0.1, **given)
        assert settings.check_layer == 2 and blended(settings).by_layer == (96, 96, 10, 10, 0)
        given[named] = Given(last_first, check_layer=0)
        with pytest.raises(SpecError, match="check_layer of policy 'given' must be an integer >= 1, got 0"):
            Blend(0.1, **given)


def test_a_rehearsal_tells_whether_a_policy_fits_a_model() -> None:
    rehearse(Blend(0.3, Given(lambda seen: seen.mass[1][:, 3], mass_layers=(1,))), CASE.model.shape)
    rehearse(Blend(0.3, "boundary"), CASE.model.shape)
    for policy in (
        Given(lambda seen: seen.mass[1][:, 4], mass_layers=(1,)),
        Given(lambda seen: seen.deviation[:, 2, 0]),
    ):
        with pytest.raises(SpecError, match="policy 'given' did not score the tokens: IndexError"):
            rehearse(Blend(0.3, policy), CASE.model.shape)
    with pytest.raises(SpecError, match="check_layer 4 leaves nothing to choose"):
        rehearse(Blend(0.3, check_layer=4), CASE.model.shape)
