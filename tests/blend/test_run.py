"""Selective recompute on the reference engine: its two ends, what it leaves alone, budgets and reports."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hypercache.blend import POLICIES, Blend, Report, Reused, Seen, Shape, run
from hypercache.blend.policies import Random
from hypercache.engines.reference import ReferenceConfig, ReferenceModel
from hypercache.errors import SpecError, TokenError
from hypercache.kv import KVBuffers
from hypercache.model import KVDtype

sys.path.append(str(Path(__file__).parent))
from blend_kit import SPANS, SYSTEM, TOKENS, A, B, Case, Q, case, error, same_bits

flat = partial(Blend, narrow=0.0)  # as many tokens in every layer
DOUBLE = case(ReferenceConfig(dtype="float64", layers=5))
REUSED = A + B
ALL = slice(0, TOKENS)
SHAPES = {
    "float32": ReferenceConfig(),
    "one K/V head, partial rotary": ReferenceConfig(kv_heads=1, rotary_dim=8, dtype="float64"),
    "interleaved": ReferenceConfig(interleaved=True, dtype="float64"),
    "bf16 cache": ReferenceConfig(kv_dtype=KVDtype.BF16),
    "two layers": ReferenceConfig(layers=2, dtype="float64"),
}


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def blended(case: Case, settings: Blend, kv: KVBuffers | None = None) -> tuple[Any, KVBuffers]:
    kv = case.reused() if kv is None else kv
    return run(case.model, case.ids, kv, SYSTEM, SPANS, settings), kv


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("narrow", [0.0, 0.5])
def test_ratio_1_is_a_full_prefill(policy: str, narrow: float) -> None:
    got, kv = blended(DOUBLE, Blend(1.0, policy, narrow=narrow))
    assert np.abs(got.hidden - DOUBLE.hidden[-Q:]).max() < 1e-10
    assert np.abs(got.logits - DOUBLE.model.logits(DOUBLE.hidden[-1])).max() < 1e-10
    assert error(kv, DOUBLE.full) < 1e-10
    assert got.report.recomputed == REUSED and got.report.policy == "" and got.report.note == ""
    assert kv.exact == TOKENS


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_ratio_1_is_a_full_prefill_in_every_shape(config: ReferenceConfig) -> None:
    asked = case(config)
    got, kv = blended(asked, Blend(1.0))
    # Where sums are taken in another order, rounding K/V to the cache's dtype may fall the other way.
    bound = 5e-2 if config.kv_dtype is KVDtype.BF16 else 1e-10 if config.dtype == "float64" else 2e-5
    assert np.abs(got.hidden - asked.hidden[-Q:]).max() < bound
    assert error(kv, asked.full) < bound


@pytest.mark.parametrize("policy", POLICIES)
def test_ratio_0_is_rotation_alone_and_computes_nothing_for_reused_tokens(policy: str) -> None:
    settings = flat(0.0, policy)
    got, kv = blended(DOUBLE, settings)
    rotated = DOUBLE.reused()
    assert same_bits(kv, rotated, slice(0, TOKENS - Q))
    hidden = DOUBLE.model.forward(DOUBLE.ids[-Q:], rotated, TOKENS - Q)  # the engine's ordinary way
    np.testing.assert_array_equal(got.hidden, hidden)
    assert got.report.flops_reused == 0 and got.report.recomputed == 0
    assert got.report.by_layer == (0,) * 5 and "ratio 0" in got.report.note
    assert kv.exact == SYSTEM


def test_k15_recomputing_repairs_and_more_of_it_repairs_more() -> None:
    """K15: K/V of another context are dirty; with what share recomputed they are how far from clean."""
    errors = [relative(blended(DOUBLE, flat(r))[0].hidden, DOUBLE.hidden[-Q:]) for r in (0, 0.3, 0.6, 1)]
    assert errors[0] > 0.05 and errors[3] < 1e-10
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ratio", [0.01, 0.15, 0.5])
def test_every_policy_keeps_its_budget_and_leaves_the_rest(policy: str, ratio: float) -> None:
    got, kv = blended(DOUBLE, flat(ratio, policy))
    report, rotated = got.report, DOUBLE.reused()
    budget = int(np.ceil(ratio * REUSED))
    assert report.recomputed == len(report.chosen) == budget and report.policy == policy
    probing = POLICIES[policy].probes
    assert report.by_layer == ((REUSED if probing else budget), budget, budget, budget, 0)
    assert (report.exact, report.reused, report.computed) == (SYSTEM, REUSED, Q)
    assert same_bits(kv, rotated, slice(0, SYSTEM))  # what is exact is not touched
    left = np.setdiff1d(np.arange(SYSTEM, TOKENS - Q), report.chosen)
    for layer in range(2 if probing else 0, 5):
        for ours, theirs in zip(kv.layer(layer), rotated.layer(layer), strict=True):
            np.testing.assert_array_equal(ours[:, left], theirs[:, left])
            if layer:  # layer 0 is exact anyhow
                assert (ours[:, report.chosen] != theirs[:, report.chosen]).any(axis=(0, 2)).all()
    if probing:  # what was computed to look is kept: both layers are those of a full prefill
        for layer in (0, 1):
            for ours, theirs in zip(kv.layer(layer), DOUBLE.full.layer(layer), strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-10)
    assert kv.exact == SYSTEM and np.isfinite(got.logits).all()


def test_policies_choose_what_they_say() -> None:
    kv = DOUBLE.reused()
    run(DOUBLE.model, DOUBLE.ids, kv, SYSTEM, SPANS, flat(1e-9, lead=0))  # layer 1 is now exact for all
    rotated, places = DOUBLE.reused(), np.arange(SYSTEM, TOKENS - Q)
    k, v = (
        np.square(ours[:, places].astype(float) - theirs[:, places]).sum(axis=(0, 2))
        for ours, theirs in zip(kv.layer(1), rotated.layer(1), strict=True)
    )
    for policy, scores in {"k": k, "v": v, "kv": k + v}.items():
        best = np.sort(places[np.argsort(-scores)[:10]])
        got = blended(DOUBLE, flat(10 / REUSED, policy, lead=0))[0].report.chosen
        assert got.tolist() == best.tolist()
    first = [span.start for span in SPANS]
    got = blended(DOUBLE, flat(6 / REUSED, "boundary"))[0].report.chosen
    assert got.tolist() == sorted(start + i for start in first for i in range(3))
    draws = [blended(DOUBLE, flat(0.2, Random(seed)))[0].report.chosen.tolist() for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_attention_ranks_by_what_falls_on_other_segments() -> None:
    seen: list[Seen] = []

    class Watching:
        name, probes, mass_layers = "watching", True, (0, 1)

        def scores(self, known: Seen) -> np.ndarray:
            seen.append(known)
            return known.mass[1].sum(axis=1)

    watched = blended(DOUBLE, flat(0.2, Watching(), lead=0))[0].report
    named = blended(DOUBLE, flat(0.2, "attention", lead=0))[0].report
    assert watched.chosen.tolist() == named.chosen.tolist() and watched.policy == "watching"
    (known,) = seen
    assert known.deviation.shape == (REUSED, 2, 2) and known.deviation.dtype == np.float32
    assert known.place.tolist() == [*range(B), *range(A)]
    assert known.segment.tolist() == [0] * B + [1] * A and known.segments == 2
    # By hand, from a full prefill, for a token of the second segment and layer 0: no softmax of ours.
    model, at = DOUBLE.model, SYSTEM + B + 7
    rows = model.project(0, model.embed(DOUBLE.ids, np.arange(TOKENS)))
    q, k, _ = rows.projected
    for head in range(4):
        weights = np.exp(k[head // 2, : at + 1] @ q[head, at] * model.config.head_dim**-0.5)
        share = weights[1 : SYSTEM + B].sum() / weights.sum()
        assert abs(known.mass[0][B + 7, head] - share) < 1e-5
    assert (known.mass[0][0] > 0).all()  # the system prompt lies before the first segment


@pytest.mark.parametrize("policy", ["kv", "random", "attention"])
def test_k15_first_tokens_of_a_segment_are_always_recomputed(policy: str) -> None:
    for lead in (1, 3):
        chosen = set(blended(DOUBLE, flat(0.1, policy, lead=lead))[0].report.chosen.tolist())
        assert {span.start + i for span in SPANS for i in range(lead)} <= chosen and len(chosen) == 10
    # Within the budget: where it is smaller, the very first of each segment come before the second ones.
    chosen = blended(DOUBLE, flat(3 / REUSED, policy, lead=4))[0].report.chosen.tolist()
    assert [span.start for span in SPANS] == [at for at in chosen if at in (SYSTEM, SYSTEM + B)]
    assert len(chosen) == 3


def test_narrowing_keeps_the_average_and_drops_what_deviates_least() -> None:
    wide = blended(DOUBLE, Blend(0.2, narrow=0.5))[0].report
    assert wide.by_layer == (96, 29, 20, 10, 0)  # 0.3, 0.2, 0.1 of 96, rounded up
    assert wide.recomputed == 29
    assert blended(DOUBLE, Blend(0.9, narrow=0.5))[0].report.by_layer == (96, 96, 87, 77, 0)
    for reused in (1, 7, 96):
        for layers in (1, 2, 3, 11):
            for ratio in (0.02, 0.3, 0.95):
                counts = Blend(ratio, narrow=1.0).counts(reused, layers)
                assert counts == sorted(counts, reverse=True) and counts[0] <= reused
                assert 0 <= sum(counts) / layers - ratio * reused < 1 + 1e-9
    places = set(blended(DOUBLE, Blend(0.2, "boundary", narrow=0.5))[0].report.chosen.tolist())
    assert len(places) == 29  # chosen before layer 0, and narrowed from there


def test_the_reports_flops_are_those_counted_by_hand() -> None:
    asked = case(ReferenceConfig(layers=3))  # hidden 64, 4 heads and 2 K/V heads of 16, MLP 160
    report = blended(asked, flat(10 / REUSED, "kv"))[0].report
    projection, rest = 2 * 64 * 8 * 16, 2 * 64 * 64 + 6 * 64 * 160

    def attention(positions: Any) -> int:
        return sum(4 * 64 * (int(at) + 1) for at in positions)

    everything, question = np.arange(TOKENS), np.arange(TOKENS - Q, TOKENS)
    assert report.flops_full == 3 * (TOKENS * (projection + rest) + attention(everything))
    mine = 2 * REUSED * projection  # q, k and v of layer 0 and of the check layer
    mine += REUSED * rest + attention(range(SYSTEM, TOKENS - Q))  # the rest of layer 0
    mine += 10 * rest + attention(report.chosen) + 10 * projection  # layer 1, and K/V of the last
    assert report.flops_reused == mine
    assert report.flops == mine + 3 * (Q * (projection + rest) + attention(question))
    assert report.flops_saved == 1 - report.flops / report.flops_full
    looking = blended(asked, flat(10 / REUSED, "attention", lead=0))[0].report
    extra = attention(range(SYSTEM, TOKENS - Q)) // 2  # its scores in layer 1
    assert looking.flops_reused == mine + extra - attention(report.chosen) + attention(looking.chosen)
    blind = blended(asked, flat(10 / REUSED, "boundary"))[0].report
    assert blind.flops_reused == 3 * 10 * projection + 2 * (10 * rest + attention(blind.chosen))
    shape = Shape(3, 64, 4, 2, 16, 160)
    assert shape.prefill(everything) == report.flops_full
    slides = shape._replace(windows=(None, 5, None))  # the sixth token and those behind it see five
    assert slides.score(0, np.arange(8)) == 2 * 64 * 36 and slides.score(1, np.arange(8)) == 2 * 64 * 30
    assert shape.prefill(everything) - slides.prefill(everything) == 4 * 64 * sum(range(TOKENS - 4))


def test_layers_are_read_and_written_only_when_they_are_there() -> None:
    whole, arriving = DOUBLE.reused(), DOUBLE.reused()
    for layer in range(5):
        for part in arriving.layer(layer):
            part[:] = np.nan
    seen: list[int] = []

    def layer_ready(layer: int) -> None:
        seen.append(layer)
        for target, source in zip(arriving.layer(layer), whole.layer(layer), strict=True):
            assert np.isnan(target).all()  # nothing was written that would now be overwritten
            target[:] = source

    settings = Blend(0.2, narrow=0.3)
    got = run(DOUBLE.model, DOUBLE.ids, arriving, SYSTEM, SPANS, settings, layer_ready)
    assert seen == [0, 1, 2, 3, 4]
    want, kv = blended(DOUBLE, settings)
    np.testing.assert_array_equal(got.logits, want.logits)
    assert same_bits(arriving, kv, ALL)


def test_what_layer_ready_raises_ends_the_run_and_nothing_is_called_exact() -> None:
    class Lost(Exception):
        pass

    def layer_ready(layer: int) -> None:
        if layer == 3:
            raise Lost

    kv = DOUBLE.reused()
    with pytest.raises(Lost):
        run(DOUBLE.model, DOUBLE.ids, kv, SYSTEM, SPANS, Blend(1.0), layer_ready)
    assert kv.exact == SYSTEM
    again = run(DOUBLE.model, DOUBLE.ids, kv, SYSTEM, [], Blend())  # all behind what is exact, anew
    assert np.abs(again.logits - DOUBLE.model.logits(DOUBLE.hidden[-1])).max() < 1e-10
    assert error(kv, DOUBLE.full) < 1e-10 and kv.exact == TOKENS


def test_missing_tokens_between_and_before_spans_are_computed_in_all_layers() -> None:
    parts = (Reused(SYSTEM + 5, SYSTEM + 30), Reused(SYSTEM + B + 1, SYSTEM + B + A - 3))
    kv = DOUBLE.reused(exact=False)
    got = run(DOUBLE.model, DOUBLE.ids, kv, 0, parts, flat(0.1))
    held = np.concatenate([np.arange(part.start, part.stop) for part in parts])
    assert got.positions.tolist() == np.setdiff1d(np.arange(TOKENS), held).tolist()
    assert got.hidden.shape == (got.report.computed, 64) == (TOKENS - len(held), 64)
    assert error(kv, DOUBLE.full, slice(0, SYSTEM + 5)) < 1e-10  # before anything approximate
    assert kv.exact == SYSTEM + 5 and np.isfinite(error(kv, DOUBLE.full))


def test_with_nothing_reused_it_is_an_ordinary_prefill_and_says_so() -> None:
    kv = DOUBLE.reused()
    got = run(DOUBLE.model, DOUBLE.ids, kv, SYSTEM, [], Blend())
    want = DOUBLE.model.run(DOUBLE.ids[SYSTEM:], DOUBLE.reused(), SYSTEM)
    np.testing.assert_array_equal(got.logits, want)
    assert "no token is reused" in got.report.note and got.report.flops_reused == 0
    assert kv.exact == TOKENS


def test_what_was_approximate_before_stays_so() -> None:
    """Decoding goes on behind a blend: the caller's past is not exact, whatever it is called."""
    kv = DOUBLE.reused(room=TOKENS + 2)
    blended(DOUBLE, flat(0.1), kv)
    more = np.append(DOUBLE.ids, 5)
    run(DOUBLE.model, more, kv, TOKENS, [], Blend())
    assert kv.exact == SYSTEM


