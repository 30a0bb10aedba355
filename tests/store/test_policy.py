from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypercache.errors import ConfigError
from hypercache.store.policy import (
    HALF_LIFE_S,
    NAMES,
    STEP_S,
    Climbs,
    ColdQueue,
    Ghosts,
    Lrfu,
    Lru,
    get,
)
from hypercache.store.s3_fifo import S3Fifo


@dataclass
class Slab:
    rank: float = -math.inf


@dataclass(eq=False)
class Item:
    """A block, as far as policies and queues know it."""

    rank: float = -math.inf
    evictable: bool = True
    queued: int = 0
    digest: bytes = b""
    used: float = -math.inf
    uses: int = 0
    bias: float = 0.0
    slab: Slab = field(default_factory=Slab)
    parent: Item | None = None


def items(count: int) -> list[Item]:
    return [Item(digest=index.to_bytes(16, "little")) for index in range(1, count + 1)]


def drain(queue: Any) -> Iterator[Item]:
    while (item := queue.coldest()) is not None:
        queue.forget(item)
        yield item


# -- queues


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "use", "hold", "free", "pop", "forget", "fall"]), st.integers(0, 99)
        )
    )
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
        elif what == "fall":
            item.rank -= pick
            if item.queued:
                queue.fell(item)
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


def test_what_went_to_another_queue_is_not_found_in_the_old_one() -> None:
    """Its old entry still lies in the heap there, and its item has an entry again, elsewhere."""
    warm: ColdQueue[Item] = ColdQueue()
    cold: ColdQueue[Item] = ColdQueue()
    moved, stays = Item(1.0), Item(2.0)
    warm.push(moved)
    warm.push(stays)
    warm.forget(moved)
    cold.push(moved)
    assert warm.coldest() is stays and len(warm) == 1
    assert cold.coldest() is moved
    cold.forget(moved)
    warm.push(moved)  # and back: with two entries in the heap, of which one is dead
    assert warm.coldest() is moved and len(warm) == 2
    assert [item.rank for item in drain(warm)] == [1.0, 2.0]


@pytest.mark.parametrize("name", NAMES)
@given(steps=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 19)), max_size=120))
def test_under_each_policy_what_goes_is_evictable_and_the_lowest(
    name: str, steps: list[tuple[int, int]]
) -> None:
    """Uses, hints that heat and cool, holds, moves between two queues, admissions: whatever the order."""
    policy = get(name)
    queues = [policy.queue(), policy.queue()]
    blocks, home, now = items(20), [0] * 20, 1000.0
    for what, pick in steps:
        block, queue = blocks[pick], queues[home[pick]]
        now += pick / 7
        if what == 0:
            policy.use([block], now)
            queue.push(block)
        elif what == 1:
            block.evictable = not block.evictable
            if block.evictable:
                queue.push(block)
        elif what == 2:
            policy.hint([block], pick * 20 - 1, pick % 9 - 4, now)
        elif what == 3:
            queue.forget(block)
            policy.leave(block)
        elif what == 4:
            queue.forget(block)
            home[pick] ^= 1
            queues[home[pick]].push(block)
        elif what == 5:
            policy.admit(block, now)
        for number, other in enumerate(queues):
            here = [b for b in blocks if b.queued and b.evictable and home[b.digest[0] - 1] == number]
            coldest = other.coldest()
            assert (coldest is None) == (not here)
            if coldest is not None:
                assert coldest.evictable and coldest is other.coldest()
                if name != "s3-fifo":
                    assert coldest.rank == min(b.rank for b in here)
        assert len(queues[0]) + len(queues[1]) == sum(bool(b.queued) for b in blocks)
        assert not any(math.isnan(b.rank) or b.slab.rank < b.rank for b in blocks)


