"""What clients hold: leases on blocks they read, reservations of blocks they write."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hypercache.errors import HyperCacheError
from hypercache.store.index import Block

LEASE_OVERHEAD = 1024  # the lease, its entries here and there, and the stream that sends from it

Reason = Literal["exists", "pending", "orphan", "full", "too_large"]


def lease_nbytes(blocks: int, chains: int) -> int:
    """Bytes of memory that a lease on so many blocks takes: a reference to each; for each chain another, and
    its count."""
    return LEASE_OVERHEAD + 8 * blocks + 56 * chains


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
    """Keeps ``held_blocks`` and their prefixes in place while open, and beyond that while pinned."""

    __slots__ = ("ended", "held_blocks", "owner", "pins")

    def __init__(self, owner: Hashable, blocks: Sequence[Block]) -> None:
        self.owner = owner
        self.held_blocks = blocks  # of one namespace; empty: holds nothing (any more)
        self.pins = 0
        self.ended = ""  # why; empty while open

    @property
    def open(self) -> bool:
        return not self.ended


class Lease(Hold):
    """A counted, time-limited hold on ``blocks``: one chain after the other, ``counts`` of each.

    ``expires`` is in the clock of ``now``. Read only while ``open``, or while you have it pinned; ``blocks``
    is empty when both are over.
    """

    __slots__ = ("blocks", "counts", "expires", "id", "nbytes")

    def __init__(
        self, owner: Hashable, blocks: list[Block], counts: tuple[int, ...], lease_id: int, expires: float
    ) -> None:
        self.blocks = blocks
        self.counts = counts
        super().__init__(owner, [chain[-1] for chain in self.chains])
        self.id = lease_id
        self.expires = expires
        self.nbytes = lease_nbytes(len(blocks), len(counts))  # it takes itself, here and in who sends from it

    @property
    def chains(self) -> Iterator[list[Block]]:
        """Each chain that has blocks."""
        end = 0
        for count in self.counts:
            end += count
            if count:
                yield self.blocks[end - count : end]

    @property
    def ready(self) -> bool:
        """Whether all its blocks can be read from where they lie."""
        return all(block.ready for block in self.blocks)

    def settle(self, others: Container[Block] = ()) -> None:
        """What of it cannot be read (it did not come from L3, nor is it among ``others``) is no longer part
        of it: of the first chain, the run before that is left, of another one nothing. It holds what it
        held."""
        counts: list[int] = []
        blocks: list[Block] = []
        end = 0
        for number, count in enumerate(self.counts):
            chain = self.blocks[end : end + count]
            end += count
            lacking = (at for at, block in enumerate(chain) if not block.ready and block not in others)
            good = next(lacking, count)
            good = good if good == count or number == 0 else 0
            counts.append(good)
            blocks += chain[:good]
        self.blocks, self.counts = blocks, tuple(counts)

    def __repr__(self) -> str:
        return f"<lease {self.id} blocks={len(self.blocks)} pins={self.pins} {self.ended or 'open'}>"


Chunk = Callable[["Reservation", int], memoryview]


class Batch:
    """The reservations of one call. They stall together: while one is written, the others wait. ``chunk``
    gives their memory."""

    __slots__ = ("chunk", "open", "progress")

    def __init__(self, now: float, chunk: Chunk) -> None:
        self.progress = now
        self.chunk = chunk
        self.open: dict[Reservation, None] = {}


class Reservation(Hold):
    """The right to write one block. ``filled`` has bit ``layer`` set once that chunk is in place.

    It takes no memory until the first :meth:`chunk` or ``BlockStore.pin``: a promise to write evicts nothing.
    """

    __slots__ = ("batch", "block", "filled")

    def __init__(self, owner: Hashable, block: Block, batch: Batch) -> None:
        super().__init__(owner, (block,))
        self.block = block
        self.batch = batch
        self.filled = 0

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
        return self.batch.chunk(self, layer)

    def __repr__(self) -> str:
        return f"<reservation {self.digest.hex()[:12]} pins={self.pins} {self.ended or 'open'}>"
