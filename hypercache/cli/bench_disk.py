"""What the disk tier's files cost, beside plain file I/O on the same disk in the same run.

Both sides move the same number of bytes with the same fsyncs, in turn, several rounds, one thread each;
figures are medians, a ratio is the median of the rounds' ratios. The page cache is treated alike: written
files are new on both sides, what was dirty before is on disk when a write begins, and a read finds all of
its bytes in the cache ("cached") or none ("cold": dropped with POSIX_FADV_DONTNEED; a virtual machine's host
may have them still).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from hypercache import codecs
from hypercache.checksum import checksum
from hypercache.cli.bench_live import NotMeasured, seconds
from hypercache.kv import KVBuffers
from hypercache.model import KVDtype, KVLayout, Part
from hypercache.store import hckv, transcode
from hypercache.store.disk import Disk, Write
from hypercache.store.hckv_file import number_of, offset_of
from hypercache.store.namespace import NamespaceInfo

SPACES = {"raw": ("raw", ""), "int4": ("int8", "int4")}  # codec on disk -> on the wire, `below`
TOKENS = 16
LAYERS = 32  # with 8 heads of 128: an 8-billion-parameter Llama, 2 MiB a block in bf16
BATCH_NBYTES = 8 << 20  # of what a call of Disk.write puts on disk
ROUND_NBYTES = 128 << 20  # of records, written and read in a round
SAMPLE = 8  # different blocks; more than any CPU cache holds

Fsync = Literal["batch", "end"]
FSYNCS: tuple[Fsync, ...] = ("end", "batch")


@dataclass(frozen=True, slots=True)
class Sample:
    """Blocks in memory as clients send them, and how they are to lie on disk."""

    info: NamespaceInfo
    chunks: list[list[memoryview]]
    crcs: list[list[int]]
    kv_nbytes: int  # of a block in the engine's dtype

    def batches(self, nbytes: int) -> list[list[Write]]:
        """``nbytes`` of records or a little more, each block of a name of its own."""
        record = hckv.block_nbytes(self.info)
        blocks = -(-nbytes // record)
        each = max(1, BATCH_NBYTES // record)
        writes = [
            Write(self.info, os.urandom(32), b"", 0, b"", self.crcs[i % SAMPLE], self.chunks[i % SAMPLE])
            for i in range(blocks)
        ]
        return [writes[i : i + each] for i in range(0, blocks, each)]


def sample(wire: str, below: str, layers: int = LAYERS) -> Sample:
    """Gaussian bf16 K/V."""
    layout = KVLayout("split", 8, (Part("k", 128), Part("v", 128)), KVDtype.BF16)
    codec = codecs.get(wire)
    nbytes = codec.chunk_nbytes(layout, TOKENS)
    name = f"benchmark {wire} {below} {layers}".encode().ljust(32, b"\0")
    info = NamespaceInfo(name, (nbytes,) * layers, TOKENS, wire, "benchmark", (layout,) * layers, below)
    random = np.random.default_rng(5)
    chunks, crcs = [], []
    for _ in range(SAMPLE):
        values = random.standard_normal((2, 8, layers * TOKENS, 128), np.float32)
        rows = np.empty((layers, nbytes), np.uint8)
        codec.encode(layout, list((values.view(np.uint32) >> 16).astype(np.uint16)), rows)
        chunks.append([row.data for row in rows])
        crcs.append([checksum(row.data) for row in rows])
    transcode.warm(info)
    return Sample(info, chunks, crcs, layers * layout.chunk_nbytes(TOKENS))


def files(
    scratch: Path, rounds: int = 5, nbytes: int = ROUND_NBYTES, layers: int = LAYERS
) -> dict[str, dict[str, Any]]:
    """By codec on disk: ``write_end``, ``write_batch`` (fsync once at the end, after each batch),
    ``read_cached``, ``read_cold`` and ``get_cached``, ``get_cold``.

    Each has ``gbps`` of the tier and ``plain_gbps`` of plain file I/O (1e9 bytes of records a second), and
    their ratio ``to_plain``. kv_to_plain: K/V in the engine's dtype that the tier moves a second, beside
    what plain files of such K/V would. A get is a read and a decode to the engine's dtype; plain is pread
    and a decode of the same record, without any check; ``time_to_plain`` is its time beside that. Namespaces
    that are transcoded have ``encode`` and ``decode`` as well: ``gbps`` of K/V in the engine's dtype,
    checksums included, and ``to_write``, ``to_read`` beside the plain rates: above 1, K/V are encoded faster
    than a plain file takes them as they are.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, (wire, below) in SPACES.items():
        data = sample(wire, below, layers)
        rows = found[name] = {
            f"write_{fsync}": _writes(scratch, data, fsync, rounds, nbytes) for fsync in FSYNCS
        }
        rows |= _reads(scratch, data, rounds, nbytes)
        if data.info.transcoded:
            rows |= _transcodes(data, rounds, rows)
    return found


