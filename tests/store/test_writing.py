"""Two-phase store, removal and stalls: cases A07, A12, E01-E04, E11."""

from __future__ import annotations

import contextlib
import random
import zlib

import pytest

from hypercache.errors import SpecError, StoreFull
from hypercache.model import KVDtype, KVLayout, Part
from hypercache.store import BlockStore, HoldEnded, Namespace, NamespaceInfo, Reservation, Skip

from .conftest import Make
from .kit import MIB, audit, chain, info, intact, payload, put, write, write_layer

CHUNKS = (40_000, 24_000)


def reserve(
    store: BlockStore,
    ns: Namespace,
    digests: list[bytes],
    now: float,
    owner: str = "w",
    parent: bytes | None = None,
) -> list[Reservation]:
    entries = store.reserve(ns, parent, digests, owner, now)
    got = [entry for entry in entries if isinstance(entry, Reservation)]
    assert len(got) == len(digests), entries
    return got


def reasons(entries: list[Reservation | Skip]) -> list[str]:
    return [entry.reason if isinstance(entry, Skip) else "reserved" for entry in entries]


def test_nothing_is_visible_before_its_last_layer(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", CHUNKS))
    (digest,) = chain("p", 1)
    (writer,) = reserve(store, ns, [digest], 0.0)
    assert writer.nbytes == sum(CHUNKS)
    assert [writer.chunk(layer).nbytes for layer in range(2)] == list(CHUNKS)
    assert not write_layer(store, writer, 1, 0.0)
    assert not write_layer(store, writer, 1, 0.0)  # the same layer again completes nothing
    assert store.match(ns, [digest], 0.0) == 0 and store.contains(ns, [digest]) == [False]
    assert store.lease(ns, [digest], "r", 1.0, 0.0).blocks == []
    assert write_layer(store, writer, 0, 0.0)
    (block,) = store.lease(ns, [digest], "r", 1.0, 0.0).blocks
    assert list(block.crcs) == [zlib.crc32(payload(digest, layer, CHUNKS[layer])) for layer in range(2)]
    assert intact(store, [block])
    with pytest.raises(HoldEnded, match="committed"):
        writer.chunk(0)
    with pytest.raises(HoldEnded, match="committed"):
        store.fill(writer, 0, 0, 0.0)


def test_a_block_waits_for_its_prefix(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", CHUNKS))
    digests = chain("p", 3)
    one, two, three = reserve(store, ns, digests, 0.0)
    write(store, three)
    write(store, two)
    assert store.contains(ns, digests) == [False] * 3
    assert store.match(ns, digests[1:], 0.0) == 0
    assert reasons(store.reserve(ns, None, digests, "x", 0.0)) == ["pending"] * 3
    audit(store)
    write(store, one)
    assert store.match(ns, digests, 0.0) == 3
    assert reasons(store.reserve(ns, None, digests, "x", 0.0)) == ["exists"] * 3


def test_an_abort_takes_what_was_reserved_on_it(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", CHUNKS))
    digests = chain("p", 4)
    put(store, ns, digests[:1], 0.0)
    two, three, four = reserve(store, ns, digests[1:], 0.0, parent=digests[0])
    (aside,) = reserve(store, ns, chain("q", 1), 0.0, parent=digests[1])
    write(store, three)
    store.abort(two)
    for late in (two, four, aside):
        with pytest.raises(HoldEnded, match="aborted"):
            write_layer(store, late, 0, 0.0)
    assert store.contains(ns, digests) == [True, False, False, False]
    assert store.stats().bytes_stored == sum(CHUNKS) and store.stats().blocks_hidden == 0
    assert store.stats().aborted_total == 3


def test_reasons_for_a_skip(make: Make) -> None:
    store = make(4 * MIB)
    ns = store.open_namespace(info("a", (MIB - 64,)))
    digests = chain("p", 5)
    assert reasons(store.reserve(ns, digests[0], digests[1:3], "w", 0.0)) == ["orphan"] * 2
    assert reasons(store.reserve(ns, None, digests, "w", 0.0)) == ["reserved"] + ["full"] * 4
    assert reasons(store.reserve(ns, None, digests[:1], "x", 0.0)) == ["pending"]
    assert reasons(store.reserve(ns, None, [], "x", 0.0)) == []
    huge = store.open_namespace(info("huge", (2 * MIB, 2 * MIB)))
    assert reasons(store.reserve(huge, None, digests[:2], "w", 0.0)) == ["too_large"] * 2
    store.drop_owner("w")
    put(store, ns, digests[:1], 0.0)
    mixed = store.reserve(ns, digests[4], [digests[3], digests[0], digests[1]], "w", 0.0)
    assert reasons(mixed) == ["orphan", "exists", "reserved"]
    store.evict(ns, digests[:1])
    assert reasons(store.reserve(ns, None, [digests[0], digests[0]], "w", 0.0)) == ["reserved", "pending"]
    store.drop_owner("w")
    store.reserve(ns, None, digests[:1], "x", 0.0)
    assert reasons(store.reserve(ns, digests[0], [digests[0], digests[1]], "w", 0.0)) == [
        "pending",
        "reserved",
    ]


@pytest.mark.parametrize("bad", [b"", b"short", "text" * 8, bytearray(16), b"x" * 65, None])
def test_malformed_digests_reserve_nothing(store: BlockStore, bad: bytes) -> None:
    ns = store.open_namespace(info("a", CHUNKS))
    with pytest.raises(SpecError, match=r"16\.\.64 bytes"):
        store.reserve(ns, None, [*chain("p", 2), bad], "w", 0.0)
    assert store.stats().reservations == 0


@pytest.mark.parametrize("crc", [-1, 1 << 32])
def test_a_checksum_is_a_uint32(store: BlockStore, crc: int) -> None:
    ns = store.open_namespace(info("a", (100,)))
    (writer,) = reserve(store, ns, chain("p", 1), 0.0)
    with pytest.raises(SpecError, match="write its chunk first"):
        store.fill(writer, 0, 0, 0.0)
    writer.chunk(0)
    with pytest.raises(SpecError, match="uint32"):
        store.fill(writer, 0, crc, 0.0)
    with pytest.raises(SpecError, match=r"layers 0\.\.0"):
        store.fill(writer, 1, 0, 0.0)
    assert writer.open and store.fill(writer, 0, 0, 0.0)


def test_e01_a_failed_put_leaves_nothing_and_the_older_blocks_good(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", CHUNKS))
    digests = chain("p", 3)
    put(store, ns, digests[:1], 0.0)
    used = store.stats().bytes_used
    two, _ = reserve(store, ns, digests[1:], 0.0, parent=digests[0])
    write_layer(store, two, 0, 0.0)
    store.abort(two)  # the server's answer to a short payload or a wrong checksum
    lease = store.lease(ns, digests, "r", 1.0, 0.0)
    assert len(lease.blocks) == 1 and intact(store, lease.blocks)
    assert store.stats().bytes_used == used


@pytest.mark.parametrize("known_dead", [True, False])
def test_e02_a_writer_that_dies_half_way_leaves_nothing(store: BlockStore, known_dead: bool) -> None:
    ns = store.open_namespace(info("a", CHUNKS))
    digests = chain("p", 5)
    for writer in reserve(store, ns, digests, 0.0, owner="dead"):
        write_layer(store, writer, 0, 1.0)
    if known_dead:
        store.drop_owner("dead")
    else:
        store.sweep(5.9)
        assert store.stats().reservations == 5
        store.sweep(6.0)
        assert store.stats().stalled_total == 5
    assert store.contains(ns, digests) == [False] * 5
    stats = store.stats()
    assert (stats.bytes_used, stats.bytes_index, stats.bytes_held, stats.reservations) == (0, 0, 0, 0)


def test_a_writer_that_makes_progress_is_not_replaced(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", (100,) * 20))
    digests = chain("p", 2)
    first, _ = reserve(store, ns, digests, 0.0)
    for layer in range(20):
        now = layer * 4.0
        write_layer(store, first, layer, now)
        store.sweep(now + 4.0)
        assert reasons(store.reserve(ns, digests[0], digests[1:], "other", now + 4.9)) == ["pending"]
    assert store.match(ns, digests, 81.0) == 1


@pytest.mark.parametrize("writing", [False, True])
def test_e03_a_stalled_writer_is_replaced_and_its_late_commit_refused(
    store: BlockStore, writing: bool
) -> None:
    """``writing``: a transport may still write into the first one's memory; it must not be the second's."""
    ns = store.open_namespace(info("a", CHUNKS))
    digests = chain("p", 2)
    first, child = reserve(store, ns, digests, 0.0, owner="first")
    write_layer(store, first, 0, 0.0)
    late = first.chunk(1)
    if writing:
        store.pin(first)
    (second,) = reserve(store, ns, digests[:1], 5.0, owner="second")
    write(store, second, 5.0)
    if writing:
        late[:] = b"\xee" * len(late)
    with pytest.raises(HoldEnded, match="taken over"):
        store.fill(first, 1, 0, 5.0)
    with pytest.raises(HoldEnded, match="taken over"):
        first.chunk(1)
    assert store.match(ns, digests, 5.0) == 1
    write(store, child, 5.0)  # what hung on it hangs on the second's now
    lease = store.lease(ns, digests, "r", 1.0, 5.0)
    assert len(lease.blocks) == 2 and intact(store, lease.blocks)
    assert store.stats().blocks_hidden == writing
    audit(store, [first] if writing else [])
    if writing:
        store.unpin(first)
    assert store.stats().blocks_hidden == 0
    assert store.stats().stalled_total == 1


def test_e03_memory_that_a_transport_may_write_to_has_no_second_owner(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", (MIB - 64,)))
    (stuck,) = reserve(store, ns, chain("p", 1), 0.0)
    store.pin(stuck)
    late = stuck.chunk(0)
    store.drop_owner("w")
    store.clear(ns)
    store.evict(ns, chain("p", 1))
    store.sweep(100.0)
    q = chain("q", 7)
    assert put(store, ns, q, 100.0).count("stored") == 6
    late[:] = b"\xee" * len(late)
    assert intact(store, store.lease(ns, q, "r", 1.0, 100.0).blocks)
    store.unpin(stuck)
    assert put(store, ns, chain("r", 7), 102.0).count("stored") == 7


def test_e04_64_writers_of_one_block_store_one_copy(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", CHUNKS))
    digests = chain("p", 1)
    answers = [store.reserve(ns, None, digests, client, 0.0)[0] for client in range(64)]
    (writer,) = [answer for answer in answers if isinstance(answer, Reservation)]
    assert {answer.reason for answer in answers if isinstance(answer, Skip)} == {"pending"}
    write(store, writer)
    assert reasons(store.reserve(ns, None, digests, 64, 0.0)) == ["exists"]
    lease = store.lease(ns, digests, "r", 1.0, 0.0)
    assert intact(store, lease.blocks) and store.stats().blocks == 1
    assert store.stats().bytes_used == lease.blocks[0].slab.klass.nbytes


def test_e11_loading_and_publishing_one_prefix_at_once(make: Make) -> None:
    """32 tasks in random order over the same 200 blocks, under eviction; every byte read is right."""
    store = make(4 * MIB)
    ns = store.open_namespace(info("a", (12_000, 6_000)))
    prompts = [chain("p", 200), chain("q", 200)]
    rng = random.Random(11)

    def task(owner: int):  # type: ignore[no-untyped-def]
        for round_ in range(60):
            digests = rng.choice(prompts)
            first = rng.randint(0, min(199, store.match(ns, digests, clock)))
            parent = digests[first - 1] if first else None
            entries = store.reserve(ns, parent, digests[first : first + 40], owner, clock)
            for entry in entries:
                if isinstance(entry, Reservation):
                    for layer in range(2):
                        yield
                        if not entry.open:
                            break
                        with contextlib.suppress(StoreFull):
                            write_layer(store, entry, layer, clock)
            lease = store.lease(ns, digests, owner, 1.0, clock)
            yield
            if lease.open:
                assert intact(store, lease.blocks[:: max(1, len(lease.blocks) // 4)])
            if round_ % 3:
                store.release(lease)
            if round_ % 5 == 4:
                store.drop_owner(owner)

    clock = 0.0
    tasks = [task(owner) for owner in range(32)]
    while tasks:
        clock += 0.01
        turn = rng.choice(tasks)
        if next(turn, "done") == "done":
            tasks.remove(turn)
        if rng.random() < 0.01:
            store.evict(ns, [rng.choice(rng.choice(prompts))])
    for owner in range(32):
        store.drop_owner(owner)
    stats = store.stats()
    assert stats.committed_total > 300 and stats.evicted_total > 50 and stats.bytes_held == 0
    assert stats.bytes_used >= stats.blocks * 18_000


def test_a07_a_clear_hides_all_at_once_and_nothing_of_before_becomes_visible(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", CHUNKS))
    other = store.open_namespace(info("b", CHUNKS))
    digests = chain("p", 20)
    put(store, ns, digests[:10], 0.0)
    put(store, other, digests, 0.0)
    lease = store.lease(ns, digests[:4], "r", 30.0, 0.0)
    running = reserve(store, ns, digests[10:12], 0.0, parent=digests[9])
    write_layer(store, running[0], 0, 0.0)
    assert store.clear(ns) == (10, 10 * sum(CHUNKS))
    assert store.clear(ns) == (0, 0)
    assert store.match(ns, digests, 0.0) == 0 and not any(store.contains(ns, digests))
    with pytest.raises(HoldEnded, match="cleared"):
        store.fill(running[0], 1, 0, 0.0)
    assert intact(store, lease.blocks)
    new = reserve(store, ns, digests[:2], 0.0)  # the new epoch's writer meets no trace of the old
    store.sweep(1.0)
    audit(store)
    for writer in new:
        write(store, writer, 1.0)
    assert store.match(ns, digests, 1.0) == 2
    assert intact(store, lease.blocks)
    store.release(lease)
    with pytest.raises(HoldEnded):
        store.fill(running[1], 0, 0, 1.0)
    store.sweep(2.0)
    assert store.match(ns, digests, 2.0) == 2 and store.match(other, digests, 2.0) == 20
    stats = store.stats()
    assert (stats.blocks, stats.blocks_hidden, stats.reservations) == (22, 0, 0)


def test_a07_a_big_namespace_is_cleared_step_by_step_and_its_space_is_there_at_need(make: Make) -> None:
    store = make(128 * MIB)
    ns = store.open_namespace(info("a", (9_000,)))
    count = 0
    while store.stats().evicted_total == 0:
        count += put(store, ns, chain(f"p{count}", 40), float(count)).count("stored")
    before = store.stats()
    assert store.clear(ns)[0] == before.blocks > 3000
    assert store.stats().blocks == 0
    assert store.stats().bytes_used == before.bytes_used  # freed later
    assert put(store, ns, chain("q", 200), 1e6) == ["stored"] * 200  # or now, if needed
    assert store.match(ns, chain("q", 200), 1e6) == 200
    sweeps = 0
    while store.stats().blocks_hidden:
        audit(store)
        store.sweep(1e6)
        sweeps += 1
    assert 2 <= sweeps < 10
    assert store.match(ns, chain("q", 200), 1e6) == 200


def test_evicted_blocks_are_invisible_at_once_and_freed_after_their_last_lease(store: BlockStore) -> None:
    ns = store.open_namespace(info("a", CHUNKS))
    digests = chain("p", 6)
    put(store, ns, digests, 0.0)
    leases = [store.lease(ns, digests[:4], "r", 30.0, 0.0), store.lease(ns, digests[:3], "r", 30.0, 0.0)]
    (running,) = reserve(store, ns, chain("q", 1), 0.0, parent=digests[2])
    assert store.evict(ns, [digests[1], digests[4]]) == 5
    with pytest.raises(HoldEnded, match="evicted"):
        running.chunk(0)
    assert store.contains(ns, digests) == [True] + [False] * 5
    assert store.stats().blocks_hidden == 3
    assert put(store, ns, digests[1:3], 1.0, parent=digests[0]) == ["stored"] * 2
    audit(store)
    for lease in leases:
        assert intact(store, lease.blocks)
    store.release(leases[0])
    assert store.stats().blocks_hidden == 2 and intact(store, leases[1].blocks)
    store.release(leases[1])
    assert store.stats().blocks_hidden == 0
    assert store.match(ns, digests, 1.0) == 3


def test_a12_sessions_that_come_back_get_their_own_bytes(make: Make) -> None:
    """64 sessions, 16 at a time, no eviction: each byte of each layer is the session's own. RAM tier only."""
    store = make(128 * MIB)
    spaces = [store.open_namespace(info(f"s{i % 4}", (4_000 + 128 * (i % 4), 2_001))) for i in range(64)]
    prompts = [chain(f"session {i}", 40) for i in range(64)]
    rng = random.Random(12)
    for start in range(0, 64, 16):
        group = range(start, start + 16)
        writers = []
        for session in group:
            writers += reserve(store, spaces[session], prompts[session], 0.0, owner=f"s{session}")
        parts = [(writer, layer) for writer in writers for layer in range(2)]
        rng.shuffle(parts)
        for writer, layer in parts:
            write_layer(store, writer, layer, 0.0)
    for session in rng.sample(range(64), 64):
        lease = store.lease(spaces[session], prompts[session], session, 9.0, 1.0)
        assert len(lease.blocks) == 40 and intact(store, lease.blocks)
    assert store.stats().evicted_total == 0


def test_one_digest_has_one_geometry(store: BlockStore) -> None:
    first = info("a", CHUNKS)
    early = store.open_namespace(info("a", CHUNKS[::-1]))  # nothing is kept of it
    ns = store.open_namespace(first)
    (writer,) = reserve(store, ns, chain("p", 1), 0.0)
    assert store.open_namespace(info("a", CHUNKS, label="another name for it")) is ns
    for use in (
        lambda: store.match(early, chain("p", 1), 0.0),
        lambda: store.reserve(early, None, chain("p", 1), "x", 0.0),
        lambda: store.lease(early, chain("p", 1), "x", 1.0, 0.0),
        lambda: store.contains(early, chain("p", 1)),
        lambda: store.evict(early, chain("p", 1)),
        lambda: store.clear(early),
        lambda: store.count(early),
    ):
        with pytest.raises(SpecError, match="another geometry"):
            use()
    for other in (info("a", CHUNKS[::-1]), info("a", CHUNKS, 64), info("a", CHUNKS, codec="int8")):
        with pytest.raises(SpecError, match="another geometry"):
            store.open_namespace(other)
    store.abort(writer)
    assert put(store, early, chain("p", 1), 0.0) == ["stored"]  # nothing was left: the next one wins
    with pytest.raises(SpecError, match="another geometry"):
        store.match(ns, chain("p", 1), 0.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"digest": b"short"},
        {"digest": b"x" * 33},
        {"chunk_nbytes": ()},
        {"chunk_nbytes": (1,) * 4097},
        {"chunk_nbytes": (0,)},
        {"chunk_nbytes": (-5,)},
        {"chunk_nbytes": (1 << 41,)},
        {"chunk_nbytes": (1.5,)},
        {"block_size": 0},
        {"codec": ""},
        {"below": "int4"},  # without layouts
        {"layouts": (KVLayout("split", 1, (Part("k", 8), Part("v", 8)), KVDtype.BF16),) * 2},
    ],
)
def test_malformed_namespaces_are_refused(bad: dict[str, object]) -> None:
    good = {"digest": b"x" * 16, "chunk_nbytes": (8,), "block_size": 16, "codec": "raw", "label": "mine"}
    NamespaceInfo(**good)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="namespace 'mine'"):
        NamespaceInfo(**{**good, **bad})  # type: ignore[arg-type]


def test_a_namespace_that_was_written_to_is_not_the_idle_one(make: Make) -> None:
    store = make(max_namespaces=2)
    a, b = (store.open_namespace(info(name, CHUNKS)) for name in "ab")
    put(store, b, chain("p", 3), 0.0)
    put(store, a, chain("p", 2), 0.0)
    c = store.open_namespace(info("c", CHUNKS))
    assert (store.count(a), store.count(b)) == (2, 3)  # to open takes nothing from others
    assert reasons(store.reserve(c, b"x" * 16, chain("p", 1), "w", 0.0)) == ["orphan"]
    assert store.reserve(c, None, [], "w", 0.0) == []
    assert (store.count(a), store.count(b)) == (2, 3)  # nor does what reserves nothing
    put(store, c, chain("p", 1), 0.0)
    assert (store.count(a), store.count(b)) == (2, 0)


def test_idle_namespaces_make_room_for_new_ones_and_their_handles_stay_good(make: Make) -> None:
    store = make(max_namespaces=2)
    a, b, c = (store.open_namespace(info(name, CHUNKS)) for name in "abc")
    for ns in (b, a):
        put(store, ns, chain("p", 2), 0.0)
    store.match(b, chain("p", 2), 1.0)
    put(store, c, chain("p", 2), 1.0)  # a was used longest ago
    assert store.match(a, chain("p", 2), 2.0) == 0 and store.match(b, chain("p", 2), 2.0) == 2
    store.evict(c, chain("p", 2))  # c is empty, and forgotten
    assert put(store, a, chain("p", 2), 3.0) == ["stored"] * 2
    assert store.stats().namespaces == 2
    leases = [store.lease(ns, chain("p", 2), "r", 9.0, 4.0) for ns in (a, b)]
    assert all(lease.open for lease in leases)
    assert reasons(store.reserve(c, None, chain("p", 2), "w", 4.0)) == ["full"] * 2
    store.drop_owner("r")
    assert put(store, c, chain("p", 2), 5.0) == ["stored"] * 2
