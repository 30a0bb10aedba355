"""Calibration of a selector: what a token's repair is worth, prompts out of text and files, killed runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is an extra: pip install 'hypercache-llm[transformers]'")
transformers = pytest.importorskip("transformers", reason="transformers is an extra")

from hypercache import blend  # noqa: E402
from hypercache.blend import Blend  # noqa: E402
from hypercache.cli.main import main  # noqa: E402
from hypercache.engines import calibration, prompts, selectors  # noqa: E402
from hypercache.engines.calibration import calibrate, observe, scene  # noqa: E402
from hypercache.engines.compare import kl  # noqa: E402
from hypercache.engines.influence import influence  # noqa: E402
from hypercache.engines.layered import LayeredTransformer  # noqa: E402
from hypercache.engines.progress import Progress  # noqa: E402
from hypercache.engines.prompts import Prompt, Question  # noqa: E402
from hypercache.engines.reference import ReferenceConfig, ReferenceModel  # noqa: E402
from hypercache.errors import SpecError, TooLarge  # noqa: E402
from hypercache.kv import KVBuffers  # noqa: E402

VOCAB = 61
TWOHOP = Path(__file__).parents[2] / "shared" / "models" / "tiny_twohop"


def llama(layers: int = 4) -> Any:
    """A random model whose attention is far from uniform."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.25,
        max_position_embeddings=512,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def engine() -> LayeredTransformer:
    return LayeredTransformer(llama())


def prompt(seed: int = 0, sizes: tuple[int, ...] = (9, 12, 7), questions: int = 2) -> Prompt:
    rng = np.random.default_rng(seed)
    prefix, *rest = (tuple(rng.integers(0, VOCAB, n).tolist()) for n in (4, *sizes))
    asked = [tuple(rng.integers(0, VOCAB, 5).tolist()) for _ in range(questions)]
    return Prompt(prefix, tuple(rest), tuple(Question(ids, (1, 2, 3)) for ids in asked))


def several(count: int, held_out: int = 2) -> list[tuple[bool, Prompt]]:
    return [(i >= count, prompt(i, (16, 20, 12))) for i in range(count + held_out)]


def between(full: KVBuffers, stale: KVBuffers, at: float, first_layer: int) -> KVBuffers:
    out = KVBuffers.allocate(full.spec, full.tokens)
    for layer in range(full.spec.num_layers):
        share = at if layer >= first_layer else 1.0
        for new, to, of in zip(out.layer(layer), full.layer(layer), stale.layer(layer), strict=True):
            new[:] = of + share * (to - of)
    return out


def loss(engine: Any, full: KVBuffers, other: KVBuffers, ids: list[int], start: int, first: int) -> float:
    """Sum of KL(full || other) behind ``ids[first:]``, without autograd."""
    logits = []
    for kv in (full, other):
        mine = KVBuffers.allocate(kv.spec, len(ids))
        for layer in range(kv.spec.num_layers):
            for new, old in zip(mine.layer(layer), kv.layer(layer), strict=True):
                new[:, :start] = old[:, :start]
        done = blend.run(engine, ids, mine, start, (), Blend(0.0))
        logits.append(engine.logits(done.hidden[first - start :]))
    return float(kl(*logits).sum())


# --- influence ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_layer", [0, 2])
def test_influence_is_the_derivative_of_the_loss(engine: LayeredTransformer, first_layer: int) -> None:
    made = scene(engine, prompt(), isolated=True)
    start, ids = made.start, [*made.ids, 5, 9, 1, 30]
    first = start + 1
    found = influence(engine.model, made.full, made.stale, ids, start, first, first_layer)
    step = 0.02
    for token in np.argsort(-np.abs(found))[:4]:
        ends = []
        for sign in (-1, 1):
            point = between(made.full, made.stale, 0.5, first_layer)
            for layer in range(first_layer, engine.shape.layers):
                parts = zip(point.layer(layer), made.full.layer(layer), made.stale.layer(layer), strict=True)
                for new, to, of in parts:
                    new[:, token] += sign * step * (to[:, token] - of[:, token])
            ends.append(loss(engine, made.full, point, ids, start, first))
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(found[token], rel=0.05, abs=2e-3)


