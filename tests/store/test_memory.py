"""What the store may use, and who has to go: cases I01, I02, I04, I10."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import tracemalloc

import pytest

from hypercache.errors import ConfigError, StoreFull
from hypercache.store import BlockStore, Lease, Namespace, Reservation
from hypercache.store.room import index_nbytes, namespace_nbytes

from .conftest import Make
from .kit import MIB, audit, chain, info, intact, put, write


@pytest.mark.parametrize("capacity", [0, -1, 4 * MIB - 1, 1 << 47, 8.0 * MIB, True, "8MiB", None])
def test_absurd_capacities_are_refused(capacity: int) -> None:
    with pytest.raises(ConfigError, match="capacity"):
        BlockStore(capacity)


@pytest.mark.parametrize("option", ["lease_limit_s", "store_stall_s", "max_namespaces"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_absurd_limits_are_refused(option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=option):
        BlockStore(8 * MIB, **{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("layers", "length"), [(1, 1), (32, 1), (32, 64), (4, 688), (80, 8)])
def test_the_index_charge_is_what_the_index_takes(make: Make, layers: int, length: int) -> None:
    store = make(512 * MIB)
    ns = store.open_namespace(info("a", (64,) * layers))
    blocks = 1376 // length * length  # just past a doubling of the dict, where it is largest per block
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for prompt in range(blocks // length):
            digests = chain(f"p{prompt}", length)
            marks = [digest[:24] for digest in digests]
            for entry in store.reserve(ns, None, digests, "w", float(prompt) + 0.5, marks):
                assert isinstance(entry, Reservation)
                entry.chunk(0)
                for layer in range(layers):
                    store.fill(entry, layer, 1 << 31, 0.5)
        del digests, entry, marks
        gc.collect()
        measured = (tracemalloc.get_traced_memory()[0] - before) / blocks
    finally:
        tracemalloc.stop()
    assert store.stats().blocks == blocks
    assert store.stats().bytes_index == blocks * index_nbytes(layers) + namespace_nbytes(layers)
    assert measured <= index_nbytes(layers) <= 2 * measured


def test_i01_the_process_stays_within_its_cap() -> None:
    """Store 16 times the capacity: resident memory stays below it + 25 %, the newest are served."""
    script = """
