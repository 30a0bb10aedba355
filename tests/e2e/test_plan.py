"""What a client makes of a plan and of a server's claims, without any server (class K)."""

from __future__ import annotations

import numpy as np
import pytest

from hypercache import protocol
from hypercache.client.plan import (
    MAX_RUN,
    Borders,
    ExactSpan,
    MissingSpan,
    ModularSpan,
    Search,
    allowed,
    arrived,
    least_blocks,
    wanted,
    whole,
)
from hypercache.errors import ProtocolError, SpecError
from hypercache.keys import context_name, seal

SIZE = 16


def digest(*what: object) -> bytes:
    return repr(what).encode().ljust(16, b".")[-16:]


def ours(start: int, stop: int) -> list[bytes]:
    return [digest("M", at) for at in range(start, stop, SIZE)]


def chain(source: int, blocks: int) -> bytes:
    return b"".join(digest("H", source + i * SIZE) for i in range(blocks))


def named(token: int) -> bytes:
    return context_name(digest("H", token))


def sealed(at: int, names: bytes) -> bytes:
    """So closed that our digests of the tokens from ``at`` on open it."""
    names_ = [names[i : i + 16] for i in range(0, len(names), 16)]
    return seal(ours(at, at + len(names_) * SIZE), names_)


def claim(at: int, blocks: int, source: int = 320, **wrong: object) -> protocol.Span:
    """What an honest server says of a run that stands at ``at``."""
    fields: dict[str, object] = {
        "at": at,
        "source": source,
        "context": named(source - SIZE) if source else b"",
        "seals": sealed(at, chain(source, blocks)),
    }
    return protocol.Span(**{**fields, **wrong})  # type: ignore[arg-type]


