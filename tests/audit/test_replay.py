"""Replays: prefixes outlive suffixes, an unlimited cache hits what was there, nothing beats Belady."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypercache.audit import traces
from hypercache.audit.replay import Cache, Hits, belady, replay
from hypercache.audit.traces import Request
from hypercache.errors import SpecError
from hypercache.store.policy import NAMES, get

PUBLIC = Path(__file__).parents[3] / "shared/traces"


def named(prompts: Sequence[Sequence[int]]) -> list[Request]:
    """One request each ten seconds; a block's id stands for all of the prompt up to it."""
    ids: dict[tuple[int, ...], int] = {}
    return [
        Request(
            10.0 * at,
            tuple(ids.setdefault(tuple(prompt[: end + 1]), len(ids)) for end in range(len(prompt))),
        )
        for at, prompt in enumerate(prompts)
    ]


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=25).map(named)


@pytest.mark.parametrize("name", NAMES)
@given(requests=PROMPTS, capacity=st.integers(1, 12))
def test_a_cache_keeps_whole_prefixes_within_its_room(
    name: str, requests: list[Request], capacity: int
) -> None:
    kept = Cache(capacity, get(name))
    hits = 0
    for request in requests:
        before = [block in kept for block in request.blocks]
        hit = kept.serve(request)
        assert hit == [*before, False].index(False)
        hits += hit
        assert len(kept) <= capacity
        stored = [block in kept for block in request.blocks]
        assert stored == sorted(stored, reverse=True)
        assert sum(stored) >= min(len(stored), hit + 1, capacity)  # what was just used is there
        for other in requests:
            there = [block in kept for block in other.blocks]
            assert there == sorted(there, reverse=True)  # no block without its prefix
    assert hits <= belady(requests, capacity).hits


@given(requests=PROMPTS)
def test_an_unlimited_cache_hits_what_an_earlier_request_had(requests: list[Request]) -> None:
    seen: set[int] = set()
    hits = 0
    for request in requests:
        hits += [*(block in seen for block in request.blocks), False].index(False)
        seen |= set(request.blocks)
    count = sum(len(request.blocks) for request in requests)
    for name in NAMES:
        assert replay(requests, 1000, get(name)) == Hits(count, hits)
    assert belady(requests, 1000) == Hits(count, hits)


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=6).map(named),
    st.integers(1, 4),
)
def test_belady_is_the_best_that_any_choice_gives(requests: list[Request], capacity: int) -> None:
    """Against all choices of what to keep, with and without the rule that prefixes stay: they agree."""
    references = [block for request in requests for block in request.blocks]
    parents = {block: request.blocks[:at] for request in requests for at, block in enumerate(request.blocks)}

    def best(whole: bool) -> int:
        @cache
        def further(at: int, kept: frozenset[int]) -> int:
            if at == len(references):
                return 0
            block = references[at]
            full = kept | {block}
            choices = [full] if len(full) <= capacity else [full - {out} for out in full]
            if whole:
                choices = [one for one in choices if all(one.issuperset(parents[each]) for each in one)]
            return (block in kept) + max(further(at + 1, one) for one in choices)

        return further(0, frozenset())

    assert belady(requests, capacity).hits == best(whole=False) == best(whole=True)


def test_a_prompt_longer_than_the_cache_keeps_its_beginning() -> None:
    kept = Cache(4, get("lrfu"))
    long = Request(0.0, tuple(range(10)))
    assert kept.serve(long) == 0
    assert [block in kept for block in long.blocks] == [True] * 4 + [False] * 6
    assert kept.serve(Request(10.0, long.blocks)) == 4


def test_an_id_behind_another_prefix_is_no_hit() -> None:
    kept = Cache(10, get("lru"))
    kept.serve(Request(0.0, (1, 2)))
    assert kept.serve(Request(1.0, (3, 2))) == 0
    assert kept.serve(Request(2.0, (1, 2))) == 2


def test_frequency_outlives_a_scan() -> None:
    """Documents that come again and again, and between them many that never do: LRU forgets the former."""
    rng = random.Random(5)
    prompts = [[rng.randrange(10)] * 3 if at % 4 == 0 else [100 + at] * 3 for at in range(4000)]
    requests = named(prompts)
    ratio = {name: replay(requests, 60, get(name)).ratio for name in NAMES}
    assert ratio["lrfu"] > 1.2 * ratio["lru"] and ratio["s3-fifo"] > 1.2 * ratio["lru"]


def test_no_room_is_no_cache() -> None:
    with pytest.raises(SpecError, match="0 blocks"):
        Cache(0, get("lru"))
    with pytest.raises(SpecError, match="-1 blocks"):
        belady([], -1)
    assert replay([], 5, get("lru")).ratio == 0.0


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
def test_the_public_trace_of_conversations() -> None:
    """15,771 of 54,559 references hit in an unlimited cache, as counted independently of this code."""
    trace = traces.read(PUBLIC / "mooncake_conversation_2000.jsonl")
    assert replay(trace.requests, 1 << 40, get("lrfu")) == Hits(54_559, 15_771)
    assert belady(trace.requests, 1 << 40) == Hits(54_559, 15_771)
    room = trace.distinct // 20
    hits = {name: replay(trace.requests, room, get(name)).hits for name in NAMES}
    assert max(hits.values()) <= belady(trace.requests, room).hits
    assert hits["lrfu"] > 1.5 * hits["lru"]
