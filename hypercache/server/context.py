"""What all sessions of a node share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hypercache.store import BlockStore
from hypercache.store.hot import Hot

if TYPE_CHECKING:
    import structlog

    from hypercache.server.metrics import Metrics
    from hypercache.server.tiers import Tiers

MAX_REMEMBERED = 4096


@dataclass
class Context:
    store: BlockStore
    metrics: Metrics
    log: structlog.typing.FilteringBoundLogger
    clock: Callable[[], float]
    max_payload: int
    lease_limit_s: float
    draining: bool = False
    tiers: Tiers | None = None  # where there is an L3
    hot: Hot = field(default_factory=Hot)
    stored_in: OrderedDict[tuple[bytes, bytes], str] = field(default_factory=OrderedDict)
    open_layers: int = 0  # of all namespaces that sessions have open: what their handles cost
    _discard: memoryview = field(default_factory=lambda: memoryview(bytearray(64 << 10)))

    def remember(self, tenant_id: bytes, digest: bytes, label: str) -> None:
        """This tenant stores under that namespace; the last few thousand are known, to explain misses."""
        self.stored_in[tenant_id, digest] = label
        self.stored_in.move_to_end((tenant_id, digest))
        if len(self.stored_in) > MAX_REMEMBERED:
            self.stored_in.popitem(last=False)

    def others(self, tenant_id: bytes, digest: bytes) -> tuple[str, ...]:
        """Labels of the tenant's other namespaces, at most 8."""
        labels = [
            label for (who, what), label in self.stored_in.items() if who == tenant_id and what != digest
        ]
        return tuple(labels[-8:])

    def discard(self, size: int) -> memoryview:
        """Memory for bytes that nobody wants; shared, its content is meaningless."""
        if size > self._discard.nbytes:
            self._discard = memoryview(bytearray(size))
        return self._discard[:size]
