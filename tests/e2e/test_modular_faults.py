"""Modular reuse when things go wrong: what is lost is missing, what is wrong is not believed, all in time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

import hypercache
from fabrics import Channel, fabric_for
from hypercache import KVBuffers, TenantKey, protocol
from hypercache.client.plan import ModularSpan
from hypercache.fingerprint import fingerprints
from hypercache.keys import modular_digests, seal, unseal
from hypercache.model import KVDtype

from .conftest import Connect, fill, make_spec, poisoned, running_node, same, tokens_of, untouched
from .modular_kit import Ids, landed, prompt_of, stored
from .test_bad_input import D, Liar, meet
from .test_faults import Server, client_of

SPEC = make_spec(layers=3, dtype=KVDtype.FP32)


@contextlib.asynccontextmanager
async def lying(
    script: Callable[[Liar, Channel, int, protocol.Message], None], name: str
) -> AsyncIterator[hypercache.Client]:
    uri = f"loop://modular-liar-{name}"
    listener = await fabric_for(uri).listen(uri, lambda channel: Liar(script))
    client = await hypercache.connect(uri, model=SPEC, codec="raw", tenant=TenantKey.public())
    try:
        yield client
    finally:
        await client.close()
        await listener.close()


def claim(client: hypercache.Client, asked: Ids, place: int, blocks: int, **wrong: Any) -> protocol.Span:
    """What an honest server would say, had it these blocks; ``names`` of its own for them."""
    at = place
    ours = modular_digests(client.namespace, TenantKey.public(), asked[at : at + blocks * 16])
    names = wrong.pop("names", [bytes(range(16))] * blocks)
    fields: dict[str, Any] = {"at": at, "source": 0, "context": b"", "seals": seal(ours, names)}
    return protocol.Span(**{**fields, **wrong})


ASKED = tokens_of(1, 301)
Claims = Callable[[hypercache.Client], list[protocol.Span]]
BELIEVED: dict[str, tuple[Claims, list[tuple[int, int]]]] = {
    "the truth": (lambda c: [claim(c, ASKED, 40, 5)], [(40, 120)]),
    "overlap": (lambda c: [claim(c, ASKED, 40, 5), claim(c, ASKED, 119, 5)], [(40, 120)]),
    "backwards": (lambda c: [claim(c, ASKED, 150, 5), claim(c, ASKED, 40, 5)], [(150, 230)]),
    "the same again": (lambda c: [claim(c, ASKED, 40, 5)] * 3, [(40, 120)]),
    "before the hit": (lambda c: [claim(c, ASKED, 31, 5)], []),
    "the last token": (lambda c: [claim(c, ASKED, 301 - 80, 5)], []),
    "up to the last token": (lambda c: [claim(c, ASKED, 300 - 80, 5)], [(220, 300)]),
    "negative": (lambda c: [claim(c, ASKED, 40, 5, at=-1)], []),
    "behind the end": (lambda c: [claim(c, ASKED, 40, 5, at=1 << 62)], []),
    "wrong tokens": (lambda c: [claim(c, ASKED, 40, 5, at=41)], []),
    "wrong in the end": (
        lambda c: [claim(c, ASKED, 40, 5, seals=claim(c, ASKED, 40, 4).seals + D[0] * 2)],
        [(40, 104)],
    ),
    "wrong in the middle": (
        lambda c: [
            claim(
                c,
                ASKED,
                40,
                9,
                seals=claim(c, ASKED, 40, 4).seals + D[0] * 2 + claim(c, ASKED, 120, 4).seals,
            ),
            claim(c, ASKED, 200, 4),
        ],
        [(40, 104), (200, 264)],
    ),
    "wrong from the start": (lambda c: [claim(c, ASKED, 40, 5, seals=D[0] * 10)], []),
    "too short": (lambda c: [claim(c, ASKED, 40, 3), claim(c, ASKED, 100, 4)], [(100, 164)]),
    "nothing at all": (lambda c: [claim(c, ASKED, 40, 5, seals=b"")], []),
    "half a name": (lambda c: [claim(c, ASKED, 40, 5, seals=claim(c, ASKED, 40, 5).seals[:-1])], []),
    "a source off the grid": (lambda c: [claim(c, ASKED, 40, 5, source=17, context=D[0])], []),
    "a source before the start": (lambda c: [claim(c, ASKED, 40, 5, source=-16, context=D[0])], []),
    "a source out of this world": (lambda c: [claim(c, ASKED, 40, 5, source=1 << 60, context=D[0])], []),
    "no context": (lambda c: [claim(c, ASKED, 40, 5, source=32)], []),
    "a context at the start": (lambda c: [claim(c, ASKED, 40, 5, context=D[0])], []),
    "ourselves": (
        lambda c: [claim(c, ASKED, 48, 5, names=list(c.prompt(ASKED).digests[3:8]), source=48, context=D[0])],
        [],
    ),
}


@pytest.mark.parametrize("what", BELIEVED)
async def test_a_server_is_believed_as_far_as_our_own_digests_go(what: str) -> None:
    def script(liar: Liar, channel: Channel, request_id: int, message: protocol.Message) -> None:
        if isinstance(message, protocol.Locate):
            liar.say(channel, request_id, protocol.Located(2, tuple(claims(client)), True))
        elif isinstance(message, protocol.Fetch):
            chains = tuple(count for _, count in message.chains)
            liar.say(channel, request_id, protocol.Fetching(2, chains))
            liar.say(channel, request_id, protocol.Error("internal", "boom"))

    claims, want = BELIEVED[what]
    async with lying(script, what.replace(" ", "-")) as client:
        match = await client.match(ASKED, modular=True, deadline=2.0)
        assert match.hit_blocks == 2 and client.state == "ready"
        assert [(span.start, span.stop) for span in match.modular] == want
        covered = [token for span in match.spans for token in range(span.start, span.stop)]
        assert covered == list(range(301))
        into = poisoned(SPEC, 301)
        result = await client.fetch(match, into, deadline=2.0)
        assert (result.hit_tokens, result.modular) == (0, ()) and untouched(into, 0, 301)
        assert into.exact == 301


@pytest.mark.parametrize("blocks", [-1, -(1 << 40), 1 << 40, 19])
async def test_a_hit_is_never_more_than_was_asked(blocks: int) -> None:
    def script(liar: Liar, channel: Channel, request_id: int, message: protocol.Message) -> None:
        liar.say(channel, request_id, protocol.Located(blocks, (claim(client, ASKED, 40, 5),), True))

    async with lying(script, f"hit{blocks}") as client:
        match = await client.match(ASKED, modular=True)
        assert match.hit_blocks == (0 if blocks < 0 else 18)
        assert [span.start for span in match.modular] == ([40] if blocks < 0 else [])


async def test_an_incomplete_search_says_so() -> None:
    def script(liar: Liar, channel: Channel, request_id: int, message: protocol.Message) -> None:
        liar.say(channel, request_id, protocol.Located(2, (), False))

    async with lying(script, "incomplete") as client:
        assert "did not look at everything" in (await client.match(ASKED, modular=True)).reason


ANSWERS: dict[str, protocol.Message] = {
    "matched": protocol.Matched(3),
    "an error": protocol.Error("unsupported", "frame type 21 is unknown"),
    "a question": protocol.Locate(0, D[0], 0, b"", 1),
}


@pytest.mark.parametrize("answer", ANSWERS)
async def test_another_answer_is_a_miss(answer: str) -> None:
    def script(liar: Liar, channel: Channel, request_id: int, message: protocol.Message) -> None:
        liar.say(channel, request_id, ANSWERS[answer])

    async with lying(script, answer.replace(" ", "-")) as client:
        match = await client.match(ASKED, modular=True, deadline=1.0)
        assert (match.hit_blocks, match.modular) == (0, ()) and match.reason


async def test_the_rest_of_a_long_search_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first answers brought stays; the reason says what was not looked at."""
    monkeypatch.setattr(protocol, "MAX_PROBES", 100)
    asked = 0

    def script(liar: Liar, channel: Channel, request_id: int, message: protocol.Message) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            spans = (claim(client, ASKED, 33, 4),)
            liar.say(channel, request_id, protocol.Located(2, spans, True))

    async with lying(script, "long") as client:
        match = await client.match(ASKED, modular=True, deadline=0.3)
        assert match.hit_blocks == 2 and [span.start for span in match.modular] == [33]
        assert "the rest was not looked at: deadline" in match.reason and asked == 2


