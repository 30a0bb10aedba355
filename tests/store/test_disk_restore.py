"""What a start makes of files that are torn, damaged, copied or of another time."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from pathlib import Path

import pytest

from hypercache.store.disk import Damaged, Disk
from hypercache.store.hckv import HckvError
from hypercache.store.hckv_file import Contents, footer_nbytes, number_of, offset_of, segment_header

from .disk_kit import (
    MIB,
    SEGMENT,
    coded,
    crash,
    du,
    expected,
    fresh,
    get,
    items,
    name,
    names_in,
    plain,
    record_nbytes,
    restored,
)
from .hckv_kit import DATA, attacks

PLAIN = plain()
RECORD = record_nbytes(PLAIN)
CAPACITY = 64 * MIB
ATTACKS = attacks()


def opened(path: Path, capacity: int = CAPACITY) -> tuple[Disk, dict[tuple[bytes, bytes], int]]:
    disk = Disk(path, capacity=capacity, segment_nbytes=SEGMENT)
    return disk, restored(disk)


def segment(path: Path, number: int) -> Path:
    return path / f"{number:016x}.hckv"


def cut(path: Path, nbytes: int) -> None:
    """Take so many bytes off a file's end."""
    os.truncate(path, path.stat().st_size - nbytes)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (was,) = file.read(1)
        file.seek(offset)
        file.write(bytes([was ^ 0x40]))


def check(disk: Disk, live: dict[tuple[bytes, bytes], int], info=PLAIN) -> int:
    """How many of the blocks can be read; those that can are the right bytes."""
    found = 0
    for (space, digest), where in live.items():
        assert space == info.digest
        chunks = get(disk, info, digest, where)
        if chunks is not None:
            assert chunks == expected(info, digest)
            found += 1
    return found


def footer_of(path: Path) -> Contents:
    data = path.read_bytes()
    return Contents.read(data[-footer_nbytes(data[-64:], len(data)) :], len(data), int(path.stem, 16))


@pytest.mark.parametrize("rest", [0, 1, 100, 4096, RECORD - 16, RECORD - 1])
def test_a_torn_end_is_cut_and_sealed(tmp_path: Path, rest: int) -> None:
    """A crash in the middle of the last record, at every kind of place in it."""
    disk = fresh(tmp_path)
    disk.write(items(PLAIN, 0, 8))
    crash(disk)
    cut(segment(tmp_path, 0), RECORD - rest)
    disk, live = opened(tmp_path)
    assert set(live) == {(PLAIN.digest, name(i)) for i in range(7)}
    assert check(disk, live) == 7
    assert disk.stats().torn_bytes == rest
    assert disk.stats().damaged == disk.stats().quarantined == 0
    assert len(footer_of(segment(tmp_path, 0))) == 7
    [where] = disk.write(items(PLAIN, 7, 1))
    assert number_of(where) == 1  # nothing is written behind what a crash has left
    disk.close()
    disk, live = opened(tmp_path)
    assert check(disk, live) == 8
    assert disk.stats().torn_bytes == 0
    disk.close()


def test_a_torn_end_with_old_bytes_behind(tmp_path: Path) -> None:
    """A file system may give a file its length before its bytes."""
    disk = fresh(tmp_path)
    disk.write(items(PLAIN, 0, 3))
    crash(disk)
    with segment(tmp_path, 0).open("ab") as file:
        file.write(bytes(3 * RECORD) + random.Random(1).randbytes(5000))
    disk, live = opened(tmp_path)
    assert check(disk, live) == 3
    assert disk.stats().torn_bytes == 3 * RECORD + 5000
    disk.close()


def test_a_segment_without_records_goes(tmp_path: Path) -> None:
    disk = fresh(tmp_path)
    disk.write(items(PLAIN, 0, 3))
    crash(disk)
    os.truncate(segment(tmp_path, 0), 4096)
    disk, live = opened(tmp_path)
    assert not live
    assert disk.stats().quarantined == 0
    assert names_in(tmp_path) == ["lock"]
    disk.close()


