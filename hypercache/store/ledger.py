"""Who holds what: opens and ends leases and reservations, each exactly once."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from itertools import islice

from hypercache.store.holds import Batch, Hold, Lease, Reservation
from hypercache.store.index import Block, hold
from hypercache.store.room import Room

OWNER_SHARE = 2  # open reservations of one owner: at most half of the arena's bytes ...
OWNER_RESERVATIONS = 1 << 14  # ... and so many: a prompt of 131,072 tokens in blocks of 8


class Ledger:
    """All open holds, by owner and by end. A hold that has ended keeps its block only while it is pinned."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._leases: dict[int, Lease] = {}
        self._expiry: list[tuple[float, int]] = []
        self._batches: dict[Batch, None] = {}
        self._owned: dict[Hashable, dict[Hold, None]] = {}
        self._writing: dict[Hashable, tuple[int, int]] = {}  # open reservations and their bytes
        self._next_lease = 1
        self.committed = 0
        self.aborted = 0
        self.stalled = 0
        self.expired = 0

    @property
    def leases_open(self) -> int:
        return len(self._leases)

    @property
    def reservations_open(self) -> int:
        return sum(len(batch.open) for batch in self._batches)

    def lease(self, owner: Hashable, chains: Sequence[Sequence[Block]], expires: float) -> Lease:
        """Hold each chain, by its last block. Without any block the lease has ended."""
        lease = Lease(owner, chains, self._next_lease, expires)
        self._next_lease += 1
        if not lease.blocks:
            lease.ended = "nothing was found"
            return lease
        self._leases[lease.id] = lease
        # Ids, not leases: a lease released early must not keep its list of blocks alive until it expires.
        heapq.heappush(self._expiry, (expires, lease.id))
        self._take(lease)
        return lease

    def reservation(self, owner: Hashable, block: Block, batch: Batch) -> Reservation:
        """Make ``owner`` the writer of a pending block."""
        reservation = Reservation(owner, block, batch)
        count, nbytes = self._writing.get(owner, (0, 0))
        self._writing[owner] = count + 1, nbytes + reservation.nbytes
        block.writer = reservation
        batch.open[reservation] = None
        self._batches[batch] = None
        self._take(reservation)
        return reservation

    def may_reserve(self, owner: Hashable, nbytes: int) -> bool:
        """Whether ``owner`` may have one more reservation, of ``nbytes``. One is always allowed; more only
        within a share, so that whoever promises and does not write keeps no one else out."""
        count, open_nbytes = self._writing.get(owner, (0, 0))
        share = self._room.arena.nbytes // OWNER_SHARE
        return not count or (count < OWNER_RESERVATIONS and open_nbytes + nbytes <= share)

    def _take(self, held: Lease | Reservation) -> None:
        self._owned.setdefault(held.owner, {})[held] = None
        held.held_blocks[0].tree.busy += 1
        for block in held.held_blocks:
            hold(block)

    def end(self, held: Hold, why: str) -> None:
        """End a hold. Changes nothing if it has ended already."""
        if held.ended:
            return
        held.ended = why
        if isinstance(held, Lease):
            del self._leases[held.id]
        elif isinstance(held, Reservation):
            del held.batch.open[held]
            if not held.batch.open:
                del self._batches[held.batch]
            self.aborted += why != "committed"
            count, nbytes = self._writing.pop(held.owner)
            if count > 1:
                self._writing[held.owner] = count - 1, nbytes - held.nbytes
        mine = self._owned[held.owner]
        del mine[held]
        if not mine:
            del self._owned[held.owner]
        self.let_go(held)

    def let_go(self, held: Hold) -> None:
        """Free what ``held`` kept, if it has ended and nothing is pinned."""
        if held.ended and not held.pins and held.held_blocks:
            blocks, held.held_blocks = held.held_blocks, ()
            blocks[0].tree.busy -= 1
            for block in blocks:
                self._room.drop_hold(block)

    def owned_by(self, owner: Hashable) -> list[Hold]:
        return list(self._owned.get(owner, ()))

    def expire(self, now: float) -> None:
        """End the leases whose time is up."""
        while self._expiry and self._expiry[0][0] <= now:
            lease = self._leases.get(heapq.heappop(self._expiry)[1])
            if lease is not None:
                self.expired += 1
                self.end(lease, "expired")

    def stalled_since(self, then: float, limit: int) -> list[Reservation]:
        """Up to ``limit`` reservations in whose batch nothing has happened after ``then``."""
        stalled = (writer for batch in self._batches if batch.progress <= then for writer in batch.open)
        return list(islice(stalled, limit))