CHAINS: dict[str, protocol.Fetching] = {
    "none": protocol.Fetching(2),
    "too many": protocol.Fetching(2, (5, 4, 1)),
    "half of one": protocol.Fetching(2, (4, 4)),
    "more of one": protocol.Fetching(2, (6, 4)),
    "less than none": protocol.Fetching(2, (-5, 4)),
    "more than two": protocol.Fetching(3, (5, 4)),
}


@pytest.mark.parametrize("what", CHAINS)
async def test_chains_come_whole_or_not_at_all(what: str) -> None:
    def script(liar: Liar, channel: Channel, request_id: int, message: protocol.Message) -> None:
        if isinstance(message, protocol.Locate):
            spans = (claim(client, ASKED, 40, 5), claim(client, ASKED, 130, 4))
            liar.say(channel, request_id, protocol.Located(2, spans, True))
        else:
            liar.say(channel, request_id, CHAINS[what])

    async with lying(script, what.replace(" ", "-")) as client:
        match = await client.match(ASKED, modular=True)
        assert len(match.modular) == 2
        into = poisoned(SPEC, 301)
        result = await client.fetch(match, into, deadline=2.0)
        assert (result.hit_tokens, result.modular) == (0, ()) and "FETCHING" in result.reason
        assert untouched(into, 0, 301)