def test_two_layers_are_exact_once_layer_0_is_computed() -> None:
    asked = case(SHAPES["two layers"])
    got, kv = blended(asked, flat(0.1))
    assert np.abs(got.hidden - asked.hidden[-Q:]).max() < 1e-10
    assert error(kv, asked.full) < 1e-10 and kv.exact == TOKENS
    assert got.report.by_layer == (REUSED, 0) and got.report.recomputed == REUSED
    assert got.report.policy == "" and "a model of two layers" in got.report.note
    assert "two layers" not in blended(asked, flat(0.1, "boundary"))[0].report.note


def test_a_model_of_one_layer_has_nothing_to_repair_and_says_so() -> None:
    one = ReferenceModel(ReferenceConfig(layers=1))
    kv = KVBuffers.allocate(one.spec, 9)
    with pytest.raises(SpecError, match=r"a model of one layer has nothing to repair: .* exact once moved"):
        run(one, [1] * 9, kv, 0, [Reused(2, 5)], Blend())


def test_a_later_check_layer_looks_deeper() -> None:
    deep = blended(DOUBLE, flat(0.1, check_layer=2))[0].report
    assert deep.by_layer == (96, 96, 10, 10, 0)


def test_spans_that_do_not_fit_are_refused_with_their_place() -> None:
    for spans, message in (
        ([Reused(5, 20)], r"reused tokens 5\.\.20 do not fit: they must begin at 12"),
        ([Reused(20, 20)], r"20\.\.20 do not fit"),
        ([Reused(30, 20)], r"30\.\.20 do not fit"),
        ([Reused(12, 40), Reused(39, 50)], r"39\.\.50 do not fit: they must begin at 40"),
        ([Reused(60, 70), Reused(20, 30)], r"20\.\.30 do not fit: they must begin at 70"),
        ([Reused(20, TOKENS)], rf"end by {TOKENS - 1} \(the last is computed\)"),
        ([Reused(-1, 20)], "Reused.start must be an integer >= 0"),
        ([(12, 20)], r"reused spans must be Reused, got tuple"),
    ):
        with pytest.raises(SpecError, match=message):
            run(DOUBLE.model, DOUBLE.ids, DOUBLE.reused(), SYSTEM, spans, Blend())  # type: ignore[arg-type]