def search(
    tokens: int = 1000, *, floor: int = 48, least: int = 4, segments: list[tuple[int, int]] | None = None
) -> Search:
    windows = tokens - SIZE
    asked = np.ones(windows, np.uint64)
    inside = allowed(0, windows, SIZE, segments, [])
    if inside is not None:
        asked[~inside] = 0
    own = [digest("own", i) for i in range(tokens // SIZE)]
    return Search(SIZE, 0, asked, floor, own, least, Borders(segments), ours)


def test_an_honest_answer_is_taken_as_it_is() -> None:
    first, second = claim(50, 4), claim(114, 5, 0)
    spans = search().believe([first, second])
    assert spans == [
        ModularSpan(50, 114, 320, named(304), chain(320, 4)),
        ModularSpan(114, 194, 0, b"", chain(0, 5)),
    ]
    assert [span.tail for span in spans] == [digest("H", 368), digest("H", 64)]
    assert [(span.delta, span.isolated) for span in spans] == [(-270, False), (114, True)]


LIES = {
    "before the hit": claim(47, 4),
    "before the prompt": claim(-1, 4),
    "past the last token but one": claim(1000 - 4 * SIZE, 4),
    "far outside": claim(1 << 40, 4),
    "no block": claim(100, 0),
    "half a block": claim(100, 4, seals=sealed(100, chain(320, 4)) + b"x" * 16),
    "off its grid": claim(100, 4, 321),
    "from before the start": claim(100, 4, -16),
    "from farther than any prompt goes": claim(100, 4, 1 << 31),
    "a head with a context": claim(100, 4, 0, context=digest("H", 0)),
    "a middle without one": claim(100, 4, context=b""),
    "half a context": claim(100, 4, context=b"x" * 15),
    "other tokens": claim(100, 4, seals=sealed(101, chain(320, 4))),
    "names in clear": claim(100, 4, seals=b"".join(map(bytes.__add__, ours(100, 164), ours(100, 164)))),
    "too few blocks": claim(100, 3),
    "the prompt itself": claim(96, 4, 96, seals=sealed(96, digest("own", 6) + b"x" * 48)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_dropped_and_what_follows_it_is_not(lie: str) -> None:
    good = claim(300, 4)
    assert search().believe([LIES[lie], good]) == search().believe([good]) != []


def test_runs_that_overlap_or_go_back_are_dropped() -> None:
    a, b = claim(100, 8), claim(400, 8)
    assert search().believe([a, claim(100 + 8 * SIZE - 1, 4)]) == search().believe([a])
    assert search().believe([b, a]) == search().believe([b])
    assert search().believe([a, a]) == search().believe([a])


def test_a_run_ends_where_its_blocks_are_not_ours() -> None:
    """Cut, with the name of the block that is its last now; too short then, it is dropped."""
    run = claim(100, 8)
    for bad in range(8):
        seals = bytearray(run.seals)
        seals[bad * 32 + 3] ^= 1
        spans = search().believe([claim(100, 8, seals=bytes(seals))])
        if bad < 4:
            assert spans == []
        else:
            (span,) = spans
            assert (span.stop, span.tail) == (100 + bad * SIZE, digest("H", 320 + (bad - 1) * SIZE))


def test_runs_are_cut_at_borders_and_stay_within_segments() -> None:
    segments = [(100, 100 + 6 * SIZE), (100 + 6 * SIZE, 400), (410, 500)]
    (a, b) = search(segments=segments).believe([claim(100, 11)])
    assert (a.start, a.stop, a.source, a.context) == (100, 196, 320, named(304))
    assert (b.start, b.stop, b.source, b.context) == (196, 276, 416, named(400))
    assert b.context == context_name(a.tail) and b.tail == digest("H", 320 + 10 * SIZE)
    assert search(segments=segments).believe([claim(99, 4)]) == []  # a window that nobody asked for
    assert search(segments=segments).believe([claim(350, 4)]) == []  # across the border at 400
    assert search(segments=[(100, 164), (164, 228)], least=5).believe([claim(100, 8)]) == []


@pytest.mark.parametrize("size", [8, 16, 64])
def test_windows_that_may_be_looked_for(size: int) -> None:
    """Against the definition, for every window."""
    segments, fixed = [(3, 70), (70, 140), (150, 155)], [(20, 24), (139, 141)]
    for first in (0, 5, 60):
        got = allowed(first, 130, size, segments, fixed)
        assert got is not None
        for index, ok in enumerate(got):
            start, stop = first + index, first + index + size
            inside = any(a <= start and stop <= b for a, b in segments)
            assert ok == (inside and all(stop <= a or start >= b for a, b in fixed)), start
    assert allowed(0, 10, size, None, []) is None
    nothing = allowed(0, 4, size, [], [])
    assert nothing is not None and not nothing.any()


def test_a_plan_covers_every_token_once() -> None:
    spans = (ModularSpan(50, 114, 320, b"c" * 16, bytes(64)), ModularSpan(114, 178, 0, b"", bytes(64)))
    plan = whole(200, 48, spans)
    assert plan == (ExactSpan(0, 48), MissingSpan(48, 50), *spans, MissingSpan(178, 200))
    assert [span.kind for span in plan] == ["exact", "missing", "modular", "modular", "missing"]
    assert whole(5, 0, ()) == (MissingSpan(0, 5),) and whole(0, 0, ()) == ()


def test_what_a_fetch_asks_for_and_what_came() -> None:
    a = ModularSpan(50, 50 + 4 * SIZE, 320, b"c" * 16, chain(320, 4))
    b = ModularSpan(200, 200 + 4 * SIZE, 0, b"", chain(0, 4))
    stretches = wanted(3, (a, b), 0, SIZE, 1000, 100)
    assert [(s.blocks, s.begin, s.delta) for s in stretches] == [(3, 0, 0), (4, 50, -270), (4, 200, 200)]
    assert arrived(stretches, [3, 4, 4], SIZE) == (a, b)
    assert arrived(stretches, [0, 0, 1], SIZE) == (b.clip(200, 216, SIZE),)

    inside = wanted(3, (a, b), 70, SIZE, 1000, 100)  # the engine holds 70 tokens: 20 of the span, one block
    assert [(s.blocks, s.begin) for s in inside] == [(0, 64), (3, 66), (4, 200)]
    (left, _) = arrived(inside, [0, 3, 4], SIZE)
    assert (left.start, left.stop, left.delta, left.context) == (70, a.stop, a.delta, a.context)
    assert left.chain == chain(336, 3)
    (short, _) = arrived(inside, [0, 2, 4], SIZE)
    assert (short.start, short.stop, short.chain) == (70, 98, chain(336, 2))
    assert [s.begin for s in wanted(3, (a, b), 114, SIZE, 1000, 100)] == [112, 200]

    (_, _, part) = wanted(3, (a, b), 0, SIZE, 263, 100)  # room for three blocks of b
    assert part.blocks == 3 and part.span == ModularSpan(200, 248, 0, b"", chain(0, 3))
    assert [s.blocks for s in wanted(3, (a, b), 0, SIZE, 40, 100)] == [2]
    assert [s.blocks for s in wanted(3, (a, b), 0, SIZE, 1000, 8)] == [3, 4, 1]
    assert [s.blocks for s in wanted(3, (a, b), 0, SIZE, 1000, 2)] == [2]


def test_a_minimum_run_is_whole_blocks() -> None:
    assert [least_blocks(n, 16) for n in (16, 17, 64, 65)] == [1, 2, 4, 5]
    assert least_blocks(MAX_RUN, 8) == MAX_RUN // 8
    for wrong in (15, 0, -1, 1.5, True, None, MAX_RUN + 1):
        with pytest.raises(SpecError, match="min_run"):
            least_blocks(wrong, 16)  # type: ignore[arg-type]


def test_requests_are_held_to_their_limits() -> None:
    most = protocol.MAX_PROBES
    assert protocol.count_probes(protocol.Locate(0, b"", 7, bytes(8 * most), 4)) == most
    for wrong in (
        protocol.Locate(0, b"", 0, b"", 4),
        protocol.Locate(0, b"", 0, bytes(9), 4),
        protocol.Locate(0, b"", 0, bytes(8 * most + 8), 4),
        protocol.Locate(0, b"", -1, bytes(8), 4),
        protocol.Locate(0, b"", protocol.MAX_TOKENS, bytes(8), 4),
        protocol.Locate(0, b"", 0, bytes(8), 0),
        protocol.Locate(0, b"", 0, bytes(8), protocol.MAX_BLOCKS + 1),
    ):
        with pytest.raises(ProtocolError):
            protocol.count_probes(wrong)
    tail = bytes(16)
    protocol.check_chains(protocol.Fetch(0, b"", (0, 1), 1, 1, ((tail, protocol.MAX_BLOCKS),)))
    for digests, chains in (
        (b"", ()),
        (b"", ((tail[:15], 1),)),
        (b"", ((tail, 0),)),
        (b"", ((tail, -1),)),
        (tail, ((tail, protocol.MAX_BLOCKS),)),
        (b"", ((tail, 1),) * (protocol.MAX_CHAINS + 1)),
    ):
        with pytest.raises(ProtocolError):
            protocol.check_chains(protocol.Fetch(0, digests, (0, 1), 1, 1, chains))
    assert protocol.split_marks(b"", 3) == [] and protocol.split_marks(bytes(72), 3) == [bytes(24)] * 3
    for marks in (bytes(24), bytes(71), bytes(96)):
        with pytest.raises(ProtocolError):
            protocol.split_marks(marks, 3)


def test_bodies_at_their_limits_are_within_their_caps() -> None:
    """The largest request and answer that the checks let through are never refused by size."""
    block, mark = bytes(protocol.DIGEST_BYTES), bytes(protocol.MARK_BYTES)
    most = 1 << 62
    spans = tuple(protocol.Span(1 << 31, 1 << 31, block, block * 2) for _ in range(protocol.MAX_CHAINS))
    for message in (
        protocol.Locate(1 << 31, block * protocol.MAX_BLOCKS, 1 << 31, bytes(8 << 17), 1 << 17),
        protocol.Store(
            1 << 31, block, block * protocol.MAX_STORE_BLOCKS, most, mark * protocol.MAX_STORE_BLOCKS
        ),
        protocol.Fetch(
            1 << 31,
            block * (protocol.MAX_BLOCKS - protocol.MAX_CHAINS),
            (0, 1024),
            most,
            1 << 40,
            ((block, 1),) * protocol.MAX_CHAINS,
        ),
        protocol.Located(1 << 17, spans, True),
        protocol.Fetching(1 << 17, (1 << 17,) * protocol.MAX_CHAINS),
    ):
        op, body = protocol.encode(message)
        assert len(body) <= {**protocol.REQUESTS, **protocol.ANSWERS}[op], message.__class__
        assert protocol.decode(op, body) == message
