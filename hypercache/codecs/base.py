"""The codec contract: K/V of a run of blocks in one layer <-> encoded layer chunks.

All codecs keep the head-major order of :class:`hypercache.model.KVLayout` inside an encoded chunk:
``[head][part](scales[token], codes[token][dim])``. A range of heads therefore stays one contiguous
slice, and encoded sizes depend on the layout alone, never on the data.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hypercache.codecs import kernels
from hypercache.errors import CodecError, SpecError
from hypercache.model import KVDtype, KVLayout
from hypercache.rope import Turn, rotated_part

Bytes2D = npt.NDArray[np.uint8]
Parts = Sequence[npt.NDArray[Any]]

KINDS = {KVDtype.BF16: kernels.BF16, KVDtype.FP16: kernels.FP16, KVDtype.FP32: kernels.FP32}
NO_TURN: kernels.Ints = (0, 0, 0, 0)


class Codec(abc.ABC):
    """One way to encode K/V. Stateless, thread-safe, never allocates per call on the data path."""

    name: ClassVar[str]
    wire_id: ClassVar[int]  # one byte, never reused for another format
    lossless: ClassVar[bool]

    @abc.abstractmethod
    def supports(self, dtype: KVDtype) -> bool:
        """Whether K/V kept in ``dtype`` can be encoded."""

    @abc.abstractmethod
    def chunk_nbytes(self, layout: KVLayout, tokens: int) -> int:
        """Encoded bytes of one chunk of ``tokens`` tokens, scales included."""

    @abc.abstractmethod
    def encode(self, layout: KVLayout, parts: Parts, out: Bytes2D) -> None:
        """Encode ``n`` blocks of one layer.

        parts: one array per ``layout.parts``, shape ``(heads, n * tokens, dim)``, dtype
            ``layout.dtype.storage``, innermost axis contiguous, other strides free.
        out: uint8 ``(n, chunk_nbytes(layout, tokens))``, rows contiguous; ``tokens`` follows from the shapes.
        Raises SpecError on any disagreement, before a byte is written.
        """

    @abc.abstractmethod
    def decode(self, layout: KVLayout, data: Bytes2D, parts: Parts, turn: Turn | None = None) -> None:
        """The reverse, into caller memory of the same shapes.

        turn: moves keys to another position in the same pass (:mod:`hypercache.rope`): the rotated part is
            decoded to float32, turned, and rounded once; all else comes out as without it. Fp16 saturates
            at 65504 there. SpecError for K/V kept in fp8.
        Raises CodecError for bytes that no encoder writes (bad scale); ``parts`` then hold unspecified
        values.
        """

    def __repr__(self) -> str:
        return f"<codec {self.name}>"


def check_shapes(codec: Codec, layout: KVLayout, parts: Parts, rows: Bytes2D) -> tuple[int, int]:
    """Validate a call of encode or decode; returns ``(blocks, tokens_per_block)``."""
    if not codec.supports(layout.dtype):
        raise SpecError(f"codec {codec.name!r} does not take {layout.dtype.value} K/V; use 'raw'")
    if rows.ndim != 2 or rows.dtype != np.uint8 or (rows.shape[1] > 1 and rows.strides[1] != 1):
        raise SpecError(
            f"encoded rows must be uint8 (blocks, nbytes) with contiguous rows, got {rows.dtype} {rows.shape}"
        )
    blocks, total = rows.shape[0], check_parts(layout, parts)
    if blocks == 0 or total == 0 or total % blocks:
        raise SpecError(f"{total} tokens do not make {blocks} whole blocks")
    tokens = total // blocks
    need = codec.chunk_nbytes(layout, tokens)
    if rows.shape[1] != need:
        raise SpecError(
            f"codec {codec.name!r} needs rows of {need} bytes for this layout, got {rows.shape[1]}"
        )
    return blocks, tokens


def check_parts(layout: KVLayout, parts: Parts) -> int:
    """Validate engine buffers of one layer against ``layout``; returns the number of tokens in them."""
    if len(parts) != len(layout.parts):
        raise SpecError(f"layout {layout.kind!r} has {len(layout.parts)} parts, got {len(parts)} arrays")
    storage = layout.dtype.storage
    if parts[0].ndim != 3:
        raise SpecError(f"part {layout.parts[0].name!r} must be (heads, tokens, dim), got {parts[0].shape}")
    total: int = parts[0].shape[1]
    for part, array in zip(layout.parts, parts, strict=True):
        want = (layout.heads, total, part.dim)
        if array.shape != want:
            raise SpecError(f"part {part.name!r} must have shape {want}, got {array.shape}")
        if array.dtype != storage:
            raise SpecError(f"part {part.name!r} must be {storage} ({layout.dtype.value}), got {array.dtype}")
        if array.shape[2] > 1 and array.strides[2] != array.itemsize:
            raise SpecError(
                f"part {part.name!r}: the innermost axis must be contiguous, strides are {array.strides}"
            )
    return total


def check_writable(what: str, array: npt.NDArray[Any]) -> None:
    """Raises SpecError for a read-only destination."""
    if not array.flags.writeable:
        raise SpecError(f"{what} is read-only; pass a writable buffer")


def place_turn(layout: KVLayout, turn: Turn | None) -> list[kernels.Ints]:
    """What a kernel is told of ``turn``, for each part; ``turn`` must outlive the call of the kernel.

    Raises SpecError where keys of this layout cannot be turned so.
    """
    told = [NO_TURN] * len(layout.parts)
    if turn is None:
        return told
    if layout.dtype not in KINDS:
        raise SpecError(
            f"{layout.dtype.value} K/V cannot be moved to another position: their scale may not hold a "
            "rotated key; use exact hits only"
        )
    which = rotated_part(layout)
    part = layout.parts[which]
    if turn.rotary_dim > part.dim:
        raise SpecError(
            f"the turn rotates {turn.rotary_dim} elements, part {part.name!r} has {part.dim}: "
            "it was made for another layer group"
        )
    told[which] = (
        turn.cos.ctypes.data,
        turn.sin.ctypes.data,
        turn.rotary_dim // 2,
        int(turn.interleaved),
    )
    return told


__all__ = ["Bytes2D", "Codec", "CodecError", "Parts", "check_shapes"]
