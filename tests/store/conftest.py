from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from hypercache.store import BlockStore

from .kit import MIB, audit

Make = Callable[..., BlockStore]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes stores whose structure is audited when the test is over."""
    stores: list[BlockStore] = []

    def build(capacity: int = 8 * MIB, **options: float) -> BlockStore:
        stores.append(BlockStore(capacity, **options))  # type: ignore[arg-type]
        return stores[-1]

    yield build
    for store in stores:
        audit(store)
        store.close()


@pytest.fixture
def store(make: Make) -> BlockStore:
    return make()
