"""Who may write what: gives out reservations along a chain of digests."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hypercache.store.holds import Batch, Chunk, Reason, Reservation, Skip
from hypercache.store.index import COMMITTED, DOOMED, Block, Tree, attach, detach, hold
from hypercache.store.ledger import Ledger
from hypercache.store.policy import Climbs
from hypercache.store.room import Room


class Promises:
    """Reserves; what is written is the store's affair. stall_s: a writer without progress for so long is
    replaced."""

    def __init__(self, room: Room, ledger: Ledger, climbs: Climbs, stall_s: float) -> None:
        self._room = room
        self._ledger = ledger
        self._climbs = climbs
        self._stall_s = stall_s

    def reserve(
        self,
        tree: Tree,
        before: Block | None,
        blocks: Sequence[tuple[bytes, bytes]],
        reason: Reason | None,
        owner: Hashable,
        now: float,
        chunk: Chunk,
    ) -> list[Reservation | Skip]:
        """The chain of ``blocks`` (digest, mark) behind ``before``. ``reason``: why the first cannot be;
        ``chunk``: what a reservation calls for its memory."""
        batch = Batch(now, chunk)
        if before is not None:
            self._climbs.use([[before]], now)
        out: list[Reservation | Skip] = []
        for digest, mark in blocks:
            block = tree.blocks.get(digest)
            if block is not None:
                self._climbs.note((block,), now)
                entry = self._rewrite(block, mark, batch, owner, now)
                before, reason = tree.blocks[digest], None
            elif reason is not None:
                entry = Skip(reason)
            else:
                entry = self._write(tree, digest, mark, before, batch, owner, now)
                if isinstance(entry, Reservation):
                    before = entry.block
                else:
                    reason = entry.reason
            out.append(entry)
        return out

    def _write(
        self,
        tree: Tree,
        digest: bytes,
        mark: bytes,
        before: Block | None,
        batch: Batch,
        owner: Hashable,
        now: float,
    ) -> Reservation | Skip:
        if before is not None:
            hold(before)  # or making room could take the very prefix
        entry: Reservation | Skip = Skip("full")
        may = self._ledger.may_reserve(owner, tree.space.nbytes)
        block = self._room.claim(tree, digest, mark) if may else None
        if block is not None:
            attach(block, before)
            tree.blocks[digest] = block
            self._climbs.note((block,), now)
            entry = self._ledger.reservation(owner, block, batch)
        if before is not None:
            self._room.drop_hold(before)
        return entry

    def _rewrite(
        self, old: Block, mark: bytes, batch: Batch, owner: Hashable, now: float
    ) -> Reservation | Skip:
        """A digest that is known already: skip it, or take it over from a writer that stalled."""
        writer = old.writer
        if writer is None:
            return Skip("exists" if old.state == COMMITTED else "pending")
        if now - writer.batch.progress < self._stall_s:
            return Skip("pending")
        if not self._ledger.may_reserve(owner, old.tree.space.nbytes):
            return Skip("full")
        block = old
        if writer.pins:  # someone may still write into the old slot: leave it to them, take another
            found = self._room.claim(old.tree, old.digest, mark)
            if found is None:
                return Skip("full")
            block = found
            attach(block, old.parent)
            old.tree.blocks[old.digest] = block
            self._climbs.note((block,), now)
        block.mark(mark)
        entry = self._ledger.reservation(owner, block, batch)
        while block is not old and old.child is not None:
            child = old.child
            detach(child)
            attach(child, block)
        if block is not old:
            old.writer = None
            old.state = DOOMED
        self._ledger.stalled += 1
        self._ledger.end(writer, "taken over: the writer had stalled")
        return entry
