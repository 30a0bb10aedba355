"""Power cuts: what was written and not synced is lost in any part and order, and what was synced is not."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from hypercache.store.disk import Disk, System
from hypercache.store.hckv_file import number_of

from .disk_kit import SEGMENT, crash, expected, get, items, name, plain, record_nbytes, restored

INFO = plain("power", (700, 3000, 9000))
CAPACITY = 4 * SEGMENT
PAGE = 4096


class Volatile(System):
    """Remembers what a power cut may undo, and syncs nothing really."""

    def __init__(self) -> None:
        self.synced: dict[Path, int] = {}  # bytes of a file that are on the disk
        self.unlinked: dict[Path, bytes] = {}

    @staticmethod
    def path(fd: int) -> Path:
        return Path(f"/proc/self/fd/{fd}").readlink()

    def pwritev(self, fd, views, offset):  # type: ignore[no-untyped-def, override]
        path = self.path(fd)
        self.synced[path] = min(self.synced.get(path, 0), offset)
        return os.pwritev(fd, views, offset)

    def fdatasync(self, fd):  # type: ignore[no-untyped-def, override]
        self.synced[self.path(fd)] = os.fstat(fd).st_size

    def unlink(self, name, *, dir_fd):  # type: ignore[no-untyped-def, override]
        path = self.path(dir_fd) / name
        data = path.read_bytes()
        os.unlink(name, dir_fd=dir_fd)
        self.unlinked[path] = data
        self.synced.pop(path, None)

    def fsync(self, fd):  # type: ignore[no-untyped-def, override]
        self.unlinked.clear()

    def cut(self, rng: random.Random) -> None:
        for path, data in self.unlinked.items():
            if rng.random() < 0.5:
                path.write_bytes(data)
        for path, safe in self.synced.items():
            if not path.exists():
                continue
            data = bytearray(path.read_bytes())
            end = rng.choice([len(data), rng.randint(safe, max(safe, len(data)))])
            for at in range(safe, end, PAGE):
                if rng.random() < 0.3:
                    data[at : at + PAGE] = bytes(min(PAGE, len(data) - at))
            path.write_bytes(data[:end])


@pytest.mark.parametrize("fsync", ["batch", "interval", "never"])
@pytest.mark.parametrize("seed", range(8))
def test_power_cuts(tmp_path: Path, seed: int, fsync) -> None:
    rng = random.Random(seed)
    live: dict[int, int] = {}
    gone: set[int] = set()
    first = 0
    for _ in range(6):
        system = Volatile()
        disk = Disk(
            tmp_path, capacity=CAPACITY, segment_nbytes=SEGMENT, fsync=fsync, interval_s=1e6, system=system
        )
        known = {name(i): i for i in range(first)}
        found = {known[digest]: where for (_, digest), where in restored(disk).items()}
        assert not gone & set(found)
        if fsync == "batch":
            assert set(live) <= set(found)
        readable = {i for i, where in found.items() if get(disk, INFO, name(i), where) is not None}
        for i in readable:
            assert get(disk, INFO, name(i), found[i]) == expected(INFO, name(i))
        if fsync == "batch":
            assert set(live) <= readable
        live = found
        for _ in range(rng.randrange(4, 25)):
            while (oldest := disk.overfull(4 * record_nbytes(INFO))) is not None:
                old = [i for i, where in live.items() if number_of(where) == oldest]
                moved = disk.move([live[i] for i in old[::3]])
                for i in old:
                    del live[i]
                live |= {i: where for i, where in zip(old[::3], moved, strict=True) if where >= 0}
                disk.drop(oldest)
            live |= dict(enumerate(disk.write(items(INFO, first, 4)), first))
            first += 4
            if rng.random() < 0.3:
                some = rng.sample(sorted(live), min(3, len(live)))
                disk.remove(INFO.digest, [name(i) for i in some])
                gone |= set(some)
                for i in some:
                    del live[i]
        crash(disk)
        system.cut(rng)
