"""Random use of L3's directory beside a dict that says what must be there."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hypercache.store.disk import Disk
from hypercache.store.hckv_file import number_of

from .disk_kit import SEGMENT, coded, crash, du, expected, get, items, name, plain, record_nbytes, restored

INFOS = (plain("first", (700, 9000)), plain("second", (20_000,)), coded(layers=9))
CAPACITY = 4 * SEGMENT
WANT: dict[tuple[bytes, bytes], list[bytes]] = {}


def want(key: tuple[int, int]) -> list[bytes]:
    info, digest = INFOS[key[0]], name(key[1])
    if (info.digest, digest) not in WANT:
        WANT[info.digest, digest] = expected(info, digest)
    return WANT[info.digest, digest]


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="hypercache-l3-"))
        self.live: dict[tuple[int, int], int] = {}  # number of the namespace, of the block: place

    @initialize()
    def start(self) -> None:
        self.disk = Disk(self.path, capacity=CAPACITY, segment_nbytes=SEGMENT)
        live = restored(self.disk)
        assert live == {(INFOS[i].digest, name(n)): where for (i, n), where in self.live.items()}

    @rule(which=st.integers(0, len(INFOS) - 1), first=st.integers(0, 40), count=st.integers(1, 12))
    def write(self, which: int, first: int, count: int) -> None:
        info = INFOS[which]
        while (oldest := self.disk.overfull(count * record_nbytes(info))) is not None:
            self.reclaim(oldest, 3)
        for n, where in enumerate(self.disk.write(items(info, first, count)), first):
            assert where >= 0
            self.live[which, n] = where

    def reclaim(self, oldest: int, every: int) -> None:
        old = [key for key, where in self.live.items() if number_of(where) == oldest]
        moved = self.disk.move([self.live[key] for key in old[::every]])
        for key in old:
            del self.live[key]
        self.live |= {key: where for key, where in zip(old[::every], moved, strict=True) if where >= 0}
        self.disk.drop(oldest)

    @precondition(lambda self: self.disk.stats().segments)
    @rule(every=st.integers(2, 5))
    def reclaim_the_oldest(self, every: int) -> None:
        self.reclaim(min(self.disk._segments), every)

    @rule(which=st.integers(0, len(INFOS) - 1), numbers=st.lists(st.integers(0, 52), max_size=20))
    def remove(self, which: int, numbers: list[int]) -> None:
        self.disk.remove(INFOS[which].digest, [name(n) for n in numbers])
        for n in numbers:
            self.live.pop((which, n), None)

    @rule(which=st.integers(0, len(INFOS) - 1))
    def clear(self, which: int) -> None:
        self.disk.remove(INFOS[which].digest, None)
        self.live = {key: where for key, where in self.live.items() if key[0] != which}

    @rule(cleanly=st.booleans())
    def restart(self, cleanly: bool) -> None:
        self.disk.close() if cleanly else crash(self.disk)
        self.start()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        which, n = data.draw(st.sampled_from(sorted(self.live)))
        assert get(self.disk, INFOS[which], name(n), self.live[which, n]) == want((which, n))

    @invariant()
    def within_the_capacity(self) -> None:
        if hasattr(self, "disk"):
            assert du(self.path) <= self.disk.stats().bytes_files <= CAPACITY

    def teardown(self) -> None:
        if hasattr(self, "disk"):
            for (which, n), where in self.live.items():
                assert get(self.disk, INFOS[which], name(n), where) == want((which, n))
            self.disk.close()
        shutil.rmtree(self.path)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
