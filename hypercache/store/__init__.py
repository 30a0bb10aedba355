"""What a node keeps: the RAM tier, its index, its eviction. Knows no network and no clock."""

from hypercache.store.arena import MemoryUnavailable
from hypercache.store.holds import HoldEnded, Lease, Reservation, Skip
from hypercache.store.index import Block
from hypercache.store.limits import memory_limit
from hypercache.store.modular import MARK_NBYTES, Located, Run
from hypercache.store.namespace import Namespace, NamespaceInfo
from hypercache.store.stats import StoreStats
from hypercache.store.store import BlockStore

__all__ = [
    "MARK_NBYTES",
    "Block",
    "BlockStore",
    "HoldEnded",
    "Lease",
    "Located",
    "MemoryUnavailable",
    "Namespace",
    "NamespaceInfo",
    "Reservation",
    "Run",
    "Skip",
    "StoreStats",
    "memory_limit",
]
