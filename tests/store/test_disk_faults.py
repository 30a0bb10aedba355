"""Disks that are full, read-only or broken: it says so, nothing half-written stays, and it goes on."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from hypercache.store.disk import Disk, DiskFault, System
from hypercache.store.hckv_file import number_of

from .disk_kit import MIB, SEGMENT, crash, du, expected, fresh, get, items, name, names_in, plain, restored

PLAIN = plain()
SMALL = 4 * MIB  # of the file system that gets full


def mount(*arguments: str) -> bool:
    try:
        return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    if not mount("-t", "tmpfs", "-o", f"size={SMALL}", "none", str(path)):
        pytest.skip("no right to mount a file system that can get full")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Disk, first: int = 0) -> tuple[dict[int, int], DiskFault]:
    """Write until the disk refuses."""
    written: dict[int, int] = {}
    for i in range(first, first + 10_000, 7):
        try:
            places = disk.write(items(PLAIN, i, 7))
        except DiskFault as error:
            written |= dict(zip(range(i, i + 7), error.places, strict=False))
            return written, error
        written |= dict(zip(range(i, i + 7), places, strict=True))
    raise AssertionError("the disk took everything")


def check(disk: Disk, written: dict[int, int]) -> None:
    for i, where in written.items():
        assert get(disk, PLAIN, name(i), where) == expected(PLAIN, name(i))


def open_again(path: Path, written: dict[int, int], gone: Collection[int] = ()) -> None:
    """After a restart there is what was written, nothing else, and no file was put aside."""
    disk = Disk(path, capacity=64 * MIB, segment_nbytes=SEGMENT)
    live = restored(disk)
    assert live == {(PLAIN.digest, name(i)): where for i, where in written.items() if i not in gone}
    assert disk.stats().quarantined == disk.stats().damaged == 0
    check(disk, {i: where for i, where in written.items() if i not in gone})
    disk.close()


def test_a_disk_that_is_full(small: Path) -> None:
    disk = fresh(small / "l3", 64 * MIB)
    written, error = fill(disk)
    assert error.reason == "full"
    assert str(small / "l3") in str(error)
    assert "free space" in str(error)
    assert len(written) > 400
    check(disk, written)
    sizes = [file.stat().st_size for file in (small / "l3").glob("*.hckv")]
    assert all(size and size % 4096 == 0 for size in sizes)  # none is empty or ends inside a record
    assert disk.stats().bytes_files - 4096 <= du(small / "l3") + 4096 <= SMALL + 8192
    with pytest.raises(DiskFault):
        disk.write(items(PLAIN, 100_000, 40))
    first = min(map(number_of, written.values()))
    disk.drop(first)  # somebody makes room
    disk.write(items(PLAIN, 200_000, 5))
    crash(disk)
    kept = {i: where for i, where in written.items() if number_of(where) != first}
    again = Disk(small / "l3", capacity=64 * MIB, segment_nbytes=SEGMENT)
    live = restored(again)
    assert set(live) == {(PLAIN.digest, name(i)) for i in (*kept, *range(200_000, 200_005))}
    check(again, kept)
    again.close()


def test_a_removal_on_a_full_disk_says_so(small: Path) -> None:
    filler = small / "filler"
    filler.write_bytes(bytes(MIB // 2))
    disk = fresh(small / "l3", 64 * MIB)
    written, _ = fill(disk)
    with pytest.raises(DiskFault) as caught:
        disk.remove(PLAIN.digest, [name(i) for i in range(1000)])
    assert caught.value.reason == "full"
    check(disk, written)
    filler.unlink()
    disk.remove(PLAIN.digest, [name(i) for i in range(1000)])
    disk.close()
    open_again(small / "l3", written, range(1000))


def test_a_full_disk_at_the_start(small: Path) -> None:
    """A torn segment cannot get its footer, and is served all the same."""
    disk = fresh(small / "l3", 64 * MIB)
    places = dict(enumerate(disk.write(items(PLAIN, 0, 10))))
    crash(disk)
    with (small / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
        for _ in range(2000):
            filler.write(bytes(4096))
    disk = fresh(small / "l3", 64 * MIB)
    assert disk.stats().unsealed == 1
    check(disk, places)
    with pytest.raises(DiskFault):
        disk.write(items(PLAIN, 10, 1))
    assert len([one for one in names_in(small / "l3") if one.endswith(".hckv")]) == 1
    (small / "filler").unlink()
    places |= dict(enumerate(disk.write(items(PLAIN, 10, 1)), 10))
    disk.close()
    open_again(small / "l3", places)


def test_a_directory_that_is_read_only(small: Path) -> None:
    disk = fresh(small / "l3", 64 * MIB)
    places = dict(enumerate(disk.write(items(PLAIN, 0, 50))))
    disk.write(items(PLAIN, 50, 5))
    crash(disk)
    assert mount("-o", "remount,ro", str(small))
    disk = fresh(small / "l3", 64 * MIB)
    check(disk, places)
    assert disk.stats().unsealed == 1
    for call in (
        lambda: disk.write(items(PLAIN, 0, 1)),
        lambda: disk.remove(PLAIN.digest, None),
        lambda: disk.drop(0),
    ):
        with pytest.raises(DiskFault, match="make the directory writable") as caught:
            call()
        assert caught.value.reason == "read_only"
    check(disk, places)
    assert mount("-o", "remount,rw", str(small))
    assert min(disk.write(items(PLAIN, 0, 1))) >= 0
    disk.close()


def test_a_new_directory_where_nothing_can_be_made(small: Path) -> None:
    (small / "empty").mkdir()
    assert mount("-o", "remount,ro", str(small))
    for path in (small / "l3", small / "empty"):
        with pytest.raises(DiskFault, match="Read-only") as caught:
            fresh(path)
        assert caught.value.reason == "read_only"


def test_files_that_may_not_grow(tmp_path: Path) -> None:
    code = f"""
