"""Shares of prompts found in earlier ones: counted by the real parts, held against a naive count."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from hypercache.cli import bench_reuse
from hypercache.cli.bench_reuse import Found, log_sets, measure, read_logs, replay
from hypercache.cli.main import main
from hypercache.engines import smollm
from hypercache.errors import ConfigError, SpecError
from hypercache.keys import BLOCK_SIZES, causal_digests

AGENT_LOGS = Path(__file__).parents[2] / "shared/traces/agent"
TARGETS = {"miniswe": 0.960, "magagent": 0.909, "taubench": 0.818}


def naive(prompts: list[list[int]], size: int, least: int) -> tuple[int, int, int]:
    """Tokens found causally, on the fixed grid and at any offset, with nothing but lists of tokens."""
    stored: list[list[int]] = []
    causal = fixed = anywhere = 0
    for prompt in prompts:
        end = max(0, len(prompt) - 1)
        hit = 0
        while hit + size <= end and any(one[: hit + size] == prompt[: hit + size] for one in stored):
            hit += size
        grid = [one[at : at + size] for one in stored for at in range(0, len(one) - size + 1, size)]
        ahead = range(hit, end - size + 1, size)
        causal, fixed = causal + hit, fixed + hit + size * sum(prompt[at : at + size] in grid for at in ahead)
        anywhere, at = anywhere + hit, hit
        while at + size <= end:
            length = max((_run(one, prompt[at:end], size) for one in stored), default=0)
            found = length if length >= least else 0
            anywhere, at = anywhere + found, at + max(found, 1)
        stored.append(prompt[: len(prompt) // size * size])
    return causal, fixed, anywhere


def _run(source: list[int], wanted: list[int], size: int) -> int:
    """Tokens of the longest run of whole blocks of ``source`` that ``wanted`` begins with."""
    longest = 0
    for begin in range(0, len(source), size):
        length = 0
        while (
            length + size <= min(len(source) - begin, len(wanted))
            and source[begin + length : begin + length + size] == wanted[length : length + size]
        ):
            length += size
        longest = max(longest, length)
    return longest


def replayed(prompts: Iterable[list[int]], size: int, min_run: int) -> Found:
    return replay([np.asarray(prompt, "<u4") for prompt in prompts], size, min_run)


def shuffled(seed: int, more: list[int]) -> list[list[int]]:
    """Prompts of documents behind each other, with turns appended, insertions and whole prompts again."""
    rng = random.Random(seed)
    documents = [[rng.randrange(1000) for _ in range(rng.randrange(200))] for _ in range(5)] + [more]
    prompts: list[list[int]] = []
    for _ in range(14):
        if prompts and rng.random() < 0.4:
            prompt = list(rng.choice(prompts))
        else:
            prompt = [rng.randrange(1000) for _ in range(rng.randrange(20))]
        for document in rng.sample(documents, rng.randrange(4)):
            prompt += document + [rng.randrange(1000) for _ in range(rng.randrange(12))]
        prompts.append(prompt)
    return [*prompts, []]


@pytest.mark.parametrize("size", BLOCK_SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_replay_counts_what_a_naive_search_finds(seed: int, size: int) -> None:
    prompts = shuffled(seed, list(range(2000, 2150)))
    for min_run in (size, 64):
        found = replayed(prompts, size, min_run)
        assert (found.causal, found.fixed_grid, found.any_offset) == naive(prompts, size, min_run)
        assert found.tokens == sum(map(len, prompts))
        assert 0 < found.causal < found.any_offset < found.tokens
        assert (found.rejected, found.complete) == (0, True)


@pytest.mark.parametrize("seed", range(4))
def test_where_text_repeats_a_bounded_search_finds_no_more_than_there_is(seed: int) -> None:
    prompts = shuffled(seed, [7] * 150)
    found, (causal, fixed, anywhere) = replayed(prompts, 16, 64), naive(prompts, 16, 64)
    assert (found.causal, found.fixed_grid) == (causal, fixed)
    assert 0.95 * anywhere < found.any_offset <= anywhere


def test_shares() -> None:
    """K10, K12: a document of 640 tokens, stored alone, is found behind a system prompt of 37."""
    rng = np.random.default_rng(3)
    document, system, question = (rng.integers(1000, 30000, n).tolist() for n in (640, 37, 5))
    found = replayed([document, system + document + question], 16, 64)
    assert (found.causal, found.fixed_grid, found.any_offset, found.runs) == (0, 0, 640, 1)
    row = found.row()
    assert row["any_offset"] == pytest.approx(640 / (640 + 37 + 640 + 5))
    assert row["client_ms_per_1000_tokens"] > 0
    assert "client_s" not in row
    # In its original context the document is a causal hit, and no run.
    assert replayed([document, document + question], 16, 64).runs == 0
    # The last token of a prompt is left to compute, so its last block is missing.
    assert replayed([document, document], 16, 64).causal == 624


def test_nothing_gives_nothing() -> None:
    assert replayed([], 16, 64).row()["any_offset"] == 0.0
    assert replayed([[], [1]], 16, 64).row()["causal"] == 0.0
    with pytest.raises(SpecError, match="block size 12"):
        replayed([], 12, 64)
    with pytest.raises(SpecError, match="min_run"):
        replayed([], 16, 8)


def test_a_block_is_believed_by_its_digest_alone() -> None:
    prompt = np.arange(100, dtype="<u4")
    node = bench_reuse._Node(16, 6)
    node.keep(causal_digests(node.ns, node.tenant, prompt), prompt)
    moved = np.concatenate([[999, 998], prompt]).astype("<u4")
    windows = bench_reuse.fingerprint.fingerprints(node.ns, node.tenant, moved)
    (run,) = node.locate([], windows, 1).runs
    assert (run.at, run.source, node.verified(run, moved)) == (2, 0, 6)
    run.blocks[3].modular = bytes(16)
    assert node.verified(run, moved) == 3


# -- logs


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Words n0 .. n999, one token each."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers comes with the transformers extra")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"?": 0} | {f"n{i}": i + 1 for i in range(1000)}, "?")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def row(when: float, *words: int) -> bytes:
    return json.dumps({"timestamp": when, "input": " ".join(f"n{n}" for n in words), "output": "é"}).encode()


def test_logs_are_read_by_file_and_time_and_what_is_broken_is_counted(
    tmp_path: Path, tokenizer: Path
) -> None:
    """O17: rows out of order, empty inputs, an empty file, non-ASCII text."""
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "beta_2.jsonl").write_bytes(row(5, 5) + b"\n" + row(1, 1) + b"\n\n" + row(1, 2))
    (logs / "beta_1.jsonl").write_bytes(row(9, 9))
    (logs / "alpha.x.jsonl").write_bytes(b"")
    (logs / "notes.txt").write_bytes(b"no log")
    broken = [
        b"{",
        b"[]",
        b"3",
        b"null",
        b'{"input": "n1"}',
        b'{"timestamp": 3}',
        b'{"timestamp": "3", "input": "n1"}',
        b'{"timestamp": NaN, "input": "n1"}',
        b'{"timestamp": true, "input": "n1"}',
        b'{"timestamp": 1' + b"0" * 400 + b', "input": "n1"}',
        b'{"timestamp": 1' + b"0" * 5000 + b', "input": "n1"}',
        b'{"timestamp": 1e999, "input": "n1"}',
        b'{"timestamp": 3, "input": null}',
        b'{"timestamp": 3, "input": ["n1"]}',
        b'{"timestamp": 3, "input": "\\ud800"}',
        b'{"timestamp": 3, "input": "\xff"}',
        b"[" * 100_000,
    ]
    (logs / "gamma_1.jsonl").write_bytes(b"\n".join([*broken, row(1), row(0.5, 4, 4)]))
    sets = log_sets(logs)
    assert {name: [path.name for path in files] for name, files in sets.items()} == {
        "alpha.x": ["alpha.x.jsonl"],
        "beta": ["beta_1.jsonl", "beta_2.jsonl"],
        "gamma": ["gamma_1.jsonl"],
    }
    encode = bench_reuse.load_tokenizer(tokenizer, print)
    read = read_logs(sets["beta"], encode)
    assert [prompt.tolist() for prompt in read.prompts] == [[10], [2], [3], [6]]
    assert (read.files, read.broken_lines) == (2, 0)
    read = read_logs(sets["gamma"], encode)
    assert [prompt.tolist() for prompt in read.prompts] == [[5, 5], []]
    assert read.broken_lines == len(broken)


def test_integers_that_no_float_tells_apart_keep_their_order(tmp_path: Path) -> None:
    later, earlier = (json.dumps({"timestamp": 2**62 + n, "input": str(n)}) for n in (1, 0))
    (tmp_path / "ns_1.jsonl").write_text(later + "\n" + earlier)
    read = read_logs([tmp_path / "ns_1.jsonl"], lambda text: [int(text)])
    assert [prompt.tolist() for prompt in read.prompts] == [[0], [1]]


def test_a_line_without_end_is_one_broken_line_and_never_held_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_reuse, "MAX_LINE", 100)
    held: list[int] = []
    parse = bench_reuse._row
    monkeypatch.setattr(bench_reuse, "_row", lambda line: held.append(len(line)) or parse(line))
    longest = row(2, 2).ljust(99) + b"\n"
    (tmp_path / "a_1.jsonl").write_bytes(
        b"\n".join([row(1, 1), row(1, 5).ljust(101), b"x" * 1000, b" " * 350]) + b"\n" + longest + b"y" * 450
    )
    read = read_logs([tmp_path / "a_1.jsonl"], lambda text: [int(text[1:])])
    assert [prompt.tolist() for prompt in read.prompts] == [[1], [2]]
    assert read.broken_lines == 4
    assert max(held) == 100


@pytest.mark.parametrize("kind", ["directory", "dangling link", "pipe", "device", "loop", "no permission"])
def test_a_log_that_cannot_be_read_is_named(
    kind: str, tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a_1.jsonl"
    match kind:
        case "directory":
            path.mkdir()
        case "dangling link":
            path.symlink_to(tmp_path / "nowhere")
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path)
        case _:
            if os.geteuid() == 0:
                pytest.skip("root may read everything")
            path.write_bytes(row(1, 1))
            path.chmod(0)
    with pytest.raises(ConfigError, match=r"--logs: .*a_1\.jsonl cannot be read: \w.*; make it readable"):
        read_logs(log_sets(tmp_path)["a"], lambda text: [1])
    arguments = ["benchmark", "--part", "reuse", "--logs", str(tmp_path), "--tokenizer", str(tokenizer)]
    assert main(arguments) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_directory_that_cannot_be_listed_is_named(tmp_path: Path) -> None:
    for directory in (tmp_path / ("x" * 300), tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="is no directory that can be read"):
            log_sets(directory)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="is no directory"):
        log_sets(tmp_path / "file")


def test_command(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(1)
    document, other = ([rng.randrange(1000) for _ in range(n)] for n in (160, 40))
    lines = [row(1, *document), row(2, *document, *other), row(3, *other[:5], *document, 1), b"oops"]
    (tmp_path / "mine_a.jsonl").write_bytes(b"\n".join(lines))
    arguments = ["benchmark", "--part", "reuse", "--logs", str(tmp_path), "--tokenizer", str(tmp_path)]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == ["mine"]
    mine = result["mine"]
    assert mine | {"client_ms_per_1000_tokens": 0, "by_block_size": 0} == {
        "block_size": 8,
        "min_run": 64,
        "tokens": 526,
        "causal": 160 / 526,
        "fixed_grid": 160 / 526,
        "any_offset": 320 / 526,
        "runs": 1,
        "blocks": 20 + 5 + 20,
        "rejected": 0,
        "complete": True,
        "client_ms_per_1000_tokens": 0,
        "prompts": 3,
        "empty_prompts": 0,
        "files": 1,
        "broken_lines": 1,
        "by_block_size": 0,
    }
    assert list(mine["by_block_size"]) == list(map(str, BLOCK_SIZES))
    assert mine["by_block_size"]["64"]["causal"] == 128 / 526
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert ["mine", "3", "526", "8", "30.42%", "30.42%", "60.84%", "1"] in [
        x.split()[:-1] for x in out.splitlines()
    ]
    assert "mine: 1 lines" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--part", "reuse"], "go together"),
        (["--logs", "."], "go together"),
        (["--part", "keys", "--logs", "."], "go together"),
        (["--part", "reuse", "--logs", "EMPTY"], "holds no *.jsonl files"),
        (["--part", "reuse", "--logs", "EMPTY/nowhere"], "is no directory"),
        (["--part", "reuse", "--logs", "LOGS", "--tokenizer", "EMPTY"], "give a tokenizer.json"),
    ],
)
def test_what_cannot_be_measured_is_said(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("EMPTY", "LOGS"):
        (tmp_path / name).mkdir()
    (tmp_path / "LOGS/a_b.jsonl").write_bytes(row(1, 1))
    moved = [str(tmp_path / one) if one.startswith(("EMPTY", "LOGS")) else one for one in arguments]
    assert main(["benchmark", *moved]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_set_without_prompts_is_no_division_by_zero(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "none_1.jsonl").write_bytes(b"")
    results = measure(tmp_path, tokenizer, print)
    assert results["none"]["any_offset"] == 0.0
    with Console(width=110, record=True, quiet=False) as console:
        bench_reuse.show(results, console)


def test_an_unknown_directory_names_itself(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        log_sets(tmp_path / "nowhere")


def test_public_agent_logs_reach_their_targets() -> None:
    """The shares that a first simulation promised, with a real tokenizer and the real parts."""
    if not AGENT_LOGS.is_dir():
        pytest.skip(f"the public agent logs are not at {AGENT_LOGS}")
    try:
        results: dict[str, Any] = measure(AGENT_LOGS, None, print)
    except smollm.ModelUnavailable as error:
        pytest.skip(f"SmolLM2's tokenizer cannot be had: {error}")
    assert {name: results[name]["any_offset"] >= target for name, target in TARGETS.items()} == dict.fromkeys(
        TARGETS, True
    )
    for result in results.values():
        assert 0 < result["causal"] <= result["fixed_grid"] <= result["any_offset"] < 1
        assert (result["rejected"], result["complete"], result["broken_lines"]) == (0, True, 0)
