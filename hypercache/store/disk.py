"""The directory of L3: blocks in `.hckv` segments. Everything that touches files; the law is docs/hckv.md.

One thread writes, removes and reclaims; any number of threads read at the same time. Where a record is, the
caller remembers: a *place* says which segment and where in it. Reading verifies everything that a record says
of itself against what is asked for, so that a place which is wrong or out of date costs a miss, no more.
"""

from __future__ import annotations

import contextlib
import os
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hypercache.errors import ConfigError, HyperCacheError
from hypercache.store import hckv
from hypercache.store.disk_files import (
    OPEN_FILES,
    Damaged,
    DiskFault,
    Files,
    System,
    closed,
    fault,
    segment_name,
)
from hypercache.store.disk_head import BUFFER_NBYTES, FRAME_NBYTES, Counts, Fsync, Head, Segment
from hypercache.store.disk_read import Reader
from hypercache.store.disk_records import Write, put, put_again, put_removal
from hypercache.store.disk_restore import Found, identify, load, mend
from hypercache.store.hckv import ALIGN, HckvError, Kind
from hypercache.store.hckv_file import ENTRY, Contents, number_of, offset_of
from hypercache.store.namespace import NamespaceInfo

MIN_SEGMENT_NBYTES: Final = 128 << 10  # a REMOVE of hckv.REMOVALS digests and the footer that names them fit
BAD_FILES: Final = 8  # quarantined ones that are kept, and 1 / BAD_SHARE of the capacity
BAD_SHARE: Final = 16


@dataclass(frozen=True, slots=True)
class DiskStats:
    """bytes_files: lengths of all files of ours, quarantined ones included; never above ``capacity``.
    records: in them, dead ones and tombstones included; bytes_per_record: of the files. writes: calls to the
    system, as are fsyncs; bytes_written, bytes_read: of records. damaged: records that did not verify, at
    start, when they were read or moved. refused: blocks that could not be written. torn_bytes: cut off at
    start, behind the last intact record of a file. quarantined: files in which nothing was intact, since the
    start; foreign: left alone. unreadable, unsealed: segments that the disk did not let us read or mend at
    start. open_files_limit: more only while a segment is read whose turn to be open is over."""

    bytes_files: int
    capacity: int
    segments: int
    records: int
    writes: int
    bytes_written: int
    reads: int
    bytes_read: int
    damaged: int
    refused: int
    torn_bytes: int
    fsyncs: int
    quarantined: int
    foreign: int
    unreadable: int
    unsealed: int
    bytes_per_record: int
    open_files: int
    open_files_limit: int
    restore_s: float
    restored_blocks: int


