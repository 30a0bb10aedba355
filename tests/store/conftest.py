from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from hypercache.store import BlockStore
from hypercache.store.policy import Lru

from .kit import MIB, audit

Make = Callable[..., BlockStore]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes stores whose structure is audited when the test is over. Their policy is LRU unless said
    otherwise: its order is the plainest to reason about."""
    stores: list[BlockStore] = []

    def build(capacity: int = 8 * MIB, **options: object) -> BlockStore:
        options.setdefault("policy", Lru())
        stores.append(BlockStore(capacity, **options))  # type: ignore[arg-type]
        return stores[-1]

    yield build
    for store in stores:
        audit(store)
        store.close()


@pytest.fixture
def store(make: Make) -> BlockStore:
    return make()