# -- writing


def _writes(scratch: Path, data: Sample, fsync: Fsync, rounds: int, nbytes: int) -> dict[str, float]:
    record = hckv.block_nbytes(data.info)
    source = np.frombuffer(os.urandom(1 << 20) * (BATCH_NBYTES // (1 << 20) + 1), np.uint8).data
    tier, plain = [], []
    total = 0
    for turn in range(rounds + 1):  # the first warms up
        batches = data.batches(nbytes)
        total = record * sum(map(len, batches))
        with _disk(scratch / "tier", total, fsync) as disk:
            os.sync()
            tier.append(seconds(partial(_write, disk, batches)))
        os.sync()
        lengths = [record * len(batch) for batch in batches]
        plain.append(_plain_write(scratch / "plain", lengths, source, fsync))
        if not turn:
            tier.clear()
            plain.clear()
    return _row(data, total, tier, plain)


def _write(disk: Disk, batches: Sequence[Sequence[Write]]) -> list[int]:
    places = [place for batch in batches for place in disk.write(batch)]
    disk.sync()
    if min(places) < 0:
        raise NotMeasured(f"{sum(place < 0 for place in places)} of {len(places)} blocks were not written")
    return places


def _plain_write(path: Path, lengths: Sequence[int], source: memoryview, fsync: Fsync) -> float:
    """Seconds for writes of ``lengths`` to a new file."""
    path.unlink(missing_ok=True)
    began = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for length in lengths:
            while length:
                length -= os.write(fd, source[:length])
            if fsync == "batch":
                os.fdatasync(fd)
        os.fdatasync(fd)
        return time.perf_counter() - began
    finally:
        os.close(fd)


@contextmanager
def _disk(directory: Path, nbytes: int, fsync: Fsync = "end") -> Iterator[Disk]:
    """A new directory with room for ``nbytes`` of records."""
    shutil.rmtree(directory, ignore_errors=True)
    mode: Literal["batch", "interval"] = "batch" if fsync == "batch" else "interval"
    disk = Disk(directory, capacity=4 * nbytes + (1 << 30), fsync=mode, interval_s=1e6)
    try:
        list(disk.restore())
        yield disk
    finally:
        disk.close()


# -- reading


def _reads(scratch: Path, data: Sample, rounds: int, nbytes: int) -> dict[str, dict[str, float]]:
    directory = scratch / "tier"
    record = hckv.block_nbytes(data.info)
    batches = data.batches(nbytes)
    total = record * sum(map(len, batches))
    found = {}
    with _disk(directory, total) as disk:
        places = _write(disk, batches)
        names = [write.digest for batch in batches for write in batch]
        engine = _Engine(data)
        works: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            what: (
                partial(_read, disk, data, names, places, engine, decode),
                partial(_plain_read, directory, data, places, engine, decode),
            )
            for what, decode in (("read", False), ("get", True))
        }
        for what, sides in works.items():
            for state in ("cached", "cold"):
                times: tuple[list[float], list[float]] = ([], [])
                for turn in range(rounds + 1):
                    for work, spent in zip(sides, times, strict=True):
                        if state == "cold":
                            drop(directory)
                        elif not turn:
                            work()
                        spent.append(seconds(work))
                row = found[f"{what}_{state}"] = _row(data, total, *(spent[1:] for spent in times))
                if what == "get":
                    row["time_to_plain"] = 1 / row["to_plain"]
    return found


class _Engine:
    """Memory for a block: as it is on the wire, as a record, and as an engine wants it."""

    def __init__(self, data: Sample) -> None:
        info = data.info
        self.layers, self.layout = len(info.chunk_nbytes), info.layouts[0]
        self.wire = np.empty((self.layers, info.chunk_nbytes[0]), np.uint8)
        self.chunks = [row.data for row in self.wire]
        self.record = memoryview(bytearray(hckv.block_nbytes(info)))
        start = hckv.payload_offset(info)
        payload = self.record[start : start + sum(info.below_nbytes)]
        self.payload = np.frombuffer(payload, np.uint8).reshape(self.layers, info.below_nbytes[0])
        self.lying = [row.data for row in self.payload]
        shape = (self.layout.heads, self.layers * info.block_size, self.layout.parts[0].dim)
        self.parts = [np.empty(shape, self.layout.dtype.storage) for _ in self.layout.parts]
        self.below = codecs.get(info.below or info.codec)

    def decode(self) -> None:
        """In calls of about 1 MiB of K/V, whose results stay in a cache, as for both sides."""
        tokens = self.parts[0].shape[1] // self.layers
        for i in range(0, self.layers, 16):
            part = slice(i * tokens, (i + 16) * tokens)
            rows = self.payload[i : i + 16]
            self.below.decode(self.layout, rows, [array[:, part] for array in self.parts])


def _read(
    disk: Disk, data: Sample, names: Sequence[bytes], places: Sequence[int], engine: _Engine, decode: bool
) -> None:
    for name, place in zip(names, places, strict=True):
        disk.read(data.info, name, place, engine.lying, as_it_lies=True)
        if decode:
            engine.decode()


def _plain_read(directory: Path, data: Sample, places: Sequence[int], engine: _Engine, decode: bool) -> None:
    fds = {
        number: os.open(directory / f"{number:016x}.hckv", os.O_RDONLY)
        for number in {*map(number_of, places)}
    }
    try:
        for place in places:
            if os.preadv(fds[number_of(place)], [engine.record], offset_of(place)) != engine.record.nbytes:
                raise NotMeasured(f"{directory}: a record is shorter than it was written")
            if decode:
                engine.decode()
    finally:
        for fd in fds.values():
            os.close(fd)


def drop(directory: Path) -> None:
    """Take the segments out of the page cache."""
    for path in directory.glob("*.hckv"):
        _drop_file(path)


def _drop_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)  # what is dirty stays in
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


