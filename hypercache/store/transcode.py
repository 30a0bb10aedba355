"""From the codec on the wire and in memory to that on disk, and back, by way of the engine's dtype.

Layers of one layout lie one after the other in memory as they do on disk, so a run of them is one call of
the codecs, as blocks are elsewhere: a call from Python costs about as much as 100 KiB of K/V. A run is
short enough for its bytes to be in a core's cache still when they are summed and encoded.

Importing this brings numba with it. Any thread may call anything here; the kernels release the GIL.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from hypercache import codecs
from hypercache.checksum import checksum
from hypercache.codecs import Codec
from hypercache.errors import ConfigError, HyperCacheError, SpecError
from hypercache.model import KVLayout
from hypercache.store.namespace import NamespaceInfo

RUN_NBYTES: Final = 2 << 20  # K/V of a run in the engine's dtype, if it has more than one layer

_Bytes = npt.NDArray[np.uint8]


class CorruptChunk(HyperCacheError):
    """A chunk is not what was stored: its CRC differs. Treat the block as a miss."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Layers ``layers`` of one layout; bytes of a chunk above (wire codec) and below (on disk)."""

    layers: slice
    layout: KVLayout
    above: int
    below: int
    offset: int  # of its first chunk on disk

    @property
    def count(self) -> int:
        return self.layers.stop - self.layers.start  # type: ignore[no-any-return]


class _Form:
    """How blocks of a namespace are transcoded."""

    __slots__ = ("above", "below", "info", "nbytes", "runs")

    def __init__(self, info: NamespaceInfo) -> None:
        self.info = info
        self.above = _codec(info, info.codec)
        self.below = _codec(info, info.below)
        self.nbytes = sum(info.below_nbytes)
        self.runs = tuple(_runs(info))


def _codec(info: NamespaceInfo, name: str) -> Codec:
    where = f"namespace {info.label!r} cannot be transcoded"
    try:
        codec = codecs.get(name)
    except ConfigError as error:
        raise SpecError(f"{where}: {error}") from None
    if not info.layouts:
        raise SpecError(f"{where}: nothing says how its K/V lie in its chunks; keep them as they came")
    for layout in dict.fromkeys(info.layouts):
        if not codec.supports(layout.dtype):
            raise SpecError(
                f"{where}: codec {name!r} does not take {layout.dtype.value} K/V; keep them as they came"
            )
    return codec


