"""What a node keeps: blocks of K/V in RAM (tier L2), found by digest, never half written, never orphaned; and
the index of those that lie on disk (tier L3).

A pure state machine: no clock (``now`` is monotonic seconds, given by the caller and never falling), no
network, no threads. Writing has two phases: ``reserve`` gives the right to write, memory follows with the
first ``pin`` or ``chunk``; ``fill`` reports each layer chunk that is in place and verified. A block is
visible once all its layers and its whole prefix are.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hypercache.errors import ConfigError, HyperCacheError, SpecError, StoreFull
from hypercache.store.arena import MAX_CAPACITY, MIN_CAPACITY, Arena, region_nbytes
from hypercache.store.holds import HoldEnded, Lease, Reason, Reservation, Skip, lease_nbytes
from hypercache.store.index import COMMITTED, DOOMED, FREED, Block, Tree
from hypercache.store.ledger import Ledger
from hypercache.store.modular import MARK_NBYTES, Located, find
from hypercache.store.namespace import Namespace, NamespaceInfo
from hypercache.store.pins import Pins
from hypercache.store.policy import Climbs, Policy, get
from hypercache.store.promises import Promises
from hypercache.store.room import Room
from hypercache.store.stats import StoreStats

if TYPE_CHECKING:
    from hypercache.store.below import Below

INDEX_SHARE = 32  # 1/32 of the capacity is kept for the index: enough for blocks of 32 KiB and more ...
BELOW_SHARE = 64  # ... and 1/64 of the disk's: for blocks of 68 KiB there and more, ...
INDEX_MOST = 4  # ... as long as that is not more than a quarter of the capacity
_SWEEP_STEPS = 1024  # cleared blocks freed per sweep, leases that expire: a few milliseconds
_SWEEP_WRITERS = (
    512  # ended per sweep: stalled, or of owners that are gone; one in another's way goes at once
)
_SWEEP_LET_GO = 16384  # blocks let go of per sweep: the same ...
_LET_GO = 4096  # ... and when a lease ends, or the last frame of it has been sent


class BlockStore:
    """All blocks of one node, within ``capacity`` bytes for data and index together.

    lease_limit_s: no lease lasts longer. store_stall_s: a writer without progress for so long is replaced.
    policy: who goes first; LRFU without one. pin_limit_s, pin_share: for how long, and how much of the arena
    (0..1), clients may pin. disk: bytes of the L3 that the index is to describe too; 0: there is none.
    Raises ConfigError for values out of range, MemoryUnavailable when the system gives no memory.
    """

    def __init__(
        self,
        capacity: int,
        *,
        max_namespaces: int = 4096,
        lease_limit_s: float = 30.0,
        store_stall_s: float = 5.0,
        policy: Policy | None = None,
        pin_limit_s: float = 3600.0,
        pin_share: float = 0.25,
        disk: int = 0,
    ) -> None:
        if type(capacity) is not int or not MIN_CAPACITY <= capacity <= MAX_CAPACITY:
            raise ConfigError(f"store capacity={capacity!r}: need {MIN_CAPACITY}..{MAX_CAPACITY} bytes")
        if type(max_namespaces) is not int or max_namespaces < 1:
            raise ConfigError(f"store max_namespaces={max_namespaces!r}: need an integer >= 1")
        seconds = {"lease_limit_s": lease_limit_s, "store_stall_s": store_stall_s, "pin_limit_s": pin_limit_s}
        for name, value in seconds.items():
            if not 0 < value < math.inf:
                raise ConfigError(f"store {name}={value!r}: need a finite number of seconds > 0")
        if not 0 <= pin_share <= 1:
            raise ConfigError(f"store pin_share={pin_share!r}: need a share, 0..1")
        self.capacity = capacity
        self.max_namespaces = max_namespaces
        self.lease_limit_s = lease_limit_s
        self.store_stall_s = store_stall_s
        policy = policy or get("lrfu")
        self._policy = policy
        self._climbs = Climbs(policy)
        index = min(capacity // INDEX_SHARE + disk // BELOW_SHARE, capacity // INDEX_MOST)
        self._arena: Arena[Block] = Arena(capacity - index, region_nbytes(capacity))
        self._room = Room(self._arena, capacity - self._arena.nbytes, policy, tiers=disk > 0)
        self._trees = self._room.trees
        self._ledger = Ledger(self._room)
        self._promises = Promises(self._room, self._ledger, self._climbs, store_stall_s)
        self._pins = Pins(self._room, pin_limit_s, int(self._arena.nbytes * pin_share))
        self._removed = 0
        self.below: Below | None = None
        if disk:
            from hypercache.store.below import Below  # with it come codecs and a compiler

            self.below = Below(self._room, policy, self._remove, self._plant)

    # -- namespaces

    def open_namespace(self, info: NamespaceInfo) -> Namespace:
        """The handle for ``info``. It stays good for the life of the store, cleared or not.

        Opening keeps nothing: the store knows a namespace, its geometry included, while it has blocks or
        reservations. Raises SpecError if the same digest is known with another geometry; the other methods
        do so too, for a handle whose digest was first written to through one of another geometry.
        """
        tree = self._trees.get(info.digest)
        if tree is None:
            return Namespace(info)
        _same_geometry(tree.space.info, info)
        return tree.space

    def _plant(self, space: Namespace) -> Tree | None:
        """An empty tree for ``space``; the namespace unused for longest makes room for it. None: all are in
        use, or the index is."""
        if len(self._trees) >= self.max_namespaces:
            idle = next((tree for tree in self._trees.values() if not tree.busy), None)
            if idle is None:
                return None
            self._room.uproot(idle)
            self._removed += self._room.clear(idle)[0]
        tree = Tree(space)
        tree.record_nbytes = 0 if self.below is None else self.below.record_nbytes(space.info)
        return tree if self._room.plant(tree) else None

    def _tree(self, ns: Namespace) -> Tree | None:
        tree = self._trees.get(ns.info.digest)
        if tree is not None and tree.space is not ns:
            _same_geometry(tree.space.info, ns.info)
        return tree

    def _used_last(self, tree: Tree) -> None:
        digest = tree.space.info.digest
        self._trees[digest] = self._trees.pop(digest)

    # -- reading

    def match(self, ns: Namespace, digests: Sequence[bytes], now: float) -> int:
        """How many blocks of the chain ``digests`` are stored, counted from the first. Counts as a use, holds
        nothing: they may be gone when you fetch them."""
        tree = self._tree(ns)
        if tree is None:
            return 0
        found = tree.run(digests)
        self._use(tree, [found], now)
        return len(found)

    def contains(self, ns: Namespace, digests: Sequence[bytes]) -> list[bool]:
        """Which blocks are stored, each on its own. No use, no hold."""
        tree = self._tree(ns)
        if tree is None:
            return [False] * len(digests)
        found = map(tree.blocks.get, digests)
        return [block is not None and block.state == COMMITTED for block in found]

    def count(self, ns: Namespace) -> int:
        """Visible blocks of a namespace."""
        tree = self._tree(ns)
        return 0 if tree is None else tree.committed

    def locate(
        self,
        ns: Namespace,
        digests: Sequence[bytes],
        first: int,
        fingerprints: npt.NDArray[np.uint64],
        least: int,
        now: float,
    ) -> Located:
        """What is stored of a prompt: the causal run of ``digests`` as :meth:`match` counts it, and behind it
        runs of at least ``least`` blocks that were stored at whatever token, behind whatever else.

        ``fingerprints[i]`` is that of the window at token ``first + i``; 0: do not look there. Counts as a
        use of what is returned, holds nothing. The work is bounded, whatever the fingerprints are: see
        ``Located.complete``. Raises SpecError for arguments of another kind.
        """
        if getattr(fingerprints, "dtype", None) != np.uint64 or fingerprints.ndim != 1:
            raise SpecError("locate: fingerprints must be a flat array of uint64; see hypercache.fingerprint")
        if first < 0 or least < 1:
            raise SpecError(f"locate: first={first}, least={least}; need first >= 0 and least >= 1")
        tree = self._tree(ns)
        if tree is None:
            return Located(0, [])
        causal = tree.run(digests)
        start = len(causal) * ns.info.block_size
        runs, complete = find(tree, self._room.sieve, first, fingerprints, start, least)
        self._use(tree, [causal, *(run.blocks for run in runs)], now)
        return Located(len(causal), runs, complete)

    def lease(
        self,
        ns: Namespace,
        digests: Sequence[bytes],
        owner: Hashable,
        ttl_s: float,
        now: float,
        chains: Sequence[tuple[bytes, int]] = (),
    ) -> Lease:
        """Hold the stored run from ``digests[0]`` on for ``ttl_s`` seconds, at most ``lease_limit_s``; and
        each of ``chains``: the digest of its last block, and how many blocks it has, counted back from that.

        ``Lease.counts`` says what is held: of the run, which may be shorter than asked, and of each chain,
        all of it or 0. Chains get 0, too, beyond 40,000 or so blocks that they find or newly hold. Raises
        ConfigError for a ttl that is not > 0, SpecError for malformed chains, and StoreFull if open leases
        take too much memory already: all together (1/64 of the capacity, or 2 MiB), or this owner's (a
        quarter of that, or one lease).
        """
        if not ttl_s > 0:
            raise ConfigError(f"lease ttl_s={ttl_s!r}: need a number of seconds > 0")
        for tail, count in chains:
            if type(tail) is not bytes or type(count) is not int or count < 1:
                raise SpecError("lease: a chain is the digest of its last block and a number of blocks >= 1")
        tree = self._tree(ns)
        asked = len(digests) + sum([count for _, count in chains])
        if not self._ledger.may_lease(owner, lease_nbytes(asked, 1 + len(chains))):
            raise StoreFull(
                f"lease: no memory for one more of up to {asked} blocks; wait until others have ended"
            )
        lease = self._ledger.lease(owner, tree, digests, chains, now + min(ttl_s, self.lease_limit_s))
        if tree is not None and lease.open:
            self._used_last(tree)
            self._climbs.use(lease.chains, now)
        return lease

    def release(self, lease: Lease) -> None:
        """End a lease: its own hold and no other. Doing it again changes nothing."""
        if not lease.ended:
            self._ledger.end(lease, "released")
            self._room.let_go(_LET_GO)

    def chunk(self, block: Block, layer: int) -> memoryview:
        """The encoded bytes of one layer of a leased block, read-only, in place.

        Raises HoldEnded if the block is gone because its lease has ended, SpecError for an unknown layer.
        """
        if block.state == FREED:
            raise HoldEnded(f"block {block.digest.hex()[:12]} is gone: its lease has ended; look it up again")
        if not block.ready:
            raise HyperCacheError(f"block {block.digest.hex()[:12]} lies in L3: recall the lease first")
        first, end = block.tree.space.span(layer)
        return self._arena.readonly(block.slab, block.slot, first, end)

    def _use(self, tree: Tree, chains: Sequence[Sequence[Block]], now: float) -> None:
        if any(chains):
            self._used_last(tree)
            self._climbs.use(chains, now)

    # -- what clients know of the future

    def hint(self, ns: Namespace, digests: Sequence[bytes], steps: int, priority: int, now: float) -> int:
        """The stored run of ``digests`` will be used in so many steps (-1: nobody knows), and is so dear
        (-3..3): the policy takes it into account until its next use. Returns the run's blocks."""
        tree = self._tree(ns)
        run = [] if tree is None else tree.run(digests)
        self._policy.hint(run, steps, priority, now)
        self._room.reorder(run)
        return len(run)

    def pin_run(
        self, ns: Namespace, digests: Sequence[bytes], owner: Hashable, seconds: float, now: float
    ) -> tuple[int, float]:
        """Keep the stored run of ``digests`` for so many seconds, in whatever tier it is. Returns how many
        blocks of it are kept, and for how long: see :class:`Pins` for the limits."""
        if not seconds > 0:
            raise ConfigError(f"pin seconds={seconds!r}: need a number > 0")
        tree = self._tree(ns)
        return (0, 0.0) if tree is None else self._pins.pin(tree.run(digests), owner, seconds, now)

    def unpin_run(self, ns: Namespace, digests: Sequence[bytes], owner: Hashable) -> int:
        """End the owner's pin of the longest run that ``digests`` begins with. Returns its blocks; 0: there
        was none."""
        tree = self._tree(ns)
        count = 0 if tree is None else self._pins.unpin(tree.run(digests), owner)
        self._room.let_go(_LET_GO)
        return count

    # -- writing

    def reserve(
        self,
        ns: Namespace,
        parent: bytes | None,
        digests: Sequence[bytes],
        owner: Hashable,
        now: float,
        marks: Sequence[bytes] = (),
    ) -> list[Reservation | Skip]:
        """The right to write the chain ``parent`` -> ``digests[0]`` -> ...; ``parent`` None: a prompt begins
        here. One entry per digest, in order.

        marks: 24 bytes a digest, by which :meth:`locate` finds the block (see :mod:`hypercache.fingerprint`);
        without one it is found causally alone. Memory is taken when bytes come (:meth:`pin`): only the index
        may have to evict now. An owner's open reservations are at most half of the arena (or one block) and
        16,384. Raises SpecError for malformed digests or marks, before anything is reserved.
        """
        for digest in (*digests, *(() if parent is None else (parent,))):
            if type(digest) is not bytes or not 16 <= len(digest) <= 64:
                raise SpecError("a block digest must be 16..64 bytes; see hypercache.keys")
        if marks and len(marks) != len(digests):
            raise SpecError(f"{len(marks)} marks for {len(digests)} digests; give one for each, or none")
        if not all(type(mark) is bytes and len(mark) == MARK_NBYTES for mark in marks):
            raise SpecError(f"a mark must be {MARK_NBYTES} bytes; see hypercache.fingerprint.marks")
        self._ledger.expire(now, _SWEEP_STEPS)
        self._abort_left_behind(len(digests))  # as many as may come now, so that it never falls behind
        tree = self._tree(ns)
        before = None if parent is None or tree is None else tree.blocks.get(parent)
        reason: Reason | None = "orphan" if parent is not None and before is None else None
        if ns.nbytes > self._arena.nbytes:
            reason = "too_large"
        if tree is None:
            if reason is None and digests and self._ledger.may_reserve(owner, ns.nbytes):
                tree = self._plant(ns)
            if tree is None:
                return [Skip(reason or "full")] * len(digests)
        self._used_last(tree)
        tree.busy += 1  # or it could go while others make room for it
        chain = list(zip(digests, marks or repeat(b""), strict=bool(marks)))
        out = self._promises.reserve(tree, before, chain, reason, owner, now, self._writable)
        tree.busy -= 1
        if not tree.blocks and not tree.busy:
            self._room.uproot(tree)
        return out

    def fill(self, reservation: Reservation, layer: int, crc: int, now: float) -> bool:
        """The chunk of ``layer`` is in place and matches ``crc`` (uint32; the caller has verified that).

        True when this was the last layer missing: the block becomes visible, at once or together with the
        prefix it waits for. Raises HoldEnded for a late fill (aborted, taken over, cleared), SpecError.
        """
        block = reservation.block
        self._need_open(reservation, "late fill of")
        block.tree.space.span(layer)
        if not 0 <= crc < 1 << 32:
            raise SpecError(f"checksum {crc} of layer {layer} is not a uint32")
        if not block.placed:
            raise SpecError(f"fill of block {block.digest.hex()[:12]} without bytes; write its chunk first")
        block.crcs[layer] = crc
        reservation.filled |= 1 << layer
        reservation.batch.progress = now
        if reservation.filled != (1 << block.tree.space.layers) - 1:
            return False
        block.writer = None
        self._ledger.committed += 1
        self._room.complete(block)
        self._ledger.end(reservation, "committed")
        return True

    def _need_open(self, reservation: Reservation, what: str) -> None:
        if not reservation.ended and not reservation.block.tree.live:
            self.abort(reservation, "its namespace was cleared")
        if reservation.ended:
            raise HoldEnded(
                f"{what} block {reservation.digest.hex()[:12]}: {reservation.ended}; nothing is stored, "
                "reserve it again"
            )

    def _place(self, reservation: Reservation) -> None:
        """Its bytes are about to come: make room for them."""
        block = reservation.block
        self._need_open(reservation, "cannot write")
        if not block.placed and not self._room.place(block):
            self._remove(block, "full")
            raise StoreFull(
                f"no room for block {block.digest.hex()[:12]} of {reservation.nbytes} bytes: all else is "
                "being read or written; try again later, or give the store more memory"
            )

    def _writable(self, reservation: Reservation, layer: int) -> memoryview:
        first, end = reservation.block.tree.space.span(layer)
        self._place(reservation)
        return self._arena.view(reservation.block.slab, reservation.block.slot, first, end)

    def progress(self, reservation: Reservation, now: float) -> None:
        """Bytes of a chunk have come in, though not yet all: its writer has not stalled. O(1)."""
        reservation.batch.progress = max(reservation.batch.progress, now)

    def abort(self, reservation: Reservation, why: str = "aborted") -> None:
        """Give a reservation up, and what was reserved on it. Changes nothing after its end, or twice."""
        if not reservation.ended:
            self._remove(reservation.block, why)

    # -- pins

    def pin(self, held: Lease | Reservation) -> None:
        """A transport reads or writes its memory from now on: it has no other owner before :meth:`unpin`,
        even if the hold ends. Raises HoldEnded if it has ended already.

        A reservation gets its memory now, if it has none yet: evicts what is used least; never what is held,
        never a prefix before its suffixes. If everything else is held, raises StoreFull, and ends it ("full")
        together with what was reserved on it.
        """
        if held.ended:
            raise HoldEnded(f"cannot pin {held!r}: {held.ended}")
        if isinstance(held, Reservation):
            self._place(held)
        held.pins += 1

    def unpin(self, held: Lease | Reservation) -> None:
        """Undo one :meth:`pin`. Raises HyperCacheError if there is none left."""
        if not held.pins:
            raise HyperCacheError(f"unpin without pin: {held!r}; call it once per pin")
        held.pins -= 1
        if not held.pins and held.ended:
            self._ledger.let_go(held)
            self._room.let_go(_LET_GO)

    # -- removal

    def evict(self, ns: Namespace, digests: Sequence[bytes], recorded: list[bytes] | None = None) -> int:
        """Remove blocks and all that continue them; what is being written there is aborted.

        Returns how many were visible. Leased ones are invisible at once and freed after their last lease.
        recorded: gets the digests of those that L3 has; they come back with a restart unless it is told.
        """
        tree = self._tree(ns)
        found = [] if tree is None else [block for d in digests if (block := tree.blocks.get(d)) is not None]
        count = sum(self._remove(block, "evicted", recorded) for block in found if block.state < DOOMED)
        self._removed += count
        return count

    def clear(self, ns: Namespace) -> tuple[int, int]:
        """Remove all blocks of a namespace, in time that does not depend on their number; :meth:`sweep` frees
        them. What is being written can never become visible. Returns visible blocks and their bytes."""
        tree = self._tree(ns)
        if tree is None:
            return 0, 0
        self._room.uproot(tree)
        count, nbytes = self._room.clear(tree)
        self._removed += count
        return count, nbytes

    def drop_owner(self, owner: Hashable) -> None:
        """A client is gone: its leases end and its reservations abort; of more than some hundreds the rest
        in the next sweeps."""
        self._ledger.part(owner)
        self._abort_left_behind(_SWEEP_WRITERS)
        self._room.let_go(_LET_GO)

    def _abort_left_behind(self, limit: int) -> None:
        for writer in self._ledger.left_behind(limit):
            if isinstance(writer, Reservation):
                self.abort(writer, "its owner is gone")

    def sweep(self, now: float) -> None:
        """Housekeeping, several times a second: expired leases, stalled writers, some of what was cleared, of
        what was let go and of what those left behind who are gone. Each in steps: it takes milliseconds."""
        self._ledger.expire(now, _SWEEP_STEPS)
        self._pins.sweep(now)
        self._room.let_go(_SWEEP_LET_GO)
        self._abort_left_behind(_SWEEP_WRITERS)
        for writer in self._ledger.stalled_since(now - self.store_stall_s, _SWEEP_WRITERS):
            self._ledger.stalled += 1
            self.abort(writer, "the writer had stalled")
        self._climbs.go(_SWEEP_STEPS)
        self._room.reap(_SWEEP_STEPS)

    def _remove(self, block: Block, why: str, recorded: list[bytes] | None = None) -> int:
        count, pending = self._room.doom(block, recorded)
        for node in pending:
            writer, node.writer = node.writer, None
            if writer is not None:
                self._ledger.end(writer, why)
        return count

    # -- numbers

    def stats(self) -> StoreStats:
        room, ledger, arena = self._room, self._ledger, self._arena
        slots = sum(slab.used for slab in arena.slabs())
        return StoreStats(
            capacity=self.capacity,
            bytes_data=arena.nbytes,
            bytes_used=arena.used,
            bytes_stored=room.warm_nbytes,
            bytes_held=room.held_nbytes(),
            bytes_pinned=self._pins.nbytes,
            bytes_pinned_limit=self._pins.limit_nbytes,
            bytes_index=room.index_used,
            bytes_index_limit=room.index_capacity,
            bytes_leases=ledger.lease_bytes,
            largest_free_run=arena.largest_free_run(),
            blocks=room.visible,
            blocks_cold=room.visible - room.warm,
            blocks_hidden=room.blocks - room.visible,
            arena_per_block=round(arena.used / slots) if slots else 0,
            index_per_block=round(room.index_used / room.blocks) if room.blocks else 0,
            namespaces=len(self._trees),
            pins=len(self._pins),
            leases=ledger.leases_open,
            reservations=ledger.reservations_open,
            committed_total=ledger.committed,
            cooled_total=room.cooled,
            evicted_total=room.evicted,
            removed_total=self._removed,
            aborted_total=ledger.aborted,
            stalled_total=ledger.stalled,
            expired_total=ledger.expired,
        )

    def close(self) -> None:
        """Give the memory back. Nothing may be called afterwards."""
        self._arena.close()


def _same_geometry(known: NamespaceInfo, other: NamespaceInfo) -> None:
    if known != other:
        raise SpecError(
            f"namespace {other.label!r} has the digest of {known.label!r} but another geometry: "
            f"{_geometry(other)} against {_geometry(known)}; the digest must commit to all of it"
        )


def _geometry(info: NamespaceInfo) -> str:
    nbytes = sum(info.chunk_nbytes)
    shapes = ", ".join(dict.fromkeys(map(str, info.layouts))) or "unknown"
    return (
        f"{info.codec}, {len(info.chunk_nbytes)} layers, {info.block_size} tokens, {nbytes} bytes per block, "
        f"{info.below or info.codec} on disk, layouts {shapes}"
    )
