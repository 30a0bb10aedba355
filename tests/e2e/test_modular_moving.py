"""Where modular blocks land: at their tokens, keys turned; and never back in the store as exact ones."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

import hypercache
from hypercache import ChunkBuffers, KVBuffers, TenantKey
from hypercache.client.operations import APPROXIMATE
from hypercache.client.plan import MissingSpan
from hypercache.model import KVDtype, RopeSpec

from .conftest import Connect, fill, make_spec, poisoned, running_node, same, tokens_of, untouched
from .modular_kit import TINY, landed, prompt_of, stored, turned


@pytest.mark.parametrize("dtype", [KVDtype.FP32, KVDtype.FP16])
async def test_it_lands_where_it_belongs_with_its_keys_turned(connect: Connect, dtype: KVDtype) -> None:
    """Exact blocks bit for bit, values bit for bit, keys turned by the distance; nothing else is written."""
    spec = make_spec(layers=3, dtype=dtype)
    client = await connect(spec)
    system, a, b = tokens_of(1, 53), tokens_of(2, 150), tokens_of(3, 200)
    kv = await stored(client, prompt_of(system, a, b, 60))
    asked = prompt_of(system, b, 7, a, 21)
    match = await client.match(asked, modular=True)
    assert match.hit_tokens == 48 and [s.delta > 0 for s in match.modular] == [False, True]
    into = poisoned(spec, len(asked))
    result = await client.fetch(match, into)
    assert (result.hit_tokens, result.modular, result.reason) == (48, match.modular, "")
    assert result.wire_bytes == (48 + match.modular_tokens) * spec.token_nbytes()
    assert same(kv, into, 0, 48)
    assert all(landed(into, kv, span, 1e-6 if dtype is KVDtype.FP32 else 1e-3) for span in match.modular)
    for span in match.spans:
        assert not isinstance(span, MissingSpan) or untouched(into, span.start, span.stop)


@pytest.mark.parametrize("codec", ["fp8", "int8", "int4", "int4-plain"])
@pytest.mark.parametrize("block_size", [8, 16, 64])
async def test_every_codec_turns_as_it_decodes(connect: Connect, codec: str, block_size: int) -> None:
    """A modular block is what the same codec makes of it in place, turned."""
    spec = make_spec(layers=2, dtype=KVDtype.FP32)
    client = await connect(spec, codec=codec, block_size=block_size)
    doc = tokens_of(1, 320)
    await stored(client, doc)
    plain = KVBuffers.allocate(spec, 321)
    assert (await client.fetch(prompt_of(doc, 1), plain)).hit_tokens == 320
    asked = prompt_of(1003, doc, 1)
    match = await client.match(asked, modular=True)
    into = poisoned(spec, len(asked))
    (span,) = (await client.fetch(match, into)).modular
    assert (span.start, span.stop) == (1003, 1323)
    assert landed(into, plain, span, 1e-6)


@pytest.mark.parametrize(("stored_at", "used_at"), [(0, 1000), (0, 100_000), (4000, 13)])
async def test_a_position_is_kept_with_the_block(connect: Connect, stored_at: int, used_at: int) -> None:
    """K07: stored at 0, used at 1,000 and at 100,000; and backwards. Values bit for bit."""
    client = await connect(make_spec(layers=1, heads=1, dim=64, dtype=KVDtype.FP32))
    doc = tokens_of(1, 160)
    kv = await stored(client, prompt_of(stored_at, doc) if stored_at else doc)
    asked = prompt_of(used_at, doc, 2)
    match = await client.match(asked, modular=True)
    (span,) = match.modular
    assert span.delta == used_at - stored_at and span.stop - span.start == 160
    into = poisoned(client.model, len(asked))
    assert (await client.fetch(match, into)).modular == (span,)
    assert landed(into, kv, span, 2e-6)


async def test_local_and_global_layers_turn_by_their_own_angles(connect: Connect) -> None:
    """K02: each layer by its own theta; a layer without rotation keeps its keys."""
    made = make_spec(layers=3, dtype=KVDtype.FP32)
    layout = made.layout(0)
    ropes = [RopeSpec("default", 10000.0, 64), RopeSpec("default", 1e6, 64), RopeSpec("none", 0.0, 0)]
    groups = tuple(type(made.groups[0])((i,), layout, rope) for i, rope in enumerate(ropes))
    spec = type(made)(weights=made.weights, groups=groups, name="layered")
    client = await connect(spec)
    doc = tokens_of(1, 160)
    kv = await stored(client, doc)
    asked = prompt_of(333, doc, 1)
    into = poisoned(spec, len(asked))
    (span,) = (await client.fetch(await client.match(asked, modular=True), into)).modular
    for layer, want in enumerate(
        [turned(kv.layer(0)[0], 333), turned(kv.layer(1)[0], 333, 1e6), kv.layer(2)[0]]
    ):
        assert (
            np.abs(into.layer(layer)[0][:, span.start : span.stop] - want).max() < 2e-6 * np.abs(want).max()
        )


@pytest.mark.parametrize("held", [0, 32, 48, 100, 101, 120, 133, 260, 261, 300])
async def test_what_the_engine_holds_is_not_written(connect: Connect, held: int) -> None:
    """C06 with modular spans: nothing before ``start`` is touched, also in the middle of a block."""
    spec = make_spec(layers=2, dtype=KVDtype.FP32)
    client = await connect(spec)
    system, doc = tokens_of(1, 48), tokens_of(2, 160)
    kv = await stored(client, prompt_of(system, 11, doc))
    asked = prompt_of(system, 53, doc, 40)
    match = await client.match(asked, modular=True)
    (span,) = match.modular
    assert (match.hit_tokens, span.start, span.stop) == (48, 106, 250)  # the stored blocks 64..208
    into = poisoned(spec, len(asked))
    result = await client.fetch(match, into, start=held)
    assert untouched(into, 0, held)
    assert result.hit_tokens == (48 if held < 48 else 0)
    left = (span.clip(held, span.stop, 16),) if held < span.stop else ()
    assert result.modular == left
    assert all(landed(into, kv, part, 2e-6) for part in left)
    assert untouched(into, span.stop, len(asked))
    if held in (32, 120):
        part = await client.fetch(match, poisoned(spec, len(asked)), start=held, layers=range(1, 2))
        assert part.modular == left and part.wire_bytes < result.wire_bytes


async def test_buffers_without_room_take_what_fits(connect: Connect) -> None:
    spec = make_spec(**TINY)
    client = await connect(spec)
    a, b = tokens_of(1, 96), tokens_of(2, 96)
    await stored(client, a)
    kv = await stored(client, b, 5)
    match = await client.match(prompt_of(5, a, 5, b, 5), modular=True)
    for tokens, want in ((207, [96, 96]), (202, [96, 96]), (201, [96, 80]), (121, [96]), (20, []), (5, [])):
        into = poisoned(spec, tokens)
        spans = (await client.fetch(match, into)).modular
        assert [span.stop - span.start for span in spans] == want
        if tokens == 201:
            assert landed(into, kv, spans[1], 1e-3) and untouched(into, 186, 201)
    rows = ChunkBuffers([np.zeros((7, size), np.uint8) for size in client.chunk_nbytes])
    assert [span.blocks for span in (await client.fetch(match, rows)).modular] == [6, 1]


async def test_chunk_buffers_take_the_plan_row_by_row(connect: Connect) -> None:
    """Bytes as they were stored, not turned: whoever decodes them turns them."""
    spec = make_spec(layers=2)
    client = await connect(spec, codec="int8")
    system, doc = tokens_of(1, 48), tokens_of(2, 160)
    await stored(client, prompt_of(system, doc), 3)
    whole = ChunkBuffers(source := [np.zeros((13, size), np.uint8) for size in client.chunk_nbytes])
    assert (await client.fetch(prompt_of(system, doc, 1), whole)).hit_tokens == 208
    match = await client.match(prompt_of(system, 5, doc, 9), modular=True)
    rows = [np.zeros((16, size), np.uint8) for size in client.chunk_nbytes]
    chunks = ChunkBuffers(rows)
    result = await client.fetch(match, chunks)
    assert (result.hit_tokens, result.modular) == (48, match.modular)
    for got, want in zip(rows, source, strict=True):
        assert np.array_equal(got[:13], want) and not got[13:].any()
    assert chunks.exact == 3
    again = await client.store(prompt_of(system, 5, doc, 9), chunks)
    assert (again.outcome, again.reason) == ({"exists": 3}, APPROXIMATE)


async def test_a_transfer_tells_what_is_good_so_far(connect: Connect) -> None:
    spec = make_spec(layers=6)
    client = await connect(spec)
    system, doc = tokens_of(1, 48), tokens_of(2, 160)
    kv = await stored(client, prompt_of(system, doc))
    asked = prompt_of(system, 5, doc, 9)
    match = await client.match(asked, modular=True)
    into = poisoned(spec, len(asked))
    seen = []
    transfer = client.start_fetch(match, into, on_layer=lambda layer: seen.append(transfer.modular))
    for layer in range(6):
        assert await transfer.layer(layer)
        assert transfer.tokens == 48 and transfer.modular == match.modular
        span = match.modular[0]
        values = into.layer(layer)[1][:, span.start : span.stop]
        assert np.array_equal(values, kv.layer(layer)[1][:, span.source : span.source + 160])
    assert (await transfer).modular == match.modular == transfer.modular
    assert seen == [match.modular] * 6

    alone = await client.match(prompt_of(3, doc, 9), modular=True)
    transfer = client.start_fetch(alone, into)
    assert await transfer.layer(5) and (await transfer).hit_tokens == 0 and await transfer.layer(2)
    transfer = client.start_fetch(alone, into)
    transfer.cancel()
    assert (await transfer).modular == () and not await transfer.layer(0)


def test_the_blocking_face() -> None:
    """The same calls, options and values."""
    started, done, uris = threading.Event(), asyncio.Event(), []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with running_node() as node:
            uris.append(node.uris[0])
            started.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(10)
    try:
        spec = make_spec(layers=2)
        with hypercache.connect_sync(uris[0], model=spec, codec="raw", tenant=TenantKey.public()) as client:
            assert client.modular_refusal == ""
            doc = tokens_of(1, 160)
            kv = fill(KVBuffers.allocate(spec, 160), 1)
            assert client.store(doc, kv).stored == 10
            asked = prompt_of(5, doc, 3)
            assert client.match(asked).modular == ()
            match = client.match(asked, modular=True, segments=[(5, 165)], min_run=32)
            assert match.modular_tokens == 160
            into = poisoned(spec, len(asked))
            transfer = client.start_fetch(match, into)
            assert transfer.layer(1) and transfer.modular == match.modular
            assert transfer.result().modular == match.modular
            assert landed(into, kv, match.modular[0], 1e-3) and into.exact == 5
            assert client.reuse.found == 1
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(10)
        loop.close()


# --- never stored


async def test_approximate_bytes_are_never_stored(connect: Connect) -> None:
    """Stored under this prompt's exact names they would poison every later hit."""
    spec = make_spec(**TINY)
    client = await connect(spec)
    system, doc = tokens_of(1, 48), tokens_of(2, 160)
    await stored(client, prompt_of(system, doc))
    asked = prompt_of(system, 21, doc, 100)
    match = await client.match(asked, modular=True)
    into = KVBuffers.allocate(spec, len(asked) + 64)
    assert into.exact == len(asked) + 64
    await client.fetch(match, into)
    assert into.exact == match.modular[0].start == 69
    for kv in (into, into.window(0, len(asked))):
        result = await client.store(asked, kv, start=0)
        assert result.reason == APPROXIMATE
        assert sum(result.outcome.values()) == 4
    late = await client.store(asked, into, start=64)
    assert (late.blocks, late.reason) == (0, APPROXIMATE)
    assert (await client.match(asked)).hit_tokens == 64

    into.mark_exact(len(asked))  # the engine computed everything anew
    done = await client.store(asked, into, start=64)
    assert (done.stored, done.reason) == (len(asked) // 16 - 4, "")


async def test_a_store_that_follows_the_layers_is_clipped_too(connect: Connect) -> None:
    spec = make_spec(**{**TINY, "layers": 3})
    client = await connect(spec)
    doc = tokens_of(1, 160)
    await stored(client, doc)
    asked = prompt_of(40, doc, 40)
    into = KVBuffers.allocate(spec, len(asked))
    await client.fetch(await client.match(asked, modular=True), into)
    saving = client.start_store(asked, into, ready_layers=0)
    saving.layer_ready(2)
    result = await saving
    assert (result.stored, result.reason) == (2, APPROXIMATE)


async def test_buffers_are_exact_again_as_far_as_a_whole_prefix_came(connect: Connect) -> None:
    """An engine that reuses its buffers says itself what it computed; a fetch says what it brought."""
    spec = make_spec(**{**TINY, "layers": 2})
    client = await connect(spec)
    doc = tokens_of(1, 160)
    await stored(client, doc)
    asked = prompt_of(40, doc, 40)
    match = await client.match(asked, modular=True)
    into = KVBuffers.allocate(spec, len(asked))
    await client.fetch(match, into)
    assert into.exact == 40
    assert (await client.fetch(tokens_of(8, 100), into)).hit_tokens == 0 and into.exact == 40
    await client.fetch(prompt_of(doc, 80), into, layers=range(1))  # the other layer keeps what it has
    assert into.exact == 40
    await client.fetch(prompt_of(doc, 80), into, start=16)
    assert into.exact == 40
    assert (await client.fetch(prompt_of(doc, 80), into)).hit_tokens == 160 and into.exact == 160
    await client.evict(doc)
    lost = await client.fetch(match, into)
    assert (lost.modular, lost.reason, into.exact) == ((), "not stored", 160)
