"""Who holds what: opens and ends leases and reservations, each exactly once."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from itertools import islice

from hypercache.store.holds import Batch, Hold, Lease, Reservation
from hypercache.store.index import Block, Tree, hold
from hypercache.store.room import Room

LEASES_SHARE = 64  # leases take at most 1/64 of the memory they are on, beside it, ...
LEASES_LEAST = 2 << 20  # ... or so many bytes, ...
OWNER_LEASES = 4  # ... and those of one owner a quarter of that, or one lease.
CHAIN_STEPS = 1 << 17  # of one lease: blocks found by chains, twice, and blocks held on their account
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
        self._reading: dict[Hashable, int] = {}  # bytes that leases take
        self._gone: list[Hashable] = []  # names that owners got who left reservations behind
        self.lease_bytes = 0  # that leases take, all together
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

    def lease(
        self,
        owner: Hashable,
        tree: Tree | None,
        digests: Sequence[bytes],
        chains: Sequence[tuple[bytes, int]],
        expires: float,
    ) -> Lease:
        """Hold the run of ``digests`` and each chain (last digest, blocks), all by their last block. Without
        any block the lease has ended. What is found by chains costs the asker little: it has a limit."""
        blocks = [] if tree is None else tree.run(digests)
        counts = [len(blocks)]
        if blocks:
            hold(blocks[-1])
        steps = CHAIN_STEPS
        for tail, count in chains:
            found = tree.chain(tail, count) if tree is not None and 2 * count <= steps else []
            if found:
                steps -= 2 * count + hold(found[-1])
                blocks += found
            counts.append(len(found))
        lease = Lease(
            owner, blocks.copy(), tuple(counts), self._next_lease, expires
        )  # a list that grew is larger
        self._next_lease += 1
        if tree is None or not blocks:
            lease.ended = "nothing was found"
            return lease
        tree.busy += 1
        self._leases[lease.id] = lease
        # Ids, not leases: a lease released early must not keep its list of blocks alive until it expires.
        heapq.heappush(self._expiry, (expires, lease.id))
        self._owned.setdefault(owner, {})[lease] = None
        self.lease_bytes += lease.nbytes
        self._reading[owner] = self._reading.get(owner, 0) + lease.nbytes
        return lease

    def may_lease(self, owner: Hashable, nbytes: int) -> bool:
        """Whether ``owner`` may have one more lease, of ``nbytes`` of memory. Leases that are over count
        until nothing is left of them, so that ending them in steps can never fall behind."""
        room = max(self._room.arena.nbytes // LEASES_SHARE, LEASES_LEAST)
        mine = self._reading.get(owner, 0)
        ending = 8 * len(self._room.ending)
        return self.lease_bytes + ending + nbytes <= room and (
            not mine or mine + nbytes <= room // OWNER_LEASES
        )

    def reservation(self, owner: Hashable, block: Block, batch: Batch) -> Reservation:
        """Make ``owner`` the writer of a pending block."""
        reservation = Reservation(owner, block, batch)
        count, nbytes = self._writing.get(owner, (0, 0))
        self._writing[owner] = count + 1, nbytes + reservation.nbytes
        block.writer = reservation
        batch.open[reservation] = None
        self._batches[batch] = None
        self._owned.setdefault(owner, {})[reservation] = None
        block.tree.busy += 1
        hold(block)
        return reservation

    def may_reserve(self, owner: Hashable, nbytes: int) -> bool:
        """Whether ``owner`` may have one more reservation, of ``nbytes``. One is always allowed; more only
        within a share, so that whoever promises and does not write keeps no one else out."""
        count, open_nbytes = self._writing.get(owner, (0, 0))
        share = self._room.arena.nbytes // OWNER_SHARE
        return not count or (count < OWNER_RESERVATIONS and open_nbytes + nbytes <= share)

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
        """Free what ``held`` kept, if it has ended and nothing is pinned. What leases kept waits in
        ``Room.ending``."""
        if not held.ended or held.pins or not held.held_blocks:
            return
        blocks, held.held_blocks = held.held_blocks, ()
        blocks[0].tree.busy -= 1
        if isinstance(held, Reservation):
            self._room.drop_hold(held.block)
        elif isinstance(held, Lease):
            self._room.ending += blocks
            self.lease_bytes -= held.nbytes
            mine = self._reading.pop(held.owner) - held.nbytes
            if mine:
                self._reading[held.owner] = mine
            held.blocks = []

    def owned_by(self, owner: Hashable) -> list[Hold]:
        return list(self._owned.get(owner, ()))

    def part(self, owner: Hashable) -> None:
        """``owner`` is gone: its leases end, and its reservations are left to :meth:`left_behind`."""
        for held in self.owned_by(owner):
            if isinstance(held, Lease):
                self.end(held, "its owner is gone")
        mine = self._owned.pop(owner, None)
        if mine:  # it may come back under its name, and shall not pay for these then
            name = object()
            for held in mine:
                held.owner = name
            self._owned[name] = mine
            self._writing[name] = self._writing.pop(owner)
            self._gone.append(name)

    def left_behind(self, limit: int) -> list[Hold]:
        """Up to ``limit`` reservations of owners that are gone, the newest first: what hangs on others goes
        before them."""
        while self._gone and self._gone[-1] not in self._owned:
            self._gone.pop()
        return list(islice(reversed(self._owned[self._gone[-1]]), limit)) if self._gone else []

    def expire(self, now: float, limit: int) -> None:
        """End leases whose time is up, at most so many."""
        while self._expiry and self._expiry[0][0] <= now and limit:
            limit -= 1
            lease = self._leases.get(heapq.heappop(self._expiry)[1])
            if lease is not None:
                self.expired += 1
                self.end(lease, "expired")

    def stalled_since(self, then: float, limit: int) -> list[Reservation]:
        """Up to ``limit`` reservations in whose batch nothing has happened after ``then``."""
        stalled = (writer for batch in self._batches if batch.progress <= then for writer in batch.open)
        return list(islice(stalled, limit))
