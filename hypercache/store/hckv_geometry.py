"""A namespace as `.hckv` headers and footers have it, in one form: the size of its records follows from that.

::

    block size, numbers of layers, shapes and runs, codecs, label | shapes | runs of layers of one shape

Real models have one to three shapes of layers, so that 4096 layers fit a header of 64 KiB. The law is
docs/hckv.md; its first reason is that sizes are checked before anything is made of them.
"""

from __future__ import annotations

import struct
from itertools import groupby
from typing import Final, NoReturn

from hypercache import codecs
from hypercache.errors import ConfigError, HyperCacheError, SpecError
from hypercache.model import KVDtype, KVLayout, Part
from hypercache.store.namespace import MAX_LAYERS, NamespaceInfo

MAX_SHAPES: Final = 512
MAX_LABEL_NBYTES: Final = 256

# Block size; numbers of layers, shapes and runs; wire and L3 codec; label bytes, label. A shape: chunk bytes
# on the wire and in L3; kind, dtype, parts, heads and two dims of its layout. A run: shape, layers.
_GEOMETRY = struct.Struct("<IHHHBBH2x256s")
_SHAPE = struct.Struct("<QQBBHIII")
_RUN = struct.Struct("<HH")
_KINDS = ("", "split", "mla")  # 0: the layout is not known
_PARTS = {"split": ("k", "v"), "mla": ("latent", "rope")}
_DTYPES = ("", "bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2")
_AS_IT_CAME = 255  # the L3 codec of a namespace that has none of its own
_CODECS = {codecs.get(name).wire_id: name for name in codecs.names()}


