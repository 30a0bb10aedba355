"""The part ``policies``: what is printed are the replays' figures, under their names."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from hypercache.audit.replay import belady, replay
from hypercache.cli import bench_policies
from hypercache.cli.bench_policies import SHARES, measure, show, synthetic
from hypercache.cli.main import main
from hypercache.errors import ConfigError
from hypercache.store.policy import NAMES, get


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    requests = synthetic(300).requests
    rows = [
        json.dumps({"timestamp": 1000 * request.time, "hash_ids": request.blocks}) for request in requests
    ]
    (tmp_path / "small.jsonl").write_text("\n".join([*rows, "no row"]), encoding="utf-8")
    (tmp_path / "lengths.csv").write_text("TIMESTAMP,ContextTokens\n", encoding="utf-8")
    return tmp_path


def test_figures_of_a_directory(logs: Path) -> None:
    found = measure(logs)
    assert found.keys() == {"small", "left_out"}
    row, trace = found["small"], synthetic(300)
    assert (row["requests"], row["references"], row["bad_rows"]) == (300, trace.references, 1)
    for size, share in SHARES.items():
        room = row[size]["blocks"]
        assert room == round(share * trace.distinct)
        assert row[size].keys() == {"blocks", *NAMES, "belady"}
        for name in NAMES:
            assert row[size][name] == replay(trace.requests, room, get(name)).ratio
            assert 0 < row[size][name] <= row[size]["belady"] <= row["unlimited"] < 1
        assert row[size]["belady"] == belady(trace.requests, room).ratio
    output = io.StringIO()
    show(found, Console(file=output, width=110))
    words = [line.split() for line in output.getvalue().splitlines()]
    ratios = [f"{row['5%'][name]:.2%}" for name in (*NAMES, "belady")]
    assert ["5%", str(row["5%"]["blocks"]), *ratios] in words
    assert "small: 1 rows left out, line 301: not JSON" in output.getvalue()
    assert "left out: lengths.csv names no blocks" in output.getvalue()
    assert "made up" not in output.getvalue()


def test_without_traces_one_is_made_up_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_policies, "synthetic", lambda: synthetic(200))
    found = measure(None)
    assert found.keys() == {"synthetic"} and found["synthetic"]["synthetic"] is True
    output = io.StringIO()
    show(found, Console(file=output, width=110))
    assert "made up" in output.getvalue()


def test_the_made_up_trace_is_always_the_same_and_has_scans() -> None:
    one, other = synthetic(500), synthetic(500)
    assert one == other
    seen = [set(request.blocks) for request in one.requests]
    assert all(len(scan & seen[299]) == 4 for scan in seen[300:400])  # the system prompt and nothing else
    assert any(len(request & seen[0]) > 4 for request in seen[1:300])


def test_from_the_command_line(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", "--part", "policies", "--traces", str(logs), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["policies"]["small"]["20%"]["lrfu"] > 0
    assert main(["benchmark", "--part", "policies", "--traces", str(logs / "gone")]) == 2
    assert "gone is no directory that can be read" in capsys.readouterr().err


def test_a_directory_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hash_ids"):
        measure(tmp_path)
