"""`kill -9` in the middle of heavy writing, sealing, moving and removing.

Nothing committed is lost, nothing that was removed comes back, and no wrong byte is read.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hypercache.store.disk import Disk

from .disk_child import BATCH, CAPACITY, INFO, SEGMENT
from .disk_kit import du, expected, get, name, restored

ROUNDS = int(os.environ.get("HYPERCACHE_KILLS", "15"))
ROOT = Path(__file__).parents[2]


def killed(path: Path, first: int, seconds: float) -> list[list[str]]:
    """What a child has told before it was killed, so long after its first word."""
    command = [sys.executable, "-m", "tests.store.disk_child", str(path), str(first)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        told = child.stdout.readline()
        if seconds:
            # Its pipe holds 64 KiB; a child that waits for us would not be killed while it writes.
            os.set_blocking(child.stdout.fileno(), False)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                told += child.stdout.read() or b""
                time.sleep(0.001)
        child.kill()
        os.set_blocking(child.stdout.fileno(), True)
        told += child.stdout.read()
    assert child.returncode == -9, told[-500:]
    return [line.split() for line in told.decode().split("\n")[:-1]]


@pytest.mark.timeout(60 + 20 * ROUNDS)
def test_killed_again_and_again(tmp_path: Path) -> None:
    """The same directory all the time: what one child leaves, the next goes on with."""
    rng = random.Random(4)
    there: set[int] = set()
    gone: set[int] = set()
    first = writes = 0
    torn = 0
    for _ in range(ROUNDS):
        maybe: set[int] = set()
        for what, *numbers in killed(tmp_path, first, rng.random() * 0.3):
            these = set(map(int, numbers))
            if what == "+":
                start, end = map(int, numbers)
                there |= set(range(start, end))
                first = end
                writes += 1
            elif what == "?":
                maybe |= these
            else:
                gone |= these
        first += BATCH  # what was being written
        disk = Disk(tmp_path, capacity=CAPACITY, segment_nbytes=SEGMENT)
        known = {name(i): i for i in range(first)}
        live = {known[digest]: where for (_, digest), where in restored(disk).items()}
        assert there - maybe - gone <= set(live)
        assert not gone & set(live)
        for i, where in live.items():
            assert get(disk, INFO, name(i), where) == expected(INFO, name(i))
        assert du(tmp_path) <= disk.stats().bytes_files <= CAPACITY
        assert disk.stats().damaged == 0
        torn += disk.stats().torn_bytes
        disk.close()
        there = set(live)
    assert writes > 5 * ROUNDS
    print(f"{ROUNDS} kills, {writes} batches, {len(gone)} removed, {torn} torn bytes")
