"""The directory of L3: its lock, its names, its open files, and what faults of a disk are called.

Every name is resolved in the directory that was locked, and no link is followed: whoever else may write there
cannot make us touch a file elsewhere. Only what has one of our names and is a regular file is ours.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from hypercache.errors import ConfigError, HyperCacheError
from hypercache.store.hckv import MAX_NUMBER

Reason = Literal["full", "io", "read_only", "closed"]

OPEN_FILES: Final = 64  # segments that are open for reading at the same time
LOCK: Final = "lock"
_NAME = re.compile(r"([0-9a-f]{16})\.hckv(\.bad)?")
_IOV_MAX: Final = 1024
_REASONS: dict[int, Reason] = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EFBIG: "full",
    errno.EROFS: "read_only",
    errno.EACCES: "read_only",
    errno.EPERM: "read_only",
}
_REMEDIES: dict[Reason, str] = {
    "full": "free space there, raise the quota or the file size limit, or lower the capacity of L3",
    "io": "look into the kernel's log and check the disk",
    "read_only": "make the directory writable for this process",
    "closed": "open it again",
}


class DiskFault(HyperCacheError):
    """The directory does not do what is asked of it now; later it may.

    reason: why. places: of a write, those of its first records, as far as they are on the disk nevertheless.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.places: list[int] = []


class Damaged(HyperCacheError):
    """This record is not what was written, or is there no more: its block is a miss."""


def fault(path: Path, error: OSError) -> DiskFault:
    reason = _REASONS.get(error.errno or 0, "io")
    what = error.strerror or str(error)
    return DiskFault(reason, f"L3, {path}: {what}; {_REMEDIES[reason]}")


def closed(path: Path) -> DiskFault:
    return DiskFault("closed", f"L3 directory {path} is not open; {_REMEDIES['closed']}")


class System:
    """The calls that a disk can fail."""

    open = staticmethod(os.open)
    preadv = staticmethod(os.preadv)
    pwritev = staticmethod(os.pwritev)
    ftruncate = staticmethod(os.ftruncate)
    fdatasync = staticmethod(os.fdatasync)
    fsync = staticmethod(os.fsync)
    unlink = staticmethod(os.unlink)


