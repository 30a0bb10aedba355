"""The codecs by name: ``get("fp8")``. One file each; the contract is :mod:`hypercache.codecs.base`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import numpy as np

from hypercache.codecs import kernels
from hypercache.codecs.base import Codec
from hypercache.codecs.fp8 import Fp8Codec
from hypercache.codecs.int4 import Int4Codec, Int4PlainCodec
from hypercache.codecs.int8 import Int8Codec
from hypercache.codecs.raw import RawCodec
from hypercache.codecs.recode import recode, warm_recode
from hypercache.errors import ConfigError
from hypercache.model import KVLayout
from hypercache.rope import Turn, rotated_part

_CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (RawCodec(), Fp8Codec(), Int8Codec(), Int4Codec(), Int4PlainCodec())
}


def names() -> tuple[str, ...]:
    """All codec names, `raw` first."""
    return tuple(_CODECS)


def get(name: str) -> Codec:
    """The codec of that name. Raises ConfigError for any other, with the known names and the nearest one."""
    if (codec := _CODECS.get(name)) is not None:
        return codec
    near = difflib.get_close_matches(name.lower(), _CODECS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"codec {name!r} is unknown, known are {', '.join(_CODECS)}{hint}")


def warm(codec: Codec, layouts: Iterable[KVLayout]) -> None:
    """Compile, or load from numba's cache, every kernel that ``codec`` needs for K/V of these layouts, those
    that move keys included.

    Seconds per head dim on a machine that never ran this version, fractions of a second afterwards. Call it
    at start, so that no request waits for it.
    """
    for layout in dict.fromkeys(layouts):
        parts = [np.zeros((layout.heads, 1, part.dim), layout.dtype.storage) for part in layout.parts]
        chunk = np.empty((1, codec.chunk_nbytes(layout, 1)), np.uint8)
        codec.encode(layout, parts, chunk)
        codec.decode(layout, chunk, parts)
        if layout.dtype.is_fp8:
            continue
        dim = layout.parts[rotated_part(layout)].dim
        for rotary_dim in (2, *kernels.FIXED):
            if rotary_dim <= dim:
                none = np.zeros(rotary_dim // 2, np.float32)
                codec.decode(layout, chunk, parts, Turn(none, none, rotary_dim, False))


__all__ = ["Codec", "get", "names", "recode", "warm", "warm_recode"]