def test_prompts_and_buffers_that_do_not_fit_are_refused() -> None:
    model, ids, kv = DOUBLE.model, DOUBLE.ids, DOUBLE.reused()
    for arguments, message in (
        ((model, ids[:0], kv, 0), "the prompt is empty"),
        ((model, ids, kv, TOKENS), "leave none of the prompt's 117 to compute"),
        ((model, ids, kv, -1), "exact tokens must be an integer >= 0"),
        ((model, ids, kv.window(0, 30), 12), "room for 30 tokens cannot take a prompt of 117"),
        ((ReferenceModel(seed=9), ids, kv, 12), "belong to another model"),
        ((object(), ids, kv, 12), "object does not compute layer by layer"),
    ):
        with pytest.raises(SpecError, match=message):
            run(*arguments, [], Blend())  # type: ignore[arg-type]
    for layer in (4, 5):  # from layer 4 on nothing is left to choose
        with pytest.raises(SpecError, match=rf"check_layer {layer} leaves nothing to choose .* in 1\.\.3"):
            blended(DOUBLE, Blend(check_layer=layer))
    assert blended(DOUBLE, Blend(0.1, check_layer=3))[0].report.by_layer == (96, 96, 96, 10, 0)
    with pytest.raises(SpecError, match="blend settings must be Blend, got float"):
        run(model, ids, kv, 12, [], 0.15)  # type: ignore[arg-type]


