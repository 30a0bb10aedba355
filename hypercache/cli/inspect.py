"""Look into .hckv files: what is in them, and is it intact?

Reads every byte, checks each checksum and commit marker, and lists what is wrong with its place and the
broken rule of docs/hckv.md. Never writes; a server may be running. Exit code 1 if anything is not intact.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hypercache.checksum import checksum
from hypercache.store.hckv import MAX_SEGMENT_NBYTES, HckvError, Kind, Record
from hypercache.store.hckv_file import (
    LOCATOR_NBYTES,
    SEGMENT_HEADER_NBYTES,
    Contents,
    footer_nbytes,
    parse_segment_header,
)
from hypercache.store.hckv_scan import Bad, scan
from hypercache.store.joined import joined

_PIECE = 1 << 20
_SHOWN_PROBLEMS = 20
_MOST_PROBLEMS = 1000  # kept of one file; all are counted
_NAME = re.compile(r"([0-9a-f]{16})\.hckv")
_MIB = 1 << 20
_KIND_OF_FILE = (
    (stat.S_ISDIR, "a directory: give the files in it, DIR/*.hckv"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISCHR, "a character device"),
)


@dataclass
class Space:
    """What a file holds of one namespace. ``digest``: the first 12 hex digits, as everywhere here; a digest
    in clear is the right to read."""

    digest: str
    label: str
    codec: str
    below: str
    block_size: int
    layers: int
    blocks: int = 0
    payload_nbytes: int = 0


@dataclass
class Report:
    """What was found in one file. ``dead_nbytes``: of records that a later one, in any of the files given,
    replaces or removes."""

    path: str
    nbytes: int = 0
    segment: int | None = None
    footer: str = "absent"  # or present, damaged, not checked
    footer_nbytes: int = 0
    records: dict[str, int] = field(default_factory=dict)
    sequences: tuple[int, int] | None = None
    payload_nbytes: int = 0
    overhead_nbytes: int = 0
    dead_nbytes: int = 0
    unused_nbytes: int = 0  # zeros behind the last record
    namespaces: list[Space] = field(default_factory=list)
    problem_count: int = 0
    problems: list[dict[str, Any]] = field(default_factory=list)

    def problem(self, offset: int, rule: str, message: str) -> None:
        self.problem_count += 1
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append({"offset": offset, "rule": rule, "message": plain(message)})


class File:
    """A regular file, open for reading, as long as it was at the last look."""

    def __init__(self, path: str) -> None:
        # Without O_NONBLOCK a FIFO would hold us up until somebody writes into it.
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        self.look()

    def look(self) -> tuple[int, int]:
        """Length and time of the last change, so that a file that is being written can be told."""
        found = os.fstat(self.fd)
        for is_one, name in _KIND_OF_FILE:
            if is_one(found.st_mode):
                os.close(self.fd)
                raise OSError(errno.EINVAL, f"is {name}")
        self.nbytes = found.st_size
        return found.st_size, found.st_mtime_ns

    def read(self, offset: int, nbytes: int) -> bytes:
        parts: list[bytes] = []
        while nbytes and (part := os.pread(self.fd, nbytes, offset)):
            parts.append(part)
            offset, nbytes = offset + len(part), nbytes - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def data(self, offset: int) -> int:
        """Where a sparse file's next bytes are."""
        try:
            return os.lseek(self.fd, offset, os.SEEK_DATA)
        except OSError as error:
            return self.nbytes if error.errno == errno.ENXIO else offset

    def zeros(self, offset: int, end: int) -> bool:
        while (offset := max(offset, self.data(offset))) < end:
            piece = self.read(offset, min(_PIECE, end - offset))
            if not piece or piece.count(0) != len(piece):
                return False
            offset += len(piece)
        return True

    def checksum(self, offset: int, nbytes: int) -> int:
        """CRC-32 of a range that need not fit memory."""
        crcs: list[int] = []
        lengths: list[int] = []
        while nbytes:
            piece = self.read(offset, min(_PIECE, nbytes))
            if not piece:
                raise HckvError("truncated", "the file ends inside a payload")
            crcs.append(checksum(memoryview(piece)))
            lengths.append(len(piece))
            offset, nbytes = offset + len(piece), nbytes - len(piece)
        return joined(crcs, lengths)