def _runs(info: NamespaceInfo) -> Iterator[_Run]:
    codec, tokens = codecs.get(info.codec), info.block_size
    layer = offset = 0
    for (layout, above, below), group in groupby(
        zip(info.layouts, info.chunk_nbytes, info.below_nbytes, strict=True)
    ):
        want = codec.chunk_nbytes(layout, tokens)
        if above != want:
            raise SpecError(
                f"namespace {info.label!r}: chunks of layer {layer} have {above} bytes, with codec "
                f"{info.codec!r} their layout gives {want}"
            )
        end = layer + len(list(group))
        one = layout.chunk_nbytes(tokens)
        most = max(1, RUN_NBYTES // one)
        while layer < end:
            count = min(most, end - layer)
            yield _Run(slice(layer, layer + count), layout, above, below, offset)
            layer += count
            offset += count * below


# By namespace digest, because hashing a whole info takes longer than encoding a chunk.
_forms: dict[bytes, _Form] = {}
_MOST_FORMS: Final = 1024


def _form(info: NamespaceInfo) -> _Form:
    form = _forms.get(info.digest)
    if form is None or (form.info is not info and form.info != info):
        if len(_forms) >= _MOST_FORMS:
            _forms.clear()
        form = _forms[info.digest] = _Form(info)
    return form


def check(info: NamespaceInfo) -> None:
    """Raises SpecError unless each layer can go from the wire codec to its engine's dtype, from there to the
    codec on disk, and back. What lies on disk as it came always can."""
    if info.transcoded:
        _form(info)


def warm(info: NamespaceInfo) -> None:
    """Compile, or load from numba's cache, what :func:`down` and :func:`up` need: seconds at most, so that
    no block waits for it. Raises as :func:`check`."""
    if info.transcoded:
        _form(info)
        codecs.warm_recode(info.layouts)


def down(
    info: NamespaceInfo, chunks: Sequence[memoryview], crcs: Sequence[int], out: memoryview
) -> array[int]:
    """Encode a block for the disk.

    chunks: each layer's chunk in the wire codec; crcs: CRC-32 of each.
    out: receives the chunks of all layers in ``info.below``, one after the other, ``sum(info.below_nbytes)``
        bytes.
    Returns the CRC-32 of each chunk in ``out``.
    Raises CorruptChunk for a chunk that its CRC does not fit, before it is decoded: what it becomes would get
    a valid CRC. CodecError for one that no encoder wrote, SpecError for sizes that do not fit. Then ``out``
    holds unspecified bytes.
    """
    form = _form(info)
    _check_sizes(info, form, chunks, out)
    if len(crcs) != len(chunks):
        raise SpecError(f"namespace {info.label!r}: {len(crcs)} checksums for {len(chunks)} chunks")
    payload = np.frombuffer(out, np.uint8)
    sums = array("I")
    for run in form.runs:
        for layer, chunk, crc in zip(_numbers(run), chunks[run.layers], crcs[run.layers], strict=True):
            if checksum(chunk) != crc:
                raise CorruptChunk(
                    f"namespace {info.label!r}: the chunk of layer {layer} changed in memory since it was "
                    "stored; its block is a miss"
                )
        below, at = _below(payload, run), 0
        for rows in _apart(chunks[run.layers]):
            some = below[at : at + len(rows)]
            codecs.recode(run.layout, info.block_size, form.above, rows, form.below, some)
            at += len(rows)
        sums.extend(checksum(row.data) for row in below)
    return sums


def up(info: NamespaceInfo, payload: memoryview, chunks: Sequence[memoryview]) -> array[int]:
    """The reverse: from a record's payload, which the caller has verified, into ``chunks``, each layer's
    place in memory.

    Returns the CRC-32 of each of ``chunks``. Raises CodecError for bytes that no encoder wrote, SpecError for
    sizes that do not fit or memory that is read-only. Then ``chunks`` hold unspecified bytes.
    """
    form = _form(info)
    _check_sizes(info, form, chunks, payload)
    source = np.frombuffer(payload, np.uint8)
    sums = array("I")
    for run in form.runs:
        below, at = _below(source, run), 0
        for rows in _apart(chunks[run.layers]):
            some = below[at : at + len(rows)]
            codecs.recode(run.layout, info.block_size, form.below, some, form.above, rows)
            at += len(rows)
        sums.extend(map(checksum, chunks[run.layers]))
    return sums


def _check_sizes(info: NamespaceInfo, form: _Form, chunks: Sequence[memoryview], payload: memoryview) -> None:
    found = tuple(chunk.nbytes for chunk in chunks)
    if found != info.chunk_nbytes or payload.nbytes != form.nbytes:
        raise SpecError(
            f"namespace {info.label!r}: a block has {len(info.chunk_nbytes)} chunks of "
            f"{sum(info.chunk_nbytes)} bytes and {form.nbytes} on disk, got {len(found)} of {sum(found)} and "
            f"{payload.nbytes}"
        )


def _numbers(run: _Run) -> range:
    return range(run.layers.start, run.layers.stop)


def _below(payload: _Bytes, run: _Run) -> _Bytes:
    return payload[run.offset : run.offset + run.count * run.below].reshape(run.count, run.below)


def _apart(chunks: Sequence[memoryview]) -> Iterator[_Bytes]:
    """Chunks of one size as rows for a codec: in one piece, where they lie one after the other."""
    arrays = [np.frombuffer(chunk, np.uint8) for chunk in chunks]
    nbytes = arrays[0].nbytes
    starts = [each.__array_interface__["data"][0] for each in arrays]
    if starts == list(range(starts[0], starts[0] + len(arrays) * nbytes, nbytes)):
        writable = all(each.flags.writeable for each in arrays)
        yield as_strided(arrays[0], (len(arrays), nbytes), (nbytes, 1), writeable=writable)
    else:
        yield from (each.reshape(1, nbytes) for each in arrays)
