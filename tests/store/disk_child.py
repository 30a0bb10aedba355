"""Writes blocks to a directory as fast as it can, until it is killed.

``python -m tests.store.disk_child PATH FIRST``: blocks are numbered from FIRST on. A line on stdout for each
thing that has happened: ``+ first last`` written, ``? n ...`` about to be removed or forgotten, ``- n ...``
removed.
"""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path

from hypercache.store.disk import Disk
from hypercache.store.hckv_file import number_of

from .disk_kit import MIB, items, name, plain, record_nbytes, restored

INFO = plain("killed", (700, 3000, 9000))
SEGMENT = MIB
CAPACITY = 4 * SEGMENT
BATCH = 50  # one system call: long enough for a kill to come in the middle of it


def say(what: str, *numbers: int) -> None:
    os.write(1, (" ".join([what, *map(str, numbers)]) + "\n").encode())


def main(path: Path, first: int) -> None:
    disk = Disk(path, capacity=CAPACITY, segment_nbytes=SEGMENT)
    known = {name(i): i for i in range(first)}
    live = {known[digest]: where for (_, digest), where in restored(disk).items()}
    nbytes = BATCH * record_nbytes(INFO)
    for turn in count():
        while (oldest := disk.overfull(nbytes)) is not None:
            old = [i for i, where in live.items() if number_of(where) == oldest]
            keep, rest = old[: len(old) // 2], old[len(old) // 2 :]
            say("?", *rest)
            for i, where in zip(keep, disk.move([live[i] for i in keep]), strict=True):
                assert where >= 0
                live[i] = where
            disk.drop(oldest)
            for i in rest:
                del live[i]
        places = disk.write(items(INFO, first, BATCH))
        say("+", first, first + BATCH)
        live |= dict(zip(range(first, first + BATCH), places, strict=True))
        first += BATCH
        if turn % 4 == 3:
            gone = list(live)[turn % len(live) :: 7]
            say("?", *gone)
            disk.remove(INFO.digest, [name(i) for i in gone])
            say("-", *gone)
            for i in gone:
                del live[i]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
