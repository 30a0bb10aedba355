"""Which codec a namespace has on the server's disk."""

from __future__ import annotations

from hypercache import codecs
from hypercache.codecs import Codec
from hypercache.errors import ConfigError, SpecError
from hypercache.model import ModelSpec

DEFAULT = "int4"  # below a wire codec that has more bits, and loses something already
AS_THEY_CAME = "raw"


def disk_codec(name: str | None, wire: Codec, model: ModelSpec) -> str:
    """The codec's name as the server is told it: "" where blocks lie on disk as they travel.

    name: None for the default: ``int4`` for what travels as ``int8`` or ``fp8``, and as it came for what
    travels lossless, or with 4 bits already. ``raw``, and the wire codec's own name: as it came.
    Raises ConfigError for an unknown codec, SpecError for one that cannot encode a layer of this model.
    """
    if name is None:
        return DEFAULT if wire.name in ("int8", "fp8") else ""
    if not isinstance(name, str):
        raise ConfigError(f"disk_codec must be a str or None, got {type(name).__name__}")
    try:
        codec = codecs.get(name)
    except ConfigError as error:
        raise ConfigError(f"disk_codec (HYPERCACHE_DISK_CODEC): {error}") from None
    if name in (AS_THEY_CAME, wire.name):
        return ""
    for layer in range(model.num_layers):
        dtype = model.layout(layer).dtype
        if not codec.supports(dtype):
            raise SpecError(
                f"disk_codec={name!r} cannot encode layer {layer}: its K/V are {dtype.value}; use "
                "disk_codec='raw', which keeps blocks on disk as they travel"
            )
    return name
