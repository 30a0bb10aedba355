"""``hypercache demo``: wrong arguments are refused before anything starts, Ctrl-C ends it silently."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hypercache.cli import demo
from hypercache.errors import ConfigError

DEMO = [sys.executable, "-m", "hypercache.cli.main", "demo", "--model", "reference"]


@pytest.mark.parametrize(
    ("codecs", "message"),
    [
        ("nope", "codec 'nope' is unknown, known are raw"),
        ("raw,fp9", "codec 'fp9' is unknown.*did you mean 'fp8'"),
        ("raw,,int8", "codec '' is unknown"),
        ("", "--codecs is empty; give one or more of raw"),
        (" ", "--codecs is empty"),
    ],
)
def test_unknown_codecs_are_refused_before_anything_starts(codecs: str, message: str) -> None:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    with pytest.raises(ConfigError, match=message):
        demo.run(parser.parse_args(["--codecs", codecs]))


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads children from Linux's /proc")
@pytest.mark.parametrize("processes", [1, 2], ids=["server starts", "engine starts"])
def test_ctrl_c_prints_nothing_and_leaves_no_process(processes: int) -> None:
    process = subprocess.Popen(
        DEMO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        while len(started := children(process.pid)) < processes:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(0.3)  # in the midst of its imports
        os.killpg(process.pid, signal.SIGINT)  # as the terminal does: to the whole foreground group
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, out, err) == (130, "", "")
    assert not any(map(alive, started))