import resource
from pathlib import Path
from tests.store.test_disk_faults import *
most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most[1]))
disk = fresh(Path({str(tmp_path / "l3")!r}), 64 * MIB)
written, error = fill(disk)
assert error.reason == "full", error
assert "file size limit" in str(error)
check(disk, written)
resource.setrlimit(resource.RLIMIT_FSIZE, most)
written |= dict(enumerate(disk.write(items(PLAIN, 1000, 30)), 1000))
check(disk, written)
disk.close()
open_again(Path({str(tmp_path / "l3")!r}), written)
"""
    root = Path(__file__).parents[2]
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr


# -- what cannot be caused otherwise


class Broken(System):
    """Fails the calls that ``plan`` names, each time with the next error; None: works."""

    def __init__(self) -> None:
        self.plan: dict[str, list[int | None]] = {}
        for call in ("open", "preadv", "pwritev", "ftruncate", "fdatasync", "unlink"):
            setattr(self, call, self._wrap(call, getattr(os, call)))

    def _wrap(self, call, real):
        def wrapped(*arguments, **options):
            plan = self.plan.get(call)
            code = plan.pop(0) if plan else None
            if code == -1 and call == "pwritev":  # half of it, and then no more
                self.plan[call] = [errno.ENOSPC, *(plan or [])]
                fd, [view], offset = arguments
                return real(fd, [view[: view.nbytes // 2]], offset)
            if code:
                raise OSError(code, os.strerror(code))
            return real(*arguments, **options)

        return wrapped


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, -1])
@pytest.mark.parametrize("cut", [None, errno.EIO])
def test_a_write_that_fails(tmp_path: Path, code: int, cut: int | None) -> None:
    system = Broken()
    disk = fresh(tmp_path / "l3", 64 * MIB, system=system)
    written = dict(enumerate(disk.write(items(PLAIN, 0, 5))))
    system.plan = {"pwritev": [code], "ftruncate": [cut]}
    with pytest.raises(DiskFault) as caught:
        disk.write(items(PLAIN, 5, 5))
    want = {errno.EIO: "io", errno.EROFS: "read_only"}.get(code, "full")
    assert caught.value.reason == want
    assert caught.value.places == []
    assert du(tmp_path / "l3") <= disk.stats().bytes_files
    written |= dict(enumerate(disk.write(items(PLAIN, 10, 5)), 10))
    check(disk, written)
    crash(disk)
    again = Disk(tmp_path / "l3", capacity=64 * MIB, segment_nbytes=SEGMENT)
    live = restored(again)
    maybe = {(PLAIN.digest, name(i)) for i in range(5, 10)} if cut and code == -1 else set()
    assert set(live) - maybe == {(PLAIN.digest, name(i)) for i in written}
    for key, where in live.items():
        assert get(again, PLAIN, key[1], where) == expected(PLAIN, key[1])
    again.close()


def test_a_write_that_fails_after_a_segment_was_full(tmp_path: Path) -> None:
    """What is in the full segment is on the disk, and the caller is told where."""
    system = Broken()
    disk = fresh(tmp_path / "l3", 64 * MIB, system=system)
    system.plan = {"pwritev": [None, None, None, None, errno.EIO]}  # header, records, footer, header
    with pytest.raises(DiskFault) as caught:
        disk.write(items(PLAIN, 0, 40))
    written = dict(enumerate(caught.value.places))
    assert {number_of(where) for where in written.values()} == {0}
    assert 5 < len(written) < 40
    check(disk, written)
    left = [i for i in range(40) if i not in written]
    written |= dict(zip(left, disk.write(items(PLAIN, left[0], len(left))), strict=True))
    disk.close()
    open_again(tmp_path / "l3", written)


@pytest.mark.parametrize("call", ["open", "pwritev"])
def test_a_segment_that_cannot_be_begun_leaves_no_file(tmp_path: Path, call: str) -> None:
    system = Broken()
    disk = fresh(tmp_path / "l3", 64 * MIB, system=system)
    system.plan = {call: [errno.ENOSPC]}
    with pytest.raises(DiskFault):
        disk.write(items(PLAIN, 0, 1))
    assert names_in(tmp_path / "l3") == ["lock"]
    assert min(disk.write(items(PLAIN, 0, 1))) >= 0
    disk.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_footer_that_cannot_be_written(tmp_path: Path, code: int) -> None:
    system = Broken()
    disk = fresh(tmp_path / "l3", 64 * MIB, system=system)
    written = dict(enumerate(disk.write(items(PLAIN, 0, 5))))
    system.plan = {"pwritev": [code]}
    with pytest.raises(DiskFault):
        disk.close()
    open_again(tmp_path / "l3", written)


def test_a_sync_that_fails(tmp_path: Path) -> None:
    """The kernel reports it once, and what it could not write is lost: that file is not written to again."""
    system = Broken()
    disk = fresh(tmp_path / "l3", 64 * MIB, fsync="batch", system=system)
    disk.write(items(PLAIN, 0, 5))
    system.plan = {"fdatasync": [errno.EIO]}
    with pytest.raises(DiskFault) as caught:
        disk.write(items(PLAIN, 5, 5))
    assert caught.value.reason == "io"
    assert len(caught.value.places) == 5  # they can be read for now
    [where] = disk.write(items(PLAIN, 10, 1))
    assert number_of(where) == 1
    system.plan = {"fdatasync": [errno.EIO]}
    with pytest.raises(DiskFault):
        disk.remove(PLAIN.digest, [name(0)])
    disk.remove(PLAIN.digest, [name(0)])
    disk.close()
    again = Disk(tmp_path / "l3", capacity=64 * MIB, segment_nbytes=SEGMENT)
    assert set(restored(again)) == {(PLAIN.digest, name(i)) for i in range(1, 11)}
    again.close()


def test_a_read_that_fails(tmp_path: Path) -> None:
    system = Broken()
    disk = fresh(tmp_path / "l3", 64 * MIB, system=system)
    places = disk.write(items(PLAIN, 0, 2))
    system.plan = {"preadv": [errno.EIO]}
    with pytest.raises(DiskFault) as caught:
        get(disk, PLAIN, name(0), places[0])
    assert caught.value.reason == "io"
    assert get(disk, PLAIN, name(0), places[0]) == expected(PLAIN, name(0))
    system.plan = {"preadv": [errno.EIO]}
    moved = disk.move(places)
    assert moved[0] == -1
    assert get(disk, PLAIN, name(1), moved[1]) == expected(PLAIN, name(1))
    disk.close()


def test_a_segment_that_cannot_be_read_at_the_start(tmp_path: Path) -> None:
    disk = fresh(tmp_path / "l3", 64 * MIB)
    places = dict(enumerate(disk.write(items(PLAIN, 0, 60))))
    disk.close()
    system = Broken()
    system.plan = {"preadv": [errno.EIO]}  # the header of the first
    disk = Disk(tmp_path / "l3", capacity=64 * MIB, segment_nbytes=SEGMENT, system=system)
    live = restored(disk)
    assert live == {(PLAIN.digest, name(i)): where for i, where in places.items() if number_of(where) != 0}
    assert disk.stats().unreadable == 1
    assert disk.stats().quarantined == 0
    disk.drop(0)  # it takes room, and goes as any other does
    assert f"{0:016x}.hckv" not in names_in(tmp_path / "l3")
    disk.close()


def test_a_file_that_cannot_be_deleted(tmp_path: Path) -> None:
    system = Broken()
    disk = fresh(tmp_path / "l3", 64 * MIB, system=system)
    places = disk.write(items(PLAIN, 0, 60))
    before = disk.stats().bytes_files
    system.plan = {"unlink": [errno.EACCES]}
    with pytest.raises(DiskFault):
        disk.drop(0)
    assert disk.stats().bytes_files == before
    assert get(disk, PLAIN, name(0), places[0]) == expected(PLAIN, name(0))
    disk.drop(0)
    assert disk.stats().bytes_files < before
    disk.close()