def test_influences_along_the_way_add_up_to_the_loss(engine: LayeredTransformer) -> None:
    made = scene(engine, prompt(3), isolated=False)
    ids = [*made.ids, 8, 2, 44]
    ways = np.linspace(0.05, 0.95, 10)
    total = np.mean(
        [influence(engine.model, made.full, made.stale, ids, made.start, at=at) for at in ways], 0
    )
    whole = loss(engine, made.full, made.stale, ids, made.start, made.start)
    assert whole > 0.05, "nothing is stale here, so nothing would be shown"
    assert total.sum() == pytest.approx(whole, rel=0.05)
    assert np.all(total[: made.prefix] == 0), "what is exact needs no repair"


def test_influence_asks_for_what_it_needs(engine: LayeredTransformer) -> None:
    made = scene(engine, prompt(), isolated=True)
    with pytest.raises(SpecError, match="behind the prompt"):
        influence(engine.model, made.full, made.stale, made.ids, made.start)
    with pytest.raises(SpecError, match="tokens or more"):
        influence(engine.model, made.full.window(0, 5), made.stale, [*made.ids, 1], made.start)
    assert all(parameter.requires_grad for parameter in engine.model.parameters()), (
        "the model is left as it was"
    )


def test_stale_keys_and_values_are_right_where_context_does_not_reach(engine: LayeredTransformer) -> None:
    """Layer 0 is exact after rotation; the first segment is exact in all layers when stored alone."""
    for isolated in (True, False):
        made = scene(engine, prompt(1), isolated)
        for new, want in zip(made.stale.layer(0), made.full.layer(0), strict=True):
            np.testing.assert_allclose(new, want, atol=2e-5)
        first = made.spans[0]
        apart = [
            np.abs(new[:, first.start : first.stop] - want[:, first.start : first.stop]).max()
            for new, want in zip(made.stale.layer(3), made.full.layer(3), strict=True)
        ]
        assert (max(apart) < 1e-4) == isolated


def test_features_are_those_the_blend_shows(engine: LayeredTransformer) -> None:
    made = scene(engine, prompt(2), isolated=True)
    rows, values = observe(engine, made)
    reused = sum(span.stop - span.start for span in made.spans)
    assert rows.shape == (reused, 4 * 2 + 2 * 2 + 3)
    assert values.shape == (reused,)
    assert np.all(rows[: made.spans[0].stop - made.spans[0].start, -1] == 0)  # segment 0 of them


def test_a_question_without_answer_is_answered_by_the_model(engine: LayeredTransformer) -> None:
    asked = Prompt((1, 2), ((3, 4, 5), (6, 7, 8)), (Question((9,)),))
    answer = scene(engine, asked, isolated=True).asked[0].answer
    kv = KVBuffers.allocate(engine.spec, 9)
    assert len(answer) == calibration.CONTINUATION
    assert answer[0] == int(np.argmax(engine.run([*range(1, 10)], kv, 0)))


# --- runs --------------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


def test_a_run_that_ended_goes_on_and_gives_the_same(engine: LayeredTransformer, tmp_path: Path) -> None:
    whole = calibrate(engine, several(4), source="s", ratio=0.15, progress=tmp_path / "whole")
    path = tmp_path / "cut"

    def until(count: int) -> Iterator[tuple[bool, Prompt]]:
        yield from several(4)[:count]
        raise Interrupted

    with pytest.raises(Interrupted):
        calibrate(engine, until(3), source="s", ratio=0.15, progress=path)
    kept = path.read_bytes()
    assert kept.count(b"\n") == 1 + 3
    with path.open("ab") as file:
        file.write(b'{"key": "half a li')  # the machine went down while it wrote
    seen: list[tuple[str, int]] = []
    again = calibrate(
        engine,
        several(4),
        source="s",
        ratio=0.15,
        progress=path,
        report=lambda what, done, of: seen.append((what, done)),
    )
    assert again.selector.encode() == whole.selector.encode()
    assert again.kl == whole.kl
    assert not path.exists(), "nothing is left of a run that has ended"
    assert seen[0] == ("going on, 3 prompts were done", 0)
    assert seen[1:5] == [("learning", done) for done in (1, 2, 3, 4)]


