"""Approximate K/V never come to lie under the digest of exact ones, whatever is fetched or stored when.

K/V here are what a model's are: those of a token depend on all tokens before it. So whatever another client
is handed as an exact prefix can be held against the truth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import hypercache
from hypercache import KVBuffers, protocol
from hypercache.client import ChunkBuffers, FetchResult, Match
from hypercache.client.buffers import RowPort
from hypercache.client.operations import APPROXIMATE
from hypercache.errors import SpecError
from hypercache.model import KVDtype

from .conftest import Connect, make_spec, same, tokens_of
from .modular_kit import Ids, prompt_of

SPEC = make_spec(layers=3, heads=1, dim=16, dtype=KVDtype.FP32)
SYSTEM, DOC = tokens_of(1, 64), tokens_of(2, 128)
ASKED = prompt_of(SYSTEM, 16, DOC, 33)  # the document moved by 80
N, BLOCKS, FIRST = 241, 15, 80  # tokens, blocks, the first approximate token

Client = hypercache.Client


def truth(ids: Ids, kv: KVBuffers | None = None, stop: int | None = None) -> KVBuffers:
    """What a prefill of ``ids`` leaves, up to token ``stop``."""
    kv = KVBuffers.allocate(SPEC, len(ids)) if kv is None else kv
    state, states = 0, []
    for token in ids[:stop].tolist():
        state = (state * 6364136223846793005 + token + 1) % (1 << 64)
        states.append(float(state >> 40))
    for layer in range(SPEC.num_layers):
        for index, part in enumerate(kv.layer(layer)):
            part[:, : len(states)] = np.array(states, np.float32)[None, :, None] + layer + 10 * index
    return kv


async def kept(client: Client, *prompts: Ids) -> None:
    for ids in prompts:
        await client.store(ids, truth(ids))


def first_wrong(kv: KVBuffers) -> int:
    """The first token that a prefill of ASKED would have left otherwise."""
    want, tokens = truth(ASKED), min(kv.tokens, N)
    wrong = [
        np.flatnonzero((a[:, :tokens] != b[:, :tokens]).any(axis=(0, 2)))
        for layer in range(SPEC.num_layers)
        for a, b in zip(kv.layer(layer), want.layer(layer), strict=True)
    ]
    return min([int(at[0]) for at in wrong if at.size], default=kv.tokens)


async def handed_out(client: Client) -> int:
    """Tokens of ASKED that whoever asks gets as exact; all of them must be."""
    kv = KVBuffers.allocate(SPEC, N)
    hit = (await client.fetch(ASKED, kv)).hit_tokens
    assert same(kv, truth(ASKED), 0, hit), f"of {hit} tokens handed out as exact some only approximate"
    return hit


def rows(client: Client) -> ChunkBuffers:
    return ChunkBuffers([np.zeros((BLOCKS, size), np.uint8) for size in client.chunk_nbytes])


def raising(layer: int) -> None:
    if layer == 2:
        raise ValueError("the engine's")


# --- what a second fetch may not undo

Route = Callable[[Client, Match, Any], Awaitable[FetchResult]]


async def spent(c: Client, m: Match, into: Any) -> FetchResult:
    await c.fetch(m, into)
    return await c.fetch(m, into, deadline=1e-9)


async def cancelled(c: Client, m: Match, into: Any) -> FetchResult:
    await c.fetch(m, into)
    transfer = c.start_fetch(m, into)
    transfer.cancel()
    return await transfer


async def plain_cancelled(c: Client, m: Match, into: Any) -> FetchResult:
    await c.fetch(m, into)
    transfer = c.start_fetch(ASKED, into)
    transfer.cancel()
    return await transfer


async def first_of_two_cancelled(c: Client, m: Match, into: Any) -> FetchResult:
    first, second = c.start_fetch(m, into), c.start_fetch(m, into)
    first.cancel()
    return await second


async def too_short(c: Client, m: Match, into: Any) -> FetchResult:
    await c.fetch(m, into)
    return await c.fetch(ASKED[:5], into)


async def not_stored(c: Client, m: Match, into: Any) -> FetchResult:
    await c.fetch(m, into)
    return await c.fetch(tokens_of(9, 200), into)


async def a_shorter_prompt(c: Client, m: Match, into: Any) -> FetchResult:
    await c.fetch(m, into)
    return await c.fetch(ASKED[:50], into)


async def modular_then_plain_at_once(c: Client, m: Match, into: Any) -> FetchResult:
    first, second = c.start_fetch(m, into), c.start_fetch(ASKED, into)
    await first
    return await second


async def plain_then_modular_at_once(c: Client, m: Match, into: Any) -> FetchResult:
    first, second = c.start_fetch(ASKED, into), c.start_fetch(m, into)
    await second
    return await first


async def the_engine_raised(c: Client, m: Match, into: Any) -> FetchResult:
    return await c.fetch(m, into, on_layer=raising)


async def cancelled_halfway(c: Client, m: Match, into: Any) -> FetchResult:
    def stop(layer: int) -> None:
        if layer == 1:
            transfer.cancel()

    transfer = c.start_fetch(m, into, on_layer=stop)
    return await transfer


async def one_layer(c: Client, m: Match, into: Any) -> FetchResult:
    await c.fetch(m, into)
    return await c.fetch(ASKED, into, layers=range(1))


async def behind_the_start(c: Client, m: Match, into: Any) -> FetchResult:
    await c.fetch(m, into)
    return await c.fetch(ASKED, into, start=48)


async def refused_layers(c: Client, m: Match, into: Any) -> FetchResult:
    result = await c.fetch(m, into)
    with pytest.raises(SpecError):
        await c.fetch(ASKED, into, layers=range(4))
    return result


async def marked_under_way(c: Client, m: Match, into: Any) -> FetchResult:
    """Marked by who has computed nothing yet: what comes after counts."""

    def mark(layer: int) -> None:
        if layer == 0:
            into.mark_exact(N if isinstance(into, KVBuffers) else BLOCKS)

    transfer = c.start_fetch(m, into, on_layer=mark)
    assert await transfer.layer(0)
    return await transfer


ROUTES = [
    spent,
    cancelled,
    plain_cancelled,
    first_of_two_cancelled,
    too_short,
    not_stored,
    a_shorter_prompt,
    modular_then_plain_at_once,
    plain_then_modular_at_once,
    the_engine_raised,
    cancelled_halfway,
    one_layer,
    behind_the_start,
    refused_layers,
    marked_under_way,
]


@pytest.mark.parametrize("chunks", [False, True], ids=["kv", "chunks"])
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
async def test_no_fetch_undoes_what_another_did(connect: Connect, route: Route, chunks: bool) -> None:
    client, other = await connect(SPEC), await connect(SPEC)
    await kept(client, SYSTEM, DOC)
    match = await client.match(ASKED, modular=True)
    assert (match.hit_tokens, match.modular[0].start) == (64, FIRST)
    into: Any = rows(client) if chunks else truth(ASKED)
    await route(client, match, into)
    assert into.exact == (4 if chunks else FIRST)
    assert chunks or first_wrong(into) == FIRST
    result = await client.store(ASKED, into)
    assert result.reason == APPROXIMATE
    assert await handed_out(other) == (64 if chunks else 80)
    if not chunks:  # whoever computes says so, and is believed
        truth(ASKED, into)
        into.mark_exact(N)
        assert (await client.store(ASKED, into)).reason == ""
        assert await handed_out(other) == 240


async def test_a_fetch_that_brings_nothing_leaves_what_was_there(connect: Connect) -> None:
    client = await connect(SPEC)
    await kept(client, SYSTEM, DOC)
    match = await client.match(ASKED, modular=True)
    for into, all_ in ((truth(ASKED), N), (rows(client), BLOCKS)):
        assert (await client.fetch(match, into, deadline=1e-9)).modular == () and into.exact == all_
        transfer = client.start_fetch(match, into)
        assert into.exact == (FIRST if all_ == N else 4)  # from before the first byte ...
        transfer.cancel()
        assert (await transfer).modular == () and into.exact == all_  # ... until none can come
    await client.evict(DOC)
    await client.evict(SYSTEM)
    kv = truth(ASKED)
    assert (await client.fetch(match, kv)).reason == "not stored" and kv.exact == N
    await client.close()
    assert "closed" in (await client.fetch(match, kv)).reason and kv.exact == N


async def test_a_whole_fetch_makes_exact_what_it_brought_and_no_more(connect: Connect) -> None:
    client = await connect(SPEC)
    await kept(client, SYSTEM, DOC)
    match = await client.match(ASKED, modular=True)
    kv, chunks = truth(ASKED), rows(client)
    await client.fetch(match, kv)
    kv.mark_approximate(10)
    result = await client.fetch(ASKED, kv)  # without spans
    assert (result.hit_tokens, kv.exact) == (64, 64)
    kv.mark_approximate(10)
    result = await client.fetch(match, kv)  # its prefix is as exact
    assert (result.hit_tokens, kv.exact) == (64, 64) and first_wrong(kv) == FIRST
    chunks.mark_approximate(0)
    await client.fetch(ASKED, chunks)
    assert chunks.exact == 4
    chunks.mark_exact(BLOCKS)
    assert chunks.exact == BLOCKS
    for wrong in (BLOCKS + 1, -1, True):
        with pytest.raises(SpecError, match="mark_exact"):
            chunks.mark_exact(wrong)
    chunks.mark_approximate(3)
    assert chunks.exact == 3


async def test_windows_share_what_is_exact_in_the_right_places(connect: Connect) -> None:
    client, other = await connect(SPEC), await connect(SPEC)
    await kept(client, SYSTEM, DOC)
    match = await client.match(ASKED, modular=True)
    kv = KVBuffers.allocate(SPEC, N + 64)
    head = truth(ASKED, kv).window(0, N)
    first, second = client.start_fetch(match, head), client.start_fetch(match, kv)
    first.cancel()
    await second
    assert head.exact == kv.exact == FIRST and kv.window(64, N).exact == 16

    # A prompt of its own behind another is no continuation of it: only marked, not fetched, exact.
    tail = kv.window(64, N + 64)
    assert (await client.fetch(SYSTEM, tail)).hit_tokens == 48 and kv.exact == FIRST
    kv.mark_approximate(10)
    assert (await client.fetch(SYSTEM, tail)).hit_tokens == 48 and kv.exact == 10
    truth(ASKED, kv).mark_exact(N)
    await client.fetch(match, head)
    tail.mark_approximate(3)
    assert (kv.exact, head.exact, tail.exact) == (67, 67, 3)
    await client.store(ASKED, head)
    assert await handed_out(other) == 64
    await client.fetch(match, tail)  # the document comes at 64 + 80
    assert kv.exact == 67
    kv.mark_exact(kv.tokens)
    await client.fetch(match, tail)
    assert (kv.exact, tail.exact) == (64 + FIRST, FIRST)


async def test_chunk_rows_are_lowered_before_and_after_bytes_land(connect: Connect) -> None:
    """They land where they stay, without anybody in between: a mark meanwhile counts for nothing."""
    chunks = rows(await connect(SPEC))
    port = RowPort(chunks, 4)
    port.landing([(0, 0, 4)]).done()
    assert chunks.exact == BLOCKS
    landing = port.landing([(0, 0, 4), (0, 4, 1)])
    assert chunks.exact == port.exact == 4
    chunks.mark_exact(BLOCKS)
    landing.done()
    assert chunks.exact == 4


# --- stores that have begun


@pytest.mark.parametrize("ready", [0, 1, 2])
@pytest.mark.parametrize("chunks", [False, True], ids=["kv", "chunks"])
async def test_a_store_lets_go_of_what_has_become_inexact(connect: Connect, ready: int, chunks: bool) -> None:
    client, other = await connect(SPEC), await connect(SPEC)
    await kept(client, SYSTEM, DOC)
    match = await client.match(ASKED, modular=True)
    into: Any = rows(client) if chunks else truth(ASKED)
    if chunks:  # as they lie after a fetch of what somebody computed
        await other.store(ASKED, truth(ASKED))
        assert (await client.fetch(ASKED, into)).hit_tokens == 240
        await other.evict(ASKED)
        await kept(other, SYSTEM)
    saving = client.start_store(ASKED, into, ready_layers=ready)
    for _ in range(5 * ready):
        await asyncio.sleep(0.005)
    await client.fetch(match, into, on_layer=saving.layer_ready)
    result = await saving
    assert result.reason == APPROXIMATE and result.stored == 0
    assert await handed_out(other) == 64


@pytest.mark.parametrize("passes", range(8))
async def test_a_store_and_a_fetch_at_once(connect: Connect, passes: int) -> None:
    """Whatever was read before the first approximate byte may be seen, nothing else."""
    client, other = await connect(SPEC), await connect(SPEC)
    await kept(client, SYSTEM, DOC)
    match = await client.match(ASKED, modular=True)
    kv = truth(ASKED)
    saving = client.start_store(ASKED, kv)
    for _ in range(passes):
        await asyncio.sleep(0)
    transfer = client.start_fetch(match, kv)
    await transfer
    result = await saving
    assert result.reason == (APPROXIMATE if result.outcome.get("aborted") else "")
    assert await handed_out(other) in (64, 240)


async def test_parts_of_a_store_that_are_exact_go_on(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_STORE_BLOCKS", 4)
    client, other = await connect(SPEC), await connect(SPEC)
    kv = truth(ASKED)
    saving = client.start_store(ASKED, kv, ready_layers=0)
    await asyncio.sleep(0.02)
    kv.mark_approximate(70)
    saving.layer_ready(2)
    result = await saving
    assert (result.outcome, result.reason) == ({"stored": 4, "aborted": 11}, APPROXIMATE)
    assert await handed_out(other) == 64


# --- anything, in any order


@pytest.mark.parametrize("seed", range(24))
async def test_whatever_comes_after_whatever(connect: Connect, seed: int) -> None:
    """One thing after the other: ``exact`` is what a naive model says. At once: it is never too much."""
    at_once = seed % 2
    rng = np.random.default_rng(seed)
    client, other = await connect(SPEC), await connect(SPEC)
    await kept(client, SYSTEM, DOC)
    kv = truth(ASKED)
    faces = [kv, kv.window(0, N)]
    exact = N
    running: list[Any] = []

    def fetch(what: Any, **how: Any) -> Any:
        return client.start_fetch(what, faces[rng.integers(2)], **how)

    for _ in range(40):
        step = rng.choice(
            ["modular", "plain", "part", "late", "cancel", "raise", "compute", "store", "forget"]
        )
        match = await client.match(ASKED, modular=True)
        first = match.modular[0].start if match.modular else N
        assert kv.exact <= first_wrong(kv)
        if step == "compute":
            for one in running:  # nobody computes where something else still comes
                await one
            running.clear()
            upto = int(rng.integers(1, N + 1))
            truth(ASKED, kv, upto).mark_exact(upto)
            exact = max(exact, upto)
        elif step == "store":
            saving = client.start_store(ASKED, faces[rng.integers(2)])
            if not at_once:
                await saving
            running.append(saving)
        elif step == "forget":
            await client.evict(ASKED)
            await kept(client, SYSTEM)
        else:
            start = int(rng.integers(0, N)) if step == "part" else 0
            layers = range(int(rng.integers(1, 4))) if step == "part" else range(3)
            what = match if step != "plain" else ASKED[: rng.integers(1, N + 1)]
            transfer = fetch(
                what,
                start=start,
                layers=layers,
                on_layer=raising if step == "raise" else None,
                deadline=1e-9 if step == "late" else None,
            )
            if step == "cancel":
                for _ in range(int(rng.integers(6))):
                    await asyncio.sleep(0)
                transfer.cancel()
            running.append(transfer)
            if not at_once:
                result = await transfer
                moved = [span.start for span in result.modular]
                if step == "raise":
                    assert kv.exact <= min(exact, first)
                    exact = kv.exact
                if step == "cancel":
                    assert kv.exact in {exact, min(exact, first), max(min(exact, first), match.hit_tokens)}
                    exact = kv.exact
                exact = min([exact, *moved])
                if not start and layers == range(3):
                    exact = max(exact, result.hit_tokens)
        if not at_once:
            assert kv.exact == exact, step
        assert kv.exact <= first_wrong(kv), step
        if at_once and rng.integers(3) == 0:
            for one in running:
                await one
            running.clear()
        await handed_out(other)
    for one in running:
        await one
    assert kv.exact <= first_wrong(kv)
    await handed_out(other)
