"""L3's directory: what is written comes back, and nothing else; its owner, its names, its size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hypercache.errors import ConfigError, HyperCacheError, SpecError
from hypercache.store.disk import Disk, DiskFault, System
from hypercache.store.hckv import REMOVALS
from hypercache.store.hckv_file import number_of, offset_of, place

from .disk_kit import (
    KIB,
    MIB,
    SEGMENT,
    coded,
    crash,
    du,
    expected,
    fresh,
    get,
    item,
    items,
    name,
    names_in,
    plain,
    record_nbytes,
    restored,
    room,
)

PLAIN = plain()
ROOT = Path(__file__).parents[2]


# -- bytes


@pytest.mark.parametrize("info", [PLAIN, coded(), plain("many", (5,) * 1500)], ids=lambda info: info.label)
def test_what_is_written_comes_back(tmp_path: Path, info) -> None:
    """1500 layers: more than one system call takes."""
    disk = fresh(tmp_path / "l3")
    places = disk.write(items(info, 0, 40))
    assert disk.stats().segments > 1
    assert len(set(places)) == 40
    for i, where in enumerate(places):
        assert get(disk, info, name(i), where) == expected(info, name(i))
    disk.close()
    again = Disk(tmp_path / "l3", capacity=16 * MIB, segment_nbytes=SEGMENT)
    live = restored(again)
    assert live == {(info.digest, name(i)): where for i, where in enumerate(places)}
    for i, where in enumerate(places):
        assert get(again, info, name(i), where) == expected(info, name(i))
    again.close()


def test_a_block_larger_than_the_buffer(tmp_path: Path) -> None:
    info = plain("large", (3 * MIB, 2 * MIB))
    disk = fresh(tmp_path / "l3", 64 * MIB, 16 * MIB)
    places = disk.write([*items(PLAIN, 0, 3), item(info, b"l" * 16), *items(PLAIN, 3, 3)])
    assert get(disk, info, b"l" * 16, places[3]) == expected(info, b"l" * 16)
    assert get(disk, PLAIN, name(4), places[5]) == expected(PLAIN, name(4))
    disk.close()


def test_large_chunks_are_written_from_where_they_lie(tmp_path: Path) -> None:
    """Between small ones, more of them than one system call takes, and in several segments."""
    infos = (PLAIN, plain("large", (40 * KIB, 16 * KIB, 20 * KIB)), coded())
    batch = [item(infos[i % 3], name(i)) for i in range(60)]
    many = plain("many", (17 * KIB,) * 1100)
    disk = fresh(tmp_path / "l3", 256 * MIB, 32 * MIB)
    places = disk.write([*batch, item(many, name(0)), *batch])
    for i in range(60):
        want = expected(infos[i % 3], name(i))
        assert get(disk, infos[i % 3], name(i), places[i]) == want
        assert get(disk, infos[i % 3], name(i), places[61 + i]) == want
    assert get(disk, many, name(0), places[60]) == expected(many, name(0))
    disk.close()
    again, small = fresh(tmp_path / "l3", 256 * MIB), fresh(tmp_path / "small")
    assert again.stats().restored_blocks == 121
    places = small.write(batch)
    assert small.stats().segments > 5
    for i, where in enumerate(places):
        assert get(small, infos[i % 3], name(i), where) == expected(infos[i % 3], name(i))
    again.close()
    small.close()


def test_all_that_a_record_says_is_restored(tmp_path: Path) -> None:
    disk = fresh(tmp_path / "l3")
    disk.write([item(PLAIN, name(0)), item(PLAIN, name(1), name(0), 1, b"m" * 24)])
    disk.close()
    again = Disk(tmp_path / "l3", capacity=16 * MIB, segment_nbytes=SEGMENT)
    [(_, contents)] = again.restore()
    assert contents.names("parent") == [b"", name(0)]
    assert contents.names("mark") == [b"", b"m" * 24]
    assert contents.entries["depth"].tolist() == [0, 1]
    assert contents.namespaces == [PLAIN]
    assert again.stats().restored_blocks == again.stats().records == 2
    again.close()


def test_only_the_block_that_was_asked_for(tmp_path: Path) -> None:
    other, form = plain("other"), replace(PLAIN, chunk_nbytes=(700, 3001, 1))
    disk = fresh(tmp_path / "l3")
    first, second = disk.write(items(PLAIN, 0, 2))
    assert get(disk, PLAIN, name(0), second) is None
    assert get(disk, other, name(0), first) is None  # another tenant
    assert get(disk, form, name(0), first) is None
    assert get(disk, PLAIN, name(0), first + 1000) is None  # behind the end
    assert get(disk, PLAIN, name(0), place(77, offset_of(first))) is None
    assert get(disk, PLAIN, name(0), first) == expected(PLAIN, name(0))
    stats = disk.stats()
    assert (stats.reads, stats.damaged) == (6, 5)
    with pytest.raises(SpecError, match="3 chunks of 3701 bytes"):
        disk.read(PLAIN, name(0), first, room(form))
    disk.close()


def test_a_bit_that_flips_in_memory_is_not_written(tmp_path: Path) -> None:
    disk = fresh(tmp_path / "l3")
    for info in (PLAIN, coded()):
        good, bad = item(info, name(0)), item(info, name(1))
        chunk = bytearray(bad.chunks[1])
        chunk[5] ^= 4
        bad = replace(bad, chunks=[bad.chunks[0], memoryview(chunk), bad.chunks[2]])
        places = disk.write([bad, good, bad])
        assert places[0] == places[2] == -1
        assert get(disk, info, name(0), places[1]) == expected(info, name(0))
    assert disk.stats().refused == 4
    assert disk.stats().records == 2
    disk.close()


def test_damage_on_disk_is_a_miss(tmp_path: Path) -> None:
    disk = fresh(tmp_path / "l3")
    for info in (PLAIN, coded()):
        where, other = disk.write(items(info, 0, 2))
        file = tmp_path / "l3" / f"{number_of(where):016x}.hckv"
        for offset in (0, 60, 300, record_nbytes(info) - 1):
            with file.open("r+b") as out:
                out.seek(offset_of(where) + offset)
                was = out.read(1)
                out.seek(-1, os.SEEK_CUR)
                out.write(bytes([was[0] ^ 1]))
            assert get(disk, info, name(0), where) is None
            with file.open("r+b") as out:
                out.seek(offset_of(where) + offset)
                out.write(was)
        assert get(disk, info, name(0), where) == expected(info, name(0))
        assert get(disk, info, name(1), other) == expected(info, name(1))
    file.unlink()
    disk.close()
    again = fresh(tmp_path / "l3")
    assert get(again, info, name(1), other) is None
    again.close()


def test_many_threads_read_while_one_writes(tmp_path: Path) -> None:
    disk = fresh(tmp_path / "l3")
    info = coded()
    known = dict(enumerate(disk.write(items(info, 0, 20))))
    want = {i: expected(info, name(i)) for i in range(20)}
    wrong: list[int] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            wrong.extend(i for i in range(20) if get(disk, info, name(i), known[i]) != want[i])

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for i in range(20, 400, 20):
        disk.write(items(info, i, 20))
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert disk.stats().segments > 5
    disk.close()


# -- removals


@pytest.mark.parametrize("ended", ["close", "crash"])
def test_what_was_removed_does_not_come_back(tmp_path: Path, ended: str) -> None:
    other = plain("other")
    disk = fresh(tmp_path / "l3")
    disk.write(items(PLAIN, 0, 10) + items(other, 0, 10))
    disk.remove(PLAIN.digest, [name(i) for i in range(0, 10, 2)])
    disk.remove(other.digest, None)
    disk.write(items(other, 3, 1) + items(PLAIN, 4, 1))  # and stored again
    disk.close() if ended == "close" else crash(disk)
    again = Disk(tmp_path / "l3", capacity=16 * MIB, segment_nbytes=SEGMENT)
    live = restored(again)
    assert set(live) == {
        (other.digest, name(3)),
        *((PLAIN.digest, name(i)) for i in (1, 3, 4, 5, 7, 9)),
    }
    again.close()


def test_more_removals_than_a_record_takes(tmp_path: Path) -> None:
    disk = fresh(tmp_path / "l3")
    disk.write(items(PLAIN, 0, 2))
    gone = [name(i) for i in range(1, 2 * REMOVALS + 10)]
    disk.remove(PLAIN.digest, gone)
    disk.remove(PLAIN.digest, [])
    disk.close()
    again = Disk(tmp_path / "l3", capacity=16 * MIB, segment_nbytes=SEGMENT)
    assert set(restored(again)) == {(PLAIN.digest, name(0))}
    assert again.stats().records == 2 + 3
    again.close()


@pytest.mark.parametrize("fsync", ["never", "batch", "interval"])
def test_a_removal_is_on_the_disk_and_the_rest_as_configured(tmp_path: Path, fsync) -> None:
    disk = fresh(tmp_path / "l3", 16 * MIB, MIB, fsync=fsync, interval_s=1e6)
    for i in range(5):
        disk.write(items(PLAIN, i, 1))
    assert disk.stats().fsyncs == (5 if fsync == "batch" else 0)
    disk.remove(PLAIN.digest, [name(0)])
    assert disk.stats().fsyncs == (6 if fsync == "batch" else 1)
    disk.sync()
    assert disk.stats().fsyncs == (6 if fsync == "batch" else 1)  # nothing new to sync
    disk.write(items(PLAIN, 9, 1))
    disk.sync()
    assert disk.stats().fsyncs == (7 if fsync == "batch" else 2)
    disk.close()


def test_what_was_moved_is_on_the_disk_before_its_old_place_goes(tmp_path: Path) -> None:
    disk = fresh(tmp_path / "l3", fsync="interval", interval_s=1e6)
    places = disk.write(items(PLAIN, 0, 20))
    disk.move(places[:1])
    before = disk.stats().fsyncs
    disk.drop(number_of(places[0]))
    assert disk.stats().fsyncs == before + 1
    disk.close()


def test_an_interval_that_is_over(tmp_path: Path) -> None:
    disk = fresh(tmp_path / "l3", fsync="interval", interval_s=0.0)
    for i in range(3):
        disk.write(items(PLAIN, i, 1))
    assert disk.stats().fsyncs == 3
    disk.close()


def test_full_segments_are_on_the_disk(tmp_path: Path) -> None:
    disk = fresh(tmp_path / "l3", fsync="never")
    disk.write(items(PLAIN, 0, 40))
    assert disk.stats().fsyncs == disk.stats().segments - 1 > 0
    disk.close()


# -- moving and dropping


def test_the_oldest_segment_goes_and_what_was_moved_stays(tmp_path: Path) -> None:
    disk = fresh(tmp_path / "l3")
    info = coded()
    places = disk.write(items(PLAIN, 0, 30) + items(info, 0, 60))
    first = number_of(places[0])
    mine = [i for i in range(30) if number_of(places[i]) == first]
    assert 3 < len(mine) < 30
    assert [*disk.entries(first).names("digest")] == [name(i) for i in mine]
    moved = disk.move([places[0], places[40], places[2]])
    disk.drop(first)
    assert not (tmp_path / "l3" / f"{first:016x}.hckv").exists()
    assert get(disk, PLAIN, name(0), moved[0]) == expected(PLAIN, name(0))
    assert get(disk, PLAIN, name(2), moved[2]) == expected(PLAIN, name(2))
    assert get(disk, info, name(10), moved[1]) == expected(info, name(10))
    assert get(disk, PLAIN, name(0), places[0]) is None
    assert disk.move([places[0]]) == [-1]
    assert len(disk.entries(first)) == 0
    disk.close()
    again = Disk(tmp_path / "l3", capacity=16 * MIB, segment_nbytes=SEGMENT)
    live = restored(again)
    assert live[PLAIN.digest, name(0)] == moved[0]
    assert live[info.digest, name(10)] == moved[1]
    assert (PLAIN.digest, name(1)) not in live
    again.close()


def test_segments_go_in_the_order_of_their_writing(tmp_path: Path) -> None:
    """Or a removal could go before what it removes, and that would be back after a restart."""
    disk = fresh(tmp_path / "l3")
    places = disk.write(items(PLAIN, 0, 40))
    second = number_of(places[-1])
    with pytest.raises(HyperCacheError, match="not the oldest"):
        disk.drop(second)
    assert get(disk, PLAIN, name(39), places[-1]) == expected(PLAIN, name(39))
    disk.close()


def test_what_is_in_the_open_segment_is_moved_out_of_it(tmp_path: Path) -> None:
    disk = fresh(tmp_path / "l3")
    [where] = disk.write(items(PLAIN, 0, 1))
    [moved] = disk.move([where])
    assert number_of(moved) != number_of(where)
    disk.drop(number_of(where))
    assert get(disk, PLAIN, name(0), moved) == expected(PLAIN, name(0))
    disk.close()


def test_what_is_damaged_is_not_moved(tmp_path: Path) -> None:
    disk = fresh(tmp_path / "l3")
    places = disk.write(items(PLAIN, 0, 3))
    with (tmp_path / "l3" / f"{0:016x}.hckv").open("r+b") as file:
        file.seek(offset_of(places[1]) + 2000)
        file.write(b"damage")
    moved = disk.move(places)
    assert moved[1] == -1
    assert get(disk, PLAIN, name(2), moved[2]) == expected(PLAIN, name(2))
    disk.close()


def test_who_reads_a_dropped_segment_reads_on(tmp_path: Path) -> None:
    """The file goes while a reader is inside the system call."""
    disk: Disk

    class Slow(System):
        dropping = False

        def preadv(self, fd, buffers, offset):
            if self.dropping:
                self.dropping = False
                disk.drop(number_of(where))
            return os.preadv(fd, buffers, offset)

    system = Slow()
    disk = fresh(tmp_path / "l3", system=system)
    where = disk.write(items(PLAIN, 0, 40))[0]
    before = disk.stats().open_files
    system.dropping = True
    assert get(disk, PLAIN, name(0), where) == expected(PLAIN, name(0))
    assert get(disk, PLAIN, name(0), where) is None
    assert disk.stats().open_files == before
    disk.close()


# -- size


def test_files_never_exceed_the_capacity(tmp_path: Path) -> None:
    """Ten times the capacity is written, with room made as a server does it."""
    capacity = 4 * SEGMENT
    disk = fresh(tmp_path / "l3", capacity)
    record = record_nbytes(PLAIN)
    live: dict[int, int] = {}
    for first in range(0, 10 * capacity // record, 10):
        while (oldest := disk.overfull(10 * record)) is not None:
            old = [i for i, where in live.items() if number_of(where) == oldest]
            keep = old[: SEGMENT // 2 // record]
            moved = disk.move([live[i] for i in keep])
            for i in old:
                del live[i]
            live |= {i: where for i, where in zip(keep, moved, strict=True) if where >= 0}
            disk.drop(oldest)
            assert du(tmp_path / "l3") <= disk.stats().bytes_files <= capacity
        batch = items(PLAIN, first, 10)
        live |= dict(zip(range(first, first + 10), disk.write(batch), strict=True))
        if first % 50 == 0:
            disk.remove(PLAIN.digest, [b"?" * 16])
        assert du(tmp_path / "l3") <= disk.stats().bytes_files <= capacity
    assert disk.stats().bytes_written > 9 * capacity
    assert disk.stats().bytes_files > capacity // 2
    for i, where in live.items():
        assert get(disk, PLAIN, name(i), where) == expected(PLAIN, name(i))
    disk.close()
    assert du(tmp_path / "l3") <= capacity


def test_who_makes_no_room_is_refused(tmp_path: Path) -> None:
    disk = fresh(tmp_path / "l3", 2 * SEGMENT)
    with pytest.raises(DiskFault, match="exceed its capacity") as caught:
        for i in range(100):
            disk.write(items(PLAIN, 10 * i, 10))
    assert caught.value.reason == "full"
    assert caught.value.places == []
    disk.remove(PLAIN.digest, [name(0)])  # for this there is always some room
    while (oldest := disk.overfull(0)) is not None:
        disk.drop(oldest)
    assert min(disk.write(items(PLAIN, 0, 10))) >= 0
    disk.close()


def test_a_batch_of_the_right_size_always_fits(tmp_path: Path) -> None:
    """In the smallest directory that is allowed, and with as much moved as is."""
    disk = fresh(tmp_path / "l3", 2 * SEGMENT)
    info = plain("one page", (1,))
    count = disk.batch_nbytes // record_nbytes(info)
    live: list[int] = []
    for first in range(0, 40 * count, count):
        while (oldest := disk.overfull(disk.batch_nbytes)) is not None:
            old = [where for where in live if number_of(where) == oldest]
            live = [where for where in live if number_of(where) != oldest]
            keep = old[: SEGMENT // 2 // record_nbytes(info)]
            moved = disk.move(keep)
            assert min(moved, default=0) >= 0
            live += moved
            disk.drop(oldest)
        live += disk.write(items(info, first, count))
        assert du(tmp_path / "l3") <= disk.stats().bytes_files <= disk.capacity
    assert disk.stats().records >= 2 * count
    disk.close()


def test_usage_and_a_smaller_capacity_are_known_after_a_restart(tmp_path: Path) -> None:
    disk = fresh(tmp_path / "l3", 8 * SEGMENT)
    disk.write(items(PLAIN, 0, 100))
    disk.close()
    used = du(tmp_path / "l3")
    again = fresh(tmp_path / "l3", 3 * SEGMENT)
    assert 0 <= again.stats().bytes_files - used <= 4096
    dropped = 0
    while (oldest := again.overfull(8 * KIB)) is not None:
        again.drop(oldest)
        dropped += 1
    assert dropped > 1
    assert again.stats().bytes_files < 3 * SEGMENT
    assert min(again.write(items(PLAIN, 0, 1))) >= 0
    again.close()


def test_a_block_that_no_segment_takes(tmp_path: Path) -> None:
    info = plain("large", (SEGMENT,))
    disk = fresh(tmp_path / "l3")
    assert not disk.keeps(info)
    assert disk.keeps(PLAIN)
    places = disk.write([*items(PLAIN, 0, 1), item(info, name(1))])
    assert places[0] >= 0
    assert places[1] == -1
    assert disk.stats().refused == 1
    disk.close()


def test_a_namespace_in_another_form(tmp_path: Path) -> None:
    """It cannot be in the same segment, as both have one name in its footer."""
    disk = fresh(tmp_path / "l3")
    places = disk.write([*items(PLAIN, 0, 1), item(replace(PLAIN, chunk_nbytes=(9,)), name(1))])
    assert places[0] >= 0
    assert places[1] == -1
    disk.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 2 * MIB - 1, "segment_nbytes": MIB}, "at least two, 2097152 bytes"),
        ({"capacity": MIB, "segment_nbytes": 64 * KIB}, "they have 131072 to"),
        ({"capacity": 1 << 40, "segment_nbytes": (1 << 32) + 1}, "to 4294967296"),
        ({"capacity": 1 << 40, "fsync": "always"}, "never, batch or interval"),
    ],
)
def test_sizes_that_cannot_be(tmp_path: Path, options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Disk(tmp_path / "l3", **options)
    assert not (tmp_path / "l3").exists()


# -- the directory


def test_the_directory_is_made_and_is_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        disk = fresh(tmp_path / "l3")
        disk.write(items(PLAIN, 0, 40))
    finally:
        os.umask(old)
    assert (tmp_path / "l3").stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "l3").iterdir()} == {0o600}
    disk.close()
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        fresh(tmp_path / "nowhere" / "l3")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="is no directory"):
        fresh(tmp_path / "file")


def test_names_do_not_depend_on_what_clients_send(tmp_path: Path) -> None:
    labels = ["a" * 300, "../../etc/passwd", "x/y\n\u202e", "\U0001f600" * 128]
    disk = fresh(tmp_path / "l3")
    for label in labels:
        info = plain(label)
        [where] = disk.write([item(info, name(0))])
        assert get(disk, info, name(0), where) == expected(info, name(0))
    disk.close()
    assert names_in(tmp_path) == ["l3"]
    assert names_in(tmp_path / "l3") == [f"{0:016x}.hckv", "lock"]


_SECOND = """
import sys
from pathlib import Path
from hypercache.errors import ConfigError
from hypercache.store.disk import Disk
try:
    Disk(Path(sys.argv[1]), capacity=1 << 20, segment_nbytes=1 << 17)
