"""Directories that are no model, or not all of one: the reason in one line, never a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is an extra: pip install 'hypercache-llm[transformers]'")
transformers = pytest.importorskip("transformers", reason="transformers is an extra")

from hypercache.cli.main import main  # noqa: E402
from hypercache.engines.load import load  # noqa: E402
from hypercache.errors import SpecError  # noqa: E402

FIELDS = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 160,
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / "good"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**FIELDS)).save_pretrained(path)
    return path


def config(**more: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | more))

    return change


def halved(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def words(count: int) -> str:
    """A tokenizer of ``count`` words w0, w1 ..."""
    vocab = {f"w{index}": index for index in range(count)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}
    split = {"type": "Whitespace"}
    parts = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": split, "model": model}
    return json.dumps(dict.fromkeys(parts) | whole)


def tokenizer(text: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / "tokenizer.json").write_text(text)
        (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (halved, "cannot be loaded as a causal language model: SafetensorError: .*whole directory"),
        (config(hidden_size="x"), "cannot be loaded .*hidden_size"),
        (config(hidden_size=128), "cannot be loaded .*RuntimeError"),
        (config(num_attention_heads=0), "cannot be loaded .*ZeroDivisionError"),
        (config(model_type=["x"]), "cannot be loaded .*TypeError: .*list"),
        (lambda path: (path / "config.json").write_text("[]"), "cannot be loaded"),
        (lambda path: (path / "config.json").write_bytes(b"\xff\xfe\0"), "cannot be loaded"),
        (tokenizer("{}"), "the tokenizer in .* cannot be loaded: "),
    ],
    ids=["weights", "type", "size", "no heads", "model_type", "list", "bytes", "tokenizer"],
)
def test_what_is_no_whole_model_is_refused_with_the_cause(
    change: Callable[[Path], Any],
    message: str,
    good: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = shutil.copytree(good, tmp_path / "changed")
    change(path)
    with pytest.raises(SpecError, match=message) as found:
        load(str(path))
    assert "\n" not in str(found.value)
    assert main(["doctor", "--model", str(path)]) == 2
    err = capsys.readouterr().err
    assert "hypercache doctor: " in err and "Traceback" not in err


def test_a_tokenizer_of_another_model_is_refused_where_it_shows(good: Path, tmp_path: Path) -> None:
    path = shutil.copytree(good, tmp_path / "changed")
    tokenizer(words(200))(path)
    encode = load(str(path)).encode
    assert encode is not None and encode("w3 w159") == [3, 159]
    with pytest.raises(SpecError, match=r"gives token 160, the model has only 0\.\.159"):
        encode("w3 w160")


def test_a_model_of_one_layer_passes_the_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = transformers.LlamaConfig(**FIELDS | {"num_hidden_layers": 1})
    transformers.LlamaForCausalLM(one).save_pretrained(tmp_path)
    assert main(["doctor", "--model", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and not found["modular"] and "one layer has nothing to repair" in found["refusal"]


def test_a_model_that_is_run_as_a_whole_is_measured_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """doctor tells that exact reuse works, and why nothing is reused out of context."""
    config = transformers.GPTNeoXConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=2048,
    )
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    loaded = load(str(tmp_path))
    assert "cannot be run layer by layer" in loaded.unlayered
    assert main(["doctor", "--model", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and not found["modular"] and found["refusal"] == loaded.unlayered
    assert found["prefix"] < 1e-5 and found["shift"] is None
    assert main(["calibrate", "--model", str(tmp_path)]) == 2
    assert "cannot be calibrated: GPTNeoX" in capsys.readouterr().err
