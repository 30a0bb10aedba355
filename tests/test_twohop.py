"""The two-hop task: its prompts mean what they say, its model can be trained, and reuse is scored rightly."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOOLS = Path(__file__).parents[1] / "tools"
sys.path.insert(0, str(TOOLS))

import twohop_eval  # noqa: E402
import twohop_task as task  # noqa: E402
import twohop_train  # noqa: E402

from hypercache.blend import POLICIES, Blend  # noqa: E402
from hypercache.engines.layered import LayeredTransformer  # noqa: E402

TRAINED = Path(__file__).parents[2] / "shared" / "models" / "tiny_twohop"


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """More threads than idle cores wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def read(ids: list[int], shape: task.Shape) -> tuple[dict[int, int], dict[int, str], dict[int, int]]:
    """What a reader of the documents knows: key -> value, key -> kind of its last definition, and position of
    each reference -> the value it has where it stands."""
    known: dict[int, int] = {}
    kinds: dict[int, str] = {}
    seen: dict[int, int] = {}
    at = 1
    for _ in range(shape.documents):
        assert ids[at] == task.DOCUMENT
        before = dict(known)
        for place in range(at + 1, at + shape.document_tokens, 3):
            key, x, end = ids[place : place + 3]
            assert end == task.END
            kinds[key] = "override" if key in before else "direct"
            if x < task.FIRST_VALUE:
                seen[place + 1] = before[x]
                kinds[key] = "twohop"
            known[key] = before.get(x, x)
        at += shape.document_tokens
    return known, kinds, seen


@pytest.mark.parametrize("shape", [task.Shape(), task.Shape(2, 2, 3), task.Shape(2, 4, 5)])
def test_answers_are_what_the_documents_say(shape):
    random = Random(3)
    for _ in range(200):
        prompt = task.prompt(random, shape)
        assert len(prompt.ids) == shape.context_tokens + 3 * shape.questions
        known, kinds, seen = read(prompt.ids, shape)
        asked = dict(prompt.questions)
        assert {position: prompt.labels[position] for position in seen} == seen
        assert set(prompt.labels) == seen.keys() | asked.keys()
        assert len({prompt.ids[position] for position in asked}) == shape.questions
        for position, kind in asked.items():
            key, answer = prompt.ids[position : position + 2]
            assert prompt.ids[position - 1] == task.ASK
            assert known[key] == answer == prompt.labels[position]
            assert kinds[key] == kind
        starts = [start for start, _ in prompt.documents]
        assert all(prompt.ids[start] == task.DOCUMENT for start in starts)
        assert prompt.documents[-1][1] == shape.context_tokens


def test_every_kind_is_asked_for_in_its_share():
    random = Random(4)
    kinds = Counter(kind for _ in range(2000) for _, kind in task.prompt(random).questions)
    shares = {kind: kinds[kind] / kinds.total() for kind in task.KINDS}
    assert shares == pytest.approx({"direct": 0.351, "twohop": 0.405, "override": 0.244}, abs=0.015)


def test_prompts_follow_from_the_seed():
    assert task.prompt(Random(5)) == task.prompt(Random(5)) != task.prompt(Random(6))


def test_copying_repeats_its_run():
    prompt = task.copying(Random(7), 24)
    assert prompt.ids[1:25] == prompt.ids[25:]
    assert len(set(prompt.ids)) == 25
    assert [prompt.labels[i] for i in sorted(prompt.labels)] == prompt.ids[26:]


def test_labels_stand_where_they_belong():
    prompts = [task.prompt(Random(seed)) for seed in range(3)]
    ids, labels = twohop_train.tensors(prompts)
    assert ids.shape == labels.shape == (3, 67)
    for row, prompt in zip(labels.tolist(), prompts, strict=True):
        assert {i: label for i, label in enumerate(row) if label != twohop_train.IGNORED} == prompt.labels


def test_prompts_to_calibrate_on_hold_no_answer():
    """One token stands for all of them, so that no more than the next one's distribution is compared."""
    prompt = task.prompt(Random(11))
    found = task.unlabelled(prompt)
    whole = [*found["prefix"], *(token for segment in found["segments"] for token in segment)]
    for question, (position, _) in zip(found["questions"], prompt.questions, strict=True):
        whole += [*question, prompt.labels[position]]
    assert whole == prompt.ids


@pytest.fixture(scope="module")
def trained(tmp_path_factory, one_thread):
    """A model after a few steps, and what its training returned and said."""
    out, said = tmp_path_factory.mktemp("twohop"), []
    transformers.utils.logging.disable_progress_bar()
    return out, twohop_train.train(out, 0.03, 0, said.append), said


def test_training_leaves_a_model(trained):
    out, reached, _ = trained
    model = transformers.LlamaForCausalLM.from_pretrained(out).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == 615_552
    random = Random(8)
    assert set(reached) == {"all", *task.KINDS}
    assert twohop_train.accuracy(model, [task.prompt(random) for _ in range(3)]).keys() == reached.keys()