@dataclass(eq=False, slots=True)
class Handle:
    """A segment, open for reading. ``doomed``: to be closed when nobody reads."""

    number: int
    fd: int
    users: int = 0
    doomed: bool = False


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies in the directory: bytes of our segments and of our quarantined files, by number."""

    segments: dict[int, int]
    bad: dict[int, int]
    foreign: int


def segment_name(number: int, bad: bool = False) -> str:
    return f"{number:016x}.hckv" + (".bad" if bad else "")


class Files:
    """The locked directory. Any thread may read; all else is for the one that writes.

    Raises ConfigError if it cannot be ours, DiskFault if the disk does not let us.
    """

    def __init__(self, path: Path, system: System, most: int = OPEN_FILES) -> None:
        self.path = path
        self._most = most  # segments open for reading
        self.system = system
        self._handles: OrderedDict[int, Handle] = OrderedDict()
        self._count = 0  # handles that are open, doomed ones included
        self._mutex = threading.Lock()
        self._closed = False
        try:
            path.mkdir(0o700, exist_ok=True)
            self._dir = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ConfigError(f"L3 directory {path}: {path.parent} does not exist; make it first") from None
        except (NotADirectoryError, FileExistsError):
            raise ConfigError(f"L3 directory {path} is no directory; name another") from None
        except OSError as error:
            raise fault(path, error) from error
        try:
            self._lock = self._locked()
        except BaseException:
            os.close(self._dir)
            raise

    def _locked(self) -> int:
        while True:
            try:
                fd = self._open_lock()
            except OSError as error:
                raise fault(self.path, error) from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found, ours = os.stat(LOCK, dir_fd=self._dir, follow_symlinks=False), os.fstat(fd)
            except BlockingIOError:
                holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
                os.close(fd)
                raise ConfigError(
                    f"L3 directory {self.path} is in use by process {holder}; give each server its own"
                ) from None
            except FileNotFoundError:  # its last owner has just purged it
                os.close(fd)
                continue
            except OSError as error:
                os.close(fd)
                raise fault(self.path, error) from error
            if (found.st_dev, found.st_ino) != (ours.st_dev, ours.st_ino):
                os.close(fd)
                continue
            with contextlib.suppress(OSError):  # the lock counts, the number is for people
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            return fd

    def _open_lock(self) -> int:
        flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            return os.open(LOCK, os.O_RDWR | os.O_CREAT | flags, 0o600, dir_fd=self._dir)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES):
                raise
            try:  # what a read-only directory holds can still be served
                return os.open(LOCK, os.O_RDONLY | flags, dir_fd=self._dir)
            except FileNotFoundError:
                raise error from None

    # -- names

    def list(self) -> Listing:
        """Raises DiskFault."""
        found = Listing({}, {}, 0)
        foreign = 0
        try:
            with os.scandir(self._dir) as entries:
                for entry in entries:
                    match = _NAME.fullmatch(entry.name)
                    regular = entry.is_file(follow_symlinks=False)
                    if match is None or not regular or int(match[1], 16) > MAX_NUMBER:
                        foreign += entry.name != LOCK or not regular
                        continue
                    into = found.bad if match[2] else found.segments
                    into[int(match[1], 16)] = entry.stat(follow_symlinks=False).st_size
        except OSError as error:
            raise fault(self.path, error) from error
        return Listing(dict(sorted(found.segments.items())), dict(sorted(found.bad.items())), foreign)

    def create(self, number: int) -> int:
        """A new segment, open for writing. Raises FileExistsError, or another OSError."""
        with self._mutex:
            return self._open(segment_name(number), os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def open(self, number: int, flags: int = os.O_RDONLY) -> int:
        """A segment that is there. Raises FileNotFoundError if it is no regular file any more, or OSError."""
        with self._mutex:
            return self._open_regular(number, flags)

    def _open_regular(self, number: int, flags: int) -> int:
        fd = self._open(segment_name(number), flags)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "no regular file", segment_name(number))
        return fd

    def _open(self, name: str, flags: int) -> int:
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        while True:
            try:
                return self.system.open(name, flags, 0o600, dir_fd=self._dir)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise FileNotFoundError(errno.ENOENT, "a link lies there", name) from None
                idle = next((one for one in self._handles.values() if not one.users), None)
                if error.errno not in (errno.EMFILE, errno.ENFILE) or idle is None:
                    raise
                self._doom(idle)  # connections took the rest

    def quarantine(self, number: int) -> None:
        """Raises OSError."""
        old, new = segment_name(number), segment_name(number, bad=True)
        os.rename(old, new, src_dir_fd=self._dir, dst_dir_fd=self._dir)

    def unlink(self, name: str) -> None:
        """Raises OSError; not where the file is gone already."""
        with contextlib.suppress(FileNotFoundError):
            self.system.unlink(name, dir_fd=self._dir)

    def sync(self) -> None:
        """Names are on the disk then. Raises OSError."""
        self.system.fsync(self._dir)

    # -- files that are read

    def acquire(self, number: int) -> Handle:
        """To be released. Raises OSError, FileNotFoundError where there is nothing to read; DiskFault."""
        with self._mutex:
            if self._closed:
                raise closed(self.path)
            handle = self._handles.get(number)
            if handle is None:
                handle = Handle(number, self._open_regular(number, os.O_RDONLY))
                self._handles[number] = handle
                self._count += 1
                self._trim()
            else:
                self._handles.move_to_end(number)
            handle.users += 1
            return handle

    def _trim(self) -> None:
        while len(self._handles) > self._most:
            self._doom(next(iter(self._handles.values())))

    def release(self, handle: Handle) -> None:
        with self._mutex:
            handle.users -= 1
            if handle.doomed and not handle.users:
                self._close(handle)

    def forget(self, number: int) -> None:
        """Whoever reads this segment may go on to."""
        with self._mutex:
            handle = self._handles.get(number)
            if handle is not None:
                self._doom(handle)

    def _doom(self, handle: Handle) -> None:
        del self._handles[handle.number]
        handle.doomed = True
        if not handle.users:
            self._close(handle)

    def _close(self, handle: Handle) -> None:
        self._count -= 1
        os.close(handle.fd)

    @property
    def open_files(self) -> int:
        """The directory and its lock included, the segment that is written not."""
        return self._count + 2

    @property
    def most_open(self) -> int:
        """Beside those that are still being read although their turn is over."""
        return self._most + 2

    def close(self, purge: bool) -> None:
        """Lets go of the lock; with ``purge``, of its file too."""
        with self._mutex:
            self._closed = True
            for handle in list(self._handles.values()):
                self._doom(handle)
        if purge:
            with contextlib.suppress(OSError):
                os.unlink(LOCK, dir_fd=self._dir)
        os.close(self._lock)
        os.close(self._dir)


# -- whole reads and writes


def read_into(system: System, fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Fill ``views`` one after the other from ``offset`` on. Returns how many bytes there were: fewer only at
    the file's end. Raises OSError."""
    return _transfer(system.preadv, fd, views, offset)


def write_from(system: System, fd: int, views: Sequence[memoryview], offset: int) -> None:
    """Write all of ``views``, one after the other. Raises OSError."""
    if _transfer(system.pwritev, fd, views, offset) != sum(view.nbytes for view in views):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _transfer(
    call: Callable[[int, list[memoryview], int], int], fd: int, views: Sequence[memoryview], offset: int
) -> int:
    left = list(views)
    first = moved = 0
    while first < len(left):
        got = call(fd, left[first : first + _IOV_MAX] if first or len(left) > _IOV_MAX else left, offset)
        if got <= 0:
            break
        moved += got
        offset += got
        while got:
            view = left[first]
            if got < view.nbytes:
                left[first] = view.cast("B")[got:]
                break
            got -= view.nbytes
            first += 1
    return moved


def read_at(system: System, fd: int, offset: int, nbytes: int) -> bytes:
    """Fewer bytes only at the file's end. Raises OSError."""
    out = bytearray(nbytes)
    got = read_into(system, fd, [memoryview(out)], offset)
    return bytes(out[:got])
