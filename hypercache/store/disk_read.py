"""Reads records of L3, and believes nothing that they do not prove."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Final

from hypercache.checksum import checksum
from hypercache.errors import HyperCacheError, SpecError
from hypercache.store import hckv
from hypercache.store.disk_files import Damaged, DiskFault, Files, fault, read_into, segment_name
from hypercache.store.disk_head import Segment
from hypercache.store.hckv import ALIGN, Record
from hypercache.store.hckv_file import number_of, offset_of
from hypercache.store.namespace import NamespaceInfo

KEPT_NBYTES: Final = 8 << 20  # of the memory a thread reads into; what is larger goes after its call
_MOST_FORMS: Final = 1024


class Reader:
    """Any number of threads may read. segments: all of the directory's, by number."""

    def __init__(self, files: Files, segments: dict[int, Segment]) -> None:
        self.reads = self.bytes_read = self.damaged = 0
        self._files = files
        self._system = files.system
        self._segments = segments
        self._mutex = threading.Lock()  # of the counters
        self._own = threading.local()
        # Form asked for and form found that were equal, by namespace: comparing takes longer than reading.
        self._equal: dict[bytes, tuple[NamespaceInfo, NamespaceInfo]] = {}

    def count(self, reads: int = 0, nbytes: int = 0, damaged: int = 0) -> None:
        with self._mutex:
            self.reads += reads
            self.bytes_read += nbytes
            self.damaged += damaged

    def read(
        self, info: NamespaceInfo, digest: bytes, place: int, chunks: Sequence[memoryview], as_it_lies: bool
    ) -> array[int]:
        """As Disk.read."""
        found = tuple(chunk.nbytes for chunk in chunks)
        sizes = info.below_nbytes if as_it_lies else info.chunk_nbytes
        if found != sizes:
            raise SpecError(
                f"namespace {info.label!r} has {len(sizes)} chunks of {sum(sizes)} "
                f"bytes, the memory for them {len(found)} of {sum(found)}"
            )
        number = number_of(place)
        where = self._files.path / segment_name(number)
        try:
            crcs, nbytes = self._read(info, digest, number, offset_of(place), chunks, as_it_lies)
        except DiskFault:
            raise
        except FileNotFoundError as error:
            self.count(1, damaged=1)
            raise Damaged(f"{where} is there no more") from error
        except OSError as error:
            raise fault(where, error) from error
        except HyperCacheError as error:
            self.count(1, damaged=1)
            raise Damaged(f"{where} at {offset_of(place)}: {error}") from error
        self.count(1, nbytes)
        return crcs

    def _read(
        self,
        info: NamespaceInfo,
        digest: bytes,
        number: int,
        offset: int,
        chunks: Sequence[memoryview],
        as_it_lies: bool,
    ) -> tuple[array[int], int]:
        segment = self._segments.get(number)
        if segment is None:
            raise Damaged("its segment is gone")
        nbytes = hckv.block_nbytes(info)
        read = self._plain if as_it_lies or not info.transcoded else self._transcoded
        handle = self._files.acquire(number)
        try:
            return read(handle.fd, segment, offset, info, digest, chunks), nbytes
        finally:
            self._files.release(handle)

    def _plain(
        self,
        fd: int,
        segment: Segment,
        offset: int,
        info: NamespaceInfo,
        digest: bytes,
        chunks: Sequence[memoryview],
    ) -> array[int]:
        """Straight to where the bytes are wanted."""
        start, nbytes = hckv.payload_offset(info), hckv.block_nbytes(info)
        own = self._memory(nbytes - sum(info.below_nbytes))
        head, tail = own[:start], own[start:]
        if read_into(self._system, fd, [head, *chunks, tail], offset) != nbytes:
            raise Damaged("the file ends inside the record")
        record = self._parsed(head, segment, info, digest)
        hckv.check_commit(record, tail)
        for layer, (chunk, crc) in enumerate(zip(chunks, record.crcs, strict=True)):
            if checksum(chunk) != crc:
                raise Damaged(f"the chunk of layer {layer} is damaged")
        return record.crcs

    def _transcoded(
        self,
        fd: int,
        segment: Segment,
        offset: int,
        info: NamespaceInfo,
        digest: bytes,
        chunks: Sequence[memoryview],
    ) -> array[int]:
        from hypercache.store import transcode  # brings a compiler; who reads no such block does without

        own = self._memory(hckv.block_nbytes(info))
        if read_into(self._system, fd, [own], offset) != own.nbytes:
            raise Damaged("the file ends inside the record")
        record = self._parsed(own, segment, info, digest)
        return transcode.up(info, checked(record, own), chunks)

    def _parsed(self, head: memoryview, segment: Segment, info: NamespaceInfo, digest: bytes) -> Record:
        record = hckv.parse(head, segment.store)
        if record.digest != digest or record.namespace != info.digest or record.info is None:
            raise Damaged("another block is there")
        asked, found = self._equal.get(info.digest, (None, None))
        if asked is not info or found is not record.info:
            if record.info != info:
                raise Damaged("its namespace has another form there")
            if len(self._equal) >= _MOST_FORMS:
                self._equal.clear()
            self._equal[info.digest] = info, record.info
        return record

    def copy(self, place: int, room: Callable[[Record], memoryview | None]) -> Record | None:
        """Copy a whole record, verified, to where ``room`` says, if it finds any. Raises Damaged; OSError of
        ``room``."""
        number, offset = number_of(place), offset_of(place)
        segment = self._segments.get(number)
        if segment is None:
            raise Damaged(f"segment {number:x} is gone")
        try:
            handle = self._files.acquire(number)
        except OSError as error:
            raise Damaged(str(error)) from error
        try:
            record = self._header(handle.fd, segment, offset)
            out = room(record)
            if out is None:
                return None
            try:
                got = read_into(self._system, handle.fd, [out], offset)
            except OSError as error:
                raise Damaged(str(error)) from error
            if got != record.nbytes or hckv.parse(out, segment.store) != record:
                raise Damaged("the record is not as long as it says")
            checked(record, out)
            return record
        finally:
            self._files.release(handle)

    def _header(self, fd: int, segment: Segment, offset: int) -> Record:
        own = self._memory(hckv.MAX_HEADER_NBYTES)
        try:
            got = read_into(self._system, fd, [own[:ALIGN]], offset)
            need = hckv.header_nbytes(own[:got])
            if got == ALIGN < need:
                got += read_into(self._system, fd, [own[ALIGN:need]], offset + ALIGN)
        except OSError as error:
            raise Damaged(str(error)) from error
        record = hckv.parse(own[:got], segment.store)
        if offset + record.nbytes > segment.nbytes:
            raise Damaged("the file ends inside the record")
        return record

    def _memory(self, nbytes: int) -> memoryview:
        """Of this thread, until its next call."""
        kept: memoryview | None = getattr(self._own, "memory", None)
        if kept is None or kept.nbytes < nbytes:
            kept = memoryview(bytearray(hckv.aligned(nbytes)))
            self._own.memory = kept if nbytes <= KEPT_NBYTES else None
        return kept[:nbytes]


def checked(record: Record, whole: memoryview) -> memoryview:
    """The payload of a record of which this is all. Raises HckvError unless it is what was written."""
    payload = whole[record.payload : record.payload + record.payload_nbytes]
    hckv.check_commit(record, whole[record.payload + record.payload_nbytes :])
    hckv.check_payload(record, payload)
    return payload
