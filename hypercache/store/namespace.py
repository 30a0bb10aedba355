"""What all blocks of one namespace have in common: identity and geometry."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from hypercache.errors import SpecError
from hypercache.model import KVLayout

MAX_LAYERS = 4096
MAX_CHUNK_NBYTES = 1 << 40


@dataclass(frozen=True)
class NamespaceInfo:
    """Identity and geometry of a namespace.

    digest: 16..32 bytes that commit to model, codec, block size, tenant and all else K/V depend on.
    chunk_nbytes: encoded bytes of one layer chunk, per layer; 1..4096 layers.
    block_size: tokens per block.
    label: for people; no part of the identity.
    layouts: of each layer's K/V, or none: then its chunks are bytes that nobody here can decode.
    below: the codec of its blocks on disk; "" means that they lie there as they came.
    """

    digest: bytes
    chunk_nbytes: tuple[int, ...]
    block_size: int
    codec: str
    label: str = field(compare=False)
    layouts: tuple[KVLayout, ...] = ()
    below: str = ""

    def __post_init__(self) -> None:
        where = f"namespace {self.label!r}"
        if not isinstance(self.digest, bytes) or not 16 <= len(self.digest) <= 32:
            raise SpecError(f"{where}: the digest must be 16..32 bytes")
        if not 1 <= len(self.chunk_nbytes) <= MAX_LAYERS:
            raise SpecError(f"{where}: {len(self.chunk_nbytes)} layers, must be 1..{MAX_LAYERS}")
        for layer, nbytes in enumerate(self.chunk_nbytes):
            if type(nbytes) is not int or not 1 <= nbytes <= MAX_CHUNK_NBYTES:
                raise SpecError(f"{where}: chunk_nbytes[{layer}]={nbytes!r}, must be 1..{MAX_CHUNK_NBYTES}")
        if type(self.block_size) is not int or self.block_size < 1:
            raise SpecError(f"{where}: block_size={self.block_size!r}, must be an integer >= 1")
        if not self.codec:
            raise SpecError(f"{where}: the codec's name is empty")
        if len(self.layouts) not in (0, len(self.chunk_nbytes)):
            raise SpecError(f"{where}: {len(self.layouts)} layouts for {len(self.chunk_nbytes)} layers")
        if self.transcoded and not self.layouts:
            raise SpecError(f"{where}: codec {self.codec!r} cannot become {self.below!r} without layouts")

    @property
    def transcoded(self) -> bool:
        """Whether chunks change their codec between memory and disk."""
        return self.below not in ("", self.codec)

    @cached_property
    def below_nbytes(self) -> tuple[int, ...]:
        """Bytes of a chunk on disk, per layer. Raises ConfigError for an unknown codec, SpecError for one
        that cannot encode a layer."""
        if not self.transcoded:
            return self.chunk_nbytes
        from hypercache import codecs  # with them comes a compiler, and who keeps nothing on disk needs none

        codec = codecs.get(self.below)
        return tuple(codec.chunk_nbytes(layout, self.block_size) for layout in self.layouts)


class Namespace:
    """Handle of an open namespace. A block's layer chunks lie one after the other, without gaps."""

    __slots__ = ("info", "nbytes", "offsets")

    def __init__(self, info: NamespaceInfo) -> None:
        self.info = info
        self.offsets = (0, *accumulate(info.chunk_nbytes))  # one more than layers
        self.nbytes = self.offsets[-1]  # of a whole block

    @property
    def layers(self) -> int:
        return len(self.info.chunk_nbytes)

    def span(self, layer: int) -> tuple[int, int]:
        """First and end byte of a layer's chunk inside its block. Raises SpecError for an unknown layer."""
        if not 0 <= layer < len(self.offsets) - 1:
            raise SpecError(
                f"namespace {self.info.label!r} has layers 0..{self.layers - 1}, asked for {layer}"
            )
        return self.offsets[layer], self.offsets[layer + 1]

    def __repr__(self) -> str:
        return f"<namespace {self.info.label!r} {self.info.digest.hex()[:12]}>"