# --- an honest server, and what may happen between match and use


async def test_evicted_between_match_and_fetch(connect: Connect) -> None:
    """What is gone is missing in the result, the rest comes, and the other tokens stay as they were."""
    client = await connect(SPEC)
    system, a, b, c = tokens_of(1, 48), tokens_of(2, 96), tokens_of(3, 160), tokens_of(4, 96)
    kvs = [await stored(client, tokens, seed) for seed, tokens in enumerate((system, a, b, c))]
    asked = prompt_of(system, 3, a, 5, b, 7, c, 9)
    match = await client.match(asked, modular=True)
    assert match.hit_tokens == 48 and match.modular_tokens == 352

    async def fetched() -> hypercache.FetchResult:
        into = poisoned(SPEC, len(asked))
        result = await client.fetch(match, into)
        assert result.reason == "evicted since the match"
        assert same(kvs[0], into, 0, result.hit_tokens)
        for span in result.modular:
            assert landed(into, kvs[1 + match.modular.index(span)], span, 2e-6)
        for span in set(match.modular) - set(result.modular):
            assert untouched(into, span.start, span.stop)
        return result

    await client.evict(b)
    result = await fetched()
    assert result.hit_tokens == 48 and result.modular == (match.modular[0], match.modular[2])
    await client.evict(system)
    result = await fetched()
    assert result.hit_tokens == 0 and result.modular == (match.modular[0], match.modular[2])
    prompt = client.prompt(a)
    await client.evict(type(prompt)(96, 16, prompt.digests[5:]))  # its last block: the chain is broken
    assert (await fetched()).modular == match.modular[2:]
    await client.evict(c)
    into = poisoned(SPEC, len(asked))
    result = await client.fetch(match, into)
    assert (result.modular, result.reason) == ((), "not stored") and untouched(into, 0, len(asked))
    again = await client.match(asked, modular=True)
    assert [(span.start, span.stop) for span in again.modular] == [(51, 131)]  # what is left of a


def spoil(node: Any, client: hypercache.Client, tokens: Ids, block: int, layer: int) -> None:
    """Flip a byte in the server's memory."""
    store = node._store
    digest = client.prompt(tokens).digests[block]
    (held,) = [tree.blocks[digest] for tree in store._trees.values() if digest in tree.blocks]
    first, _ = held.tree.space.span(layer)
    store._arena.view(held.slab, held.slot, first, first + 1)[0] ^= 1


@pytest.mark.parametrize("layer", [0, 2])
async def test_a_corrupt_chunk_costs_the_rest_of_its_span(layer: int) -> None:
    """E07: neither the prefix nor another span suffers, and no wrong byte reaches the engine."""
    async with running_node() as node, client_of(node.uris[0], model=SPEC) as client:
        system, a, b = tokens_of(1, 48), tokens_of(2, 160), tokens_of(3, 96)
        kvs = [await stored(client, tokens, seed) for seed, tokens in enumerate((system, a, b))]
        asked = prompt_of(system, 3, a, 5, b, 7)
        match = await client.match(asked, modular=True)
        spoil(node, client, a, 6, layer)
        into = poisoned(SPEC, len(asked))
        seen = []
        transfer = client.start_fetch(match, into, on_layer=lambda _: seen.append(transfer.modular))
        result = await transfer
        assert (result.hit_tokens, result.reason) == (48, "checksum mismatch on arrival")
        first, second = result.modular
        assert (first.start, first.stop) == (51, 51 + 96) and second == match.modular[1]
        assert first.tail == client.prompt(a).digests[5]
        assert same(kvs[0], into, 0, 48) and landed(into, kvs[1], first, 2e-6)
        assert landed(into, kvs[2], second, 2e-6)
        assert untouched(into.window(51 + 112, 211), 0, 48) or layer  # later blocks of the layers before came
        assert seen == [match.modular] * layer + [result.modular] * (3 - layer)

        spoil(node, client, b, 0, 1)
        result = await client.fetch(match, poisoned(SPEC, len(asked)))
        assert result.modular == (first,) and result.hit_tokens == 48
        spoil(node, client, system, 1, 1)
        result = await client.fetch(match, poisoned(SPEC, len(asked)))
        assert result.modular == (first,) and result.hit_tokens == 16
        spoil(node, client, system, 0, 1)
        spoil(node, client, a, 0, 1)
        into = poisoned(SPEC, len(asked))
        transfer = client.start_fetch(match, into)
        result = await transfer
        assert (result.modular, result.hit_tokens) == ((), 0)
        assert into.exact == 51  # where the head of a came in layer 0
        assert not await transfer.layer(2)