@pytest.mark.parametrize("sealed", [True, False])
def test_damage_in_the_middle_costs_the_records_that_have_it(tmp_path: Path, sealed: bool) -> None:
    disk = fresh(tmp_path)
    places = disk.write(items(PLAIN, 0, 9))
    disk.close() if sealed else crash(disk)
    for i, at in ((2, 10), (4, 2000), (6, RECORD - 10)):  # header, payload, commit marker
        flip(segment(tmp_path, 0), offset_of(places[i]) + at)
    disk, live = opened(tmp_path)
    assert {(PLAIN.digest, name(i)) for i in (0, 1, 3, 5, 7, 8)} <= set(live)
    assert check(disk, live) == 6
    assert disk.stats().damaged == 3
    disk.close()


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize("at", [0, 8, 20, 30, 4093])
def test_a_damaged_segment_header(tmp_path: Path, at: int, others: int, sealed: bool) -> None:
    """Its records say whose they are. The directory keeps its id where that was the only file."""
    disk = fresh(tmp_path)
    disk.write(items(PLAIN, 0, 5))
    crash(disk)
    flip(segment(tmp_path, 0), at)
    if sealed:
        opened(tmp_path)[0].close()
    for i in range(others):
        disk = fresh(tmp_path)
        disk.write(items(PLAIN, 10 + i, 1))
        disk.close()
    disk, live = opened(tmp_path)
    assert len(live) == check(disk, live) == 5 + others
    moved = disk.move(list(live.values()))
    disk.drop(0)
    live = dict(zip(live, moved, strict=True))
    assert check(disk, live) == 5 + others
    disk.close()
    disk, again = opened(tmp_path)
    assert again == live
    disk.close()


def test_header_and_first_record_damaged(tmp_path: Path) -> None:
    """Alone, nothing tells its records from what a client stored. Beside others, their id does."""
    disk = fresh(tmp_path / "a")
    places = disk.write(items(PLAIN, 0, 5))
    crash(disk)
    for at in (0, offset_of(places[0])):
        flip(segment(tmp_path / "a", 0), at)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    disk, live = opened(tmp_path / "a")
    assert not live
    assert disk.stats().quarantined == 1
    assert names_in(tmp_path / "a") == [f"{0:016x}.hckv.bad", "lock"]
    disk.close()

    flip(segment(tmp_path / "b", 0), 0)
    disk = fresh(tmp_path / "b")
    disk.write(items(PLAIN, 5, 1))
    disk.close()
    flip(segment(tmp_path / "b", 0), 0)
    disk, live = opened(tmp_path / "b")
    assert len(live) == check(disk, live) == 5
    assert disk.stats().quarantined == 0
    disk.close()


def test_a_damaged_footer_is_made_anew(tmp_path: Path) -> None:
    disk = fresh(tmp_path)
    disk.write(items(PLAIN, 0, 5))
    disk.remove(PLAIN.digest, [name(0), name(1)])
    disk.close()
    before = segment(tmp_path, 0).read_bytes()
    flip(segment(tmp_path, 0), len(before) - 4000)
    disk, live = opened(tmp_path)
    assert len(live) == check(disk, live) == 3
    assert segment(tmp_path, 0).read_bytes() == before
    disk.close()


