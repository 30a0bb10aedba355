from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from hypercache.store.policy import ColdQueue


@dataclass(eq=False)
class Item:
    rank: float
    evictable: bool = True
    queued: int = 0


@given(
    st.lists(st.tuples(st.sampled_from(["add", "use", "hold", "free", "pop", "forget"]), st.integers(0, 99)))
)
def test_the_queue_always_finds_the_coldest_evictable_item(steps: list[tuple[str, int]]) -> None:
    queue: ColdQueue[Item] = ColdQueue()
    items: list[Item] = []
    for clock, (what, pick) in enumerate(steps):
        item = items[pick % len(items)] if items else None
        if what == "add" or item is None:
            items.append(Item(clock))
            queue.push(items[-1])
        elif what == "use":
            item.rank = clock
        elif what == "hold":
            item.evictable = False
        elif what == "free":
            item.evictable = True
            queue.push(item)
        elif what == "forget":
            queue.forget(item)
            items.remove(item)
        else:
            coldest = queue.coldest()
            ready = [i for i in items if i.evictable]
            if coldest is None:
                assert not ready
            else:
                assert coldest.evictable and coldest.rank == min(i.rank for i in ready)
        assert len(queue) == sum(bool(item.queued) for item in items)


def test_forgotten_items_do_not_pile_up() -> None:
    """Load that is removed and never evicted must not grow the queue."""
    queue: ColdQueue[Item] = ColdQueue()
    rng = random.Random(1)
    items: list[Item] = []
    for clock in range(20_000):
        items.append(Item(clock))
        queue.push(items[-1])
        if len(items) > 100:
            queue.forget(items.pop(rng.randrange(100)))
    assert len(queue) == 100
    assert len(queue._heap) <= 2 * 100 + 66
