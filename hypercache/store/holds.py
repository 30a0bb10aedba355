"""What clients hold: leases on blocks they read, reservations of blocks they write."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal

from hypercache.errors import HyperCacheError
from hypercache.store.index import Block

Reason = Literal["exists", "pending", "orphan", "full", "too_large"]


class HoldEnded(HyperCacheError):
    """The lease or reservation has ended: expired, aborted, taken over, or its namespace was cleared."""


@dataclass(frozen=True, slots=True)
class Skip:
    """A digest that was not reserved: "exists"; "pending" (another writer is alive); "orphan" (its prefix is
    neither stored nor reserved); "full" (all else is held, or the owner has reserved as much as one may);
    "too_large" (exceeds the tier). What follows a block skipped for the last three is skipped for the same
    reason."""

    reason: Reason


class Hold:
    """Keeps ``held_block`` and its prefix in place while open, and beyond that while pinned."""

    __slots__ = ("ended", "held_block", "owner", "pins")

    def __init__(self, owner: Hashable, block: Block | None) -> None:
        self.owner = owner
        self.held_block = block  # None: holds nothing (any more)
        self.pins = 0
        self.ended = ""  # why; empty while open

    @property
    def open(self) -> bool:
        return not self.ended


class Lease(Hold):
    """A counted, time-limited hold on ``blocks``, a chain. ``expires`` is in the clock of ``now``.

    Read only while ``open``, or while you have it pinned.
    """

    __slots__ = ("blocks", "expires", "id")

    def __init__(self, owner: Hashable, blocks: list[Block], lease_id: int, expires: float) -> None:
        super().__init__(owner, blocks[-1] if blocks else None)
        self.blocks = blocks
        self.id = lease_id
        self.expires = expires

    def __repr__(self) -> str:
        return f"<lease {self.id} blocks={len(self.blocks)} pins={self.pins} {self.ended or 'open'}>"


Chunk = Callable[["Reservation", int], memoryview]


class Batch:
    """The reservations of one call. They stall together: while one is written, the others wait."""

    __slots__ = ("open", "progress")

    def __init__(self, now: float) -> None:
        self.progress = now
        self.open: dict[Reservation, None] = {}


class Reservation(Hold):
    """The right to write one block. ``filled`` has bit ``layer`` set once that chunk is in place.

    It takes no memory until the first :meth:`chunk` or ``BlockStore.pin``: a promise to write evicts nothing.
    """

    __slots__ = ("_chunk", "batch", "block", "filled")

    def __init__(self, owner: Hashable, block: Block, batch: Batch, chunk: Chunk) -> None:
        super().__init__(owner, block)
        self.block = block
        self.batch = batch
        self.filled = 0
        self._chunk = chunk

    @property
    def digest(self) -> bytes:
        return self.block.digest

    @property
    def nbytes(self) -> int:
        """Bytes of the whole block, all layers."""
        return self.block.tree.space.nbytes

    def chunk(self, layer: int) -> memoryview:
        """Where the chunk of ``layer`` goes: a writable view. Pin the reservation before a transport gets it.

        Raises HoldEnded, SpecError, and StoreFull like ``BlockStore.pin``.
        """
        return self._chunk(self, layer)

    def __repr__(self) -> str:
        return f"<reservation {self.digest.hex()[:12]} pins={self.pins} {self.ended or 'open'}>"