class Disk:
    """directory: made if it is not there (its parent must be), and locked: it has one owner.

    capacity: bytes that its files may have together, at least two segments.
    fsync: whether what is written is on the disk itself, and survives a power cut, after each batch, at most
        ``interval_s`` later as long as more is written, or when the kernel likes. Removals, and segments that
        are full, are in any case. What was written survives the end of the process with any of them.
    open_files: segments that are open for reading at the same time.
    Raises ConfigError for a directory or size that cannot be; DiskFault.
    """

    def __init__(
        self,
        directory: Path,
        *,
        capacity: int,
        segment_nbytes: int = 256 << 20,
        fsync: Fsync = "interval",
        interval_s: float = 1.0,
        open_files: int = OPEN_FILES,
        system: System | None = None,
    ) -> None:
        if not MIN_SEGMENT_NBYTES <= segment_nbytes <= hckv.MAX_SEGMENT_NBYTES:
            raise ConfigError(
                f"L3 segments of {segment_nbytes} bytes; they have {MIN_SEGMENT_NBYTES} to "
                f"{hckv.MAX_SEGMENT_NBYTES}"
            )
        if capacity < 2 * segment_nbytes:
            raise ConfigError(
                f"L3 capacity of {capacity} bytes for segments of {segment_nbytes}: allow at least two, "
                f"{2 * segment_nbytes} bytes, or make segments smaller"
            )
        if fsync not in ("never", "batch", "interval"):
            raise ConfigError(f"L3 fsync {fsync!r}; it is never, batch or interval")
        self.directory = directory
        self.capacity = capacity
        self.segment_nbytes = segment_nbytes
        self.fsync: Fsync = fsync
        self._interval_s = interval_s
        self._system = system or System()
        self._files = Files(directory, self._system, open_files)
        try:
            listing = self._files.list()
        except BaseException:
            self._files.close(purge=False)
            raise
        self._segments = {number: Segment(number, nbytes) for number, nbytes in listing.segments.items()}
        self._bad = listing.bad
        self._foreign = listing.foreign
        # Removals may use what blocks may not, and what is moved (half a segment at most, with its entries in
        # the footer) needs room before its old segment goes.
        self._most = capacity - min(1 << 20, segment_nbytes // 8)
        self._full = self._most - segment_nbytes // 2 - segment_nbytes // 32 - self._frames(segment_nbytes)
        self._wanted = 0  # bytes that the last write lacked
        self._head: Head | None = None
        self._counts = Counts()
        self._closed = False
        self._reader = Reader(self._files, self._segments)
        self._refused = self._torn = self._quarantined = self._unreadable = self._unsealed = 0
        self._restore_s = 0.0
        self._restored = 0

    # -- start and end

    def restore(self) -> Iterator[tuple[int, Contents]]:
        """What the directory holds: each segment's number and contents, in the order in which they were
        written. To be run to its end once, before anything is written."""
        began = time.perf_counter()
        ours, others, store = identify(self._files, {n: one.nbytes for n, one in self._segments.items()})
        self._foreign += others
        self._segments.clear()
        self._segments |= {one.segment.number: one.segment for one in ours}
        sequence, number = sum(one.segment.nbytes for one in ours) // ALIGN, -1  # whatever damage may hide
        last = 0
        for one in ours:
            load(self._files, one, store)
            found = self._restored_from(one)
            if found is None:
                continue
            number = one.segment.number
            last = max(last, found.sequence)
            self._restored += int((found.entries["kind"] == Kind.BLOCK).sum())
            yield number, found
        self._head = Head(
            self._files,
            self._segments,
            store=store or os.urandom(hckv.STORE_ID_NBYTES),
            sequence=last + sequence,
            number=number + 1,
            segment_nbytes=self.segment_nbytes,
            fsync=self.fsync,
            interval_s=self._interval_s,
        )
        self._counts = self._head.counts
        self._restore_s = time.perf_counter() - began

    def _restored_from(self, one: Found) -> Contents | None:
        number = one.segment.number
        if not one.readable:
            self._unreadable += 1
            return Contents()
        assert one.contents is not None
        self._reader.count(damaged=one.damaged)
        if not len(one.contents):
            self._dismiss(number, bad=not one.header or one.torn > 0)
            return None
        if not one.sealed:
            try:
                mend(self._files, one)
                self._torn += one.torn
            except OSError:
                self._unsealed += 1
        return one.contents

    def _dismiss(self, number: int, bad: bool) -> None:
        """A file that holds nothing: removed, or put aside for who wants to know why."""
        try:
            if bad:
                self._files.quarantine(number)
                self._bad[number] = self._segments[number].nbytes
                self._quarantined += 1
            else:
                self._files.unlink(segment_name(number))
            del self._segments[number]
            while len(self._bad) > BAD_FILES or sum(self._bad.values()) > self.capacity // BAD_SHARE:
                self._drop_bad()
        except OSError:
            self._unsealed += 1

    def _drop_bad(self) -> None:
        number = min(self._bad)
        self._files.unlink(segment_name(number, bad=True))
        del self._bad[number]

    def close(self, purge: bool = False) -> None:
        """Seals what is being written and lets go of the directory; with ``purge``, deletes all that is ours
        there. Raises DiskFault for what did not work, and has let go nevertheless."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._head is not None and not purge:
                self._head.seal()
            if purge:
                if self._head is not None:
                    self._head.abandon()
                for number in list(self._segments):
                    self._forget(number)
                while self._bad:
                    self._drop_bad()
                self._files.sync()
        except OSError as error:
            raise fault(self.directory, error) from error
        finally:
            self._files.close(purge)

    def _writer(self) -> Head:
        if self._closed or self._head is None:
            raise closed(self.directory)
        return self._head

    # -- writing

    @property
    def batch_nbytes(self) -> int:
        """Records that should be written at once: always fits when :meth:`overfull` of as many says None."""
        return min(BUFFER_NBYTES, self.segment_nbytes // 4)

    @property
    def lasting_nbytes(self) -> int:
        """Bytes of records that can stay for good while others come and go."""
        return self._full - self.segment_nbytes

    def keeps(self, info: NamespaceInfo) -> bool:
        """Whether blocks of a namespace can be written: their form has a record, and that fits a segment."""
        try:
            return self._writer().takes(info)
        except HckvError:
            return False

    def write(self, batch: Sequence[Write]) -> list[int]:
        """Places of these blocks. -1: it could not be written, because a chunk is not what its CRC says or
        its namespace is none that :meth:`keeps` takes. All are written, or a DiskFault is raised."""
        head = self._writer()
        need = self._need([item.info for item in batch])
        if self._nbytes() + need > self._most:
            self._wanted = need
            raise self._no_room(need)
        places: list[int] = []
        try:
            for item in batch:
                try:
                    where = put(head, item)
                except HyperCacheError:
                    self._refused += 1
                    where = -1
                places.append(where)
            head.commit()
        except OSError as error:
            raise self._undone(head, error, places) from error
        except BaseException:
            head.undo()
            raise
        self._wanted = 0
        return places

    def remove(self, namespace: bytes, digests: Sequence[bytes] | None) -> None:
        """These blocks, or with None all of a namespace, are gone, also after a restart: that is on the disk
        when this returns. Raises DiskFault; HckvError for names that no block has."""
        head = self._writer()
        parts: list[Sequence[bytes] | None] = [None]
        if digests is not None:
            parts = [digests[i : i + hckv.REMOVALS] for i in range(0, len(digests), hckv.REMOVALS)]
        sizes = [hckv.removal_nbytes(len(part or ())) for part in parts]
        need = sum(sizes) + len(digests or ()) * 33 + self._frames(sum(sizes)) + head.reserved
        if not self._make_room(need):
            raise self._no_room(need)
        try:
            for part in parts:
                put_removal(head, namespace, part)
            head.commit(durable=True)
        except OSError as error:
            raise self._undone(head, error, []) from error
        except BaseException:
            head.undo()
            raise

    def move(self, places: Sequence[int]) -> list[int]:
        """Write these records again, in a segment behind their own. Returns their new places; -1 for one that
        is damaged, or for which there is no room below the capacity. Raises DiskFault."""
        head = self._writer()
        found: list[int] = []
        left = self._most - self._nbytes() - head.reserved - self._frames(self.segment_nbytes)
        try:
            if head.number in map(number_of, places):
                head.seal()
            for where in places:
                try:
                    new, nbytes = put_again(head, self._reader, where, left)
                except HyperCacheError:
                    self._reader.count(damaged=1)
                    new, nbytes = -1, 0
                found.append(new)
                left -= nbytes
            head.commit()
        except OSError as error:
            raise self._undone(head, error, found) from error
        except BaseException:
            head.undo()
            raise
        return found

    def sync(self) -> None:
        """All that was written is on the disk. Raises DiskFault."""
        head = self._writer()
        try:
            head.sync()
        except OSError as error:
            raise fault(self.directory, error) from error

    def _undone(self, head: Head, error: OSError, places: Sequence[int]) -> DiskFault:
        """What to raise; what was not committed is taken back."""
        found = fault(self.directory, error)
        for where in places:
            if where >= 0 and not head.known(number_of(where), offset_of(where)):
                break
            found.places.append(where)
        head.undo()
        return found

    # -- room

    def _nbytes(self) -> int:
        files = [one.nbytes for one in list(self._segments.values())]
        return ALIGN + sum(files) + sum(list(self._bad.values()))  # ALIGN: the lock's

    def _frames(self, nbytes: int) -> int:
        """What segments cost beside ``nbytes`` of records and their entries, where none is more than half
        empty."""
        return FRAME_NBYTES * (2 + 2 * nbytes // self.segment_nbytes)

    def _need(self, infos: Sequence[NamespaceInfo]) -> int:
        total = 0
        spaces = {info.digest: info for info in infos}
        sizes: dict[bytes, int] = {}
        for name, info in spaces.items():
            with contextlib.suppress(HyperCacheError):
                sizes[name] = hckv.block_nbytes(info) + ENTRY.itemsize
                total += hckv.payload_offset(info) * 2
        total += sum(sizes.get(info.digest, 0) for info in infos)
        return total + self._writer().reserved + self._frames(total)

    def _no_room(self, need: int) -> DiskFault:
        return DiskFault(
            "full",
            f"L3 directory {self.directory}: {need} bytes more than now would exceed its capacity of "
            f"{self.capacity}; the oldest segment is to go first",
        )

    def _make_room(self, nbytes: int) -> bool:
        """Delete quarantined files while ``nbytes`` exceed the capacity."""
        with contextlib.suppress(OSError):
            while self._bad and self._nbytes() + nbytes > self.capacity:
                self._drop_bad()
        return self._nbytes() + nbytes <= self.capacity

    def overfull(self, nbytes: int) -> int | None:
        """The oldest segment, if it has to go before ``nbytes`` of records can be written. Half of its bytes
        can be moved first."""
        head = self._writer()
        want = max(nbytes + self._frames(nbytes), min(self._wanted, self._full - self.segment_nbytes // 4))
        want += head.reserved
        if self._nbytes() + want <= self._full:
            return None
        try:
            while self._bad and self._nbytes() + want > self._full:
                self._drop_bad()
            if self._nbytes() + want <= self._full or not self._segments:
                return None
            oldest = min(self._segments)
            if oldest == head.number:
                head.seal()
        except OSError as error:
            raise fault(self.directory, error) from error
        return oldest if oldest in self._segments else None

    def entries(self, segment: int) -> Contents:
        """What a segment holds, as :meth:`restore` gives it; empty if it is not there or cannot be read."""
        head = self._writer()
        if segment == head.number and head.contents is not None:
            return head.contents
        one = self._segments.get(segment)
        if one is None:
            return Contents()
        found = Found(one, True)
        load(self._files, found, one.store)
        return found.contents or Contents()

    def drop(self, segment: int) -> None:
        """Delete the oldest segment. Who is reading it reads on. Raises DiskFault.

        HyperCacheError for another one: its removals may be of what an older one holds."""
        head = self._writer()
        if segment in self._segments and segment != min(self._segments):
            raise HyperCacheError(
                f"segment {segment:x} of {self.directory} is not the oldest; drop that first"
            )
        try:
            if segment == head.number:
                head.seal()
            elif self.fsync != "never":
                head.sync()  # what was moved is on the disk before its old place goes
            if segment in self._segments:
                self._forget(segment)
                self._files.sync()  # a power cut must not bring it back after the next one is gone
        except OSError as error:
            raise fault(self.directory, error) from error

    def _forget(self, number: int) -> None:
        self._files.unlink(segment_name(number))
        del self._segments[number]
        self._files.forget(number)

    # -- reading

    def read(
        self,
        info: NamespaceInfo,
        digest: bytes,
        place: int,
        chunks: Sequence[memoryview],
        *,
        as_it_lies: bool = False,
    ) -> array[int]:
        """Fill ``chunks``, each layer's, from the record at ``place``: in the wire codec, or as they lie
        there. Returns the CRC-32 of each. Any thread.

        Raises Damaged if that is not an intact record of this block; DiskFault. Then ``chunks`` hold
        unspecified bytes.
        """
        if self._closed:
            raise closed(self.directory)
        return self._reader.read(info, digest, place, chunks, as_it_lies)

    # -- numbers

    def stats(self) -> DiskStats:
        """Any thread."""
        segments = list(self._segments.values())
        head = self._head
        records = sum(one.records for one in segments)
        return DiskStats(
            bytes_files=self._nbytes(),
            capacity=self.capacity,
            segments=len(segments),
            records=records,
            writes=self._counts.writes,
            bytes_written=self._counts.bytes_written,
            reads=self._reader.reads,
            bytes_read=self._reader.bytes_read,
            damaged=self._reader.damaged,
            refused=self._refused,
            torn_bytes=self._torn,
            fsyncs=self._counts.fsyncs,
            quarantined=self._quarantined,
            foreign=self._foreign,
            unreadable=self._unreadable,
            unsealed=self._unsealed,
            bytes_per_record=self._nbytes() // records if records else 0,
            open_files=0
            if self._closed
            else self._files.open_files + (head is not None and head.number >= 0),
            open_files_limit=self._files.most_open + 1,
            restore_s=self._restore_s,
            restored_blocks=self._restored,
        )


__all__ = ["Damaged", "Disk", "DiskFault", "DiskStats", "Fsync", "System", "Write"]
