"""The head of L3: the one segment that is being written, and how it is begun, cut back and sealed.

Records are made in a buffer, or around what lies in memory, and one write takes many of them. What the file
is known to hold grows when a call is over (:meth:`Head.commit`): a fault before that cuts the file back to
where the call began.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from hypercache.errors import HyperCacheError
from hypercache.store.disk_files import Files, segment_name, write_from
from hypercache.store.hckv import ALIGN, MAX_NUMBER, block_nbytes, payload_offset
from hypercache.store.hckv_file import ENTRY, LOCATOR_NBYTES, Contents, place, segment_header
from hypercache.store.namespace import NamespaceInfo

BUFFER_NBYTES: Final = 8 << 20  # written at once
FRAME_NBYTES: Final = 2 * ALIGN + LOCATOR_NBYTES  # of a segment: its header, and what rounds its footer up
_REMOVED_NBYTES: Final = 33  # of a footer, for a digest that a REMOVE names

Fsync = Literal["never", "batch", "interval"]
Enter = Callable[[Contents, int, int], None]  # tells contents about a record: its offset and sequence


@dataclass(eq=False, slots=True)
class Segment:
    """A file of ours. nbytes: its length. store: the id that its records have."""

    number: int
    nbytes: int
    store: bytes | None = None
    records: int = 0


@dataclass(slots=True)
class Counts:
    """What was done to the disk since the start."""

    writes: int = 0
    bytes_written: int = 0
    fsyncs: int = 0


class _Open:
    """The segment that is being written."""

    __slots__ = ("contents", "end", "entered", "fd", "footer", "segment", "spaces", "synced")

    def __init__(self, segment: Segment, fd: int) -> None:
        self.segment = segment
        self.fd = fd
        self.contents = Contents()
        self.end = self.contents.end  # of what was written
        self.footer = FRAME_NBYTES - ALIGN  # bytes that it has at most
        self.spaces: dict[bytes, NamespaceInfo] = {}
        self.synced = False  # all that was written is on the disk
        self.entered = False  # and so is the file's name


class Head:
    """segments: all of the directory's, by number; the open one is among them.

    Methods raise OSError. After one, what was made since the last :meth:`commit` is gone, and the next call
    may be tried: in this segment if it could be cut back, else in a new one.
    """

    def __init__(
        self,
        files: Files,
        segments: dict[int, Segment],
        *,
        store: bytes,
        sequence: int,
        number: int,
        segment_nbytes: int,
        fsync: Fsync,
        interval_s: float,
    ) -> None:
        self.store = store
        self.counts = Counts()
        self._files = files
        self._system = files.system
        self._segments = segments
        self._sequence = sequence
        self._next = number
        self._segment_nbytes = segment_nbytes
        self._fsync = fsync
        self._interval_s = interval_s
        self._last_sync = time.monotonic()
        self._buffer = _memory(BUFFER_NBYTES)
        self._filled = 0
        self._gathered: list[memoryview] = []  # what is written before the buffer's bytes from ``_from`` on
        self._from = 0
        self._made: list[tuple[int, int, Enter]] = []  # since the last commit
        self._open: _Open | None = None

    @property
    def number(self) -> int:
        """Of the open segment, -1 if there is none."""
        return -1 if self._open is None else self._open.segment.number

    @property
    def contents(self) -> Contents | None:
        """What the open segment is known to hold."""
        return None if self._open is None else self._open.contents

    @property
    def reserved(self) -> int:
        """Bytes that are still to be written for what there is."""
        return 0 if self._open is None else self._filled + self._open.footer

    @property
    def sequence(self) -> int:
        """Of the record that is made next."""
        return self._sequence + 1

    def takes(self, info: NamespaceInfo) -> bool:
        """Whether a segment has room for a record of this namespace. HckvError: there can be none."""
        return FRAME_NBYTES + block_nbytes(info) + _in_footer(info, 0) <= self._segment_nbytes

    # -- records

    def cost(self, info: NamespaceInfo) -> int:
        """Bytes that a block's record adds to the files at most, beside what each new segment costs."""
        new = self._open is None or info.digest not in self._open.spaces
        return block_nbytes(info) + _in_footer(info if new else None, 0)

    def room(self, nbytes: int, info: NamespaceInfo | None, removed: int = 0) -> memoryview:
        """Where the next record is to be made. ``info``: of a block; ``removed``: digests of a REMOVE."""
        now = self._open
        if now is not None:
            known = None if info is None else now.spaces.get(info.digest)
            if known is not None and known is not info and known != info:
                raise HyperCacheError(f"namespace {known.label!r} has another form in this segment")
            footer = _in_footer(info if known is None else None, removed)
            if now.end + self._filled + nbytes + now.footer + footer > self._segment_nbytes:
                self.seal()
                now = None
        if now is None:
            now, footer = self._begin(), _in_footer(info, removed)
        if self._filled + nbytes > BUFFER_NBYTES:
            self._write()
        if nbytes > self._buffer.nbytes:
            self._buffer = _memory(nbytes)
        now.footer += footer
        if info is not None:
            now.spaces[info.digest] = info
        return self._buffer[self._filled : self._filled + nbytes]

    def made(self, nbytes: int, enter: Enter, start: int = 0, payload: Sequence[memoryview] = ()) -> int:
        """The record in the last :meth:`room` is complete. Returns its place.

        payload: bytes of it, from ``start`` on, that are not there but are written from where they lie."""
        assert self._open is not None
        if payload:
            first = self._filled + start
            self._gathered += [self._buffer[self._from : first], *payload]
            self._from = first + sum(part.nbytes for part in payload)
        offset = self._open.end + self._filled
        self._sequence += 1
        self._made.append((offset, self._sequence, enter))
        self._filled += nbytes
        return place(self._open.segment.number, offset)

    def _write(self) -> None:
        now = self._open
        if now is None or not self._filled:
            return
        nbytes = self._filled
        views = [*self._gathered, self._buffer[self._from : nbytes]]
        self._empty()
        now.synced = False
        write_from(self._system, now.fd, views, now.end)
        now.end += nbytes
        now.segment.nbytes = now.end
        self.counts.writes += 1
        self.counts.bytes_written += nbytes

    def _empty(self) -> None:
        self._gathered.clear()
        self._filled = self._from = 0

    def commit(self, durable: bool = False) -> None:
        """All that was made is written, and on the disk as far as was asked for or ``durable`` says."""
        self._write()
        self._enter()
        if self._buffer.nbytes > BUFFER_NBYTES:
            self._buffer = _memory(BUFFER_NBYTES)
        if durable:
            self.sync(names=True)
        elif self._fsync == "batch" or (
            self._fsync == "interval" and time.monotonic() - self._last_sync >= self._interval_s
        ):
            self.sync()

    def _enter(self) -> None:
        now = self._open
        if now is not None:
            for offset, sequence, enter in self._made:
                enter(now.contents, offset, sequence)
            now.segment.records = len(now.contents)
        self._made.clear()

    def known(self, number: int, offset: int) -> bool:
        """Whether a record there is committed."""
        return self._open is None or number != self.number or offset < self._open.contents.end

    def undo(self) -> None:
        """After an OSError: nothing that was not committed stays."""
        self._made.clear()
        self._empty()
        now = self._open
        if now is None:
            return
        try:
            self._system.ftruncate(now.fd, now.contents.end)
        except OSError:
            self._leave()
        else:
            now.end = now.segment.nbytes = now.contents.end

    # -- the file

    def _begin(self) -> _Open:
        while True:
            number = self._next
            if number > MAX_NUMBER:
                raise OSError(errno.ENOSPC, "no segment number is left; clear the directory")
            self._next += 1
            with contextlib.suppress(FileExistsError):
                fd = self._files.create(number)
                break
        now = _Open(Segment(number, ALIGN, self.store), fd)
        try:
            write_from(self._system, fd, [memoryview(segment_header(number, self.store))], 0)
            if self._fsync != "never":
                self._files.sync()
                now.entered = True
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                self._files.unlink(segment_name(number))
            raise
        self._segments[number] = now.segment
        self._open = now
        return now

    def seal(self) -> None:
        """The open segment gets its footer and is closed; an empty one goes. It stays without where the disk
        refuses: then a restart reads all its records."""
        self._write()
        self._enter()
        now = self._open
        if now is None:
            return
        try:
            if len(now.contents):
                write_footer(self._files, now.fd, now.segment, now.contents)
                self._synced(now)
            else:
                self._files.unlink(segment_name(now.segment.number))
                del self._segments[now.segment.number]
                self._files.forget(now.segment.number)
        finally:
            self._leave()

    def abandon(self) -> None:
        """The open segment is closed as it is."""
        self._made.clear()
        self._empty()
        self._leave()

    def _leave(self) -> None:
        """The open segment is not written to any more."""
        now, self._open = self._open, None
        if now is not None:
            with contextlib.suppress(OSError):
                now.segment.nbytes = os.fstat(now.fd).st_size
            os.close(now.fd)

    def sync(self, names: bool = False) -> None:
        """What was written is on the disk; with ``names``, whatever the policy, the file's name too."""
        now = self._open
        if now is None:
            return
        try:
            if not now.synced:
                self._synced(now)
            if names and not now.entered:
                self._files.sync()
                now.entered = True
        except OSError:
            self._leave()  # the kernel forgets what it could not write, and says so only once
            raise

    def _synced(self, now: _Open) -> None:
        self._system.fdatasync(now.fd)
        self.counts.fsyncs += 1
        now.synced = True
        self._last_sync = time.monotonic()


def _memory(nbytes: int) -> memoryview:
    """Whose pages cost nothing until they are used."""
    return np.empty(nbytes, np.uint8).data


def _in_footer(info: NamespaceInfo | None, removed: int) -> int:
    """What a record adds to its segment's footer at most; ``info``: if its namespace is new there."""
    return ENTRY.itemsize + _REMOVED_NBYTES * removed + (0 if info is None else payload_offset(info))


def write_footer(files: Files, fd: int, segment: Segment, contents: Contents) -> None:
    """Behind the last record. Raises OSError; then the file ends with its records, if it can be cut."""
    footer = contents.footer(segment.number)
    try:
        write_from(files.system, fd, [memoryview(footer)], contents.end)
    except OSError:
        with contextlib.suppress(OSError):
            files.system.ftruncate(fd, contents.end)
        raise
    segment.nbytes = contents.end + len(footer)