class HckvError(HyperCacheError):
    """Bytes that break the law of docs/hckv.md. ``rule``: the broken rule's short, stable name there."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{message} (rule {rule!r})")
        self.rule = rule


def broken(rule: str, message: str) -> NoReturn:
    """Raises HckvError."""
    raise HckvError(rule, message)


def geometry(info: NamespaceInfo) -> bytes:
    """A namespace as headers and footers have it. Raises HckvError where the law has no form for it."""
    label = info.label.encode("utf-8", "replace")[:MAX_LABEL_NBYTES]
    label = label.decode("utf-8", "ignore").encode()  # not half a character
    wire = _codec_id(info.codec)
    below = _codec_id(info.below) if info.below else _AS_IT_CAME
    layouts = info.layouts or (None,) * len(info.chunk_nbytes)
    layers = list(zip(info.chunk_nbytes, info.below_nbytes, layouts, strict=True))
    shapes = {layer: number for number, layer in enumerate(dict.fromkeys(layers))}
    runs = [(shapes[layer], len(list(run))) for layer, run in groupby(layers)]
    if len(shapes) > MAX_SHAPES:
        broken("shapes", f"{len(shapes)} different kinds of layers, at most {MAX_SHAPES} can be written")
    if info.block_size >= 1 << 32:
        broken("geometry", f"block_size {info.block_size} has more than 32 bits")
    return b"".join(
        (
            _GEOMETRY.pack(
                info.block_size, len(layers), len(shapes), len(runs), wire, below, len(label), label
            ),
            *(_shape(*layer) for layer in shapes),
            *(_RUN.pack(*run) for run in runs),
        )
    )


def _shape(wire: int, below: int, layout: KVLayout | None) -> bytes:
    if layout is None:
        return _SHAPE.pack(wire, below, 0, 0, 0, 0, 0, 0)
    dims = [part.dim for part in layout.parts]
    if max(layout.heads, *dims) >= 1 << 32:
        broken("geometry", f"{layout.heads} heads, dims {dims}: more than 32 bits")
    kind, dtype = _KINDS.index(layout.kind), _DTYPES.index(layout.dtype.value)
    return _SHAPE.pack(wire, below, kind, dtype, len(dims), layout.heads, *dims)


def _codec_id(name: str) -> int:
    """The byte that names a codec. Raises HckvError for one that the format does not know."""
    try:
        return codecs.get(name).wire_id
    except ConfigError as error:
        raise HckvError("codec", f"records cannot name it: {error}") from None


def read_geometry(namespace: bytes, section: bytes) -> NamespaceInfo:
    """The reverse of :func:`geometry`. Raises HckvError for all that it would not have written."""
    if len(section) < _GEOMETRY.size:
        broken("geometry", f"{len(section)} bytes of geometry, it has at least {_GEOMETRY.size}")
    block_size, layers, shapes, runs, wire, below, label_nbytes, label = _GEOMETRY.unpack_from(section)
    if wire not in _CODECS or below not in (*_CODECS, _AS_IT_CAME):
        broken("codec", f"codecs {wire} and {below}, not both known here: written by a newer HyperCache")
    if not 1 <= shapes <= runs <= layers <= MAX_LAYERS or shapes > MAX_SHAPES:
        broken("geometry", f"{layers} layers in {runs} runs of {shapes} shapes")
    first = _GEOMETRY.size
    start = first + shapes * _SHAPE.size
    if len(section) != start + runs * _RUN.size or label_nbytes > MAX_LABEL_NBYTES:
        broken("geometry", f"{len(section)} bytes for {shapes} shapes, {runs} runs, label of {label_nbytes}")
    table = [_read_shape(*fields) for fields in _SHAPE.iter_unpack(section[first:start])]
    order = list(_RUN.iter_unpack(section[start:]))
    if max(number for number, _ in order) >= shapes or sum(count for _, count in order) != layers:
        broken("geometry", f"the {runs} runs do not give {layers} layers of {shapes} shapes")
    each = [table[number] for number, count in order for _ in range(count)]
    layouts = tuple(layout for _, _, layout in each if layout is not None)
    if len(layouts) not in (0, layers):
        broken("geometry", f"{len(layouts)} of {layers} layers have a layout")
    try:
        info = NamespaceInfo(
            digest=namespace,
            chunk_nbytes=tuple(chunk for chunk, _, _ in each),
            block_size=block_size,
            codec=_CODECS[wire],
            label=label[:label_nbytes].decode(),
            layouts=layouts,
            below="" if below == _AS_IT_CAME else _CODECS[below],
        )
    except (SpecError, UnicodeDecodeError) as error:
        raise HckvError("geometry", f"not a namespace: {error}") from None
    check_sizes(info)
    if geometry(info) != section:
        broken("geometry", "not in the one form that this namespace has")
    return info


def _read_shape(
    wire: int, below: int, kind: int, dtype: int, parts: int, heads: int, *dims: int
) -> tuple[int, int, KVLayout | None]:
    if kind == 0:
        return wire, below, None
    if kind >= len(_KINDS) or not 0 < dtype < len(_DTYPES) or parts != 2:
        broken("layout", f"layout kind {kind}, dtype {dtype}, {parts} parts: written by a newer HyperCache")
    name = _KINDS[kind]
    try:
        of = tuple(Part(part, dim) for part, dim in zip(_PARTS[name], dims, strict=True))
        return wire, below, KVLayout(name, heads, of, KVDtype(_DTYPES[dtype]))
    except SpecError as error:
        raise HckvError("layout", f"not a layout: {error}") from None


def check_sizes(info: NamespaceInfo) -> None:
    """Raises HckvError unless each chunk has the size that its codec gives it, where layouts are known."""
    if not info.layouts:
        return
    for name in dict.fromkeys((info.codec, info.below or info.codec)):
        _codec_id(name)
        codec = codecs.get(name)
        sizes = info.chunk_nbytes if name == info.codec else info.below_nbytes
        for layer, (layout, nbytes) in enumerate(zip(info.layouts, sizes, strict=True)):
            if not codec.supports(layout.dtype) or codec.chunk_nbytes(layout, info.block_size) != nbytes:
                broken("chunk-size", f"layer {layer}: {nbytes} bytes are no chunk of codec {name!r} there")
