"""The numbers of a store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Plain counts; bytes. ``*_total`` only rise. bytes_used <= bytes_data, bytes_data + bytes_index_limit <=
    capacity; bytes_stored <= bytes_used, the rest being rounding, blocks in writing, and hidden blocks."""

    capacity: int
    bytes_data: int  # size of the arena
    bytes_used: int  # slots that have an owner, in any state; a reservation has one from its first bytes on
    bytes_stored: int  # payload of visible blocks in the arena
    bytes_held: int  # slots that leases, reservations and pins keep in place
    bytes_pinned: int  # that clients have pinned, in whatever tier
    bytes_pinned_limit: int
    bytes_index: int
    bytes_index_limit: int  # without what is kept for the modular index's sieve, 1..2 % of it
    bytes_leases: int  # that leases themselves take, beside the capacity
    largest_free_run: int
    blocks: int  # visible, in all tiers
    blocks_cold: int  # of those: on disk only
    blocks_hidden: int  # being written, waiting for their prefix, or waiting to be freed
    arena_per_block: int  # bytes of slot for each block that has one, rounding included
    index_per_block: int  # bytes of index for each block in it
    namespaces: int
    pins: int
    leases: int
    reservations: int
    committed_total: int
    cooled_total: int  # gave up their place in the arena, while L3 has them
    evicted_total: int  # for room; visible blocks only
    removed_total: int  # by evict and clear
    aborted_total: int  # reservations that ended uncommitted, for whatever reason
    stalled_total: int  # of those: no progress for store_stall_s
    expired_total: int  # leases that reached their limit
