"""What a node keeps: the RAM tier, its index, its eviction. Knows no network and no clock."""

from hypercache.store.arena import MemoryUnavailable
from hypercache.store.holds import HoldEnded, Lease, Reservation, Skip
from hypercache.store.index import Block
from hypercache.store.limits import memory_limit
from hypercache.store.namespace import Namespace, NamespaceInfo
from hypercache.store.stats import StoreStats
from hypercache.store.store import BlockStore

__all__ = [
    "Block",
    "BlockStore",
    "HoldEnded",
    "Lease",
    "MemoryUnavailable",
    "Namespace",
    "NamespaceInfo",
    "Reservation",
    "Skip",
    "StoreStats",
    "memory_limit",
]
