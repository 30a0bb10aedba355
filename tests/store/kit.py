"""What the store's tests share: digests, self-identifying payloads, and an audit of the whole structure."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence

from hypercache.errors import StoreFull
from hypercache.store import Block, BlockStore, Lease, Namespace, NamespaceInfo, Reservation, Skip
from hypercache.store.index import COMMITTED, COMPLETE, DOOMED, FREED, PENDING, UNWRITTEN
from hypercache.store.modular import key
from hypercache.store.room import namespace_nbytes

MIB = 1 << 20


def info(
    name: str, chunks: Sequence[int], block_size: int = 16, codec: str = "raw", label: str = ""
) -> NamespaceInfo:
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return NamespaceInfo(digest, tuple(chunks), block_size, codec, label or name)


def chain(name: str, length: int) -> list[bytes]:
    """Digests of a prompt's blocks."""
    return [hashlib.blake2b(f"{name}/{i}".encode(), digest_size=32).digest() for i in range(length)]


def payload(digest: bytes, layer: int, nbytes: int) -> bytes:
    """Bytes that say whose they are, everywhere in the chunk."""
    stamp = hashlib.blake2b(digest + layer.to_bytes(2, "little"), digest_size=16).digest()
    return (stamp * (nbytes // 16 + 1))[:nbytes]


def write_layer(store: BlockStore, reservation: Reservation, layer: int, now: float) -> bool:
    view = reservation.chunk(layer)
    data = payload(reservation.digest, layer, view.nbytes)
    view[:] = data
    return store.fill(reservation, layer, zlib.crc32(data), now)


def write(store: BlockStore, reservation: Reservation, now: float = 0.0) -> None:
    """Fill all layers."""
    layers = reservation.block.tree.space.layers
    done = [write_layer(store, reservation, layer, now) for layer in range(layers)]
    assert done == [False] * (layers - 1) + [True]


def put(
    store: BlockStore,
    ns: Namespace,
    digests: Sequence[bytes],
    now: float,
    parent: bytes | None = None,
    marks: Sequence[bytes] = (),
) -> list[str]:
    """Store a chain, one block after the other; "stored" or the reason of the skip, per block."""
    out: list[str] = []
    for index, digest in enumerate(digests):
        (entry,) = store.reserve(ns, parent, [digest], "writer", now, marks[index : index + 1])
        try:
            if isinstance(entry, Skip):
                out.append(entry.reason)
            else:
                write(store, entry, now)
                out.append("stored")
        except StoreFull:
            out.append("full")
        if out[-1] in ("full", "orphan", "too_large"):
            return out + out[-1:] * (len(digests) - len(out))
        parent = digest
    return out


def intact(store: BlockStore, blocks: Iterable[Block]) -> bool:
    """Every byte is the block's own and matches the checksum given at store."""
    for block in blocks:
        for layer in range(block.tree.space.layers):
            data = bytes(store.chunk(block, layer))
            if data != payload(block.digest, layer, len(data)) or zlib.crc32(data) != block.crcs[layer]:
                return False
    return True


def live_blocks(store: BlockStore, more: Iterable[Block] = ()) -> list[Block]:
    """All that are counted: with a slot, to be found, kept by what hangs on them, or among ``more``."""
    found = dict.fromkeys(more)
    found |= {b: None for slab in store._arena.slabs() for b in slab.owners if b is not None}
    for tree in (*store._trees.values(), *store._room._dead):
        found |= dict.fromkeys(tree.blocks.values())
    for mine in store._ledger._owned.values():
        found |= dict.fromkeys(block for held in mine for block in held.held_blocks)
    found |= dict.fromkeys(store._pins.blocks)
    found |= dict.fromkeys(store._room.ending)
    for block in list(found):
        while block.parent is not None:
            block = block.parent
            found[block] = None
    return list(found)


def audit(
    store: BlockStore, pinned: Iterable[Lease | Reservation] = (), moving: Iterable[Block] = ()
) -> None:
    """Check every identity of the structure from scratch. Slow; looks inside on purpose. ``pinned``: what the
    caller has pinned just now; ``moving``: what it has been given to write to L3, or to read from there."""
    moving = list(moving)
    pinned = set(pinned)
    room, arena, stats = store._room, store._arena, store.stats()
    blocks = live_blocks(store, [*moving, *(block for held in pinned for block in held.held_blocks)])
    assert len(set(map(id, blocks))) == len(blocks) == room.blocks
    assert stats.bytes_used == sum(b.slab.klass.nbytes for b in blocks if b.placed) <= stats.bytes_data
    assert stats.bytes_index == sum(room.charge(b.tree) for b in blocks) + sum(
        namespace_nbytes(tree.space.layers) for tree in store._trees.values()
    )
    used = {block.tree for block in blocks}  # also by what is hidden, and is let go of step by step
    assert all(tree.live and (tree.busy or tree in used) for tree in store._trees.values())
    assert stats.bytes_data + stats.bytes_index_limit <= stats.capacity
    assert stats.bytes_index <= stats.bytes_index_limit
    for slab in arena.slabs():
        assert slab.used == sum(b is not None for b in slab.owners) > 0
        assert slab.held == sum(b is not None and b.held > 0 for b in slab.owners)
        assert (slab in slab.klass.partial) == (slab.used < slab.klass.count)
        assert slab.queued or slab.held
    visible = [b for b in blocks if b.state == COMMITTED and b.tree.live]
    assert stats.blocks == len(visible) == sum(tree.committed for tree in store._trees.values())
    warm = [b for b in visible if b.ready]
    assert stats.bytes_stored == sum(b.tree.space.nbytes for b in warm) <= stats.bytes_used
    assert stats.blocks_cold == len(visible) - len(warm)
    assert stats.pins == len(store._pins.blocks)
    assert stats.bytes_pinned <= stats.bytes_pinned_limit
    if room.dirty is not None:
        assert len(room.dirty) == sum(b.dirty is not None and b.dirty.queued > 0 for b in blocks)
    children = Counter(id(b.parent) for b in blocks)
    held_children = Counter(id(b.parent) for b in blocks if b.held)
    own = Counter(id(b) for mine in store._ledger._owned.values() for h in mine for b in h.held_blocks)
    ending = Counter(map(id, room.ending))
    warm_children = Counter(id(b.parent) for b in blocks if b.placed)
    busy = Counter(id(b) for b in moving)
    pins = Counter(map(id, store._pins.blocks))
    assert room._nowhere.held == sum(not b.placed and b.held > 0 for b in blocks)
    for block in blocks:
        assert block.state != FREED
        if block.placed:
            assert block.slab.owners[block.slot] is block
        else:
            assert block.state in (PENDING, DOOMED) or block.record >= 0
            assert block.slab is room._nowhere
        found = block.tree.blocks.get(block.digest) is block
        if block.tree.live:
            assert found == (block.state < DOOMED)
        linked, child = 0, block.child
        while child is not None:
            assert child.parent is block
            linked, child = linked + 1, child.next
        assert linked == children[id(block)]
        # Holds: its held children's, its own, one while it waits, and ended ones that ``pinned`` keeps.
        kept = sum(b is block for h in pinned if not h.open for b in h.held_blocks)
        kept += ending[id(block)] + busy[id(block)] + pins[id(block)]
        assert block.warm == warm_children[id(block)]
        if block.state == COMMITTED and block.tree.live and block.tree.record_nbytes:
            assert (block.dirty is not None) == (block.record == UNWRITTEN and block.ready)
        else:
            assert block.dirty is None or not block.tree.live
        assert block.held == held_children[id(block)] + own[id(block)] + (block.state == COMPLETE) + kept
        assert (block.writer is not None) == (block.state == PENDING)
        if block.state == COMMITTED and block.evictable:
            assert block.queued
        if block.hidden:
            assert block.held or block.child is not None or found  # else it is lost
        parent = block.parent
        assert block.depth == (0 if parent is None else parent.depth + 1)
        if parent is not None:  # no orphans
            assert parent.state != FREED and parent.tree is block.tree
            if not store._climbs and block.state < DOOMED:
                assert parent.used >= math.floor(block.used)
            if block.state == COMMITTED and block.tree.live:
                assert parent.state == COMMITTED
            if parent.state == DOOMED:
                assert block.state == DOOMED
    audit_windows(store, blocks)


def audit_windows(store: BlockStore, blocks: Iterable[Block]) -> None:
    """The modular index has the committed blocks that have a mark, each in the ring of its fingerprint."""
    found: list[Block] = []
    slots: Counter[int] = Counter()
    sieve = store._room.sieve
    for tree in {block.tree for block in blocks} | set(store._trees.values()):
        for filed, newest in tree.windows.items():
            slots[filed >> sieve.shift] += 1
            node = newest
            while True:
                assert key(tree, node.fingerprint) == filed and node.tree is tree
                assert node.older is not None and node.older.newer is node
                found.append(node)
                node = node.older
                if node is newest:
                    break
    assert len(set(found)) == len(found)
    assert set(found) == {block for block in blocks if block.state == COMMITTED and block.fingerprint}
    assert all((block.newer is None) == (block.older is None) == (block not in found) for block in blocks)
    counts = sieve._array
    taken = counts.nonzero()[0].tolist()
    assert {slot: int(counts[slot]) + sieve._more.get(slot, 0) for slot in taken} == slots