class Plain:
    """A file of records as a prompt of ``blocks`` blocks of ``kv`` has in int4, to be read without a tier."""

    def __init__(self, path: Path, blocks: int, kv: KVBuffers) -> None:
        self._path, self._kv = path, kv
        data = sample(*SPACES["int4"], layers=kv.spec.num_layers)
        record, start = hckv.block_nbytes(data.info), hckv.payload_offset(data.info)
        size = sum(data.info.below_nbytes)
        self.nbytes = blocks * record
        self._record = np.empty((blocks, record), np.uint8)
        self._rows = self._record[:, start : start + size].reshape(blocks, kv.spec.num_layers, -1)
        self._layout, self._codec = data.info.layouts[0], codecs.get(data.info.below)
        for i, row in enumerate(self._record):
            transcode.down(
                data.info, data.chunks[i % SAMPLE], data.crcs[i % SAMPLE], row[start : start + size].data
            )
        path.write_bytes(self._record.data)
        self.read()  # the first touch of memory is no read

    def read(self) -> None:
        """pread of all records, and a decode into the engine's buffers, layer by layer."""
        fd = os.open(self._path, os.O_RDONLY)
        try:
            if os.preadv(fd, [self._record.data], 0) != self.nbytes:
                raise NotMeasured(f"{self._path} is shorter than it was written")
        finally:
            os.close(fd)
        for layer in range(self._kv.spec.num_layers):
            self._codec.decode(self._layout, self._rows[:, layer], self._kv.layer(layer))

    def drop(self) -> None:
        """Take the file out of the page cache."""
        _drop_file(self._path)


def _row(data: Sample, nbytes: int, tier: Sequence[float], plain: Sequence[float]) -> dict[str, float]:
    ratio = median(b / a for a, b in zip(tier, plain, strict=True))
    return {
        "gbps": nbytes / median(tier) / 1e9,
        "plain_gbps": nbytes / median(plain) / 1e9,
        "to_plain": ratio,
        "kv_to_plain": ratio * data.kv_nbytes / hckv.block_nbytes(data.info),
    }


# -- the codecs between


def _transcodes(data: Sample, rounds: int, rows: dict[str, Any]) -> dict[str, dict[str, float]]:
    out = [memoryview(bytearray(sum(data.info.below_nbytes))) for _ in range(SAMPLE)]

    def down() -> None:
        for chunks, crcs, payload in zip(data.chunks, data.crcs, out, strict=True):
            transcode.down(data.info, chunks, crcs, payload)

    engine = _Engine(data)

    def up() -> None:
        for payload in out:
            transcode.up(data.info, payload, engine.chunks)

    found = {}
    for name, work, other in (("encode", down, "write"), ("decode", up, "read")):
        work()
        rate = SAMPLE * data.kv_nbytes / median(seconds(work) for _ in range(rounds)) / 1e9
        plain = rows["write_end" if other == "write" else "read_cold"]["plain_gbps"]
        found[name] = {"gbps": rate, f"to_{other}": rate / plain}
    return found