def test_a_hundred_corrupt_files_do_not_stop_the_start(tmp_path: Path) -> None:
    info = plain("single", (100_000,))  # a segment each
    disk = fresh(tmp_path)
    disk.write(items(info, 0, 120))
    disk.close()
    first = 4096 + 208
    whole = segment(tmp_path, 0).stat().st_size
    damages = [
        lambda path: os.truncate(path, 0),
        lambda path: os.truncate(path, 100),
        lambda path: os.truncate(path, 4096 + 100),
        lambda path: os.truncate(path, 50_000),
        lambda path: cut(path, 1),
        lambda path: (cut(path, 4096), flip(path, 4096 + 30)),
        lambda path: (flip(path, 0), flip(path, 4096), flip(path, whole - 30)),
        lambda path: flip(path, first + 40_000),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), path.symlink_to(path)),
    ]
    for number in range(100):
        damages[number % 10](segment(tmp_path, number))
    disk, live = opened(tmp_path)
    readable = check(disk, live, info)
    # cut by a byte: found by a scan. A payload's damage is found when it is read.
    assert readable == 20 + 10
    stats = disk.stats()
    assert stats.quarantined == 60
    assert stats.foreign == 20
    assert stats.damaged == 10
    bad = [one for one in names_in(tmp_path) if one.endswith(".bad")]
    assert 0 < len(bad) <= 8
    assert (
        0
        <= stats.bytes_files
        - sum(file.lstat().st_size for file in tmp_path.iterdir() if file.is_file() and not file.is_symlink())
        <= 4096
    )
    [where] = disk.write(items(info, 500, 1))
    assert get(disk, info, name(500), where) == expected(info, name(500))
    disk.close()


def test_quarantine_is_bounded_in_bytes_and_goes_before_blocks(tmp_path: Path) -> None:
    for number in range(5):
        segment(tmp_path, number).write_bytes(os.urandom(100_000))
    disk, live = opened(tmp_path, 32 * SEGMENT)  # 1/16 of it: two such files
    assert not live
    assert disk.stats().quarantined == 5
    assert names_in(tmp_path) == [f"{number:016x}.hckv.bad" for number in (3, 4)] + ["lock"]
    assert disk.stats().bytes_files >= 200_000
    disk.close()
    disk, _ = opened(tmp_path, 2 * SEGMENT)  # and less is allowed now
    assert disk.overfull(4096) is None
    assert names_in(tmp_path) in ([f"{4:016x}.hckv.bad", "lock"], ["lock"])
    assert min(disk.write(items(PLAIN, 0, 3))) >= 0
    disk.close(purge=True)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("stem", ATTACKS)
def test_attack_files(tmp_path: Path, stem: str) -> None:
    """Each alone in a directory: the start succeeds, and the intact records are let through, no others."""
    attack = ATTACKS[stem]
    shutil.copy(DATA / f"{stem}.hckv", tmp_path / f"{attack.stem or f'{7:016x}'}.hckv")
    disk, live = opened(tmp_path)
    served = set()
    for (_, digest), where in live.items():
        with contextlib.suppress(Damaged, HckvError):
            record = disk._reader.copy(where, lambda record: memoryview(bytearray(record.nbytes)))
            assert record is not None
            served |= {digest} & {record.digest}
    if attack.stem:  # somebody's copy
        assert not served
        assert disk.stats().foreign == 1
    elif stem == "footer-disagrees":  # a record of another block than it says
        assert served < set(attack.found)
    else:
        assert served == set(attack.found)
    disk.close()


def test_a_copy_of_a_segment_brings_nothing_back(tmp_path: Path) -> None:
    """Somebody has saved a file, and puts it back under another name after a removal."""
    disk = fresh(tmp_path / "l3")
    disk.write(items(PLAIN, 0, 5))
    disk.close()
    shutil.copy(segment(tmp_path / "l3", 0), tmp_path / "copy")
    disk = fresh(tmp_path / "l3")
    disk.remove(PLAIN.digest, None)
    disk.close()
    shutil.copy(tmp_path / "copy", segment(tmp_path / "l3", 9))
    disk, live = opened(tmp_path / "l3")
    assert not live
    assert disk.stats().foreign == 1
    disk.close(purge=True)
    assert names_in(tmp_path / "l3") == [f"{9:016x}.hckv"]


