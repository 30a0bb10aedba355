"""What a match may say: block boundaries (class C), identity (class A), and why there is none (class B)."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from hypercache import KVBuffers, MediaSpan, TenantKey, protocol
from hypercache.errors import TokenError
from hypercache.model import Adapter, KVDtype

from .conftest import Connect, fill, make_spec, poisoned, same, tokens_of


@pytest.mark.parametrize("count", [16, 32, 64, 128, 1024])
async def test_one_token_is_always_left_to_compute(connect: Connect, count: int) -> None:
    """C01: everything cached, yet the hit ends a block earlier; a longer prompt hits all of it."""
    client = await connect(make_spec(layers=1, heads=1))
    tokens = tokens_of(count, count)
    kv = fill(KVBuffers.allocate(client.model, count), 1)
    assert (await client.store(tokens, kv)).stored == count // 16
    assert (await client.match(tokens)).hit_tokens == count - 16
    assert (await client.match(np.append(tokens, 7))).hit_tokens == count
    result = await client.fetch(tokens, poisoned(client.model, count))
    assert result.hit_tokens == count - 16


async def test_hits_are_whole_stored_blocks_for_every_length(connect: Connect) -> None:
    """C02, C03, C04: 0 <= hit <= n-1, a multiple of 16, and a boundary that was stored."""
    client = await connect(make_spec(layers=1, heads=1))
    tokens = tokens_of(1, 201)
    kv = fill(KVBuffers.allocate(client.model, 201), 1)
    assert (await client.store(tokens[:100], kv)).stored == 6
    for n in range(202):
        match = await client.match(tokens[:n])
        assert match.hit_tokens == min(96, max(0, (n - 1) // 16 * 16)), n
        assert match.prompt_tokens == n


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 63, 64, 65])
async def test_short_prompts_go_through_every_call(connect: Connect, block_size: int, count: int) -> None:
    """C04, C05, L05: no exception where there is no full block, and the reason is said."""
    client = await connect(make_spec(layers=2), block_size=block_size)
    tokens = tokens_of(2, count)
    kv = fill(KVBuffers.allocate(client.model, count), 1)
    stored = await client.store(tokens, kv)
    assert stored.stored == count // block_size
    match = await client.match(tokens)
    assert match.hit_tokens == max(0, (count - 1) // block_size * block_size)
    if count == 0:
        assert match.reason == "no tokens"
    elif count <= block_size:
        assert match.reason == "below block size"
    result = await client.fetch(match, poisoned(client.model, count))
    assert result.hit_tokens == match.hit_tokens
    assert await client.contains(tokens) == [True] * (count // block_size)
    assert await client.evict(tokens) == count // block_size


async def test_no_tokens_is_a_miss_and_never_shared(connect: Connect) -> None:
    """A05: embeddings without token ids hit nothing and store nothing."""
    client = await connect()
    kv = fill(KVBuffers.allocate(client.model, 64), 1)
    for nothing in (None, [], (), np.array([], np.int64)):
        assert (await client.match(nothing)).hit_tokens == 0
        assert (await client.store(nothing, kv)).blocks == 0
        assert (await client.fetch(nothing, kv)).hit_tokens == 0
    for wrong in ([1.5], [True], [-1], [2**32], [[1, 2]], "text"):
        with pytest.raises(TokenError):
            await client.match(wrong)


async def test_a_hole_ends_the_run(connect: Connect) -> None:
    """C08: what follows an evicted block is no hit, and does not stay behind."""
    client = await connect()
    tokens = tokens_of(3, 49)
    kv = fill(KVBuffers.allocate(client.model, 49), 1)
    await client.store(tokens, kv)
    assert (await client.match(tokens)).hit_blocks == 3
    prompt = client.prompt(tokens)
    tail = type(prompt)(prompt.tokens, prompt.block_size, prompt.digests[1:2])
    assert await client.evict(tail) == 2
    assert (await client.match(tokens)).hit_blocks == 1
    assert await client.evict(tokens) == 1
    assert (await client.match(tokens)).hit_blocks == 0


async def test_another_identity_is_a_miss(connect: Connect) -> None:
    """A01, A02, A06, A08, C10: adapter, weights, dtype, block size, rank, codec, salt, tenant, RoPE."""
    digest = hashlib.sha256(b"adapter A").digest()
    adapted = make_spec(adapter=Adapter("x", digest))
    home = await connect(adapted)
    tokens = tokens_of(4, 65)
    await home.store(tokens, fill(KVBuffers.allocate(adapted, 65), 1))
    assert (await home.match(tokens)).hit_blocks == 4
    others = [
        await connect(make_spec()),
        await connect(make_spec(adapter=Adapter("x", hashlib.sha256(b"adapter B").digest()))),
        await connect(make_spec(adapter=Adapter("x", digest), weights=b"trained on")),
        await connect(make_spec(adapter=Adapter("x", digest), dtype=KVDtype.BF16)),
        await connect(make_spec(adapter=Adapter("x", digest), tp_size=2)),
        await connect(adapted, codec="int8"),
        await connect(adapted, salt="S"),
        await connect(adapted, block_size=64),
        await connect(adapted, tenant=TenantKey.from_secret(b"a secret of sixteen bytes", "acme")),
    ]
    for other in others:
        match = await other.match(tokens)
        assert match.hit_blocks == 0, other
        assert match.reason.startswith("not stored")
        assert (await other.fetch(tokens, KVBuffers.allocate(other.model, 65))).hit_tokens == 0
    assert (await (await connect(adapted)).match(tokens)).hit_blocks == 4


async def test_an_empty_namespace_says_which_others_there_are(connect: Connect) -> None:
    """B05, C10: not a silent 0 %, but the labels of this tenant's other namespaces, and nobody else's."""
    first = await connect(make_spec())
    await first.store(tokens_of(5, 64), fill(KVBuffers.allocate(first.model, 64), 1))
    second = await connect(make_spec(), block_size=64)
    reason = (await second.match(tokens_of(5, 65))).reason
    assert "nothing under (test " in reason and "block=64" in reason and "block=16" in reason
    stranger = await connect(
        make_spec(), tenant=TenantKey.from_secret(b"another secret of enough bytes", "b")
    )
    reason = (await stranger.match(tokens_of(5, 65))).reason
    assert "nothing of tenant 'b'" in reason and "block=" not in reason


async def test_same_weights_under_other_names_are_shared(connect: Connect) -> None:
    """B05: a name or path is a label."""
    here = make_spec()
    there = type(here)(weights=here.weights, groups=here.groups, name="/other/host/path")
    a, b = await connect(here), await connect(there)
    tokens = tokens_of(6, 33)
    await a.store(tokens, fill(KVBuffers.allocate(here, 33), 1))
    assert (await b.match(tokens)).hit_blocks == 2


async def test_pictures_are_keyed_by_content(connect: Connect) -> None:
    """A09: blocks before the picture are shared, blocks it touches and all after are not."""
    client = await connect()
    tokens = tokens_of(7, 401)
    spans = [[MediaSpan(70, 326, hashlib.sha256(bytes([i])).digest())] for i in range(2)]
    kv = fill(KVBuffers.allocate(client.model, 401), 1)
    await client.store(client.prompt(tokens, media=spans[0]), kv)
    assert (await client.match(client.prompt(tokens, media=spans[0]))).hit_blocks == 25
    assert (await client.match(client.prompt(tokens, media=spans[1]))).hit_blocks == 70 // 16
    assert (await client.match(tokens)).hit_blocks == 70 // 16


async def test_clear_takes_everything_and_what_is_under_way(connect: Connect) -> None:
    """A07: a store that began before the clear leaves nothing readable."""
    spec = make_spec()
    client, other = await connect(spec), await connect(spec, codec="int8")
    tokens = tokens_of(8, 65)
    kv = fill(KVBuffers.allocate(spec, 65), 1)
    await client.store(tokens, kv)
    await other.store(tokens, kv)
    late = tokens_of(9, 65)
    saving = client.start_store(late, kv, ready_layers=2)
    assert (await client.match(late)).hit_blocks == 0
    assert await client.clear() == 4
    saving.layer_ready(3)
    assert (await saving).stored == 0
    assert (await client.match(tokens)).hit_blocks == 0
    assert (await client.match(late)).hit_blocks == 0
    assert (await other.match(tokens)).hit_blocks == 4
    assert (await client.store(tokens, kv)).stored == 4
    into = poisoned(spec, 65)
    assert (await client.fetch(tokens, into)).hit_tokens == 64
    assert same(kv, into, 0, 64)


async def test_prompts_beyond_the_limit_of_a_request(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call turns a very long prompt into a protocol violation."""
    monkeypatch.setattr(protocol, "MAX_BLOCKS", 8)
    client = await connect(make_spec(layers=1, heads=1, dim=8))
    tokens = tokens_of(10, 16 * 20 + 1)
    kv = fill(KVBuffers.allocate(client.model, len(tokens)), 1)
    monkeypatch.setattr(protocol, "MAX_STORE_BLOCKS", 8)
    assert (await client.store(tokens, kv)).stored == 20
    assert (await client.match(tokens)).hit_blocks == 8
    assert await client.contains(tokens) == [True] * 8 + [False] * 12
    assert (await client.fetch(tokens, poisoned(client.model, len(tokens)))).hit_tokens == 8 * 16
    assert await client.evict(tokens) == 20
    assert client.state == "ready"