class Inspector:
    """Inspects files one after the other, and knows at the end which of their records are dead."""

    def __init__(self, show_records: bool) -> None:
        self.reports: list[Report] = []
        self.show_records = show_records
        self._live: dict[tuple[bytes, bytes], tuple[int, int, Report]] = {}  # sequence, bytes, where
        self._removed: dict[tuple[bytes, bytes], int] = {}  # sequence of the last removal
        self._cleared: dict[bytes, int] = {}

    def inspect(self, path: str) -> Report:
        report = Report(plain(path))
        if self.show_records:
            print(f"records of {report.path}")
        self.reports.append(report)
        try:
            file = File(path)
        except (OSError, ValueError) as error:
            report.problem(0, "io", _reason(error))
            return report
        try:
            self._inspect(file, report, Path(path).name)
        except OSError as error:
            report.problem(0, "io", _reason(error))
        finally:
            os.close(file.fd)
        return report

    def _inspect(self, file: File, report: Report, name: str) -> None:
        report.nbytes = file.nbytes
        store: bytes | None = None
        try:
            header = parse_segment_header(file.read(0, SEGMENT_HEADER_NBYTES))
        except HckvError as error:
            report.problem(0, error.rule, str(error))
            if error.rule in ("truncated", "segment-magic"):
                return
        else:
            report.segment, store = header.number, header.store
            match = _NAME.fullmatch(name)
            if match is not None and int(match[1], 16) != header.number:
                report.problem(0, "number", f"segment {header.number} under another segment's name")
        footer, end = self._footer(file, report)
        contents = Contents()
        for found in self._found(file, report, end, store):
            if isinstance(found, Bad):
                report.problem(found.offset, found.error.rule, f"{found.nbytes} bytes: {found.error}")
                continue
            offset, record = found
            try:
                contents.add(offset, record)
                self._check_payload(file, offset, record)
            except HckvError as error:
                report.problem(offset, error.rule, str(error))
            self._count(report, offset, record)
        if footer is not None and contents.footer(report.segment or 0) != footer:
            report.problem(end, "footer-records", "the footer says something else than the records")
        self._summarise(report, contents)

    def _footer(self, file: File, report: Report) -> tuple[bytes | None, int]:
        """The footer, if it can be used, and where the records end."""
        end = file.nbytes
        if end > MAX_SEGMENT_NBYTES:
            report.problem(0, "segment-length", f"only {MAX_SEGMENT_NBYTES} bytes of {end} are looked at")
            return None, MAX_SEGMENT_NBYTES
        try:
            nbytes = footer_nbytes(file.read(max(0, end - LOCATOR_NBYTES), LOCATOR_NBYTES), file.nbytes)
            report.footer, report.footer_nbytes = "damaged", nbytes  # unless it is found whole
            end -= nbytes
            data = file.read(end, nbytes)
            if report.segment is None:
                report.footer = "not checked"  # whose it is cannot be told
                return None, end
            Contents.read(data, file.nbytes, report.segment)
        except HckvError as error:
            if error.rule != "footer-absent":
                report.footer = "damaged"
                report.problem(end, error.rule, str(error))
            return None, end
        report.footer = "present"
        return data, end

    def _found(
        self, file: File, report: Report, end: int, store: bytes | None
    ) -> Iterator[tuple[int, Record] | Bad]:
        """What a scan finds, but for the tail of a segment that was not sealed: zeros there are space that
        was not used yet, and what a server is writing at this moment is looked at again."""
        start, before = SEGMENT_HEADER_NBYTES, file.look()
        while True:
            tail: Bad | None = None
            for found in scan(file.read, end, store, start, file.data):
                if isinstance(found, Bad):
                    start = found.offset + found.nbytes
                    if start == end and report.footer != "present":
                        tail = found
                        break
                else:
                    start = found[0] + found[1].nbytes
                yield found
            if tail is None or (report.footer == "damaged" and tail.error.rule == "magic"):
                return  # the latter: these bytes are the footer, of which was spoken already
            if tail.error.rule == "magic" and file.zeros(tail.offset, end):
                report.unused_nbytes = end - tail.offset
                return
            time.sleep(0.1)
            now = file.look()
            if now == before:
                yield tail
                return
            start, before, report.nbytes = tail.offset, now, file.nbytes
            _, end = self._footer(file, report)

    def _check_payload(self, file: File, offset: int, record: Record) -> None:
        offset += record.payload
        for layer, (nbytes, crc) in enumerate(zip(record.chunk_nbytes, record.crcs, strict=True)):
            if file.checksum(offset, nbytes) != crc:
                raise HckvError("payload-crc", f"the chunk of layer {layer} is damaged")
            offset += nbytes

    def _count(self, report: Report, offset: int, record: Record) -> None:
        name = record.kind.name
        report.records[name] = report.records.get(name, 0) + 1
        first = record.sequence if report.sequences is None else report.sequences[0]
        report.sequences = (first, record.sequence)
        report.payload_nbytes += record.payload_nbytes
        report.overhead_nbytes += record.nbytes - record.payload_nbytes
        space, sequence = record.namespace, record.sequence
        if record.kind is Kind.BLOCK:
            key = space, record.digest
            mine = sequence, record.nbytes, report
            other = self._live.get(key)
            newer = mine if other is None or other[0] < sequence else other
            if other is not None:
                dead = other if newer is mine else mine
                dead[2].dead_nbytes += dead[1]
            self._live[key] = newer
        elif record.kind is Kind.REMOVE:
            for digest in record.removed:
                self._removed[space, digest] = max(sequence, self._removed.get((space, digest), 0))
        else:
            self._cleared[space] = max(sequence, self._cleared.get(space, 0))
        if self.show_records:
            print(_record_line(offset, record))

    def _summarise(self, report: Report, contents: Contents) -> None:
        for info in contents.namespaces:
            label, digest = plain(info.label), info.digest.hex()[:12]
            codecs = info.codec, info.below or info.codec
            space = Space(digest, label, *codecs, info.block_size, len(info.chunk_nbytes))
            report.namespaces.append(space)
        of = contents.entries
        blocks = Counter(of["namespace"][of["kind"] == Kind.BLOCK].tolist())
        for number, space in enumerate(report.namespaces):
            space.blocks = blocks[number]
            space.payload_nbytes = blocks[number] * sum(contents.namespaces[number].below_nbytes)

    def finish(self) -> None:
        """All files are read: what tombstones name is dead, wherever it lies."""
        for key, (sequence, nbytes, report) in self._live.items():
            if sequence < max(self._removed.get(key, 0), self._cleared.get(key[0], 0)):
                report.dead_nbytes += nbytes