def test_what_is_no_token_of_the_model_is_refused_before_anything_is_computed() -> None:
    kv = DOUBLE.reused()
    ids = DOUBLE.ids.tolist()
    for bad, message in (
        ([*ids[:-1], 512], r"token 116 is 512; this model's token ids are in 0\.\.511"),
        ([*ids[:20], 2**32 - 1, *ids[21:]], r"token 20 is 4294967295"),
        ([*ids[:20], -1, *ids[21:]], "token 20 is -1"),
        ([*ids[:20], 1.5, *ids[21:]], "token 20 is"),
        ([*ids[:20], True, *ids[21:]], "token 20 is"),
        ([*ids[:20], "1", *ids[21:]], "token 20 is"),
        (DOUBLE.ids.astype(float), "token 0 is of type float64"),
        (DOUBLE.ids.astype(bool), "token 0 is of type bool"),
        (DOUBLE.ids[None], r"one flat sequence, got shape \(1, 117\)"),
        (DOUBLE.ids[:, None], r"one flat sequence, got shape \(117, 1\)"),
        ("text", "got str; tokenize"),
        (5, "must be a sequence of integers, got int"),
        (np.full(TOKENS, 2**63 + 1, np.uint64), "token 0 is 9223372036854775809"),
    ):
        with pytest.raises(TokenError, match=message):
            run(DOUBLE.model, bad, kv, SYSTEM, SPANS, Blend())  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="the prompt is empty"):
        run(DOUBLE.model, None, kv, 0, [], Blend())  # type: ignore[arg-type]
    assert same_bits(kv, DOUBLE.reused(), ALL)


