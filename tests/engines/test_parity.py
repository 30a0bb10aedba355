"""The gate before modular reuse: measured on the model, and a wrong RoPE setting is found out (K02)."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from rich.console import Console

from hypercache.cli import doctor
from hypercache.cli.main import main
from hypercache.engines import parity
from hypercache.engines.reference import ReferenceConfig, ReferenceModel, Rows, rope_angles
from hypercache.errors import SpecError
from hypercache.model import KVDtype, LayerGroup, RopeSpec

RNG = np.random.default_rng(3)
DOCUMENTS = [RNG.integers(0, 512, 40).tolist() for _ in range(4)]
QUESTION = RNG.integers(0, 512, 8).tolist()


class Misread(ReferenceModel):
    """A model that rotates as its weights want it, under a spec that says another RoPE."""

    def __init__(self, rope: RopeSpec) -> None:
        super().__init__()
        group = self.spec.groups[0]
        self.true = group.rope
        self.spec = dataclasses.replace(self.spec, groups=(LayerGroup(group.layers, group.layout, rope),))

    def embed(self, ids: np.ndarray, positions: np.ndarray) -> Rows:
        return super().embed(ids, positions)._replace(angles=rope_angles(self.true, positions, "float32"))


@pytest.mark.parametrize("dtype", [KVDtype.FP32, KVDtype.FP16, KVDtype.BF16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_model_that_is_what_its_spec_says_passes(dtype: KVDtype, interleaved: bool) -> None:
    config = ReferenceConfig(rotary_dim=8, interleaved=interleaved, kv_dtype=dtype)
    found = parity.measure(ReferenceModel(config), DOCUMENTS, QUESTION)
    assert found.passed and found.refusal == ""
    assert set(found.order) == {"naive", "rotated", "blend"}
    assert found.order["rotated"].kl < found.order["naive"].kl
    assert found.order["blend"].flops_saved < found.order["rotated"].flops_saved


@pytest.mark.parametrize(
    "rope",
    [
        RopeSpec("default", 500.0, 16),
        RopeSpec("default", 10000.0, 8),
        RopeSpec("default", 10000.0, 16, interleaved=True),
        RopeSpec("linear", 10000.0, 16, scaling=(("factor", 4.0),)),
    ],
    ids=["theta", "rotary_dim", "pairing", "scaling"],
)
def test_k02_a_wrong_rope_setting_is_found_out(rope: RopeSpec) -> None:
    found = parity.measure(Misread(rope), DOCUMENTS, QUESTION)
    assert not found.passed and found.order == {}
    assert found.prefix <= found.prefix_tolerance  # exact hits work all the same
    assert found.shift is not None and found.shift > 0.05
    assert "not what the model computes" in found.refusal


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "mystery", "none"])
def test_a_kind_that_cannot_be_moved_is_refused_by_name(kind: str) -> None:
    found = parity.measure(Misread(RopeSpec(kind, 10000.0, 16)), DOCUMENTS, QUESTION)
    assert found.shift is None and found.order == {} and found.passed
    assert (kind if kind != "none" else "no layer has a rotary embedding") in found.refusal


def test_moving_is_measured_in_the_memory_of_one_layer() -> None:
    engine = ReferenceModel(ReferenceConfig(layers=30))
    one = parity._one_layer(engine.spec, 100)
    assert len({id(one.layer(layer)[0]) for layer in range(30)}) == 1
    assert parity.shift_error(engine, DOCUMENTS[0], 100) < 1e-5


def test_too_little_to_measure_with_is_refused() -> None:
    engine = ReferenceModel()
    for documents, question in ((DOCUMENTS[:2], QUESTION), ([*DOCUMENTS, []], QUESTION), (DOCUMENTS, [])):
        with pytest.raises(SpecError, match="three documents"):
            parity.measure(engine, documents, question)


def test_doctor_prints_what_it_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", "reference", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and found["modular"] and found["refusal"] == ""
    assert found["shift"] < 1e-5 and found["order"]["rotated"]["kl"] < found["order"]["naive"]["kl"]
    order = {name: parity.Order(**row) for name, row in found["order"].items()}
    known = {key: found[key] for key in ("prefix", "prefix_tolerance", "shift", "tolerance", "refusal")}
    doctor.show("a model", parity.Parity(**known, order=order), Console(width=200))
    text = capsys.readouterr().out
    assert "shifted block   ok" in text and "modular reuse   possible" in text
    doctor.show("a model", parity.Parity(**{**known, "shift": 0.5, "refusal": "why"}, order={}), Console())
    text = capsys.readouterr().out
    assert "shifted block   FAILED" in text and "modular reuse   refused: why" in text


def test_doctor_names_what_is_no_model(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    assert main(["doctor", "--model", str(tmp_path)]) == 2
    assert "has no config.json" in capsys.readouterr().err