async def test_killed_in_the_middle_of_a_fetch() -> None:
    """G01 with spans under way: the fetch ends in time; what it names is right, and it names nothing."""
    spec = make_spec(layers=24, heads=8, dim=128)
    server = await asyncio.to_thread(Server)
    try:
        async with client_of(server.uri, model=spec, deadline=20.0) as client:
            doc = tokens_of(1, 256)
            await stored(client, doc)
            asked = prompt_of(7, doc, 9)
            match = await client.match(asked, modular=True)
            assert match.modular_tokens == 256
            into = poisoned(spec, len(asked))
            began = time.monotonic()
            transfer = client.start_fetch(match, into, on_layer=lambda layer: layer or server.process.kill())
            result = await transfer
            assert time.monotonic() - began < 15.0
            if result.modular != match.modular:  # all of it may have been on its way
                assert (result.modular, result.hit_tokens) == ((), 0) and "lost" in result.reason
                assert transfer.modular == () and into.exact == 7  # some of it has come
                assert not await transfer.layer(23)
            after = await client.match(asked, modular=True, deadline=1.0)
            assert (after.modular, after.hit_tokens) == ((), 0) and after.reason.startswith("unreachable")
    finally:
        server.stop()


async def test_cancelled_and_out_of_time(connect: Connect) -> None:
    client = await connect(SPEC)
    doc = tokens_of(1, 160)
    await stored(client, doc)
    asked = prompt_of(7, doc, 9)
    match = await client.match(asked, modular=True)
    for _ in range(20):
        into = poisoned(SPEC, len(asked))
        transfer = client.start_fetch(match, into)
        await asyncio.sleep(0)
        transfer.cancel()
        kept = [part.copy() for layer in range(3) for part in into.layer(layer)]
        assert (await transfer).modular == () and into.exact == len(asked)
        await asyncio.sleep(0.01)
        now = [part for layer in range(3) for part in into.layer(layer)]
        assert all(np.array_equal(a, b) for a, b in zip(kept, now, strict=True))
    late = await client.match(asked, modular=True, deadline=1e-6)
    assert late.modular == () and late.reason.startswith("deadline")
    assert (await client.match(asked, modular=True)).modular == match.modular
    assert (client._coder.incoming._out, client._link._operations) == (0, {})