def test_progress_of_other_inputs_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.array([0.1, np.pi])]
    with Progress(path, "one") as first:
        first.put("a", arrays)
    with Progress(path, "one") as same:
        for got, want in zip(same.get("a") or [], arrays, strict=True):
            np.testing.assert_array_equal(got, want)
            assert got.dtype == want.dtype
    spoilt = path.read_bytes().replace(b'"data": "AAAA', b'"data": "BAAA')
    path.write_bytes(spoilt)
    with Progress(path, "one") as damaged:
        assert damaged.get("a") is None, "a line that is not whole is not believed"
        damaged.put("a", arrays)
    with Progress(path, "two") as other:
        assert len(other) == 0


def test_what_cannot_be_calibrated_is_refused_with_the_reason(tmp_path: Path) -> None:
    def refused(engine: Any) -> str:
        with pytest.raises(SpecError) as caught:
            calibrate(engine, several(1), source="s", ratio=0.15, progress=tmp_path / "p")
        return str(caught.value)

    assert "none is left to recompute" in refused(LayeredTransformer(llama(layers=2)))
    assert "no gradients" in refused(ReferenceModel(ReferenceConfig(layers=4)))


# --- prompts -----------------------------------------------------------------------------------------


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_text_is_cut_into_passages_that_the_held_out_prompts_do_not_share() -> None:
    text = "".join(chr(300 + i) for i in range(4000))
    made = list(prompts.from_text(text, letters, 12, 4, seed=1))
    assert made == list(prompts.from_text(text, letters, 12, 4, seed=1))
    assert made != list(prompts.from_text(text, letters, 12, 4, seed=2))
    learned, held = ({segment for one in part for segment in one.segments} for part in (made[:12], made[12:]))
    assert not learned & held
    for asked in made[0].questions:
        assert any(segment[-8:] == asked.ids for segment in made[0].segments)
        assert asked.answer[0] == asked.ids[-1] + 1, "what the text goes on with"
    with pytest.raises(SpecError, match="or more are needed"):
        next(prompts.from_text(text[:900], letters, 12, 4, seed=1))


def lines(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_lines_of_texts_and_of_token_ids(tmp_path: Path) -> None:
    ids = {"segments": [[1, 2], [3]], "question": [4, 5]}
    more = {"prefix": [9], "segments": [[1], [2]], "questions": [[3], [4]], "answer": [5]}
    path = lines(tmp_path, ids, "", more, {"segments": ["ab", "c"], "question": "d"}, {"text": "x" * 2000})
    first, second, third, fourth = prompts.from_lines(path, letters, 1000, seed=0)
    assert first == Prompt((), ((1, 2), (3,)), (Question((4, 5)),))
    assert second == Prompt((9,), ((1,), (2,)), (Question((3,), (5,)), Question((4,), (5,))))
    assert third == Prompt((), ((97, 98), (99,)), (Question((100,)),))
    assert len(fourth.segments) == prompts.PASSAGES


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("{", "line 2"),
        ("[1]", "line 2"),
        ("[" * 100_000, "line 2"),
        ({"segments": [[1], [2]]}, "a question"),
        ({"segments": [[1]], "question": [1]}, "two segments"),
        ({"segments": [[1], []], "question": [1]}, "none of them empty"),
        ({"segments": [[1], [2]], "question": []}, "question is empty"),
        ({"segments": [[1], [2]], "question": [1], "extra": 1}, "extra"),
        ({"segments": [[1], [-2]], "question": [1]}, "vocabulary"),
        ({"segments": [[1], [1000]], "question": [1]}, "vocabulary"),
        ({"segments": [[1], [True]], "question": [1]}, "list of token ids"),
        ({"segments": [[1], "text"], "question": [1]}, "no tokenizer"),
        ({"text": "text"}, "no tokenizer"),
    ],
)
def test_lines_that_are_no_prompts_are_refused_by_number(tmp_path: Path, row: Any, why: str) -> None:
    good = {"segments": [[1], [2]], "question": [1]}
    with pytest.raises(SpecError, match=r"prompts\.jsonl, line 2") as caught:
        list(prompts.from_lines(lines(tmp_path, good, row), None, 1000, seed=0))
    assert why in str(caught.value)