import hashlib
from hypercache.store import BlockStore, NamespaceInfo, Reservation
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
cap = 64 << 20
before = resident()
store = BlockStore(cap)
sizes = [(2048,) * 32, (6144,) * 30, (300_000,) * 4]
infos = [NamespaceInfo(bytes([i]) * 16, s, 16, "raw", "x") for i, s in enumerate(sizes)]
spaces = [store.open_namespace(i) for i in infos]
done, peak = 0, 0
while done < 16 * cap:
    ns = spaces[done // cap % 3]
    digests = [hashlib.blake2b(b"%d.%d" % (done, i), digest_size=32).digest() for i in range(12)]
    for entry in store.reserve(ns, None, digests, 1, float(done)):
        assert isinstance(entry, Reservation)
        for layer in range(ns.layers):
            view = entry.chunk(layer)
            view[:] = b"x" * view.nbytes
            store.fill(entry, layer, 0, float(done))
    done += 12 * ns.nbytes
    peak = max(peak, resident() - before)
    assert store.match(ns, digests, float(done)) == 12
assert store.stats().evicted_total > 1000
print("over" if peak > 1.25 * cap else "ok", peak)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.startswith("ok"), done.stdout + done.stderr


def test_i02_a_full_store_of_mixed_sizes_never_jams_and_leaves_one_piece(make: Make) -> None:
    """More than 10^5 operations: blocks of 16 and 64 tokens and 1..80 layers through a full store."""
    store = make(64 * MIB)
    rng = random.Random(2)
    spaces = [
        store.open_namespace(info(f"{tokens}x{layers}", (tokens * 96,) * layers))
        for tokens in (16, 64)
        for layers in (1, 2, 5, 13, 32, 80)
    ]
    leases: list[Lease] = []
    stored = 0
    clock = 0.0
    while stored < 25_000:
        clock += 0.01
        ns = spaces[min(int(rng.expovariate(0.4)), 11)]  # small blocks are many, large ones few
        digests = chain(f"{rng.randrange(2000)}", rng.randint(1, 30))
        entries = store.reserve(ns, None, digests, "w", clock)
        for entry in entries:
            if isinstance(entry, Reservation):
                stored += 1
                if rng.random() < 0.001:
                    store.abort(entry)
                    break
                entry.chunk(0)
                for layer in range(ns.layers):
                    store.fill(entry, layer, 0, clock)
            else:
                assert entry.reason == "exists", entry
        if rng.random() < 0.1:
            leases.append(store.lease(ns, digests, "r", 1.0, clock))
        if rng.random() < 0.01:
            store.clear(ns)
        if rng.random() < 0.05:
            store.evict(ns, digests[:1])
        if rng.random() < 0.1:
            store.sweep(clock)
    audit(store)
    stats = store.stats()
    assert stats.evicted_total > 5000
    assert stats.bytes_used > 0.5 * stats.bytes_data
    for ns in spaces:
        store.clear(ns)
    store.drop_owner("r")
    while store.stats().blocks_hidden:
        store.sweep(clock + 10)
    stats = store.stats()
    assert (stats.bytes_used, stats.bytes_index) == (0, 0)
    assert stats.largest_free_run == stats.bytes_data


def fill_up(store: BlockStore, ns: Namespace, clock: float = 0.0) -> list[list[bytes]]:
    """Prompts of 8 blocks, until the first eviction."""
    prompts: list[list[bytes]] = []
    evicted = store.stats().evicted_total
    while store.stats().evicted_total == evicted:
        prompts.append(chain(f"fill {len(prompts)}", 8))
        assert put(store, ns, prompts[-1], clock + len(prompts) * 0.001) == ["stored"] * 8
    return prompts


def test_i10_a_large_block_gets_room_in_a_store_full_of_small_ones(make: Make) -> None:
    store = make(64 * MIB)
    small = store.open_namespace(info("small", (16 * 1024,) * 4))
    large = store.open_namespace(info("large", (8 * MIB,) * 4))
    prompts = fill_up(store, small)
    assert store.stats().bytes_used > 0.95 * store.stats().bytes_data
    held = store.lease(small, prompts[-1], "r", 30.0, 10.0)
    assert put(store, large, chain("big", 1), 10.0) == ["stored"]
    assert store.match(large, chain("big", 1), 10.0) == 1
    assert len(held.blocks) == 8 and intact(store, held.blocks)
    kept = [store.match(small, prompt, 10.0) for prompt in prompts]
    assert sum(kept) * small.nbytes > 20 * MIB  # no more than needed went,
    assert sum(kept[2 : len(kept) // 3]) == 0  # and the oldest did (the newest lies among the first)
    assert put(store, small, chain("again", 8), 11.0) == ["stored"] * 8
    huge = store.open_namespace(info("huge", (64 * MIB,)))
    assert put(store, huge, chain("x", 1), 12.0) == ["too_large"]


def test_i10_a_large_block_finds_no_room_between_leases(make: Make) -> None:
    store = make(64 * MIB)
    small = store.open_namespace(info("small", (MIB,)))
    large = store.open_namespace(info("large", (8 * MIB,) * 4))
    prompts = fill_up(store, small)
    for prompt in prompts[1::2]:
        store.lease(small, prompt, "r", 20.0, 10.0)
    assert put(store, large, chain("big", 1), 10.0) == ["full"]
    store.drop_owner("r")
    assert put(store, large, chain("big", 1), 10.0) == ["stored"]


def test_a_class_takes_regions_from_another_only_if_those_are_colder(make: Make) -> None:
    store = make(16 * MIB)
    a = store.open_namespace(info("a", (100_000,)))
    b = store.open_namespace(info("b", (200_000,)))
    prompts = fill_up(store, a, 100.0)
    put(store, b, chain("b0", 4), 200.0)  # has no regions: some of a's must go
    taken = store.stats().evicted_total
    for prompt in prompts:
        store.match(a, prompt, 300.0)  # now all of a is hotter than b's
    for step in range(1, 10):
        assert put(store, b, chain(f"b{step}", 4), 300.0) == ["stored"] * 4
    found = [store.match(b, chain(f"b{step}", 4), 301.0) for step in range(10)]
    assert found[0] == 0 and found[-1] == 4
    assert taken < 30
    for step in range(10, 60):  # a falls behind: b may have all of it
        assert put(store, b, chain(f"b{step}", 4), 400.0 + step) == ["stored"] * 4
    assert sum(store.match(a, prompt, 500.0) for prompt in prompts) == 0
    audit(store)


def test_tiny_blocks_are_bounded_by_the_index_budget(make: Make) -> None:
    store = make(4 * MIB)
    ns = store.open_namespace(info("tiny", (10, 20)))
    limit = (store.stats().bytes_index_limit - namespace_nbytes(2)) // index_nbytes(2)
    for prompt in range(limit // 8 + 20):
        assert put(store, ns, chain(f"p{prompt}", 8), float(prompt)) == ["stored"] * 8
    stats = store.stats()
    assert stats.blocks == limit and stats.bytes_index <= stats.bytes_index_limit
    assert store.match(ns, chain(f"p{prompt}", 8), 1e6) == 8
    assert store.match(ns, chain("p0", 8), 1e6) == 0


def test_i04_counts_hold_when_everything_is_in_use(make: Make) -> None:
    store = make(4 * MIB)
    ns = store.open_namespace(info("a", (500_000,)))
    digests = chain("p", 10)
    writers: list[Reservation] = []
    for client, digest in enumerate(digests):
        (entry,) = store.reserve(ns, digests[client - 1] if client else None, [digest], client, 0.0)
        assert isinstance(entry, Reservation)
        try:
            entry.chunk(0)
        except StoreFull:
            assert entry.ended == "full"
            break
        writers.append(entry)
    assert store.stats().bytes_held == store.stats().bytes_used > 0
    assert put(store, ns, chain("q", 1), 1.0) == ["full"]
    for writer in writers:
        write(store, writer, 1.0)
    lease = store.lease(ns, digests, "r", 9.0, 1.0)
    assert len(lease.blocks) == len(writers)
    assert put(store, ns, chain("q", 1), 1.0) == ["full"]
    store.release(lease)
    assert store.stats().bytes_held == 0
    assert put(store, ns, chain("q", 1), 1.0) == ["stored"]


def test_a_new_block_costs_one_old_block_even_where_slabs_are_long(make: Make) -> None:
    store = make(64 * MIB)
    ns = store.open_namespace(info("a", (700_000,)))
    for step in range(120):
        before = store.stats().evicted_total
        assert put(store, ns, chain(f"p{step}", 1), float(step)) == ["stored"]
        assert store.stats().evicted_total - before in (0, 1)
    (block,) = store.lease(ns, chain("p119", 1), "r", 1.0, 200.0).blocks
    assert block.slab.klass.run > 1 and block.slab.klass.count > 1
    assert store.stats().evicted_total > 20


def test_what_was_cleared_goes_before_what_is_alive(make: Make) -> None:
    store = make(8 * MIB)
    a = store.open_namespace(info("a", (100_000,)))
    b = store.open_namespace(info("b", (100_000,)))
    old = chain("old", 30)
    put(store, a, old, 0.0)
    lease = store.lease(a, old, "r", 9.0, 0.0)
    assert "full" in put(store, b, chain("newer", 100), 1.0)
    store.release(lease)  # the older blocks are alive, the newer ones are not
    store.clear(b)
    assert put(store, a, chain("next", 10), 3.0) == ["stored"] * 10
    assert store.match(a, old, 4.0) == 30
    assert store.stats().evicted_total == 0


def test_load_that_is_cleared_and_never_evicted_leaves_nothing_behind(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", (1000,)))
    for step in range(30):
        for prompt in range(50):
            put(store, ns, chain(f"p{prompt}", 1), float(step))
        store.clear(ns)
        store.sweep(float(step))
    assert store.stats().blocks_hidden == 0
    entries = [len(queue._heap) for queue in (*store._room._leaves.values(), store._room._slabs)]
    assert max(entries) <= 2 * 50 + 66