def plain(text: str) -> str:
    """``text`` without anything that a terminal obeys: labels and file names are other people's."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _record_line(offset: int, record: Record) -> str:
    names = [name.hex()[:12] or "-" for name in (record.namespace, record.digest, record.parent)]
    last = f"depth {record.depth}"
    if record.info is not None:
        last += f", token {record.depth * record.info.block_size}"
    elif record.removed:
        last = f"{len(record.removed)} removed, {record.removed[0].hex()[:12]} first"
    return (
        f"  {offset:>12}  {record.kind.name:<6}  {record.sequence:>8}  {names[0]}  {names[1]:<12}  "
        f"after {names[2]:<12}  {record.nbytes:>10} bytes  {last}"
    )


def show(report: Report) -> None:
    """For people."""
    segment = "" if report.segment is None else f", segment {report.segment}"
    print(f"{report.path}: {report.nbytes} bytes{segment}")
    if report.segment is not None or report.records:
        print(
            f"  footer     {report.footer}" + (f", {report.footer_nbytes} bytes" * bool(report.footer_nbytes))
        )
        counts = ", ".join(f"{number} {kind}" for kind, number in report.records.items()) or "none"
        spread = (
            "" if report.sequences is None else f"; sequences {report.sequences[0]}..{report.sequences[1]}"
        )
        print(f"  records    {counts}{spread}")
        amounts = {
            "payload": report.payload_nbytes,
            "around it": report.overhead_nbytes,
            "dead": report.dead_nbytes,
            "not used yet": report.unused_nbytes,
        }
        print("  MiB        " + ", ".join(f"{name} {n / _MIB:.2f}" for name, n in amounts.items()))
    for space in report.namespaces:
        below = "" if space.below == space.codec else f" as {space.below}"
        print(
            f"  namespace  {space.digest}  {space.blocks} blocks, {space.layers} layers, "
            f"{space.block_size} tokens, {space.codec}{below}, "
            f"{space.payload_nbytes / _MIB:.2f} MiB, {space.label!r}"
        )
    for problem in report.problems[:_SHOWN_PROBLEMS]:
        print(f"  PROBLEM    at {problem['offset']}: {problem['message']}")
    if report.problem_count > _SHOWN_PROBLEMS:
        print(f"  PROBLEMS   {report.problem_count} in all; --json has more of them")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="segment files, DIR/*.hckv")
    parser.add_argument("--records", action="store_true", help="a line for each record")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    inspector = Inspector(args.records and not args.json)
    for path in args.files:
        inspector.inspect(path)
    inspector.finish()
    problems = sum(report.problem_count for report in inspector.reports)
    if args.json:
        found = [asdict(report) for report in inspector.reports]
        json.dump({"intact": not problems, "problems": problems, "files": found}, sys.stdout, indent=2)
        print()
    else:
        for report in inspector.reports:
            show(report)
        files = _counted(len(inspector.reports), "file")
        print(f"{files}: " + (_counted(problems, "problem") if problems else "all intact"))
    return 1 if problems else 0