def test_a_prompt_that_is_too_long_is_refused(tmp_path: Path) -> None:
    row = {"segments": [[1] * prompts.MAX_TOKENS, [2]], "question": [1]}
    with pytest.raises(TooLarge, match="line 1"):
        list(prompts.from_lines(lines(tmp_path, row), None, 1000, seed=0))


def test_a_text_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(SpecError, match="not UTF-8"):
        prompts.read_text(path)


# --- the command -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    llama().save_pretrained(path)
    return path


def ids_file(tmp_path: Path, count: int = 8) -> Path:
    made = [prompt(i, (16, 20, 12)) for i in range(count)]
    rows = [
        {
            "prefix": list(one.prefix),
            "segments": [list(segment) for segment in one.segments],
            "questions": [list(question.ids) for question in one.questions],
            "answer": [1, 2, 3],
        }
        for one in made
    ]
    return lines(tmp_path, *rows)


def command(model: Path, *more: str | Path) -> list[str]:
    return ["calibrate", "--model", str(model), "--json", *map(str, more)]


def test_the_command_keeps_a_selector_that_is_better(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYPERCACHE_HOME", str(tmp_path / "home"))
    code = main(command(saved, "--prompts", ids_file(tmp_path), "--count", "6"))
    found = json.loads(capsys.readouterr().out)
    assert (code == 0) == found["better"]
    assert found["prompts"] == 6
    assert found["rows"] == 6 * 48
    assert found["held_out"] >= 1
    assert found["better"] == (
        found["kl"]["selector"] <= min(found["kl"]["rotated"], found["kl"]["deviation"])
    )
    files = [path.name for path in (tmp_path / "home" / "selectors").iterdir()]
    assert files == ([f"{found['fingerprint']}.json"] if found["better"] else [])
    if found["better"]:
        assert selectors.load(Path(found["out"])).trained.prompts == 6


def test_a_killed_command_goes_on_where_it_was(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ids_file(tmp_path, 30)
    out, other = tmp_path / "cut.json", tmp_path / "whole.json"
    arguments = command(saved, "--prompts", rows, "--count", "24", "--out")
    script = [sys.executable, "-m", "hypercache.cli.main", *arguments, str(out)]
    process = subprocess.Popen(script, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    progress = tmp_path / "cut.json.progress"
    try:
        deadline = time.monotonic() + 90
        while not progress.exists() or progress.read_bytes().count(b"\n") < 3:
            assert process.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    kept = progress.read_bytes().count(b"\n") - 1
    assert 2 <= kept < 30
    assert main([*arguments, str(out)]) == main([*arguments, str(other)])
    first, second = (json.loads(part + "}") for part in capsys.readouterr().out.split("}\n")[:2])
    assert first["kl"] == pytest.approx(second["kl"], rel=1e-6)
    if first["better"]:
        assert out.read_bytes() == other.read_bytes()
    assert not progress.exists()


def test_a_text_needs_a_tokenizer(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(saved, "--out", tmp_path / "s.json")) == 2
    assert "has no tokenizer: give --prompts FILE.jsonl" in capsys.readouterr().err


def test_the_text_in_the_package_is_enough(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"the": 0, "of": 1, "<unk>": 2, ".": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    model = tmp_path / "model"
    model.mkdir()
    for file in saved.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(model)
    code = main(["calibrate", "--model", str(model), "--count", "2", "--out", str(tmp_path / "s.json")])
    assert code in (0, 1)
    said = capsys.readouterr().out
    assert "learned from" in said
    assert "KL to full prefill, 1 other prompts: rotated only" in said
    assert (tmp_path / "s.json").exists() == (code == 0)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--ratio", "0"), "--ratio"),
        (("--count", "0"), "--count"),
        (("--prompts", "/nowhere.jsonl", "--out", "/tmp/never.json"), "/nowhere.jsonl cannot be read"),
    ],
)
def test_wrong_usage_is_named(
    saved: Path, more: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(saved, *more)) == 2
    assert why in capsys.readouterr().err


@pytest.mark.skipif(not TWOHOP.exists(), reason="needs the trained two-hop model beside the checkout")
def test_on_a_trained_model_it_beats_layer_1_deviation(tmp_path: Path) -> None:
    """Two-hop prompts without labels: random facts, references between them, questions."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    engine = LayeredTransformer(transformers.AutoModelForCausalLM.from_pretrained(TWOHOP).eval())
    rng = np.random.default_rng(0)
    outcome = calibrate(
        engine, [(i >= 16, twohop(rng)) for i in range(20)], source="s", ratio=0.15, progress=tmp_path / "p"
    )
    assert outcome.kl["selector"] < 0.7 * outcome.kl["deviation"] < 0.7 * outcome.kl["rotated"]


def twohop(rng: np.random.Generator) -> Prompt:
    """Three documents of five facts ``key x ;``: x is a value, or in later documents a key defined before."""
    keys = rng.permutation(48)[:15] + 8
    values = rng.integers(56, 88, 15)
    refers = (rng.random(15) < 0.5) & (np.arange(15) >= 5)
    direct = [int(f) for f in np.flatnonzero(~refers)]
    documents = []
    for first in range(0, 15, 5):
        earlier = [f for f in direct if f < first]
        facts: list[int] = [1]
        for f in range(first, first + 5):
            facts += [int(keys[f]), int(keys[rng.choice(earlier)] if refers[f] else values[f]), 2]
        documents.append(tuple(facts))
    asked = rng.permutation(15)[:6]
    return Prompt((0,), tuple(documents), tuple(Question((3, int(keys[f])), (0,)) for f in asked))


def test_two_runs_on_one_file_do_not_mix(tmp_path: Path) -> None:
    """The second is refused while the first writes; lines of other inputs are none of ours."""
    path = tmp_path / "p"
    with Progress(path, "a") as first:
        first.put("k", [np.ones(2, np.float32)])
        with pytest.raises(SpecError, match="written by another run"):
            Progress(path, "b")
    line = path.read_bytes().splitlines(keepends=True)[1]
    with Progress(path, "b") as second:
        assert len(second) == 0
        second.put("other", [np.zeros(1)])
    with path.open("ab") as file:
        file.write(line)
    with Progress(path, "b") as again:
        assert len(again) == 1 and again.get("k") is None
    with Progress(tmp_path / "empty", "a"):
        pass
    assert not (tmp_path / "empty").exists()


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "\\ud800 word"}\n')
    with pytest.raises(SpecError, match=r"line 1: .*surrogates"):
        next(prompts.from_lines(path, lambda text: list(text.encode()), 256, 0))


def test_what_cannot_be_read_is_told_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--model", str(tmp_path / "none"), "--prompts", str(tmp_path / "nofile")]) == 2
    assert "nofile cannot be read" in capsys.readouterr().err
