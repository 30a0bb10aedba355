"""From one codec to another in one pass: what decoding and encoding again give, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hypercache.codecs import kernels
from hypercache.codecs.base import KINDS, Bytes2D, Codec, check_writable
from hypercache.codecs.int8 import Int8Codec
from hypercache.codecs.raw import RawCodec
from hypercache.codecs.scaled import SCALE, ScaledCodec
from hypercache.errors import SpecError
from hypercache.model import KVLayout, Part

_ANY = (RawCodec(), Int8Codec())  # a kernel serves all codecs


def recode(layout: KVLayout, tokens: int, source: Codec, data: Bytes2D, target: Codec, out: Bytes2D) -> None:
    """Chunks of ``tokens`` tokens in codec ``source`` -> the same K/V in codec ``target``.

    data, out: uint8 ``(n, codec.chunk_nbytes(layout, tokens))``, rows contiguous; they must not overlap.
    The K/V are rounded to ``layout.dtype`` between, so that it makes no difference where they are decoded; to
    the same codec, chunks are copied.
    Raises SpecError for shapes and dtypes that do not fit, before a byte is written; CodecError for bytes
    that no encoder writes: ``out`` holds unspecified bytes then.
    """
    for codec, rows in ((source, data), (target, out)):
        _check(codec, layout, tokens, rows)
    if data.shape[0] != out.shape[0]:
        raise SpecError(f"{data.shape[0]} chunks cannot become {out.shape[0]}")
    check_writable("out", out)
    if source is target:
        np.copyto(out, data)
        return
    at, to = 0, 0
    for part in layout.parts:
        code, rotation, scales, nbytes = _form(source, layout, part)
        to_code, to_rotation, to_scales, to_nbytes = _form(target, layout, part)
        bad = kernels.recoder(part.dim)(
            (code, rotation, to_code, to_rotation, KINDS[layout.dtype]),
            (layout.heads, data.shape[0], tokens, part.dim),
            (data.ctypes.data + at, data.strides[0], data.shape[1] // layout.heads),
            (out.ctypes.data + to, out.strides[0], out.shape[1] // layout.heads),
        )
        if bad >= 0:
            assert isinstance(source, ScaledCodec)
            raise source.bad_scale(layout, data, tokens, part, at, bad)
        at += tokens * (scales + nbytes)
        to += tokens * (to_scales + to_nbytes)


def warm_recode(layouts: Iterable[KVLayout]) -> None:
    """Compile, or load from numba's cache, what :func:`recode` needs; as :func:`hypercache.codecs.warm`."""
    for layout in dict.fromkeys(layouts):
        if layout.dtype in KINDS:
            raw, int8 = (np.zeros((1, codec.chunk_nbytes(layout, 1)), np.uint8) for codec in _ANY)
            recode(layout, 1, _ANY[0], raw, _ANY[1], int8)


def _form(codec: Codec, layout: KVLayout, part: Part) -> tuple[int, int, int, int]:
    """Code, size of the Walsh-Hadamard blocks, bytes of a scale and of a row's codes."""
    if isinstance(codec, ScaledCodec):
        return codec.code, codec.rotation(part.dim), SCALE, codec.row_nbytes(part.dim)
    return kernels.RAW, 1, 0, part.dim * layout.dtype.itemsize


def _check(codec: Codec, layout: KVLayout, tokens: int, rows: Bytes2D) -> None:
    if layout.dtype not in KINDS or not isinstance(codec, RawCodec | ScaledCodec):
        raise SpecError(f"{layout.dtype.value} K/V cannot go from or to codec {codec.name!r} in one pass")
    need = codec.chunk_nbytes(layout, tokens)
    if rows.ndim != 2 or rows.dtype != np.uint8 or rows.shape[1] != need or rows.strides[1] != 1:
        raise SpecError(
            f"codec {codec.name!r} needs uint8 (chunks, {need}) with contiguous rows, got {rows.dtype} "
            f"{rows.shape}"
        )
