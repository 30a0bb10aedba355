"""Blocks found out of context, and leases on several chains: cases K10, K12, C01, C03, C04, C08, K15."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypercache import keys, protocol
from hypercache.errors import SpecError
from hypercache.fingerprint import fingerprints, marks
from hypercache.store import (
    MARK_NBYTES,
    Block,
    BlockStore,
    HoldEnded,
    Located,
    Namespace,
    NamespaceInfo,
    Reservation,
    Run,
)
from hypercache.store.modular import EITHER_END, SEARCH_STEPS, Sieve

from .conftest import Make
from .kit import MIB, audit, chain, info, intact, put, write

TENANT = keys.TenantKey.public()
Tokens = npt.NDArray[np.int64]


class Shelf:
    """Prompts of real tokens in one namespace of a store."""

    def __init__(self, store: BlockStore, block_size: int = 16, nbytes: int = 64, name: str = "a") -> None:
        self.store, self.size = store, block_size
        digest = name.encode().ljust(16, b".")
        self.keys = keys.Namespace(digest, block_size, "raw", b"f" * 16, TENANT.tenant_id)
        self.ns = store.open_namespace(NamespaceInfo(digest, (nbytes,), block_size, "raw", name))

    def digests(self, tokens: Tokens) -> list[bytes]:
        return keys.causal_digests(self.keys, TENANT, tokens)

    def add(self, *parts: Tokens, now: float = 0.0, marked: bool = True) -> Tokens:
        tokens = np.concatenate(parts)
        digests = self.digests(tokens)
        entries = self.store.reserve(
            self.ns, None, digests, "w", now, marks(self.keys, TENANT, tokens) if marked else ()
        )
        for entry in entries:
            if isinstance(entry, Reservation):
                write(self.store, entry, now)
        assert self.store.contains(self.ns, digests) == [True] * len(digests)
        return tokens

    def ask(self, *parts: Tokens, least: int = 1, first: int = 0, now: float = 1.0) -> Located:
        """Locate a prompt, and check whatever must hold of any answer."""
        tokens = np.concatenate(parts)
        digests = self.digests(tokens)
        asked = fingerprints(self.keys, TENANT, tokens, first)
        located = self.store.locate(self.ns, digests, first, asked, least, now)
        assert located.hit == self.store.match(self.ns, digests, now)
        end = located.hit * self.size
        for run in located.runs:
            assert run.at >= max(end, first) and len(run.blocks) >= least
            end = run.at + len(run.blocks) * self.size
            mine = tokens[run.at : end]
            assert [b.modular for b in run.blocks] == keys.modular_digests(self.keys, TENANT, mine)
            assert run.source == run.blocks[0].depth * self.size
            assert [b.parent for b in run.blocks[1:]] == list(run.blocks[:-1])
            assert self.store.contains(self.ns, [b.digest for b in run.blocks]) == [True] * len(run.blocks)
        assert end <= len(tokens)
        return located


def spans(located: Located, size: int = 16) -> list[tuple[int, int, int]]:
    """(target token, source token, blocks) of each run."""
    return [(run.at, run.source, len(run.blocks)) for run in located.runs]


def words(seed: int, count: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 50_000, count)


@pytest.fixture
def shelf(store: BlockStore) -> Shelf:
    return Shelf(store)


# --- finding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 64])
def test_k10_a_document_is_found_behind_a_prompt_of_any_length(store: BlockStore, size: int) -> None:
    shelf = Shelf(store, size)
    document = shelf.add(words(1, 640))
    for length in range(1, 65):
        system = words(1000 + length, length)
        located = shelf.ask(system, document, words(3, 5), least=64 // size)
        assert located.hit == 0 and located.complete
        assert spans(located) == [(length, 0, 640 // size)]
        assert located.runs[0].blocks[0].context == b""  # K15: it was computed in isolation


def test_k10_a_system_prompt_shorter_than_a_block_costs_no_more_than_one_block(shelf: Shelf) -> None:
    """Both times the document stands behind a prompt off the grid; no one knows its borders."""
    document = words(1, 640)
    shelf.add(words(2, 37), document)
    for inserted in range(16):
        located = shelf.ask(words(2, 37), words(3, inserted), document, least=4)
        found = located.hit + sum(len(run.blocks) for run in located.runs)
        assert located.hit == (42 if not inserted else 2)
        assert inserted == 0 or spans(located) == [(48 + inserted, 48, 39)]
        assert found >= 40 - 1


def test_k12_a_document_behind_another_question_is_found_and_counted_apart(shelf: Shelf) -> None:
    system, document = words(1, 64), words(2, 320)
    first = shelf.add(system, words(3, 21), document)
    located = shelf.ask(system, words(4, 45), document)
    assert located.hit == 4
    assert spans(located) == [(64 + 45 + 11, 96, 19)]
    (run,) = located.runs
    assert run.blocks[0].context == shelf.digests(first)[5]
    assert run.blocks[-1].digest == shelf.digests(first)[24]


def test_what_stands_in_its_own_context_is_never_modular(shelf: Shelf) -> None:
    prompt = shelf.add(words(1, 320))
    assert spans(shelf.ask(prompt)) == [] and shelf.ask(prompt).hit == 20
    assert spans(shelf.ask(prompt[:200])) == []
    twice = shelf.ask(prompt, prompt)
    assert (twice.hit, spans(twice)) == (20, [(320, 0, 20)])
    begun = shelf.ask(prompt[:100], prompt)  # ends within a block: the same text begins before the hit's end
    assert (begun.hit, spans(begun)) == (6, [(100, 0, 20)])


def test_no_run_begins_inside_the_causal_hit(shelf: Shelf) -> None:
    repeated = np.tile(words(1, 8), 40)  # each block's text stands at every eighth token
    shelf.add(repeated)
    located = shelf.ask(repeated, words(2, 20))
    assert (located.hit, spans(located)) == (20, [])


def test_a_run_may_stand_where_it_stood_before(shelf: Shelf) -> None:
    document = words(1, 160)
    shelf.add(words(2, 32), document)
    assert spans(shelf.ask(words(3, 32), document)) == [(32, 32, 10)]


def test_runs_follow_each_other_without_a_gap(shelf: Shelf) -> None:
    one, two, three = words(1, 96), words(2, 80), words(3, 64)
    for part in (one, two, three):
        shelf.add(part)
    located = shelf.ask(words(9, 7), three, one, words(8, 3), two, one)
    assert spans(located) == [(7, 0, 4), (71, 0, 6), (170, 0, 5), (250, 0, 6)]


@pytest.mark.parametrize("least", [1, 2, 3, 4, 5, 6, 20])
def test_a_run_has_the_least_length(shelf: Shelf, least: int) -> None:
    documents = [shelf.add(words(length, 16 * length)) for length in (5, 3, 1, 4)]
    located = shelf.ask(words(99, 5), *documents, least=least)
    assert [len(run.blocks) for run in located.runs] == [n for n in (5, 3, 1, 4) if n >= least]
    assert located.complete


def test_the_longest_wins_then_the_isolated_then_the_newest(shelf: Shelf) -> None:
    document, more = words(1, 64), words(2, 32)
    shelf.add(words(10, 16), document)
    shelf.add(words(11, 32), document)
    assert spans(shelf.ask(words(3, 5), document)) == [(5, 32, 4)]
    shelf.add(document)
    shelf.add(words(12, 48), document)
    assert spans(shelf.ask(words(3, 5), document)) == [(5, 0, 4)]
    shelf.add(words(13, 96), document, more)
    assert spans(shelf.ask(words(3, 5), document, more)) == [(5, 96, 6)]


def test_a_run_takes_the_branch_that_was_asked_for(shelf: Shelf) -> None:
    """A hub with many children, and a text with many homes: whichever are fewer are looked through."""
    hub, tail = words(1, 32), words(2, 32)
    for seed in range(300):
        shelf.add(hub, words(100 + seed, 16))
    shelf.add(hub, tail)
    for seed in range(300, 400):
        shelf.add(hub, words(100 + seed, 16))
    assert spans(shelf.ask(words(3, 5), hub, tail)) == [(5, 0, 4)]
    for seed in range(300):
        shelf.add(words(1000 + seed, 16), tail)
    for asked, count in ((tail, 4), (words(250, 16), 3), (words(450, 16), 3)):
        assert spans(shelf.ask(words(3, 5), hub, asked)) == [(5, 0, count)]


def test_c01_the_last_token_is_left_where_it_is_not_asked_for(shelf: Shelf) -> None:
    for length in (16, 32, 64, 128):
        shelf.add(words(length, length))
        prompt = np.concatenate([words(9, 4), words(length, length)])
        assert sum(len(run.blocks) for run in shelf.ask(prompt[:-1]).runs) == length // 16 - 1
        assert sum(len(run.blocks) for run in shelf.ask(prompt).runs) == length // 16


def test_c03_c04_whole_blocks_within_the_prompt_at_every_length(shelf: Shelf) -> None:
    document = shelf.add(words(1, 200))
    for length in range(201):
        located = shelf.ask(words(2, 3), document[:length])
        assert sum(len(run.blocks) for run in located.runs) == length // 16


def test_c08_behind_a_hole_a_new_run_begins_and_none_goes_across(shelf: Shelf) -> None:
    document = shelf.add(words(1, 160))
    digests = shelf.digests(document)
    assert shelf.store.evict(shelf.ns, [digests[6]]) == 4
    assert spans(shelf.ask(words(2, 5), document)) == [(5, 0, 6)]
    assert spans(shelf.ask(words(2, 5), document, least=7)) == []


def test_first_is_the_token_of_the_first_fingerprint(shelf: Shelf) -> None:
    document = shelf.add(words(1, 160))
    for first in (0, 1, 5, 6, 21, 22, 160, 1000):
        located = shelf.ask(words(2, 5), document, first=first)
        missed = 0 if first <= 5 else -(-(first - 5) // 16)
        count = max(0, 10 - missed)
        assert spans(located) == ([(5 + 16 * missed, 16 * missed, count)] if count else [])


def test_zero_is_not_asked_for(shelf: Shelf) -> None:
    document = shelf.add(words(1, 160))
    asked = fingerprints(shelf.keys, TENANT, document)
    asked[48] = 0
    located = shelf.store.locate(shelf.ns, [], 0, asked, 1, 0.0)
    assert spans(located) == [(0, 0, 3), (64, 64, 6)]
    unmarked = bytes(MARK_NBYTES)  # a fingerprint of 0 finds nothing either
    assert put(shelf.store, shelf.ns, chain("p", 1), 0.0, None, [unmarked]) == ["stored"]
    assert shelf.store.locate(shelf.ns, [], 0, np.zeros(50, np.uint64), 1, 0.0).runs == []


def test_a_block_without_a_mark_is_found_in_its_context_alone(shelf: Shelf) -> None:
    document = shelf.add(words(1, 160), marked=False)
    assert shelf.ask(document).hit == 10
    assert spans(shelf.ask(words(2, 5), document)) == []
    shelf.add(document, words(3, 64))  # who stored first has decided; what continues it has its marks
    assert spans(shelf.ask(words(2, 5), document, words(3, 64))) == [(165, 160, 4)]


def test_namespaces_do_not_see_each_other(store: BlockStore) -> None:
    one, two = Shelf(store, name="one"), Shelf(store, name="two")
    document = one.add(words(1, 160))
    assert spans(two.ask(words(2, 5), document)) == []
    asked = fingerprints(one.keys, TENANT, document)  # not even with the other's fingerprints
    two.add(words(3, 16))
    assert store.locate(two.ns, [], 0, asked, 1, 0.0) == Located(0, [], True)


def test_nothing_is_found_where_nothing_is(store: BlockStore) -> None:
    shelf = Shelf(store)
    assert shelf.ask(words(1, 100)) == Located(0, [], True)
    shelf.add(words(1, 100))
    shelf.store.clear(shelf.ns)
    assert shelf.ask(words(2, 5), words(1, 100)) == Located(0, [], True)
    assert store.stats().blocks == 0


@pytest.mark.parametrize(
    "asked",
    [[1, 2], np.zeros(3, np.int64), np.zeros((2, 2), np.uint64), np.zeros(3, ">u8"), b"x" * 16, None],
)
def test_fingerprints_of_another_kind_are_refused(shelf: Shelf, asked: Any) -> None:
    with pytest.raises(SpecError, match="uint64"):
        shelf.store.locate(shelf.ns, [], 0, asked, 1, 0.0)


def test_fingerprints_may_lie_in_any_memory(shelf: Shelf) -> None:
    document = shelf.add(words(1, 160))
    asked = fingerprints(shelf.keys, TENANT, document)
    received = np.frombuffer(asked.tobytes(), "<u8")  # read-only
    strided = np.repeat(asked, 3)[::3]
    for other in (received, strided):
        assert spans(shelf.store.locate(shelf.ns, [], 7, other, 1, 0.0)) == [(7, 0, 10)]


@pytest.mark.parametrize(("first", "least"), [(-1, 1), (0, 0), (0, -5)])
def test_absurd_places_and_lengths_are_refused(shelf: Shelf, first: int, least: int) -> None:
    with pytest.raises(SpecError, match="first="):
        shelf.store.locate(shelf.ns, [], first, np.zeros(3, np.uint64), least, 0.0)


@pytest.mark.parametrize(
    "given", [[b"m" * 23], [b"m" * 24] * 3, [b"m" * 24, "m" * 24], [None, None], [b"", 5]]
)
def test_marks_that_are_none_are_refused_before_anything_is_reserved(shelf: Shelf, given: Any) -> None:
    with pytest.raises(SpecError, match="mark"):
        shelf.store.reserve(shelf.ns, None, chain("p", 2), "w", 0.0, given)
    assert shelf.store.stats().reservations == 0


# --- what may be found ---------------------------------------------------------------------------------


def found(shelf: Shelf, fingerprint: int) -> list[Block]:
    asked = np.array([fingerprint], np.uint64)
    return [b for run in shelf.store.locate(shelf.ns, [], 0, asked, 1, 0.0).runs for b in run.blocks]


def mark(fingerprint: int) -> bytes:
    return fingerprint.to_bytes(8, "little") + b"m" * 16


def test_only_what_is_visible_is_found(shelf: Shelf) -> None:
    store, ns, digests = shelf.store, shelf.ns, chain("p", 3)
    entries = store.reserve(ns, None, digests, "w", 0.0, [mark(7), mark(8), mark(9)])
    assert all(isinstance(entry, Reservation) for entry in entries)
    one, two, three = (entry for entry in entries if isinstance(entry, Reservation))
    write(store, two)  # complete, but what it hangs on is not
    assert [found(shelf, fingerprint) for fingerprint in (7, 8, 9)] == [[], [], []]
    write(store, one)
    assert [found(shelf, fingerprint) for fingerprint in (7, 8, 9)] == [[one.block], [two.block], []]
    lease = store.lease(ns, digests, "r", 9.0, 0.0)
    store.evict(ns, digests[1:2])  # leased, so still there, and invisible
    assert [found(shelf, fingerprint) for fingerprint in (7, 8, 9)] == [[one.block], [], []]
    assert not three.open
    store.clear(ns)
    assert [found(shelf, fingerprint) for fingerprint in (7, 8, 9)] == [[], [], []]
    audit(store)
    store.release(lease)


@pytest.mark.parametrize("pinned", [False, True])
def test_who_takes_over_brings_the_mark(shelf: Shelf, pinned: bool) -> None:
    store, ns, digests = shelf.store, shelf.ns, chain("p", 1)
    (old,) = store.reserve(ns, None, digests, "w", 0.0, [mark(7)])
    assert isinstance(old, Reservation)
    if pinned:
        store.pin(old)
    (new,) = store.reserve(ns, None, digests, "x", 6.0, [mark(8)])
    assert isinstance(new, Reservation)
    write(store, new, 6.0)
    assert found(shelf, 7) == [] and found(shelf, 8) == [new.block]
    with pytest.raises(HoldEnded):
        old.chunk(0)
    if pinned:
        store.unpin(old)
    audit(store)


def test_a_text_in_many_contexts_is_found_while_any_of_them_is_left(shelf: Shelf) -> None:
    """More than are looked at in one search; whichever go, the rest is found again."""
    store, ns = shelf.store, shelf.ns
    count = 5 * EITHER_END
    digests = [digest for index in range(count) for digest in chain(f"c{index}", 1)]
    for digest in digests:
        assert put(store, ns, [digest], 0.0, None, [mark(7)]) == ["stored"]
    order = np.random.default_rng(4).permutation(count)
    for gone in order[:-1]:
        assert [block.digest in digests for block in found(shelf, 7)] == [True]
        store.evict(ns, [digests[gone]])
        audit(store)
    assert [block.digest for block in found(shelf, 7)] == [digests[order[-1]]]
    store.evict(ns, [digests[order[-1]]])
    assert found(shelf, 7) == [] and not store._trees


def test_found_again_after_it_was_evicted_for_room(make: Make) -> None:
    """Under pressure the index never has a block that is gone."""
    store = make(4 * MIB)
    shelf = Shelf(store, nbytes=100_000)
    documents = [words(seed, 64) for seed in range(30)]
    for clock in range(200):
        document = documents[clock * 7 % 30]
        shelf.add(words(1000 + clock, 16), document, now=float(clock))
        assert [len(run.blocks) for run in shelf.ask(words(5, 3), document, now=float(clock)).runs] == [4]
        shelf.ask(words(5, 3), documents[clock * 11 % 30], now=float(clock))
    assert store.stats().evicted_total > 500
    audit(store)


def test_being_found_counts_as_a_use(make: Make) -> None:
    store = make(4 * MIB)
    shelf = Shelf(store, nbytes=300_000)
    old, young = shelf.add(words(1, 32), now=1.0), shelf.add(words(2, 32), now=2.0)
    assert spans(shelf.ask(words(3, 5), old, now=3.0)) == [(5, 0, 2)]
    clock = 4.0
    while store.match(shelf.ns, shelf.digests(young)[:1], 1.5):
        shelf.add(words(int(clock), 16), now=clock)
        clock += 1.0
    assert store.match(shelf.ns, shelf.digests(old), clock) == 2


# --- bounds --------------------------------------------------------------------------------------------


def test_a_text_that_repeats_is_one_run(make: Make) -> None:
    """Thousands of blocks of one fingerprint: the run begins at the first of them, not at any other."""
    shelf = Shelf(make(64 * MIB))
    for text in (np.full(32_768, 7), np.tile(words(1, 48), 683)):
        shelf.add(text)
        for start in (1, 3, 17):
            located = shelf.ask(words(2, 16), text[start:], least=4)
            assert located.complete and len(located.runs) == 1
            assert len(located.runs[0].blocks) >= 2044


def test_the_work_of_a_search_has_an_end(make: Make) -> None:
    """One token repeated against short runs of the same: at each of the offsets all candidates are tried."""
    shelf = Shelf(make(64 * MIB))
    for seed in range(8):
        shelf.add(words(seed, 16), np.full(48, 7))
    asked = fingerprints(shelf.keys, TENANT, np.full(131_072, 7))
    located = shelf.store.locate(shelf.ns, [], 0, asked, 4, 0.0)
    assert located.runs == [] and not located.complete
    short = shelf.store.locate(shelf.ns, [], 0, asked[:500], 4, 0.0)
    assert short.runs == [] and short.complete
    behind = np.concatenate([np.full(20_000, 7), shelf.add(words(50, 160))])  # what comes too late
    assert spans(shelf.ask(behind, least=4)) == []
    assert spans(shelf.ask(behind, least=4, first=19_000)) == [(20_000, 0, 10)]
    found = shelf.store.locate(shelf.ns, [], 0, asked[:16_384], 3, 0.0)  # the next begins behind each
    assert found.complete and sum(len(run.blocks) for run in found.runs) == 341 * 3


def test_runs_cost_and_what_was_not_looked_at_is_said(make: Make) -> None:
    """A window for each token, each another block: thousands of runs of one block, in one legal request."""
    store = make(64 * MIB)
    ns = store.open_namespace(info("a", (1,), 8))
    values = [n * 0x9E3779B97F4A7C15 % 2**64 for n in range(1, 2049)]
    digests = chain("p", len(values))
    assert set(put(store, ns, digests, 0.0, None, [mark(value) for value in values])) == {"stored"}
    asked = np.random.default_rng(1).permutation(np.tile(np.array(values, np.uint64), 64))
    located = store.locate(ns, [], 0, asked, 1, 0.0)
    assert not located.complete
    assert 1000 < len(located.runs) < protocol.MAX_CHAINS  # all can be fetched by one request
    last = located.runs[-1]
    rest = store.locate(ns, [], 0, asked[: last.at + 1], 1, 0.0)
    assert rest.runs == located.runs and rest.complete  # the more is asked, the less of it is looked at
    assert SEARCH_STEPS // 32 < protocol.MAX_CHAINS


@pytest.mark.parametrize("size", [8, 16])
def test_a_long_prompt_of_known_documents_is_searched_to_its_end(make: Make, size: int) -> None:
    """131,072 tokens, each document stored in 20 contexts: it costs about what it costs stored once."""
    shelf = Shelf(make(640 * MIB), size, nbytes=1)
    documents = [words(seed, 1024) for seed in range(8)]
    for context in range(20):
        for document in documents:
            shelf.add(words(100 + context, context * size), document)
    order = np.random.default_rng(7).integers(0, len(documents), 125)
    asked = np.concatenate([part for n in order for part in (words(1000 + int(n), 24), documents[n])])
    located = shelf.ask(asked, least=64 // size)
    assert len(asked) == 131_000 and located.complete
    assert [(run.at, run.source, len(run.blocks) * size) for run in located.runs] == [
        (24 + 1048 * n, 0, 1024) for n in range(125)
    ]


def test_a_longer_run_is_found_whichever_context_has_it(shelf: Shelf) -> None:
    """The isolated one is tried first; another one goes on where it ends, behind many that do not."""
    document, more = words(1, 64), words(2, 64)
    shelf.add(words(3, 16), document, more)
    for context in range(3):
        shelf.add(words(10 + context, 32), document, words(20 + context, 16))
    shelf.add(document)
    for context in range(70):
        shelf.add(words(100 + context, 16), more)
    assert spans(shelf.ask(words(9, 5), document, more)) == [(5, 16, 8)]
    assert spans(shelf.ask(words(9, 5), document)) == [(5, 0, 4)]


# --- the sieve -----------------------------------------------------------------------------------------


def test_nobody_learns_what_others_store(store: BlockStore) -> None:
    """A legal question about ones own namespace has the same answer whatever another tenant has stored."""
    mine, theirs = Shelf(store, name="mine"), Shelf(store, name="theirs")
    mine.add(words(1, 16))
    victim = theirs.add(words(2, 160))
    before = [np.full(131_072, value, np.uint64) for value in fingerprints(theirs.keys, TENANT, victim)[:8]]
    for asked in before:
        for probe in (asked, asked ^ np.uint64(1 << 63), asked ^ np.uint64(1 << 20)):
            assert store.locate(mine.ns, [], 0, probe, 1, 0.0) == Located(0, [], True)


def test_false_alarms_of_the_sieve_do_not_show(shelf: Shelf) -> None:
    document = shelf.add(words(1, 160))
    asked = np.random.default_rng(3).integers(1, 1 << 63, 131_072).astype(np.uint64)
    asked[-160:] = 0
    asked[-160 : -160 + 145] = fingerprints(shelf.keys, TENANT, document)
    shelf.store._room.sieve._array[:] += np.uint8(1)  # every slot is taken
    located = shelf.store.locate(shelf.ns, [], 0, asked, 4, 0.0)
    assert located.complete and spans(located) == [(131_072 - 160, 0, 10)]
    shelf.store._room.sieve._array[:] -= np.uint8(1)


def test_equal_bits_of_fingerprints_mean_nothing() -> None:
    """Whoever chooses fingerprints fills no slot of the sieve with them, nor does it know whose it fills."""
    store = BlockStore(8 * MIB)
    sieve, spaces = store._room.sieve, [store.open_namespace(info(name, (1,))) for name in "ab"]
    low = [mark((n << 40) + 5) for n in range(1, 201)]
    high = [mark(5 + n) for n in range(200)]
    for ns, marked in zip(spaces, (low, high), strict=True):
        for n, one in enumerate(marked):
            assert put(store, ns, chain(f"{n}", 1), 0.0, None, [one]) == ["stored"]
        assert int(sieve._array.max()) <= 8
    slots = [{key >> sieve.shift for key in tree.windows} for tree in store._trees.values()]
    assert all(len(mine) > 150 for mine in slots)
    for ns in spaces:
        store.clear(ns)
    store.sweep(0.0)
    assert not sieve._array.any()
    store.close()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=200))
def test_the_sieve_never_misses(steps: Sequence[tuple[bool, int]]) -> None:
    sieve = Sieve(1)
    has: list[int] = []
    for adds, number in steps:
        if adds:
            sieve.add(number << 58)
            has.append(number)
        elif number in has:
            sieve.discard(number << 58)
            has.remove(number)
    passes = sieve.passes(np.arange(41, dtype=np.uint64) << np.uint64(58))
    slots = {number << 58 >> sieve.shift for number in has}
    assert passes.tolist() == [number << 58 >> sieve.shift in slots for number in range(41)]


def test_a_slot_of_the_sieve_counts_as_far_as_it_must() -> None:
    """No count sticks: what is gone raises no alarm, however many there were."""
    sieve, keys_ = Sieve(1), np.array([1, 1 << 63], np.uint64)
    for count in (300, 255, 256, 700):
        for _ in range(count):
            sieve.add(1)
        for _ in range(count - 1):
            sieve.discard(1)
            assert sieve.passes(keys_).tolist() == [True, False]
        sieve.discard(1)
        assert sieve.passes(keys_).tolist() == [False, False]
        assert not sieve._more


def test_the_sieve_counts_in_the_capacity(store: BlockStore) -> None:
    stats = store.stats()
    assert stats.bytes_data + stats.bytes_index_limit + store._room.sieve.nbytes == stats.capacity
    assert stats.bytes_index_limit > 0.95 * (stats.capacity - stats.bytes_data)


# --- leases on several chains --------------------------------------------------------------------------


def two_prompts(store: BlockStore, nbytes: int = 1000) -> tuple[Namespace, list[bytes], list[bytes]]:
    ns = store.open_namespace(info("a", (nbytes,)))
    p, q = chain("p", 6), chain("q", 5)
    assert put(store, ns, p, 0.0) == ["stored"] * 6
    assert put(store, ns, q, 0.0) == ["stored"] * 5
    return ns, p, q


def test_a_lease_holds_a_run_and_chains_in_the_order_asked(store: BlockStore) -> None:
    ns, p, q = two_prompts(store)
    lease = store.lease(ns, p[:3], "r", 9.0, 0.0, [(q[3], 2), (p[5], 1), (q[0], 1)])
    assert lease.counts == (3, 2, 1, 1)
    assert [block.digest for block in lease.blocks] == [*p[:3], *q[2:4], p[5], q[0]]
    assert intact(store, lease.blocks) and lease.open
    assert store.lease(ns, p, "r", 9.0, 0.0).counts == (6,)
    alone = store.lease(ns, [], "r", 9.0, 0.0, [(q[4], 5)])
    assert alone.open and alone.counts == (0, 5) and [b.digest for b in alone.blocks] == q


def test_c08_a_chain_that_is_not_all_there_counts_nothing(store: BlockStore) -> None:
    ns, p, q = two_prompts(store)
    (pending,) = store.reserve(ns, p[5], chain("new", 1), "w", 0.0)
    assert isinstance(pending, Reservation)
    asked = [(q[4], 6), (chain("x", 1)[0], 1), (pending.digest, 1), (q[4], 5), (q[4], 1 << 16)]
    assert store.lease(ns, p, "r", 9.0, 0.0, asked).counts == (6, 0, 0, 0, 5, 0)
    store.evict(ns, [q[2]])
    nothing = store.lease(ns, [], "r", 9.0, 0.0, [(q[3], 1), (q[2], 3)])
    assert nothing.counts == (0, 0, 0) and nothing.blocks == [] and not nothing.open
    empty = store.open_namespace(info("empty", (64,)))
    assert store.lease(empty, p, "r", 9.0, 0.0, [(q[0], 1)]).counts == (0, 0)


def test_d09_every_chain_of_a_lease_stays_in_place_until_it_ends(make: Make) -> None:
    store = make(4 * MIB)
    ns, p, q = two_prompts(store, 100_000)
    lease = store.lease(ns, p[:2], "r", 20.0, 0.0, [(q[2], 2), (q[2], 1), (q[4], 1)])
    for step in range(60):
        put(store, ns, chain(f"more {step}", 2), 1.0 + step / 100)
    assert intact(store, lease.blocks)
    assert store.contains(ns, [*p, *q]) == [True] * 2 + [False] * 4 + [True] * 5
    store.pin(lease)
    store.clear(ns)
    store.release(lease)
    store.release(lease)
    assert intact(store, lease.blocks) and store.stats().bytes_held == 7 * lease.blocks[0].slab.klass.nbytes
    audit(store, [lease])
    store.unpin(lease)
    assert store.stats().bytes_held == 0 and store.stats().leases == 0
    store.sweep(5.0)
    assert store.stats().bytes_used == 0


def test_a_lease_on_chains_expires_like_any_other(store: BlockStore) -> None:
    ns, p, q = two_prompts(store)
    lease = store.lease(ns, p, "r", 2.0, 0.0, [(q[4], 5)])
    store.sweep(2.0)
    assert lease.ended == "expired" and store.stats().bytes_held == 0
    lease = store.lease(ns, [], "r", 2.0, 3.0, [(q[4], 5), (p[5], 2)])
    store.drop_owner("r")
    assert not lease.open and store.stats().bytes_held == 0 and store.stats().expired_total == 1


@pytest.mark.parametrize(
    "chains",
    [
        *([(b"x" * 16, count)] for count in (0, -1, 1.0, True, None)),
        [("x" * 16, 1)],
    ],
)
def test_chains_that_are_none_are_refused(store: BlockStore, chains: Any) -> None:
    ns, p, _ = two_prompts(store)
    with pytest.raises(SpecError, match="lease: "):
        store.lease(ns, p, "r", 9.0, 0.0, chains)
    assert store.stats().leases == 0


def test_a_run_can_be_leased_by_its_tail(shelf: Shelf) -> None:
    """What locate says is what lease takes."""
    system, document = words(1, 64), words(2, 320)
    shelf.add(words(3, 21), document)
    shelf.add(system)
    located = shelf.ask(system, words(4, 45), document, least=4)
    asked = [(run.blocks[-1].digest, len(run.blocks)) for run in located.runs]
    lease = shelf.store.lease(shelf.ns, shelf.digests(system), "r", 9.0, 1.0, asked)
    assert lease.counts == (4, 19) and lease.blocks[4:] == list(located.runs[0].blocks)
    assert isinstance(located.runs[0], Run)
