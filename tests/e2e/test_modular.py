"""Reuse out of context: what is stored anywhere is found at any token, lands turned, and is said to be what
it is (class K; C where matching is concerned)."""

from __future__ import annotations

import hashlib
import logging
import time
from typing import Any

import numpy as np
import pytest

import hypercache
from hypercache import KVBuffers, MediaSpan, TenantKey, protocol
from hypercache.client.client import SWITCHED_OFF
from hypercache.client.plan import ExactSpan, MissingSpan, ModularSpan
from hypercache.errors import ConfigError, SpecError
from hypercache.keys import context_name
from hypercache.model import Adapter, KVDtype, ModelSpec, RopeSpec

from .conftest import Connect, Node, fill, make_spec, poisoned, tokens_of, untouched
from .modular_kit import TINY, landed, prompt_of, stored

# --- finding


async def test_a_short_system_prompt_shifts_nothing(connect: Connect) -> None:
    """K10: a document stored alone is found behind a system prompt of 37 tokens, all of it."""
    client = await connect(make_spec(**TINY))
    doc = tokens_of(1, 640)
    await stored(client, doc)
    match = await client.match(prompt_of(37, doc, 9), modular=True)
    (span,) = match.modular
    assert (span.start, span.stop, span.source, span.isolated) == (37, 677, 0, True)
    assert (match.hit_tokens, match.modular_tokens) == (0, 640)
    assert match.spans == (MissingSpan(0, 37), span, MissingSpan(677, 686))


