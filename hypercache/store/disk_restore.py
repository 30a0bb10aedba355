"""What a start finds in the directory of L3: which files are to be trusted, and what they hold.

A segment with its footer is taken by that. Any other is read record by record, its torn end is cut off, and
it gets the footer that it lacks, so that nothing is ever written behind what a crash has left.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from hypercache.store import hckv
from hypercache.store.disk_files import Files, read_at
from hypercache.store.disk_head import Segment, write_footer
from hypercache.store.hckv import ALIGN, HckvError
from hypercache.store.hckv_file import (
    LOCATOR_NBYTES,
    SEGMENT_HEADER_NBYTES,
    Contents,
    footer_nbytes,
    header_fits,
    parse_segment_header,
)
from hypercache.store.hckv_scan import Bad, scan

_AHEAD: Final = 256 << 10  # read at once while small records follow each other
_OWNER: Final = slice(176, 192)  # of a record's header: the store's id


@dataclass(slots=True)
class Found:
    """A segment as it lies there. contents: None if it cannot be read now, or holds nothing to be trusted.
    sealed: its footer fits. damaged: places where records were and are no more; torn: bytes behind them."""

    segment: Segment
    header: bool
    contents: Contents | None = None
    sealed: bool = False
    readable: bool = True
    damaged: int = 0
    torn: int = 0


def identify(files: Files, sizes: dict[int, int]) -> tuple[list[Found], int, bytes | None]:
    """Look at the headers of all segments. Returns those that are ours in ascending order, how many are not,
    and the directory's store id, if any file tells.

    Not ours is what a header that fits calls by another number or another store: a copy that somebody made,
    which may have what was removed since. Nor what it calls by a version of the future: that is for who can
    read it, and what looks like a torn end to us need not be one.
    """
    found: list[Found] = []
    others = 0
    for number, nbytes in sizes.items():
        one = Found(Segment(number, nbytes), False)
        try:
            with _open(files, number) as fd:
                one.segment.nbytes = os.fstat(fd).st_size
                head = read_at(files.system, fd, 0, SEGMENT_HEADER_NBYTES + hckv.MAX_HEADER_NBYTES)
        except FileNotFoundError:
            others += 1
            continue
        except OSError:
            one.readable = False
            found.append(one)
            continue
        try:
            header = parse_segment_header(head)
            if header.number != number:
                others += 1
                continue
            one.header, one.segment.store = True, header.store
        except HckvError as error:
            if error.rule in ("version", "checksum-algorithm") and header_fits(head):
                others += 1
                continue
            one.segment.store = _owner(head[SEGMENT_HEADER_NBYTES:])
        found.append(one)
    store = _most_common(one.segment.store for one in found)
    ours = [one for one in found if not one.header or one.segment.store == store]
    return ours, others + len(found) - len(ours), store


def _most_common(stores: Iterable[bytes | None]) -> bytes | None:
    counts = Counter(store for store in stores if store is not None)
    return max(reversed(counts), key=counts.__getitem__, default=None)  # among equals, the newest file's


def _owner(head: bytes) -> bytes | None:
    """The id in the first record: nobody but us chooses what lies there."""
    try:
        hckv.parse(head)
    except HckvError:
        return None
    return head[_OWNER]


def load(files: Files, one: Found, store: bytes | None) -> None:
    """Find out what a segment holds. ``store``: the directory's, for a file that does not tell."""
    segment = one.segment
    if segment.store is None:
        segment.store = store
    try:
        with _open(files, segment.number) as fd:
            try:
                one.contents = read_footer(files, fd, segment)
                one.sealed = True
            except HckvError:
                one.contents = _scanned(files, fd, one)
    except OSError:
        one.readable = False
        return
    segment.records = len(one.contents)


def read_footer(files: Files, fd: int, segment: Segment) -> Contents:
    """Raises HckvError, OSError."""
    tail = read_at(files.system, fd, max(0, segment.nbytes - LOCATOR_NBYTES), LOCATOR_NBYTES)
    nbytes = footer_nbytes(tail, segment.nbytes)
    footer = read_at(files.system, fd, segment.nbytes - nbytes, nbytes)
    return Contents.read(footer, segment.nbytes, segment.number)


def _scanned(files: Files, fd: int, one: Found) -> Contents:
    contents = Contents()
    reader = _Reader(files, fd)
    gaps = torn = 0
    for item in scan(reader.read, one.segment.nbytes, one.segment.store, data=reader.data):
        if isinstance(item, Bad):
            torn += item.nbytes
            continue
        offset, record = item
        try:
            contents.add(offset, record)
        except HckvError:  # it calls its namespace by a name that another one has here
            gaps += 1
            continue
        gaps, torn = gaps + bool(torn), 0
    one.damaged, one.torn = gaps, max(0, one.segment.nbytes - contents.end)
    return contents


def mend(files: Files, one: Found) -> None:
    """Cut the torn end of a segment off and seal it. Raises OSError; it can be read nevertheless."""
    assert one.contents is not None
    with _open(files, one.segment.number, os.O_RDWR) as fd:
        try:
            files.system.ftruncate(fd, one.contents.end)
            one.segment.nbytes = one.contents.end
            write_footer(files, fd, one.segment, one.contents)
            files.system.fdatasync(fd)
        finally:
            one.segment.nbytes = os.fstat(fd).st_size


@contextlib.contextmanager
def _open(files: Files, number: int, flags: int = os.O_RDONLY) -> Iterator[int]:
    fd = files.open(number, flags)
    try:
        yield fd
    finally:
        os.close(fd)


class _Reader:
    """Reads ahead where reads follow each other closely, and exactly what is asked for elsewhere."""

    def __init__(self, files: Files, fd: int) -> None:
        self._files = files
        self._fd = fd
        self._at = self._end = 0
        self._ahead = b""

    def read(self, offset: int, nbytes: int) -> bytes:
        start = offset - self._at
        if start < 0 or start + nbytes > len(self._ahead):
            near = 0 <= offset - self._end <= _AHEAD
            self._at = offset
            self._ahead = read_at(
                self._files.system, self._fd, offset, max(nbytes, _AHEAD if near else ALIGN)
            )
            start = 0
        self._end = offset + nbytes
        return self._ahead[start : start + nbytes]

    def data(self, offset: int) -> int:
        """Where a sparse file's next bytes are."""
        try:
            return os.lseek(self._fd, offset, os.SEEK_DATA)
        except OSError as error:
            return os.fstat(self._fd).st_size if error.errno == errno.ENXIO else offset
