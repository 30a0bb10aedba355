"""Public request logs: what is a trace, what is a bad row, and what is no trace at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hypercache.audit import traces
from hypercache.audit.traces import Bad, NoBlocks, Request, find, read
from hypercache.errors import ConfigError

PUBLIC = Path(__file__).parents[3] / "shared/traces"
needs_public = pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")


def row(timestamp: Any = 0, ids: Any = (1,), **more: Any) -> str:
    return json.dumps({"timestamp": timestamp, "hash_ids": ids, **more})


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def test_rows_come_by_time_and_times_are_seconds(tmp_path: Path) -> None:
    path = write(
        tmp_path / "log.jsonl",
        row(7000, [1, 2], input_length=600),
        "",
        row(5000, [1, 3], input_length=1024),
        row(7000, [4], input_length=1, output_length=3),
    )
    trace = read(path)
    assert (trace.name, trace.block_size, trace.bad_rows) == ("log", 512, 0)
    assert trace.requests == [Request(0.0, (1, 3)), Request(2.0, (1, 2)), Request(2.0, (4,))]
    assert (trace.references, trace.distinct) == (5, 4)


def test_the_other_dialect_counts_seconds_and_blocks_of_16(tmp_path: Path) -> None:
    path = write(
        tmp_path / "qwen.jsonl",
        row(61.5, [1, 2], chat_id=1, parent_chat_id=-1, input_length=20),
        row(63.0, [1], chat_id=2, parent_chat_id=1, input_length=20),  # without the partial block
    )
    trace = read(path)
    assert trace.block_size == 16
    assert trace.requests == [Request(0.0, (1, 2)), Request(1.5, (1,))]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"timestamp": 1, "hash_ids": [' + "9" * 5000 + "]}", "not JSON"),
        ("[]", "not an object"),
        ('{"timestamp": 1}', "no hash_ids"),
        (row(1, "1,2"), "no hash_ids"),
        (row(1, [1, 2.0]), "no hash_ids"),
        (row(1, [True]), "no hash_ids"),
        (row(1, [5, 5]), "twice"),
        ('{"hash_ids": [1]}', "no timestamp"),
        (row("1", [1]), "no timestamp"),
        (row(True, [1]), "no timestamp"),
        (row(float("nan"), [1]), "no timestamp"),
        (row(10**30, [1]), "no timestamp"),
        ('{"timestamp": 1e999, "hash_ids": [1]}', "no timestamp"),
        (row(1, [1, 2], input_length=5000), "input_length 5000"),
        (row(1, [1], input_length="512"), "input_length '512'"),
        (row(1.0, [1], chat_id=1), "another dialect"),
    ],
)
def test_a_bad_row_is_reported_with_its_line_and_the_rest_is_read(
    tmp_path: Path, line: str | bytes, why: str
) -> None:
    trace = read(write(tmp_path / "log.jsonl", row(0, [1]), "", line, row(1000, [2])))
    assert [request.blocks for request in trace.requests] == [(1,), (2,)]
    assert trace.bad_rows == 1
    (bad,) = trace.bad
    assert bad.line == 3 and why in bad.why


def test_many_bad_rows_are_counted_and_the_first_kept(tmp_path: Path) -> None:
    trace = read(write(tmp_path / "log.jsonl", *["?"] * 500, row(0, [1])))
    assert trace.bad_rows == 500
    assert [bad.line for bad in trace.bad] == list(range(1, traces.MAX_REPORTED + 1))


def test_a_line_without_end_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_LINE", 100)
    long = row(0, list(range(500)))
    assert len(long) > 100
    trace = read(write(tmp_path / "log.jsonl", row(0, [1]), long, row(1000, [2]), long))
    assert [request.blocks for request in trace.requests] == [(1,), (2,)]
    assert [bad.line for bad in trace.bad] == [2, 4]


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", row(0, [1]))
    write(tmp_path / "empty.jsonl")
    write(tmp_path / "lengths.csv", "TIMESTAMP,ContextTokens", "2023-11-16 18:17:03.9799600,4808")
    write(tmp_path / "notes.txt", "no trace")
    found, others = find(tmp_path)
    assert [trace.name for trace in found] == ["a"]
    assert len(others) == 2
    assert "empty.jsonl names no blocks (it is empty)" in others[0]
    assert "lengths.csv names no blocks (line 1: not JSON" in others[1] and "no hit ratio" in others[1]
    with pytest.raises(NoBlocks, match="hash_ids in each line"):
        read(tmp_path / "lengths.csv")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone"):
        find(tmp_path / "gone")
    with pytest.raises(ConfigError, match="no trace that names blocks"):
        find(tmp_path)
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ConfigError, match=r"pipe\.jsonl cannot be read: not a regular file"):
        find(tmp_path)
    with pytest.raises(ConfigError, match=r"gone\.jsonl cannot be read"):
        read(tmp_path / "gone.jsonl")


@needs_public
def test_the_public_traces() -> None:
    found, others = find(PUBLIC)
    sizes = {trace.name: (len(trace.requests), trace.references, trace.bad_rows) for trace in found}
    assert sizes == {
        "mooncake_conversation_2000": (2000, 54_559, 0),
        "mooncake_synthetic_2000": (2000, 49_580, 0),
    }
    named = {why.split()[0] for why in others}
    assert named == {
        "aibrix_5s_workload.jsonl",
        "azure2023_code_2000.csv",
        "azure2023_conv_2000.csv",
        "lmbenchmark_agentic_demo.jsonl",
    }
    assert Bad(1, "not JSON, or longer than a line may be") not in found[0].bad