def test_training_learns():
    """The first stage, on runs so short that it shows soon: repeating them beats guessing."""
    torch.manual_seed(0)
    random = Random(0)
    model = transformers.LlamaForCausalLM(twohop_train.config())
    learner = twohop_train.Learner(model)
    losses = [learner.step([task.copying(random, 4) for _ in range(64)], 2e-3)[0] for _ in range(60)]
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])


def test_recomputing_everything_answers_as_full_prefill(trained):
    engine = LayeredTransformer(transformers.LlamaForCausalLM.from_pretrained(trained[0]).eval())
    prompt = task.prompt(Random(9))
    rows = [twohop_eval.Row("full"), twohop_eval.Row("all", Blend(1.0)), twohop_eval.Row("none", Blend(0.0))]
    said = []
    for row in rows:
        found = twohop_eval.blended(engine, prompt, row, twohop_eval.stitch(engine, prompt, True))
        said.append(found.hidden[-18:])
    assert np.allclose(said[0], said[1], atol=1e-4)
    assert np.abs(said[0] - said[2]).max() > 1e-2


def test_stitched_documents_are_exact_in_layer_0_alone(trained):
    engine = LayeredTransformer(transformers.LlamaForCausalLM.from_pretrained(trained[0]).eval())
    prompt = task.prompt(Random(10))
    stitched = {rotated: twohop_eval.stitch(engine, prompt, rotated) for rotated in (True, False)}
    full = twohop_eval.KVBuffers.allocate(engine.spec, len(prompt.ids))
    twohop_eval.run(engine, prompt.ids, full, 0, [], Blend(0.0))
    context = prompt.documents[-1][1]

    def error(rotated: bool, layer: int) -> float:
        pairs = zip(stitched[rotated].layer(layer), full.layer(layer), strict=True)
        return max(float(np.abs(a - b)[:, :context].max()) for a, b in pairs)

    assert error(True, 0) < 1e-4
    assert error(False, 0) > 0.01
    assert error(True, 1) > 0.001
    first = prompt.documents[0][1]  # nothing stands between START and the first document in either case
    for a, b in zip(stitched[True].layer(3), full.layer(3), strict=True):
        assert np.allclose(a[:, :first], b[:, :first], atol=1e-4)


def test_eval_from_the_command_line(trained):
    command = [sys.executable, str(TOOLS / "twohop.py"), "eval", "--model", str(trained[0])]
    done = subprocess.run(
        [*command, "--prompts", "2", "--json"], capture_output=True, text=True, check=True, timeout=100
    )
    found = json.loads(done.stdout)
    assert found["prompts"] == 2
    ways = Counter(row["way"] for row in found["rows"])
    assert ways["full"] == ways["naive"] == ways["rotated"] == 1
    for name in POLICIES:
        assert ways[name] == len(twohop_eval.RATIOS) + 2
    assert all(0 <= row["all"] <= 1 and 0 <= row["flops_saved"] < 1 for row in found["rows"])


def test_prompts_from_the_command_line():
    command = [sys.executable, str(TOOLS / "twohop.py"), "prompts", "--prompts", "3", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    random = Random(5)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines == [task.unlabelled(task.prompt(random)) for _ in range(3)]


def test_what_is_no_model_is_said_in_one_line(tmp_path):
    command = [sys.executable, str(TOOLS / "twohop.py"), "eval", "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_table_names_every_way():
    from rich.console import Console

    row = {"way": "kv", "ratio": 0.15, "narrow": 0.5, "all": 0.5, "direct": 0.25}
    row |= {"recomputed": 8.0, "flops_saved": 0.4}
    console = Console(width=110, record=True)
    twohop_eval.show([row, row | {"way": "full", "ratio": None}], console)
    text = console.export_text()
    assert "kv 15%, narrow 0.5" in text and "full" in text and "25.0%" in text and "n/a" in text


@pytest.mark.skipif(not TRAINED.is_dir(), reason="no trained model: python tools/twohop.py train makes one")
def test_a_trained_model_answers_under_full_prefill_and_needs_the_right_tokens():
    engine = LayeredTransformer(transformers.LlamaForCausalLM.from_pretrained(TRAINED).eval())
    rows = {
        "full": twohop_eval.Row("full"),
        "rotated": twohop_eval.Row("rotated", Blend(0.0)),
        "kv": twohop_eval.Row("kv", Blend(0.3, "kv")),
        "random": twohop_eval.Row("random", Blend(0.3, "random")),
    }
    found = twohop_eval.evaluate(engine, 30, 2, list(rows.values()))
    said = {name: row["all"] for name, row in zip(rows, found, strict=True)}
    assert said["full"] > 0.97
    assert said["rotated"] < said["random"] < said["kv"]