# -- LRFU, by its definition


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 900)), min_size=1, max_size=60),
    st.sampled_from([0.5, 30.0, 600.0, 1e6]),
)
def test_lrfu_orders_by_the_sum_of_decayed_uses(uses: list[tuple[int, int]], half_life_s: float) -> None:
    """C(t) = sum over uses of 2^(-(t - use) / half-life), computed at a later time as the paper has it."""
    policy, blocks, times = Lrfu(half_life_s), items(5), [[] for _ in range(5)]
    now = 0
    for pick, gap in uses:
        now += gap
        policy.use([blocks[pick]], float(now))
        times[pick].append(now)

    def count(pick: int) -> float:
        """log2 of the decayed count at ``now``: what is small stays told apart."""
        newest = times[pick][-1]
        total = sum(2.0 ** ((use - newest) / half_life_s) for use in times[pick])
        return math.log2(total) + (newest - now) / half_life_s

    for pick, block in enumerate(blocks):
        if times[pick]:
            assert block.rank - now / half_life_s == pytest.approx(count(pick), rel=1e-9, abs=1e-6)
            assert block.uses == len(times[pick]) and block.used == times[pick][-1]
        else:
            assert block.rank == -math.inf


def test_lrfu_is_lru_at_one_end_and_lfu_at_the_other() -> None:
    often, lately = items(2)
    for half_life_s, colder in ((1.0, often), (1e9, lately)):
        policy = Lrfu(half_life_s)
        for block in (often, lately):
            block.rank, block.used, block.uses = -math.inf, -math.inf, 0
        for now in range(10):
            policy.use([often], now)
        policy.use([lately], 10)
        policy.use([lately], 20)
        assert min((often, lately), key=lambda block: block.rank) is colder


@pytest.mark.parametrize("name", NAMES)
def test_what_one_request_asks_is_one_use(name: str) -> None:
    policy, (block,) = get(name), items(1)
    policy.use([block], 4.1)
    first = block.uses
    for now in (5.01, 5.3, 5.9):  # look-up, lease, store
        policy.use([block], now)
    assert block.uses == first + 1


def test_an_ancestor_told_late_counts_once_for_each_second() -> None:
    policy = Lrfu()
    climbs = Climbs(policy)
    chain = items(1000)
    for parent, child in itertools.pairwise(chain):
        child.parent = parent
    for now in (10.0, 10.4, 11.0):
        climbs.use([chain[-1:]], now)
    while climbs:
        climbs.go(256)
    assert {block.uses for block in chain[-256:]} == {2}
    assert {block.uses for block in chain} == {1, 2}  # both seconds had passed when the walk came there
    assert all(block.used >= 10.0 for block in chain)


# -- hints


def after(half_lives: float, now: float = 1000.0) -> float:
    return now + half_lives * HALF_LIFE_S


@pytest.mark.parametrize("name", ["lrfu", "lru"])
def test_a_hint_moves_a_block_at_once_and_the_next_use_undoes_it(name: str) -> None:
    policy = get(name)
    queue = policy.queue()
    blocks = items(4)
    for index, block in enumerate(blocks):
        policy.use([block], 1000.0 + index)
        queue.push(block)
    a, b, c, d = blocks
    policy.hint([d], steps=200, priority=0, now=1004.0)
    policy.hint([c], steps=100, priority=0, now=1004.0)
    policy.hint([a], steps=-1, priority=1, now=1004.0)
    assert list(drain(queue)) == [d, c, b, a]
    twin = Item()
    policy.use([twin], 1003.0)
    for block in (d, twin):
        policy.use([block], 1010.0)
    assert (d.rank, d.bias) == (twin.rank, 0.0)


def test_the_rule_of_a_hint_in_half_lives() -> None:
    policy = Lrfu()
    block, fresh = items(2)
    policy.use([block], after(-1))
    policy.use([fresh], 1000.0)
    for steps, priority, rank in (
        (0, 0, math.log2(1.5)),  # half of its use is left, and one more
        (20, 0, math.log2(1.5) - 20 * STEP_S / HALF_LIFE_S),
        (0, 3, math.log2(1.5) + 3),
        (0, 99, math.log2(1.5) + 3),
        (-1, -2, -1 - 2),
        (-1, 0, -1),
    ):
        policy.hint([block], steps, priority, 1000.0)  # each forgets the one before
        assert block.rank - fresh.rank == pytest.approx(rank)