except ConfigError as error:
    print(error)
"""


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    disk = fresh(tmp_path / "l3")
    [where] = disk.write(items(PLAIN, 0, 1))
    child = subprocess.run(
        [sys.executable, "-c", _SECOND, str(tmp_path / "l3")], capture_output=True, text=True, check=True
    )
    assert f"{tmp_path / 'l3'} is in use by process {os.getpid()};" in child.stdout
    with pytest.raises(ConfigError, match="in use"):
        fresh(tmp_path / "l3")
    assert get(disk, PLAIN, name(0), where) == expected(PLAIN, name(0))
    disk.close()
    fresh(tmp_path / "l3").close()


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "l3"
    path.mkdir()
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious" * 1000)
    (path / "notes.txt").write_text("mine")
    (path / "0.hckv").write_bytes(b"short name")
    (path / f"{3:016X}.HCKV").write_bytes(b"upper case")
    (path / f"{(1 << 63):016x}.hckv").write_bytes(b"number too large")
    (path / f"{1:016x}.hckv").symlink_to(outside)
    (path / f"{2:016x}.hckv").symlink_to(path / f"{2:016x}.hckv")  # a loop
    (path / f"{0:016x}.hckv").mkdir()
    os.mkfifo(path / f"{4:016x}.hckv")
    before = names_in(path)
    disk = fresh(path)
    assert disk.stats().foreign == 8
    assert disk.stats().bytes_files <= 4096
    places = disk.write(items(PLAIN, 0, 120))  # their numbers are skipped
    assert {0, 1, 2, 4}.isdisjoint(map(number_of, places))
    assert get(disk, PLAIN, name(0), places[0]) == expected(PLAIN, name(0))
    disk.close(purge=True)
    assert names_in(path) == before
    assert outside.read_bytes() == b"precious" * 1000


def test_a_link_put_in_place_of_a_segment_is_not_followed(tmp_path: Path) -> None:
    disk = fresh(tmp_path / "l3")
    places = disk.write(items(PLAIN, 0, 40))
    file = tmp_path / "l3" / f"{number_of(places[0]):016x}.hckv"
    file.rename(tmp_path / "moved")
    file.symlink_to(tmp_path / "moved")
    assert get(disk, PLAIN, name(0), places[0]) is None
    disk.close()


def test_a_lock_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "l3").mkdir()
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "l3" / "lock").symlink_to(victim)
    with pytest.raises(DiskFault):
        fresh(tmp_path / "l3")
    assert victim.read_bytes() == b"precious"


def test_purge_leaves_nothing(tmp_path: Path) -> None:
    disk = fresh(tmp_path / "l3")
    disk.write(items(PLAIN, 0, 100))
    disk.close(purge=True)
    assert names_in(tmp_path / "l3") == []
    again = fresh(tmp_path / "l3")
    again.close()
    assert names_in(tmp_path / "l3") == ["lock"]


def test_an_end_without_writes_leaves_no_segment(tmp_path: Path) -> None:
    disk = fresh(tmp_path / "l3")
    bad = item(PLAIN, name(0))
    assert disk.write([replace(bad, crcs=[1, 2, 3])]) == [-1]
    disk.close()
    assert names_in(tmp_path / "l3") == ["lock"]


def test_after_the_end(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "l3", capacity=MIB, segment_nbytes=SEGMENT)
    with pytest.raises(DiskFault, match="not open"):
        disk.write([])
    list(disk.restore())
    [where] = disk.write(items(PLAIN, 0, 1))
    disk.close()
    disk.close()
    for call in (
        lambda: disk.write(items(PLAIN, 0, 1)),
        lambda: disk.remove(PLAIN.digest, None),
        lambda: disk.read(PLAIN, name(0), where, room(PLAIN)),
        lambda: disk.overfull(0),
    ):
        with pytest.raises(DiskFault, match="not open") as caught:
            call()
        assert caught.value.reason == "closed"
    assert disk.stats().open_files == 0


def test_open_files_are_bounded(tmp_path: Path) -> None:
    info = plain("large", (100 * KIB,))
    disk = fresh(tmp_path / "l3", 64 * MIB)
    places = disk.write(items(info, 0, 150))
    before = len(names_in(Path("/proc/self/fd")))
    for i, where in enumerate(places):
        assert get(disk, info, name(i), where) is not None
    assert disk.stats().segments == 150
    assert disk.stats().open_files <= 64 + 3
    assert len(names_in(Path("/proc/self/fd"))) - before <= 64
    disk.close()


def test_descriptors_that_run_out(tmp_path: Path) -> None:
    """Files that nobody reads just now are closed for those that are needed."""
    code = f"""