def test_a_segment_of_another_directory_is_foreign(tmp_path: Path) -> None:
    for path in ("a", "b"):
        disk = fresh(tmp_path / path)
        disk.write(items(plain(path), 0, 40))
        disk.close()
    last = max(number for number in range(9) if segment(tmp_path / "a", number).exists())
    os.truncate(segment(tmp_path / "b", 0), 0)
    segment(tmp_path / "b", 0).unlink()
    shutil.copy(segment(tmp_path / "a", last), segment(tmp_path / "b", 0))
    assert len([one for one in names_in(tmp_path / "b") if one.endswith(".hckv")]) > 2
    disk, live = opened(tmp_path / "b")
    assert {space for space, _ in live} == {plain("b").digest}
    assert disk.stats().foreign == 1
    disk.close()


def test_a_version_of_the_future(tmp_path: Path) -> None:
    disk = fresh(tmp_path)
    disk.write(items(PLAIN, 0, 40))
    disk.close()
    data = bytearray(segment(tmp_path, 1).read_bytes())
    data[8] = 2
    segment(tmp_path, 7).write_bytes(bytes(data[:4096]) + os.urandom(9000))
    disk, live = opened(tmp_path)
    assert check(disk, live) == 40
    assert disk.stats().quarantined == 1
    disk.close()


def test_numbers_start_behind_the_last_that_counts(tmp_path: Path) -> None:
    segment(tmp_path, (1 << 39) - 1).write_bytes(b"junk")
    segment(tmp_path, (1 << 39) - 2).write_bytes(segment_header((1 << 39) - 2, bytes(16)))
    disk = fresh(tmp_path)
    [where] = disk.write(items(PLAIN, 0, 1))
    assert number_of(where) == 0
    disk.close()


def test_sequences_never_come_twice(tmp_path: Path) -> None:
    """Not even those of records that damage hides for now."""
    disk = fresh(tmp_path)
    disk.write(items(PLAIN, 0, 5))
    crash(disk)
    saved = segment(tmp_path, 0).read_bytes()
    for offset in range(4096 + 2 * RECORD, len(saved), RECORD):
        flip(segment(tmp_path, 0), offset)
    disk = fresh(tmp_path)
    disk.write(items(PLAIN, 10, 5))
    disk.close()
    segment(tmp_path, 0).write_bytes(saved)
    disk, live = opened(tmp_path)  # `restored` checks that they rise
    assert len(live) == check(disk, live) == 10
    disk.close()


@pytest.mark.parametrize("seed", range(12))
def test_fuzz(tmp_path: Path, seed: int) -> None:
    """Bytes flip, pieces go, come twice or are swapped: each read gives the right bytes or none."""
    rng = random.Random(seed)
    infos = (PLAIN, coded())
    disk = fresh(tmp_path)
    for i in range(0, 60, 6):
        disk.write(items(infos[i % 2], i, 6))
    disk.remove(PLAIN.digest, [name(0)])
    disk.close() if seed % 2 else crash(disk)
    for _ in range(rng.randrange(1, 12)):
        path = rng.choice(sorted(tmp_path.glob("*.hckv")))
        data = bytearray(path.read_bytes())
        at = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(0, len(data), 4096)
        match rng.randrange(5):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + rng.randrange(1, 9000)] = b""
            case 2:
                data[at : at + 4096] = rng.randbytes(4096)
            case 3:
                other = rng.randrange(0, len(data), 4096)
                data[at : at + 4096] = data[other : other + 4096]
            case 4:
                data[at:at] = data[4096 : 4096 + RECORD]
        path.write_bytes(data)
    for turn in range(2):
        disk, live = opened(tmp_path)
        for (space, digest), where in live.items():
            info = next(one for one in infos if one.digest == space)
            chunks = get(disk, info, digest, where)
            assert chunks is None or chunks == expected(info, digest)
        disk.move(list(live.values()))
        places = disk.write(items(PLAIN, 1000 + turn, 1))
        assert get(disk, PLAIN, name(1000 + turn), places[0]) == expected(PLAIN, name(1000 + turn))
        disk.close()
    assert du(tmp_path) <= disk.stats().bytes_files