HINTS = st.lists(st.tuples(st.integers(-1, 10_000), st.integers(-9, 9)), max_size=20)


@pytest.mark.parametrize("name", ["lrfu", "lru"])
@given(hints=HINTS)
def test_what_is_hinted_and_not_used_goes_before_what_was_used_later(
    name: str, hints: list[tuple[int, int]]
) -> None:
    policy = get(name)
    queue = policy.queue()
    hinted, *others = items(50)
    policy.use([hinted], 1000.0)
    queue.push(hinted)
    for steps, priority in hints:
        policy.hint([hinted], steps, priority, 1001.0)
    policy.use(others, after(5))
    for block in others:
        queue.push(block)
    assert queue.coldest() is hinted


@given(hints=HINTS)
def test_a_hint_in_s3_fifo_is_worth_some_uses_and_no_more(hints: list[tuple[int, int]]) -> None:
    """Where others are used twice, what is hinted goes before a second turn of all."""
    policy = S3Fifo()
    queue = policy.queue()
    hinted, *others = items(50)
    policy.use([hinted, *others], 1000.0)
    for block in (hinted, *others):
        queue.push(block)
    for steps, priority in hints:
        policy.hint([hinted], steps, priority, 1001.0)
    gone: list[Item] = []
    for round_ in range(100):
        for block in others:
            policy.use([block], 1002.0 + 3 * round_)
        victim = queue.coldest()
        assert victim is not None
        gone.append(victim)
        queue.forget(victim)
        policy.leave(victim)
        fresh = Item(digest=bytes([round_ + 100] * 16))
        for second in range(3):
            policy.use([fresh], 1002.0 + 3 * round_ + second)
        queue.push(fresh)
        others = [block for block in (*others, fresh) if block is not victim]
        if victim is hinted:
            return
    pytest.fail("it outlived what was used")


def test_a_cold_hint_and_a_hot_child_do_not_add_up() -> None:
    """A prefix takes over the rank of a child that goes; undoing its hint must not lift it above all else."""
    policy = Lrfu()
    prefix, other = items(2)
    policy.use([prefix, other], 1000.0)
    policy.hint([prefix], 10_000, 0, 1000.0)
    prefix.rank = other.rank  # as Room does it
    policy.use([prefix, other], 1001.0)
    assert prefix.rank == pytest.approx(other.rank)


# -- back from L3


def test_a_scan_from_l3_replaces_itself() -> None:
    policy = Lrfu()
    queue = policy.queue()
    hot, known, *scan = items(40)
    for now in range(1000, 1010):
        policy.use([hot], now)
    policy.use([known], 1003.0)
    queue.push(hot)
    for block in scan:
        policy.use([block], 1020.2)  # the lease of the fetch that brings it
        assert not policy.admit(block, 1021.1)
        queue.push(block)
    assert set(drain(queue)) == {hot, *scan}
    for block in (hot, *scan):
        queue.push(block)
    for _ in scan:
        coldest = queue.coldest()
        assert coldest in scan
        queue.forget(coldest)
    assert queue.coldest() is hot
    policy.use([known], 1030.0)
    policy.use([hot], 1.0)  # long told
    assert not policy.admit(known, 1030.0)  # one use, 27 s ago, against ten
    policy.use([known, scan[0]], 1040.0)
    twin = Item()
    for now in (1020.2, 1040.0):
        policy.use([twin], now)
    assert scan[0].rank == pytest.approx(twin.rank)  # being thrown out has not cost it its count