import os, resource
from tests.store.test_disk import *
info = plain("large", (100 * KIB,))
disk = fresh(Path({str(tmp_path / "l3")!r}), 64 * MIB)
places = disk.write(items(info, 0, 40))
free = os.dup(0) + 4
os.close(free - 4)
resource.setrlimit(resource.RLIMIT_NOFILE, (free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
for turn in range(2):
    for i, where in enumerate(places):
        assert get(disk, info, name(i), where) == expected(info, name(i))
    places += disk.write(items(info, 40 + 9 * turn, 9))
assert disk.stats().segments == 58
assert disk.stats().open_files <= 3 + 4
disk.close()
"""
    command = [sys.executable, "-c", code]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr


def test_a_mistake_of_the_caller_leaves_nothing_behind(tmp_path: Path) -> None:
    disk = fresh(tmp_path / "l3")
    bad = replace(item(PLAIN, name(1)), mark=3)
    with pytest.raises(TypeError):
        disk.write([item(PLAIN, name(0)), bad])
    [where] = disk.write(items(PLAIN, 2, 1))
    assert get(disk, PLAIN, name(2), where) == expected(PLAIN, name(2))
    assert disk.stats().records == 1
    disk.close()


def test_numbers_can_be_shown(tmp_path: Path) -> None:
    disk = fresh(tmp_path / "l3")
    [where] = disk.write(items(PLAIN, 0, 1))
    get(disk, PLAIN, name(0), where)
    stats = json.loads(json.dumps(asdict(disk.stats())))
    assert stats["records"] == stats["reads"] == 1
    assert stats["bytes_written"] == stats["bytes_read"] == record_nbytes(PLAIN)
    assert stats["capacity"] == 16 * MIB
    disk.close()