async def test_a_document_behind_another_question(connect: Connect, node: Node) -> None:
    """K12: sys+Q1+doc, then sys+Q2+doc: the document is found, causal and modular are counted apart."""
    client = await connect(make_spec(**TINY))
    system, doc = tokens_of(1, 64), tokens_of(2, 640)
    first = prompt_of(system, 21, doc, 30)
    await stored(client, first)
    match = await client.match(prompt_of(system, 50, doc, 70), modular=True)
    assert match.hit_tokens == 64
    (span,) = match.modular
    assert 39 * 16 <= span.stop - span.start <= 640
    assert span.start >= 64 + 50 and span.stop <= 64 + 50 + 640 and span.delta == 50 - 21
    assert span.source % 16 == 0
    before = client.prompt(first).digests[span.source // 16 - 1]
    assert span.context == context_name(before) and not span.isolated

    into = KVBuffers.allocate(client.model, match.prompt_tokens)
    result = await client.fetch(match, into)
    assert (result.hit_tokens, result.modular, result.reason) == (64, (span,), "")
    counted = node.status()["counters"]
    blocks = (span.stop - span.start) // 16
    nbytes = client.chunk_nbytes[0]
    for name, value in {
        'requests_total{op="locate",outcome="ok"}': 1,
        'blocks_hit_total{op="match"}': 4,
        'blocks_hit_total{op="fetch"}': 4,
        'blocks_hit_total{op="fetch_modular"}': blocks,
        'blocks_missed_total{op="fetch_modular"}': 0,
        "modular_matches_total": 1,
        "modular_matches_found_total": 1,
        "modular_blocks_found_total": blocks,
        "modular_sent_bytes_total": blocks * nbytes,
        "sent_bytes_total": (blocks + 4) * nbytes,
    }.items():
        assert counted["hypercache_" + name] == value, name
    assert (client.reuse.matches, client.reuse.eligible, client.reuse.found) == (1, 1, 1)
    assert client.reuse.tokens_found == client.reuse.tokens_fetched == blocks * 16


@pytest.mark.parametrize("count", range(1, 16))
async def test_an_insertion_before_a_document_keeps_its_hits(connect: Connect, count: int) -> None:
    client = await connect(make_spec(**TINY))
    system, doc = tokens_of(1, 40), tokens_of(2, 400)
    await stored(client, prompt_of(system, doc, 20))
    match = await client.match(prompt_of(system, count, doc, 33), modular=True)
    assert match.hit_tokens == 32
    (span,) = match.modular
    assert span.delta == count
    # It begins and ends within a stored block: all whole ones between are found.
    assert (span.start, span.stop) == (40 + count + 8, 40 + count + 392)


async def test_a_separator_in_other_tokens(connect: Connect) -> None:
    """K08: stored alone with BOS, asked in the middle without, separators tokenised otherwise."""
    client = await connect(make_spec(**TINY))
    doc = tokens_of(1, 320)
    await stored(client, prompt_of(np.array([1]), doc, np.array([422, 422])))
    for separator in ([28705, 422, 422], [422, 422]):
        prompt = prompt_of(77, np.array(separator), doc, np.array(separator), 12)
        (span,) = (await client.match(prompt, modular=True)).modular
        begin = 77 + len(separator)
        assert (span.start, span.source) == (begin + 15, 16)  # the block with BOS in it is another
        assert span.stop >= begin + 320 - 16 and span.stop <= begin + 320


async def test_documents_in_another_order(connect: Connect) -> None:
    """Each span is found where its document stands now, and says from where it came."""
    client = await connect(make_spec(**TINY))
    docs = [tokens_of(seed, count) for seed, count in ((1, 160), (2, 333), (3, 97), (4, 240))]
    system = tokens_of(9, 48)
    await stored(client, prompt_of(system, *docs, 5))
    order = [2, 0, 3, 1]
    asked = prompt_of(system, *[docs[i] for i in order], 50)
    match = await client.match(asked, modular=True)
    assert match.hit_tokens == 48
    old = np.cumsum([48, *map(len, docs)])
    new = dict(zip(order, np.cumsum([48, *[len(docs[i]) for i in order]]), strict=False))
    # Two stand behind each other as they did? None do: 2,0,3,1.
    assert [span.delta for span in match.modular] == [new[i] - old[i] for i in order]
    for i, span in zip(order, match.modular, strict=True):
        assert new[i] <= span.start < new[i] + 16 and new[i] + len(docs[i]) - 16 < span.stop
        assert span.stop <= new[i] + len(docs[i])
    covered = [token for span in match.spans for token in range(span.start, span.stop)]
    assert covered == list(range(len(asked)))


async def test_causal_always_wins(connect: Connect) -> None:
    """A document in its original context is never modular, wherever else it is stored as well."""
    client = await connect(make_spec(**TINY))
    system, doc = tokens_of(1, 64), tokens_of(2, 320)
    await stored(client, prompt_of(system, doc, 32))
    await stored(client, doc)
    await stored(client, prompt_of(48, doc))
    for tail in (1, 15, 17, 100):
        match = await client.match(prompt_of(system, doc, tail), modular=True)
        assert match.spans == (ExactSpan(0, 384), MissingSpan(384, 384 + tail))
    for length in (384, 300, 65, 64, 17):  # C01: cut anywhere, the last token is left to compute
        match = await client.match(prompt_of(system, doc)[:length], modular=True)
        hit = (length - 1) // 16 * 16
        assert match.spans == (ExactSpan(0, hit), MissingSpan(hit, length))
    assert (await client.match(prompt_of(doc, 3), modular=True)).spans[0] == ExactSpan(0, 320)


async def test_lengths_and_boundaries_hold_with_modular_on(connect: Connect) -> None:
    """C01, C02, C03, C04: for every length hits are stored blocks, and no span has the last token."""
    client = await connect(make_spec(**TINY))
    doc = tokens_of(1, 201)
    assert (await client.store(doc[:100], fill(KVBuffers.allocate(client.model, 201), 1))).stored == 6
    moved = np.concatenate([[7], doc])
    for n in range(202):
        causal, modular = await client.match(doc[:n]), await client.match(doc[:n], modular=True)
        assert modular.hit_tokens == causal.hit_tokens == min(96, max(0, (n - 1) // 16 * 16))
        assert (modular.modular, modular.reason) == ((), causal.reason)
        found = await client.match(moved[:n], modular=True, min_run=16)
        whole = min(96, max(0, (n - 2) // 16 * 16))
        assert found.hit_tokens == 0
        assert [(s.start, s.stop) for s in found.modular] == ([(1, 1 + whole)] if whole else [])
        assert (await client.fetch(found, poisoned(client.model, n))).modular == found.modular


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 63, 64, 65])
@pytest.mark.parametrize("block_size", [16, 64])
async def test_short_prompts(connect: Connect, count: int, block_size: int) -> None:
    """C04, C05: nothing to find is said, not raised."""
    client = await connect(make_spec(**TINY), block_size=block_size)
    match = await client.match(tokens_of(1, count), modular=True)
    assert (match.hit_tokens, match.modular) == (0, ())
    want = "no tokens" if not count else "below block size" if count <= block_size else "not stored"
    assert match.reason.startswith(want)
    assert (await client.fetch(match, poisoned(client.model, count))).modular == ()
    assert (await client.match(None, modular=True)).reason == "no tokens"


async def test_holes(connect: Connect) -> None:
    """C08: what follows an evicted block is gone out of context, too."""
    client = await connect(make_spec(**TINY))
    tokens = tokens_of(3, 64)
    await stored(client, tokens)
    asked = prompt_of(5, tokens, 1)
    assert (await client.match(asked, modular=True)).modular_tokens == 64
    prompt = client.prompt(tokens)
    assert await client.evict(type(prompt)(64, 16, prompt.digests[1:2])) == 3
    assert (await client.match(asked, modular=True, min_run=16)).modular_tokens == 16
    assert (await client.match(asked, modular=True)).modular_tokens == 0
    assert await client.evict(tokens) == 1
    assert (await client.match(asked, modular=True, min_run=16)).modular_tokens == 0


async def test_one_copy_serves_all_places(connect: Connect, node: Node) -> None:
    """The same document twice in a prompt, and its payload once in the store."""
    client = await connect(make_spec(**TINY))
    doc = tokens_of(1, 128)
    kv = await stored(client, doc)
    blocks = node.status()["store"]["blocks"]
    asked = prompt_of(3, doc, 6, doc, 1)
    match = await client.match(asked, modular=True)
    assert [(s.start, s.source) for s in match.modular] == [(3, 0), (137, 0)]
    assert match.modular[0].tail == match.modular[1].tail
    into = KVBuffers.allocate(client.model, len(asked))
    assert (await client.fetch(match, into)).modular == match.modular
    assert all(landed(into, kv, span, 2e-3) for span in match.modular)
    assert node.status()["store"]["blocks"] == blocks == 8


async def test_repeated_text_is_found_in_bounded_time(connect: Connect) -> None:
    """One token 4,000 times, stored and asked: no window is special, and every answer holds."""
    client = await connect(make_spec(**TINY))
    same_tokens = np.full(4000, 7)
    await stored(client, same_tokens)
    match = await client.match(prompt_of(5, same_tokens), modular=True)
    assert match.modular[0].start == 5 and match.modular_tokens >= 3900
    assert match.modular[-1].stop < 4005


# --- where it may be found


async def test_never_across_identities(connect: Connect) -> None:
    """K15, C10: not another tenant's, salt's, model's, adapter's, block size's, codec's or RoPE setting's."""
    digest = hashlib.sha256(b"adapter A").digest()

    def spec(theta: float = 10000.0, **more: Any) -> ModelSpec:
        made = make_spec(**{"adapter": Adapter("x", digest), **TINY, **more})
        groups = [type(g)(g.layers, g.layout, RopeSpec("default", theta, 8)) for g in made.groups]
        return type(made)(**{**{f: getattr(made, f) for f in FIELDS}, "groups": tuple(groups)})

    FIELDS = ("weights", "adapter", "tp_rank", "tp_size", "name")
    acme = TenantKey.from_secret(b"a secret of sixteen bytes", "acme")
    home = await connect(spec(), tenant=acme)
    doc = tokens_of(1, 320)
    await stored(home, doc)
    asked = prompt_of(20, doc, 5)
    assert (await home.match(asked, modular=True)).modular_tokens == 320
    others = [
        await connect(spec(), tenant=TenantKey.public()),
        await connect(spec(), tenant=TenantKey.from_secret(b"a secret of sixteen bytes", "acme2")),
        await connect(spec(), tenant=TenantKey.from_secret(b"b secret of sixteen bytes", "acme")),
        await connect(spec(), tenant=acme, salt="S"),
        await connect(spec(), tenant=acme, block_size=64),
        await connect(spec(), tenant=acme, block_size=8),
        await connect(spec(), tenant=acme, codec="int8"),
        await connect(spec(adapter=None), tenant=acme),
        await connect(spec(adapter=Adapter("x", hashlib.sha256(b"B").digest())), tenant=acme),
        await connect(spec(weights=b"trained on"), tenant=acme),
        await connect(spec(dtype=KVDtype.BF16), tenant=acme),
        await connect(spec(theta=10001.0), tenant=acme),
        await connect(spec(tp_size=2), tenant=acme),
    ]
    for other in others:
        match = await other.match(asked, modular=True, min_run=64)
        assert (match.hit_tokens, match.modular) == (0, ()), other
    again = await connect(spec(), tenant=acme)
    assert (await again.match(asked, modular=True)).modular_tokens == 320


async def test_what_can_be_read_under_a_stolen_name(connect: Connect) -> None:
    """K15: a span of one tenant names nothing in another's space."""
    mine = await connect(
        make_spec(**TINY), tenant=TenantKey.from_secret(b"a secret of sixteen bytes", "acme")
    )
    other = await connect(make_spec(**TINY))
    doc = tokens_of(1, 320)
    await stored(mine, doc)
    match = await mine.match(prompt_of(20, doc, 5), modular=True)
    into = poisoned(other.model, 345)
    result = await other.fetch(match, into)
    assert (result.modular, result.reason) == ((), "not stored") and untouched(into, 0, 345)


async def test_isolated_and_in_context(connect: Connect) -> None:
    """K15: a span says in which context it was computed; one that was computed alone is preferred."""
    client = await connect(make_spec(**TINY))
    doc = tokens_of(1, 160)
    behind = prompt_of(32, doc, 16)
    await stored(client, behind)
    asked = prompt_of(50, doc, 5)
    (span,) = (await client.match(asked, modular=True)).modular
    assert not span.isolated and span.context == context_name(client.prompt(behind).digests[1])
    await stored(client, doc)
    (span,) = (await client.match(asked, modular=True)).modular
    assert span.isolated and span.source == 0 and span.context == b""


async def test_switches(connect: Connect, node: Node) -> None:
    """Off for a request unless asked; off for a client, who is then not found by others either."""
    spec = make_spec(**TINY)
    client, closed = await connect(spec), await connect(spec, modular=False)
    doc, hidden = tokens_of(1, 160), tokens_of(2, 160)
    await stored(client, doc)
    await stored(closed, hidden)
    asked, other = prompt_of(3, doc, 5), prompt_of(3, hidden, 5)
    assert (await client.match(asked)).modular == ()
    assert (await client.match(asked, modular=False)).spans == (MissingSpan(0, 168),)
    assert node.status()["counters"]['hypercache_requests_total{op="locate",outcome="ok"}'] == 0
    assert (await client.match(asked, modular=True)).modular_tokens == 160
    assert (await client.match(other, modular=True)).modular == ()
    assert client.modular_refusal == "" and closed.modular_refusal == SWITCHED_OFF
    match = await closed.match(asked, modular=True)
    assert match.modular == () and match.reason == f"not stored; no modular reuse: {SWITCHED_OFF}"
    assert (await closed.match(prompt_of(hidden, 5), modular=True)).reason == ""
    with pytest.raises(ConfigError, match="modular must be a bool"):
        await connect(spec, modular="no")


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "mrope", "brand-new"])
async def test_a_model_whose_keys_cannot_move(connect: Connect, kind: str) -> None:
    """K01: refused by name, whatever is asked; causal hits go on working."""
    made = make_spec(**TINY)
    group = made.groups[0]
    spec = type(made)(
        weights=made.weights,
        groups=(type(group)(group.layers, group.layout, RopeSpec(kind, 1e4, 8)),),
        name="odd",
    )
    client = await connect(spec)
    doc = tokens_of(1, 160)
    await stored(client, doc)
    assert kind in client.modular_refusal
    match = await client.match(prompt_of(4, doc, 5), modular=True)
    assert match.modular == () and match.reason.endswith(client.modular_refusal)
    assert (await client.match(prompt_of(doc, 5), modular=True)).hit_tokens == 160


# --- segments and runs


async def test_segments_bound_what_is_looked_for(connect: Connect) -> None:
    client = await connect(make_spec(**TINY))
    a, b = tokens_of(1, 160), tokens_of(2, 160)
    await stored(client, prompt_of(a, b))
    asked = prompt_of(10, a, b, 10)

    async def found(segments: Any, **more: Any) -> list[tuple[int, int]]:
        match = await client.match(asked, modular=True, segments=segments, **more)
        return [(span.start, span.stop) for span in match.modular]

    assert await found(None) == [(10, 330)]
    assert await found([(0, 340)]) == [(10, 330)]
    assert await found([(10, 170), (170, 330)]) == [(10, 170), (170, 330)]  # one run, cut at the border
    assert await found([(10, 170)]) == [(10, 170)]
    assert await found([(200, 340)]) == [(202, 330)]
    assert await found([(10, 100), (100, 330)]) == [(10, 90), (106, 330)]
    assert await found([(10, 100), (100, 330)], min_run=81) == [(106, 330)]
    assert await found([]) == []
    (first, second) = (await client.match(asked, modular=True, segments=[(10, 170), (170, 330)])).modular
    assert first.isolated and second.context == context_name(first.tail)
    into = poisoned(client.model, 340)
    match = await client.match(asked, modular=True, segments=[(170, 330)])
    assert (await client.fetch(match, into)).modular == match.modular
    assert untouched(into, 0, 170) and untouched(into, 330, 340)
    for wrong in ([(0, 341)], [(5, 5)], [(-1, 4)], [(0, 50), (40, 60)], [(50, 60), (0, 10)], [3], "ab"):
        with pytest.raises(SpecError, match="segment"):
            await client.match(asked, modular=True, segments=wrong)


async def test_a_minimum_run(connect: Connect) -> None:
    client = await connect(make_spec(**TINY))
    long, short = tokens_of(1, 96), tokens_of(2, 48)
    await stored(client, long)
    await stored(client, short)
    asked = prompt_of(5, short, 5, long, 5)
    for least, want in ((16, [48, 96]), (48, [48, 96]), (49, [96]), (64, [96]), (96, [96]), (97, [])):
        match = await client.match(asked, modular=True, min_run=least)
        assert [span.stop - span.start for span in match.modular] == want, least
    for wrong in (15, 0, -3, 2.5, "64", None, 1 << 30):
        with pytest.raises(SpecError, match="min_run"):
            await client.match(asked, modular=True, min_run=wrong)


async def test_pictures_do_not_move(connect: Connect) -> None:
    """What placeholder tokens stand for is not in their ids: blocks with media in them are not reused."""
    client = await connect(make_spec(**TINY))
    doc = tokens_of(1, 320)
    picture, other = (hashlib.sha256(bytes([i])).digest() for i in range(2))
    kv = fill(KVBuffers.allocate(client.model, 320), 1)
    await client.store(client.prompt(doc, media=[MediaSpan(100, 200, picture)]), kv)
    asked = prompt_of(7, doc, 5)
    for content in (picture, other, None):
        media = [MediaSpan(107, 207, content)] if content else []
        match = await client.match(client.prompt(asked, media=media), modular=True)
        want = [(7, 103), (215, 327)] if content else [(7, 103)]  # unsaid, the run ends where it differs
        assert [(s.start, s.stop) for s in match.modular] == want


async def test_long_prompts_take_several_questions(
    connect: Connect, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that lie across two questions are found whole, wherever they lie."""
    client = await connect(make_spec(**TINY))
    docs = [tokens_of(seed, 160) for seed in range(4)]
    await stored(client, prompt_of(*docs))
    for gap in (0, 1, 50, 97, 111):
        asked = prompt_of(docs[0], gap, docs[2], docs[3], 30, docs[1], 9)
        whole = await client.match(asked, modular=True)
        assert whole.hit_tokens == 160 and len(whole.modular) == 2
        count = node.status()["counters"]['hypercache_requests_total{op="locate",outcome="ok"}']
        with monkeypatch.context() as patch:
            patch.setattr(protocol, "MAX_PROBES", 100)
            parts = await client.match(asked, modular=True)
        assert parts.modular == whole.modular and parts.hit_tokens == 160
        assert node.status()["counters"]['hypercache_requests_total{op="locate",outcome="ok"}'] > count + 3


async def test_a_prompt_keeps_the_tokens_it_was_hashed_from(connect: Connect) -> None:
    """A caller who reuses an array must not have a block found by tokens that it does not hold."""
    client = await connect(make_spec(**TINY))
    doc, other = tokens_of(1, 160), tokens_of(2, 160)
    ids = doc.astype("<u4")  # taken without a copy
    prompt = client.prompt(ids)
    ids[:] = other
    await client.store(prompt, fill(KVBuffers.allocate(client.model, 160), 1))
    assert (await client.match(prompt_of(5, doc, 5), modular=True)).modular_tokens == 160
    assert (await client.match(prompt_of(5, other, 5), modular=True)).modular_tokens == 0
    bare = type(prompt)(prompt.tokens, prompt.block_size, client.prompt(prompt_of(5, doc, 5)).digests)
    match = await client.match(bare, modular=True)
    assert match.modular == () and match.reason == "not stored; no modular reuse: the prompt has no tokens"


# --- saying that it does nothing


async def _ask_in_vain(client: hypercache.Client, count: int) -> None:
    for seed in range(count):
        await client.match(tokens_of(1000 + seed, 200), modular=True)


@pytest.mark.parametrize(
    ("cause", "says"),
    [
        ("off", "connect(modular=False)"),
        ("refused", "'dynamic' RoPE"),
        ("empty", "nothing of tenant"),
        ("never", "token ids differ"),
    ],
)
async def test_fifty_matches_in_vain_are_one_warning(
    connect: Connect, caplog: pytest.LogCaptureFixture, cause: str, says: str
) -> None:
    """K13: 0 blocks found in 50 prompts that could have had some: one warning that names the cause."""
    spec = make_spec(**TINY)
    if cause == "refused":
        group = spec.groups[0]
        rope = RopeSpec("dynamic", 1e4, 8, scaling=(("factor", 2.0),))
        spec = type(spec)(
            weights=spec.weights, groups=(type(group)(group.layers, group.layout, rope),), name="d"
        )
    client = await connect(spec, modular=cause != "off")
    if cause == "never":
        await stored(client, tokens_of(1, 320))
    with caplog.at_level(logging.WARNING, "hypercache.client"):
        for _ in range(60):  # too short to count
            await client.match(tokens_of(2, 50), modular=True)
        for _ in range(60):  # not asked for
            await client.match(tokens_of(2, 200))
        await _ask_in_vain(client, 49)
        assert not caplog.records
        await _ask_in_vain(client, 60)
    (record,) = caplog.records
    assert "50 matches" in record.message and says in record.message
    assert (client.reuse.matches, client.reuse.eligible, client.reuse.found) == (169, 109, 0)


async def test_no_warning_where_something_was_found(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """K13 from the other side."""
    client = await connect(make_spec(**TINY))
    doc = tokens_of(1, 320)
    await stored(client, doc)
    with caplog.at_level(logging.WARNING, "hypercache.client"):
        await client.match(prompt_of(3, doc, 4), modular=True)
        await _ask_in_vain(client, 80)
    assert not caplog.records and client.reuse.found == 1


# --- cost


async def test_long_prompts_cost_one_round_trip(connect: Connect, node: Node) -> None:
    """131,072 uncovered tokens: one question, and the CPU it takes (server included here) is printed."""
    client = await connect(make_spec(**TINY))
    tokens = np.random.default_rng(1).integers(0, 50_000, 131_072)
    await client.match(tokens[:1000], modular=True)
    counted = node.status()["counters"]['hypercache_requests_total{op="locate",outcome="ok"}']
    began = time.process_time()
    match = await client.match(tokens, modular=True, deadline=60)
    print(f"CPU of both sides: {1e3 * (time.process_time() - began):.1f} ms")
    assert match.reason.startswith("not stored") and match.modular == ()
    after = node.status()["counters"]
    assert after['hypercache_requests_total{op="locate",outcome="ok"}'] == counted + 1
    assert after['hypercache_requests_total{op="match",outcome="ok"}'] == 0


async def test_reasons_say_what_is_so(connect: Connect) -> None:
    """A fetch without a match saw nothing evicted; segments that are all too short are named as the cause."""
    client = await connect(spec=make_spec(**TINY))
    document = prompt_of(100)
    await stored(client, document)
    longer = prompt_of(document, 60)
    result = await client.fetch(longer, KVBuffers.allocate(client.model, len(longer)))
    assert (result.hit_tokens, result.reason) == (96, "not stored beyond this")
    asked = prompt_of(5, document)
    match = await client.match(asked, modular=True, segments=[(5, 60), (60, 100)])
    assert (
        not match.modular
        and match.reason == "not stored; no modular reuse: no segment has the 64 tokens of a run"
    )
    with pytest.raises(SpecError, match="modular"):
        await client.match(asked, modular="yes")  # type: ignore[arg-type]


def test_a_span_is_shown_in_words() -> None:
    span = ModularSpan(3, 35, 16, bytes(range(16)), b"\x11" * 32)
    assert repr(span) == "ModularSpan(start=3, stop=35, source=16, behind 000102030405)"
    assert repr(ModularSpan(3, 35, 0, b"", b"\x11" * 32)).endswith("source=0, isolated)")