def test_what_is_worth_more_than_the_coldest_is_admitted() -> None:
    policy = Lrfu()
    queue = policy.queue()
    (once, often) = items(2)
    policy.use([once], 1000.0)
    queue.push(once)
    for now in (1001, 1002, 1010):
        policy.use([often], now)
    assert policy.admit(often, 1010.0)
    assert often.rank > once.rank


# -- ghosts


def test_ghosts_are_bounded_and_the_newest() -> None:
    ghosts = Ghosts(100)
    for index in range(10_000):
        ghosts.add(index.to_bytes(8, "big"), 1 << 30, float(index))
    assert len(ghosts) == 100
    assert ghosts.take((9_899).to_bytes(8, "big")) == -math.inf
    assert ghosts.take((9_900).to_bytes(8, "big")) == 9_900.0
    assert ghosts.take((9_900).to_bytes(8, "big")) == -math.inf
    ghosts.add(bytes(8), 10)
    assert len(ghosts) == 10


@pytest.mark.parametrize("name", ["lrfu", "s3-fifo"])
def test_policies_keep_no_more_ghosts_than_they_may(name: str) -> None:
    policy = get(name, ghosts=50)
    for block in items(255):
        policy.use([block], 5.0)
        policy.leave(block)
        policy.leave(block)  # it lost its slot first, and then went
    assert len(policy.ghosts) <= 50  # type: ignore[attr-defined]


def test_a_block_that_is_stored_again_takes_up_its_count() -> None:
    policy = Lrfu()
    (block,) = items(1)
    for now in (10.0, 20.0, 30.0):
        policy.use([block], now)
    policy.leave(block)
    again = Item(digest=block.digest)
    policy.use([again], 40.0)
    policy.use([block], 40.0)
    assert again.rank == pytest.approx(block.rank) and again.uses >= 4
    policy.hint([again], 5, 0, 41.0)
    for one in (again, block):
        policy.use([one], 42.0)
    assert again.rank == pytest.approx(block.rank)


# -- S3-FIFO


def test_s3_fifo_keeps_what_is_used_and_lets_a_scan_pass() -> None:
    policy = S3Fifo()
    queue = policy.queue()
    blocks = items(250)
    hot, scan = blocks[:10], blocks[10:]
    resident: list[Item] = []
    for block in hot:
        policy.use([block], 1.0)
        queue.push(block)
        resident.append(block)
    for now in (2.0, 3.0):
        policy.use(hot, now)
    for now, block in enumerate(scan, 4):
        policy.use([block], now)
        queue.push(block)
        resident.append(block)
        if len(resident) > 50:
            out = queue.coldest()
            assert out is not None
            queue.forget(out)
            policy.leave(out)
            resident.remove(out)
    assert set(hot) <= set(resident)


def test_s3_fifo_sends_a_ghost_to_the_main_queue() -> None:
    policy = S3Fifo()
    blocks = items(20)
    policy.use(blocks, 1.0)
    policy.leave(blocks[0])
    policy.use([blocks[0]], 2.0)
    assert blocks[0].bias == S3Fifo.MAIN
    policy.leave(blocks[0])
    policy.use([blocks[0]], 3.0)
    assert blocks[0].bias == S3Fifo.SMALL  # what went from the main queue is no ghost


def test_lru_is_the_time_of_the_last_use() -> None:
    policy, (a, b) = Lru(), items(2)
    policy.use([a], 5.2)
    policy.use([b], 5.1)
    policy.use([a], 5.0)  # told late
    assert (a.rank, b.rank, a.slab.rank) == (5.2, 5.1, 5.2)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("fifo", {}, "choose one of lrfu, lru, s3-fifo"),
        ("lrfu", {"half_life_s": 0}, "half_life_s=0"),
        ("lru", {"half_life_s": math.nan}, "half_life_s=nan"),
        ("s3-fifo", {"ghosts": -1}, "ghosts=-1"),
    ],
)
def test_what_cannot_be_is_refused(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        get(name, **options)