def test_settings_that_mean_nothing_are_refused() -> None:
    for bad, message in (
        ({"ratio": 1.5}, r"Blend\.ratio must be in 0\.\.1, got 1\.5"),
        ({"ratio": float("nan")}, r"Blend\.ratio must be in 0\.\.1"),
        ({"ratio": "15%"}, r"Blend\.ratio must be int or float"),
        ({"ratio": True}, r"Blend\.ratio must be int or float"),
        ({"narrow": -0.1}, r"Blend\.narrow must be in 0\.\.1"),
        ({"check_layer": 0}, r"Blend\.check_layer must be an integer >= 1"),
        ({"lead": -1}, r"Blend\.lead must be an integer >= 0"),
        ({"policy": "best"}, r"policy 'best' is unknown; use auto, k, v, kv, attention, boundary, random"),
        ({"policy": None}, r"Blend\.policy must be a policy, got NoneType"),
        ({"selector": "kv"}, r"Blend\.selector must be a policy, got str"),
        ({"policy": 3}, r"Blend\.policy must be a policy, got int"),
        ({"policy": Random}, r"Blend\.policy must be a policy, got type"),
    ):
        with pytest.raises(SpecError, match=message):
            Blend(**bad)


def test_auto_is_the_selector_where_there_is_one() -> None:
    assert blended(DOUBLE, Blend(0.1))[0].report.policy == "kv"
    given = Blend(0.1, selector=POLICIES["boundary"])
    assert blended(DOUBLE, given)[0].report.policy == "boundary"


def test_a_report_is_told_in_a_line_and_as_json() -> None:
    report = Report(
        exact=10,
        reused=80,
        ratio=0.15,
        recomputed=16,
        computed=10,
        by_layer=(80, 16, 8, 0),
        chosen=np.arange(16),
        flops=40,
        flops_full=100,
        flops_reused=20,
        policy="kv",
        note="",
    )
    assert str(report) == (
        "100 tokens: 10 exact, 80 reused (15% of them recomputed by 'kv'), 10 computed; "
        "60% of the FLOPs saved"
    )
    assert str(replace(report, policy="", note="why")).endswith("saved; why")
    told = json.loads(json.dumps(report.as_dict()))
    assert told["flops_saved"] == 0.6 and told["by_layer"] == [80, 16, 8, 0] and "chosen" not in told


def test_settings_that_contradict_each_other_or_are_no_policy_are_refused() -> None:
    with pytest.raises(SpecError, match="leave out one of the two"):
        Blend(policy="kv", selector=POLICIES["v"])
    with pytest.raises(SpecError, match=r"Blend.policy must be a policy, got"):
        Blend(policy=type(POLICIES["kv"]))  # type: ignore[arg-type]
