"""The benchmark's own parts, small: they measure what they say, against a real server process."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from hypercache.cli import bench_codecs, bench_live, bench_match
from hypercache.cli.benchmark import DIMS, show
from hypercache.cli.local_server import local_server
from hypercache.engines.reference import ReferenceConfig
from hypercache.errors import Unavailable

CODEC_ROW = {
    "ratio": 1.969,
    "cosine": 0.99998,
    "rel_error": 0.0068,
    "rel_error_outliers": 0.0197,
    "same_values": 0.2,
    "same_values_outliers": 0.1,
    "encode_to_memcpy": 0.5,
    "decode_to_memcpy": 0.6,
    "turned_to_memcpy": 0.4,
}


def test_parts_against_a_live_server() -> None:
    with local_server("64MiB") as server:
        os.kill(server["pid"], 0)
        engine = bench_live.engine(server["uris"][0], ReferenceConfig(), prompt_tokens=50, rounds=1)
        live = bench_live.live(server["uris"][0], blocks=3, rounds=1)
        match = bench_match.measure(server["uris"][0], tokens=8192, rounds=1)
    with pytest.raises(ProcessLookupError):
        os.kill(server["pid"], 0)
    assert engine["hit_tokens"] == 48
    assert engine["logits_max_error"] < 1e-3 * engine["logits_max"]
    assert live["kv_bytes"] == 3 * 16 * 128 * 1024
    assert [name for name, row in live.items() if isinstance(row, dict)] == list(bench_live.LIVE_CODECS)
    assert live["raw"]["identical"] is True
    assert live["int8"]["identical"] is False
    assert live["raw"]["wire_bytes"] == live["kv_bytes"]
    assert live["int8"]["wire_bytes"] == pytest.approx(live["kv_bytes"] / 1.969, rel=0.001)

    for size in ("8", "16", "64"):
        assert match[size]["unknown"]["share"] == 0 and match[size]["known"]["share"] > 0.97

    keys = bench_live.hashing(tokens=5_000, rounds=1)
    lossless = CODEC_ROW | {"same_values": 1.0, "same_values_outliers": 1.0}
    codecs = {
        name: {"dim": DIMS[1], **row, f"dim_{DIMS[0]}": row}
        for name, row in (("int8", CODEC_ROW), ("raw", lossless))
    }
    output = io.StringIO()
    results = {"engine": engine, "keys": keys, "live": live, "codecs": codecs, "match": match}
    show(results, Console(file=output, width=110))
    rows = [line.split() for line in output.getvalue().splitlines()]
    assert ["int8", "64", "1.969", "0.999980", "0.0068", "0.0197", "0.50x", "0.60x", "0.40x"] in rows
    assert ["raw", "64", "1.969", "exact", "exact", "exact", "0.50x", "0.60x", "0.40x"] in rows
    for words in (
        "error to f32",
        "against float32 K/V",
        "48 of 50 tokens hit",
        "blocks of 64",
        "one question for 8,192 tokens",
        "3 blocks, 6 MiB",
        "1.969",
        "no, lossy",
    ):
        assert words in output.getvalue()


def test_lossless_is_what_comes_back_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """raw has an error to float32, since bf16 has; what says that it is lossless is its own input."""
    monkeypatch.setattr(bench_codecs, "BUFFER_BYTES", 2 << 20)
    by_codec = bench_codecs.measure(0.0, dims=(64,))
    for name, by_dim in by_codec.items():
        figures = by_dim["64"]
        assert 0 < figures["relative_error"] < 1
        for key in ("same_values", "same_values_outliers"):
            assert (figures[key] == 1.0) == (name == "raw"), (name, key)


def test_what_does_not_fit_is_no_figure() -> None:
    """A server too small for the blocks must not be turned into a throughput."""
    with local_server("8MiB") as server, pytest.raises(bench_live.NotMeasured, match="full"):
        bench_live.live(server["uris"][0], blocks=8, rounds=1)


def test_a_server_that_does_not_start_is_named() -> None:
    with (
        pytest.raises(Unavailable, match=r"did not start \(exit 2\): .*memory = '1KiB'"),
        local_server("1KiB"),
    ):
        pytest.fail("it started")


SHORTER = """
import sys
from hypercache.cli import bench_blend, bench_codecs, benchmark, main
bench_blend.measure = dict  # it needs no server
bench_codecs.BUFFER_BYTES, benchmark.CODEC_SECONDS = 2 << 20, 0.0
sys.exit(main.main(["benchmark"]))
"""


@pytest.mark.parametrize("phase", ["starting", "three clients"])
def test_interrupting_it_is_quiet_and_leaves_no_server(phase: str) -> None:
    """As a terminal does it: Ctrl-C goes to the benchmark and to its server at once."""
    process = subprocess.Popen(
        [sys.executable, "-c", SHORTER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while "serve" not in _command_of(found := children.read_text(encoding="utf-8").split()):
        assert process.poll() is None
        time.sleep(0.01)
    if phase == "starting":
        time.sleep(0.3)  # the parent comes back from the fork and waits for the ready line, or is further on
    else:
        while _connections(int(found[0])) < len(bench_live.LIVE_CODECS):
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")
    with pytest.raises(ProcessLookupError):
        os.kill(int(found[0]), 0)


def _connections(pid: int) -> int:
    """TCP connections of a process (state 01 in proc(5)'s net/tcp)."""
    try:
        links = {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        return 0
    rows = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="utf-8").splitlines()[1:]]
    return sum(row[3] == "01" and f"socket:[{row[9]}]" in links for row in rows)


def _command_of(pids: list[str]) -> list[str]:
    try:
        return Path(f"/proc/{pids[0]}/cmdline").read_text(encoding="utf-8").split("\0") if pids else []
    except OSError:
        return []
