"""Part A of the benchmark: its figures of reuse out of context are complete, ordered and rightly counted."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from rich.console import Console

from hypercache.blend import POLICIES, Blend
from hypercache.cli import bench_blend, benchmark
from hypercache.cli.bench_blend import Case, _Trial
from hypercache.engines.reference import ReferenceConfig

SMALL = ReferenceConfig(layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=128, vocab=128)
CASE = Case("small", system=40, a=24, b=16, question=8)


@pytest.fixture(scope="module")
def results():
    return bench_blend.measure(6, SMALL, (CASE, replace(CASE, name="shorter", system=8)))


def test_each_repair_is_better_than_the_one_before(results):
    for rows in (results, *results["blend_others"]):
        naive, rotated, blend = (rows[way] for way in ("naive", "rotated", "blend"))
        assert naive["cosine"] < rotated["cosine"] < blend["cosine"] < 1
        assert naive["rel_l2"] > rotated["rel_l2"] > blend["rel_l2"] > 0
    assert results["blend_others"][0]["rotated"]["rel_l2"] > results["rotated"]["rel_l2"]


def test_what_is_reported(results):
    assert set(results) == {
        *("naive", "rotated", "blend", "rope"),
        *("blend_conditions", "blend_policies", "blend_others"),
    }
    assert set(results["blend_policies"]) == set(POLICIES)
    assert results["blend_conditions"]["seeds"] == list(range(6))
    assert results["blend_conditions"]["prompt"]["system"] == CASE.system
    assert json.loads(json.dumps(results)) == results
    for row in (results["naive"], results["rotated"], *results["blend_policies"].values()):
        for name in ("cosine", "rel_l2", "flops_saved", "flops_saved_reused"):
            spread = row["spread"][name]
            assert spread["min"] <= spread["median"] == row[name] <= spread["max"]
        assert row["spread"]["cosine"]["sd"] > 0
    assert 0 < results["rope"]["max_abs_error"] < 5e-7
    assert results["rope"]["layer0_max_abs_error"] < 1e-5


def test_what_is_taken_as_it_is_costs_nothing_and_looking_is_counted(results):
    assert results["naive"]["flops_saved"] == results["rotated"]["flops_saved"] == 1
    for name, row in results["blend_policies"].items():
        if POLICIES[name].probes:  # layer 0 of A and B, less than a quarter of the work, comes on top
            assert row["flops_saved_reused"] < results["blend"]["flops_saved_reused"] - 0.2


def test_the_saved_share_is_that_of_the_layers_and_tokens_that_ran():
    """All of A and B recomputed: everything but the last layer's attention and MLP is spent."""
    trial = _Trial(CASE, SMALL, 0)
    row = trial.row(True, Blend(1.0, bench_blend.POLICY))
    positions = np.arange(CASE.system, CASE.prefix)
    keys = positions.sum() + len(positions)
    project = len(positions) * 2 * 64 * (4 + 2 * 2) * 16
    attend = 4 * 4 * 16 * keys + len(positions) * (2 * 64 * 64 + 6 * 64 * 128)
    assert row["flops_saved_reused"] == pytest.approx(attend / (4 * (project + attend)))
    assert row["cosine"] == pytest.approx(1, abs=1e-9)
    assert row["rel_l2"] < 1e-5


def test_stitched_keys_are_those_of_the_other_order_only_once_rotated():
    trial = _Trial(CASE, SMALL, 1)
    assert trial.rotation_error() < 1e-5
    naive, rotated = trial.stitched(False), trial.stitched(True)
    for i in range(SMALL.layers):
        (k, v), (moved, same) = (kv.window(0, CASE.prefix).layer(i) for kv in (naive, rotated))
        assert np.array_equal(v, same)
        assert np.array_equal(k[:, : CASE.system], moved[:, : CASE.system])
        assert np.abs(k - moved)[:, CASE.system :].max() > 0.1


def test_compare_by_hand():
    truth = np.array([[3.0, 4.0], [1.0, 0.0]])
    found = bench_blend.compare(np.array([[4.0, 3.0], [1.0, 0.0]]), truth)
    assert found == {"cosine": pytest.approx((24 / 25 + 1) / 2), "rel_l2": pytest.approx((2 / 26) ** 0.5)}


def test_show_has_a_line_for_each_way(results):
    console = Console(width=110, record=True)
    bench_blend.show(results, console)
    text = console.export_text()
    for name in ("naive", "rotated", *(f"15% {policy}" for policy in POLICIES), "Sys 8, embeddings 0.02"):
        assert name in text
    assert f"{results['blend']['cosine']:.4f}" in text


def test_json_has_the_rows_at_its_top(monkeypatch, capsys):
    small = partial(bench_blend.measure, 2, SMALL, (CASE,))
    monkeypatch.setattr(bench_blend, "measure", small)
    parser = ArgumentParser()
    benchmark.add_arguments(parser)
    assert benchmark.run(parser.parse_args(["--json", "--part", "blend"])) == 0
    assert json.loads(capsys.readouterr().out) == small()
