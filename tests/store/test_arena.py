"""The arena on its own, and I02 and I06."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypercache.errors import ConfigError
from hypercache.store.arena import Arena, MemoryUnavailable, Slab, region_nbytes, slot_nbytes

from .kit import MIB

Home = tuple[Slab[str], int]


def take(arena: Arena[str], nbytes: int, owner: str = "x") -> Home | None:
    klass = arena.size_class(nbytes)
    assert klass is not None
    found = arena.allocate(klass)
    if found is not None:
        found[0].owners[found[1]] = owner
    return found


@given(st.integers(1, 1 << 40))
def test_size_classes_are_aligned_and_waste_little(nbytes: int) -> None:
    slot = slot_nbytes(nbytes)
    assert slot >= nbytes and slot % 64 == 0
    assert slot - nbytes <= max(63, nbytes / 16)
    assert slot_nbytes(slot) == slot


def test_there_are_few_classes() -> None:
    assert len({slot_nbytes(n) for n in range(1, MIB)}) < 16 * 16


@pytest.mark.parametrize(
    ("capacity", "region"),
    [(1, MIB), (64 * MIB, MIB), (4 << 30, 64 * MIB), (6 << 30, 64 * MIB), (1 << 40, 128 * MIB)],
)
def test_regions_are_a_64th_within_bounds(capacity: int, region: int) -> None:
    assert region_nbytes(capacity) == region


@given(st.integers(64, 40 * MIB))
def test_slabs_waste_little_where_there_is_a_choice(nbytes: int) -> None:
    arena: Arena[str] = Arena(64 * MIB, MIB)
    klass = arena.size_class(nbytes)
    assert klass is not None and klass.count >= 1
    assert klass.count * klass.nbytes <= klass.run * MIB <= arena.nbytes
    waste = 1 - klass.count * klass.nbytes / (klass.run * MIB)
    assert waste <= 1 / 8 or klass.count == 1
    arena.close()


def test_slots_never_overlap_and_views_are_theirs() -> None:
    arena: Arena[str] = Arena(8 * MIB, MIB)
    homes = []
    for index in range(10_000):
        found = take(arena, (100, 70_000, 1_300_000)[index % 3])
        if found is None:
            break
        homes.append((found, index))
    for (slab, slot), index in homes:
        arena.view(slab, slot, 0, slab.klass.nbytes)[:] = bytes([index % 251]) * slab.klass.nbytes
    for (slab, slot), index in homes:
        view = arena.readonly(slab, slot, 0, slab.klass.nbytes)
        assert view.readonly and bytes(view) == bytes([index % 251]) * slab.klass.nbytes
    assert len(homes) > 6
    arena.close()


def test_an_object_larger_than_a_region_takes_neighbouring_regions() -> None:
    arena: Arena[str] = Arena(8 * MIB, MIB)
    found = take(arena, 5 * MIB // 2)
    assert found is not None and found[0].klass.run == 3
    assert arena.largest_free_run() == 5 * MIB
    arena.release(*found)
    assert arena.largest_free_run() == 8 * MIB


def test_nothing_is_larger_than_the_arena_but_all_of_it_can_be_one_object() -> None:
    arena: Arena[str] = Arena(8 * MIB, MIB)
    assert arena.size_class(8 * MIB + 1) is None
    found = take(arena, 8 * MIB - 10)
    assert found is not None and arena.used == 8 * MIB
    assert take(arena, 1) is None


def test_i02_mixed_sizes_at_95_percent_leave_no_fragments() -> None:
    """Sizes of 16 and 64 tokens, 1..80 layers; when all is gone the space is in one piece again."""
    arena: Arena[str] = Arena(256 * MIB, 4 * MIB)
    rng = random.Random(2)
    homes: list[Home] = []
    for _ in range(120_000):
        if arena.used < 0.95 * arena.nbytes and rng.random() < 0.6:
            found = take(arena, rng.choice((16, 64)) * rng.randint(1, 80) * 512)
            if found is not None:
                homes.append(found)
                continue
        if homes:
            index = rng.randrange(len(homes))
            homes[index], homes[-1] = homes[-1], homes[index]
            arena.release(*homes.pop())
    assert len(homes) > 50
    assert arena.used == sum(slab.klass.nbytes for slab, _ in homes)
    for home in homes:
        arena.release(*home)
    assert arena.used == 0
    assert arena.largest_free_run() == arena.nbytes == arena.regions_free * arena.region


@given(st.data())
def test_the_coldest_window_is_the_coldest(data: st.DataObject) -> None:
    arena: Arena[str] = Arena(8 * MIB, MIB)
    while True:
        found = take(arena, data.draw(st.sampled_from([MIB, 2 * MIB, 3 * MIB])))
        if found is None:
            break
        found[0].rank = data.draw(st.integers(0, 5))
        found[0].held = data.draw(st.integers(0, 1))
    for slab in arena.slabs():
        if data.draw(st.booleans()):
            arena.release(slab, 0)
    run = data.draw(st.integers(1, 8))
    heats = []
    for first in range(8 - run + 1):
        slabs = [slab for slab in arena.regions[first : first + run] if slab is not None]
        if not any(slab.held for slab in slabs):
            heats.append(max((slab.rank for slab in slabs), default=-math.inf))
    window = arena.coldest_window(run)
    if window is None:
        assert not heats
    else:
        heat, slabs = window
        assert heat == min(heats) and len(set(slabs)) == len(slabs)
        assert max((slab.rank for slab in slabs), default=-math.inf) == heat
    arena.close()


@pytest.mark.parametrize(("nbytes", "region"), [(0, 1), (MIB, 0), (MIB, 2 * MIB), (1 << 60, MIB), (-1, -1)])
def test_absurd_sizes_are_refused(nbytes: int, region: int) -> None:
    with pytest.raises(ConfigError, match="region"):
        Arena(nbytes, region)


def test_i06_a_map_that_the_system_refuses_is_a_typed_error_and_leaves_the_process_well() -> None:
    script = """
import resource
from hypercache.store import BlockStore, MemoryUnavailable
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
try:
    BlockStore(1 << 30)
except MemoryUnavailable as error:
    assert "lower the memory setting" in str(error) and isinstance(error, MemoryError)
    BlockStore(8 << 20).close()
    print("degraded")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "degraded\n", done.stderr
    assert issubclass(MemoryUnavailable, MemoryError)


def test_closing_spares_views_that_are_still_lent() -> None:
    arena: Arena[str] = Arena(4 * MIB, MIB)
    found = take(arena, 100)
    assert found is not None
    view = arena.view(*found, 0, 100)
    view[:] = b"x" * 100
    arena.close()
    assert bytes(view) == b"x" * 100
