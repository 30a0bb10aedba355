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

from hypercache.cli import bench_live
from hypercache.cli.benchmark import DIMS, show
from hypercache.cli.local_server import local_server
from hypercache.engines.reference import ReferenceConfig
from hypercache.errors import Unavailable

CODEC_ROW = {
    "ratio": 1.969,
    "cosine": 0.99998,
    "rel_error": 0.0068,
    "rel_error_outliers": 0.0197,
    "encode_to_memcpy": 0.5,
    "decode_to_memcpy": 0.6,
}


def test_parts_against_a_live_server() -> None:
    with local_server("64MiB") as server:
        os.kill(server["pid"], 0)
        engine = bench_live.engine(server["uris"][0], ReferenceConfig(), prompt_tokens=50, rounds=1)
        live = bench_live.live(server["uris"][0], blocks=3, rounds=1)
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

    keys = bench_live.hashing(tokens=5_000, rounds=1)
    codecs = {"int8": {"dim": DIMS[1], **CODEC_ROW, f"dim_{DIMS[0]}": CODEC_ROW}}
    output = io.StringIO()
    show({"engine": engine, "keys": keys, "live": live, "codecs": codecs}, Console(file=output, width=110))
    for words in ("48 of 50 tokens hit", "blocks of 64", "3 blocks, 6 MiB", "1.969", "no, lossy"):
        assert words in output.getvalue()


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


def test_interrupting_it_is_quiet_and_leaves_no_server() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "hypercache.cli.main", "benchmark"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while "serve" not in _command_of(found := children.read_text(encoding="utf-8").split()):
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.3)  # the parent comes back from the fork and waits for the ready line, or is further on
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.kill(int(found[0]), 0)


def _command_of(pids: list[str]) -> list[str]:
    try:
        return Path(f"/proc/{pids[0]}/cmdline").read_text(encoding="utf-8").split("\0") if pids else []
    except OSError:
        return []