async def test_what_a_hostile_client_can_find(connect: Connect, node: Any) -> None:
    """What is found is what is stored in that space; whatever is asked, the answer is bounded."""
    client = await connect(SPEC)
    doc = tokens_of(1, 160)
    await stored(client, doc)
    peer = await meet(node)
    peer.send(client._link._opening, request_id=2)
    assert (await peer.answer()).handle == 1
    probes = fingerprints(client.namespace, TenantKey.public(), doc).astype("<u8").tobytes()
    for handle, blocks in ((0, 0), (1, 10)):
        peer.send(protocol.Locate(handle, b"", 0, probes, 1), request_id=3)
        answer = await peer.answer()
        assert sum(len(span.seals) // 32 for span in answer.spans) == blocks
    (span,) = answer.spans
    own = list(client.prompt(doc).digests)
    ours = modular_digests(client.namespace, TenantKey.public(), doc)
    assert span == protocol.Span(0, 0, b"", seal(ours, own)) and unseal(span.seals, ours) == own
    rng = np.random.default_rng(0)
    for seed in range(20):
        peer.send(protocol.Locate(1, rng.bytes(16 * seed), seed, rng.bytes(8 * 4096), 1), request_id=4)
        assert await peer.answer() == protocol.Located(0, (), True)
    peer.send(protocol.Locate(1, b"", 0, probes[:8] * protocol.MAX_PROBES, 1), request_id=5)
    answer = await peer.answer()
    assert len(answer.spans) <= protocol.MAX_PROBES // 16 and answer.blocks == 0

    tail = own[-1]
    peer.send(protocol.Fetch(1, b"", (0, 3), 5000, 1 << 20, ((tail, 11), (tail, 2), (D[0], 1))), request_id=6)
    assert await peer.answer() == protocol.Fetching(0, (0, 2, 0))
    layers = [await peer.answer() for _ in range(2)]
    assert sum(count for _, _, count in layers[0].runs) == 6 and len(layers[1]) == 6 * client.chunk_nbytes[0]
    assert await peer.answer() == protocol.Fetched(2)
    peer.send(protocol.Fetch(1, b"", (0, 3), 5000, 1, ((D[0], 1),)), request_id=7)
    assert await peer.answer() == protocol.Fetching(0, (0,))
    assert await peer.answer() == protocol.Fetched(0)
    assert node.status()["store"]["leases"] == 0
    assert (await client.match(prompt_of(3, doc), modular=True)).modular_tokens == 144


@pytest.mark.parametrize("block_size", [8, 16, 64])
async def test_no_digest_is_told_to_who_only_names_fingerprints(
    connect: Connect, node: Any, block_size: int
) -> None:
    """A causal digest is the right to read a block, a modular one opens its seal. Whoever presents a matching
    fingerprint, guessed or seen, is told neither, in no part of the answer."""
    client = await connect(SPEC, block_size=block_size)
    system, doc = tokens_of(2, 5 * 64), tokens_of(1, 6 * 64)
    for tokens in (doc, prompt_of(system, doc), prompt_of(3, system, doc, doc)):
        await stored(client, tokens)
    peer = await meet(node)
    peer.send(client._link._opening, request_id=2)
    handle = (await peer.answer()).handle
    secret = {*client.prompt(doc).digests, *client.prompt(prompt_of(system, doc)).digests}
    secret |= set(client.prompt(prompt_of(3, system, doc, doc)).digests)
    for tokens in (doc, system, prompt_of(3, system, doc, doc)):
        secret |= set(modular_digests(client.namespace, TenantKey.public(), tokens))
    found = 0
    for asked in (doc, prompt_of(7, system, doc, doc), prompt_of(doc[5:], system[3:]), system[block_size:]):
        for least in (1, 4):
            probes = fingerprints(client.namespace, TenantKey.public(), asked).astype("<u8").tobytes()
            peer.send(protocol.Locate(handle, b"", 0, probes, least), request_id=3)
            answer = await peer.answer()
            found += sum(len(span.seals) // 32 for span in answer.spans)
            _, body = protocol.encode(answer)
            assert not [digest for digest in secret if digest in body or digest[:8] in body]
    assert found > 8 and any(span.context for span in answer.spans)


async def test_random_prompts_hold_what_they_say(connect: Connect) -> None:
    """Prompts cut from a pool at random, stored and asked: each span has the tokens of its source there."""
    spec = make_spec(layers=2, heads=1, dim=16, dtype=KVDtype.FP32)
    client = await connect(spec)
    rng = np.random.default_rng(3)
    pool = [rng.integers(0, 4 if i % 3 == 0 else 50_000, int(rng.integers(20, 300))) for i in range(12)]
    kept: dict[bytes, tuple[Ids, KVBuffers]] = {}
    covered = 0
    for seed in range(40):
        parts = [pool[i] for i in rng.integers(0, len(pool), 5)]
        asked = np.concatenate([part[int(rng.integers(0, 20)) :] for part in parts]).astype(np.int64)
        match = await client.match(asked, modular=True)
        into = poisoned(spec, len(asked))
        result = await client.fetch(match, into)
        assert (result.hit_tokens, result.modular) == (match.hit_tokens, match.modular)
        assert same(kept[client.prompt(asked).digests[0]][1], into, 0, 16) if match.hit_tokens else True
        for span in match.modular:
            assert isinstance(span, ModularSpan) and span.start >= match.hit_tokens
            assert span.stop < len(asked) and (span.stop - span.start) >= 64
            tokens, kv = kept[span.tail]
            assert np.array_equal(
                asked[span.start : span.stop], tokens[span.source :][: span.stop - span.start]
            )
            assert landed(into, kv, span, 2e-6)
            covered += span.stop - span.start
        assert all(a.stop == b.start for a, b in zip(match.spans, match.spans[1:], strict=False))
        kv = fill(KVBuffers.allocate(spec, len(asked)), seed)
        await client.fetch(match, kv)  # its prefix must be that of the first who stored it
        for layer in range(2):
            for part, new in zip(
                kv.layer(layer), fill(KVBuffers.allocate(spec, len(asked)), seed).layer(layer), strict=True
            ):
                part[:, match.hit_tokens :] = new[:, match.hit_tokens :]
        kv.mark_exact(len(asked))
        await client.store(asked, kv)
        for digest in client.prompt(asked).digests:
            kept.setdefault(digest, (asked, kv))
    assert covered > 5_000
