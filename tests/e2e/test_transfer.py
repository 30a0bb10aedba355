"""Store in one client, fetch in another: every shape, dtype and codec, over every fabric."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import hypercache
from hypercache import ChunkBuffers, HyperCacheError, KVBuffers, StoreResult, TenantKey, protocol
from hypercache.errors import ConfigError, SpecError
from hypercache.model import KVDtype, KVLayout, LayerGroup, ModelSpec, Part, RopeSpec

from .conftest import (
    ROPE,
    Connect,
    Node,
    fill,
    floats,
    make_spec,
    poisoned,
    running_node,
    same,
    tokens_of,
    untouched,
)

W = bytes(range(32))


def mla_spec() -> ModelSpec:
    layout = KVLayout("mla", 1, (Part("latent", 512), Part("rope", 64)), KVDtype.BF16)
    return ModelSpec(weights=W, groups=(LayerGroup((0, 1, 2), layout, ROPE),), name="mla")


def mixed_spec() -> ModelSpec:
    """Layers of two shapes in turn, as in models with local and global attention (J02)."""
    local = KVLayout("split", 16, (Part("k", 256), Part("v", 256)), KVDtype.BF16)
    wide = KVLayout("split", 4, (Part("k", 512), Part("v", 512)), KVDtype.BF16)
    return ModelSpec(
        weights=W,
        groups=(
            LayerGroup((0, 2, 4), local, RopeSpec("default", 1e4, 256), window=512),
            LayerGroup((1, 3, 5), wide, RopeSpec("default", 1e6, 512)),
        ),
        name="mixed",
    )


SHAPES = {
    "gqa-fp16": make_spec(),
    "gqa-bf16": make_spec(dtype=KVDtype.BF16),
    "mha-fp32": make_spec(layers=2, heads=8, dtype=KVDtype.FP32),
    "mqa": make_spec(layers=1, heads=1, dim=128),
    "k-not-v (J01)": make_spec(dim=192, v_dim=128),
    "mla (J01)": mla_spec(),
    "mixed (J02)": mixed_spec(),
    "28 layers (J03)": make_spec(layers=28, heads=1),
    "93 layers (J03)": make_spec(layers=93, heads=1),
    "40 heads (J03)": make_spec(layers=2, heads=40),
    "fp8 engine": make_spec(dtype=KVDtype.FP8_E4M3, kv_scales=((0.5, 0.25),) * 4),
    "rank 1 of 2": make_spec(heads=4, tp_rank=1, tp_size=2),
}


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("shape", SHAPES)
async def test_raw_round_trip_is_bit_equal(connect: Connect, shape: str, block_size: int) -> None:
    spec = SHAPES[shape]
    writer, reader = await connect(spec, block_size=block_size), await connect(spec, block_size=block_size)
    tokens = tokens_of(1, 3 * block_size + 5)
    kv = fill(KVBuffers.allocate(spec, len(tokens)), 7)
    stored = await writer.store(tokens, kv)
    assert stored.outcome == {"stored": 3}
    match = await reader.match(tokens)
    assert (match.hit_tokens, match.reason) == (3 * block_size, "")
    into = poisoned(spec, len(tokens))
    order: list[int] = []
    result = await reader.fetch(match, into, on_layer=order.append)
    assert (result.hit_tokens, result.reason) == (3 * block_size, "")
    assert order == list(range(spec.num_layers))
    assert same(kv, into, 0, 3 * block_size)
    assert untouched(into, 3 * block_size, len(tokens))


@pytest.mark.parametrize("codec", ["fp8", "int8", "int4", "int4-plain"])
@pytest.mark.parametrize("dtype", [KVDtype.BF16, KVDtype.FP16, KVDtype.FP32])
async def test_lossy_codecs_stay_within_their_bounds(connect: Connect, codec: str, dtype: KVDtype) -> None:
    spec = make_spec(dim=128, dtype=dtype)
    writer, reader = await connect(spec, codec=codec), await connect(spec, codec=codec)
    tokens = tokens_of(2, 65)
    kv = fill(KVBuffers.allocate(spec, 65), 3)
    assert (await writer.store(tokens, kv)).stored == 4
    into = poisoned(spec, 64)
    result = await reader.fetch(tokens, into)
    assert result.hit_tokens == 64
    ratio = spec.token_nbytes() * 64 / result.wire_bytes
    assert ratio > {"fp8": 1.9, "int8": 1.9, "int4": 3.8, "int4-plain": 3.8}[codec] * dtype.itemsize / 2
    for layer in range(spec.num_layers):
        for true, got in zip(kv.layer(layer), into.layer(layer), strict=True):
            a, b = floats(true[:, :64]), floats(got)
            cosine = float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))
            assert cosine > {"fp8": 0.999, "int8": 0.9999, "int4": 0.99, "int4-plain": 0.99}[codec]


@pytest.mark.parametrize("start", [0, 16, 40, 48, 63])
async def test_only_what_the_engine_lacks_is_written(connect: Connect, start: int) -> None:
    """C06: the load range is [start, hit), also when start is inside a block."""
    spec = make_spec()
    client = await connect(spec)
    tokens = tokens_of(3, 100)
    kv = fill(KVBuffers.allocate(spec, 100), 5)
    assert (await client.store(tokens, kv)).stored == 6
    into = poisoned(spec, 100)
    result = await client.fetch(tokens, into, start=start)
    assert (result.start, result.hit_tokens) == (start, 96)
    assert untouched(into, 0, start)
    assert same(kv, into, start, 96)
    assert untouched(into, 96, 100)


async def test_a_range_of_layers(connect: Connect) -> None:
    spec = make_spec(layers=6)
    client = await connect(spec)
    tokens = tokens_of(4, 33)
    kv = fill(KVBuffers.allocate(spec, 33), 1)
    await client.store(tokens, kv)
    into = poisoned(spec, 33)
    result = await client.fetch(tokens, into, layers=range(2, 5))
    assert result.hit_tokens == 32
    for layer in range(6):
        for a, b in zip(kv.layer(layer), into.layer(layer), strict=True):
            if layer in range(2, 5):
                assert np.array_equal(a[:, :32], b[:, :32])
            else:
                assert bool((b.view(np.uint8) == 0xA5).all())
    for layers in (range(0), range(5, 7), range(0, 6, 2), range(-1, 2)):
        with pytest.raises(SpecError, match="layers"):
            await client.fetch(tokens, into, layers=layers)


async def test_layers_can_be_waited_for_one_by_one(connect: Connect) -> None:
    spec = make_spec(layers=8)
    client = await connect(spec)
    tokens = tokens_of(5, 129)
    kv = fill(KVBuffers.allocate(spec, 129), 1)
    await client.store(tokens, kv)
    into = poisoned(spec, 129)
    transfer = client.start_fetch(tokens, into)
    for layer in range(8):
        assert await transfer.layer(layer)
        for a, b in zip(kv.layer(layer), into.layer(layer), strict=True):
            assert np.array_equal(a[:, :128], b[:, :128])
    assert (await transfer).hit_tokens == 128
    assert await transfer.layer(3)
    with pytest.raises(SpecError, match="layer 8"):
        await transfer.layer(8)
    missing = client.start_fetch(tokens_of(6, 129), into)
    assert not await missing.layer(0)
    assert (await missing).reason == "not stored"


async def test_layerwise_store_is_invisible_until_its_last_layer(connect: Connect) -> None:
    """E02 seen from outside: half of the layers is nothing."""
    spec = make_spec(layers=5)
    writer, reader = await connect(spec), await connect(spec)
    tokens = tokens_of(7, 80)
    kv = fill(KVBuffers.allocate(spec, 80), 2)
    saving = writer.start_store(tokens, kv, ready_layers=0)
    for layer in range(5):
        assert (await reader.match(tokens)).hit_blocks == 0
        saving.layer_ready(layer)
        await asyncio.sleep(0.02)
    assert (await saving).outcome == {"stored": 5}
    assert (await reader.match(tokens)).hit_blocks == 4
    assert await reader.contains(tokens) == [True] * 5


async def test_growing_prompt_stores_only_its_new_blocks(connect: Connect) -> None:
    spec = make_spec()
    client = await connect(spec)
    tokens = tokens_of(8, 160)
    kv = fill(KVBuffers.allocate(spec, 160), 2)
    assert (await client.store(tokens[:64], kv)).stored == 4
    assert (await client.store(tokens, kv)).outcome == {"exists": 4, "stored": 6}
    match = await client.match(np.append(tokens, [1]))
    assert match.hit_tokens == 160
    again = await client.store(tokens, kv, start=128)
    assert again.outcome == {"exists": 2}
    assert again.wire_bytes <= 2 * 16 * spec.token_nbytes()
    with pytest.raises(SpecError, match="multiple of the block size"):
        await client.store(tokens, kv, start=17)
    orphan = await client.store(tokens_of(9, 64), kv, start=32)
    assert orphan.outcome == {"orphan": 2}


async def test_chunk_buffers_carry_encoded_bytes(connect: Connect) -> None:
    spec = make_spec(layers=3)
    client = await connect(spec, codec="int8")
    rng = np.random.default_rng(0)
    tokens = tokens_of(10, 65)
    kv = fill(KVBuffers.allocate(spec, 65), 4)
    await client.store(tokens, kv)
    rows = ChunkBuffers([np.zeros((4, size), np.uint8) for size in client.chunk_nbytes])
    assert (await client.fetch(tokens, rows)).hit_tokens == 64
    other = tokens_of(11, 65)
    assert (await client.store(other, rows)).stored == 4
    a, b = poisoned(spec, 64), poisoned(spec, 64)
    await client.fetch(tokens, a)
    await client.fetch(other, b)
    assert same(a, b, 0, 64)
    with pytest.raises(SpecError, match="bytes a chunk"):
        await client.store(other, ChunkBuffers([rng.integers(0, 9, (4, 8), np.uint8)] * 3))


async def test_buffers_that_do_not_fit_are_refused_before_a_byte_moves(connect: Connect, node: Node) -> None:
    """Wrong shape, layer count, dtype, model: the error names both sides (J04, J05)."""
    client = await connect(make_spec())
    tokens = tokens_of(12, 64)
    for other in (
        make_spec(layers=3),
        make_spec(heads=4),
        make_spec(dim=128),
        make_spec(dtype=KVDtype.BF16),
        make_spec(weights=b"other weights, same name"),
    ):
        with pytest.raises(SpecError, match="client to 'test'"):
            await client.store(tokens, KVBuffers.allocate(other, 64))
        with pytest.raises(SpecError, match="client to 'test'"):
            await client.fetch(tokens, KVBuffers.allocate(other, 64))
    assert not any(await client.contains(tokens))
    with pytest.raises(SpecError, match="codec 'int8'"):
        await connect(make_spec(dtype=KVDtype.FP8_E4M3, kv_scales=((1.0, 1.0),) * 4), codec="int8")
    with pytest.raises(ConfigError, match="int9"):
        await connect(codec="int9")
    with pytest.raises(HyperCacheError, match=r"16, 64|16 or 64"):
        await connect(block_size=32)
    for deadline in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="deadline"):
            await client.match(tokens, deadline=deadline)


async def test_short_buffers_take_what_fits(connect: Connect) -> None:
    client = await connect()
    tokens = tokens_of(13, 129)
    kv = fill(KVBuffers.allocate(client.model, 129), 4)
    await client.store(tokens, kv)
    into = poisoned(client.model, 40)
    assert (await client.fetch(tokens, into)).hit_tokens == 32
    assert same(kv, into, 0, 32) and untouched(into, 32, 40)


async def test_many_transfers_at_once_keep_their_bytes_apart(connect: Connect) -> None:
    """L09, E11: self-identifying payloads, readers and writers mixed."""
    spec = make_spec(layers=3)
    clients = [await connect(spec) for _ in range(4)]
    prompts = [tokens_of(100 + i, 81) for i in range(16)]
    truth = [fill(KVBuffers.allocate(spec, 81), i) for i in range(16)]

    async def one(client: object, i: int) -> None:
        await client.store(prompts[i], truth[i])  # type: ignore[attr-defined]
        into = poisoned(spec, 81)
        result = await client.fetch(prompts[i], into)  # type: ignore[attr-defined]
        assert same(truth[i], into, 0, result.hit_tokens)
        assert untouched(into, max(result.hit_tokens, 80), 81)

    await asyncio.gather(*(one(clients[(i + r) % 4], i) for r in range(3) for i in range(16)))
    for i in range(16):
        assert (await clients[0].match(prompts[i])).hit_blocks == 5


async def test_read_only_destinations_are_refused(connect: Connect) -> None:
    client = await connect()
    tokens = tokens_of(20, 65)
    kv = fill(KVBuffers.allocate(client.model, 65), 1)
    assert (await client.store(tokens, kv)).stored == 4
    for layer in range(4):
        for part in kv.layer(layer):
            part.flags.writeable = False
    assert (await client.store(tokens, kv)).outcome == {"exists": 4}  # reading is fine
    with pytest.raises(SpecError, match="layer 0 are read-only"):
        await client.fetch(tokens, kv)
    rows = [np.zeros((4, size), np.uint8) for size in client.chunk_nbytes]
    rows[2].flags.writeable = False
    with pytest.raises(SpecError, match="layer 2 is read-only"):
        await client.fetch(tokens, ChunkBuffers(rows))


async def test_what_no_encoder_wrote_is_a_miss(connect: Connect) -> None:
    """J09, E07: a bad scale behind a right checksum ends the hit before its block."""
    spec = make_spec(layers=3)
    client = await connect(spec, codec="int8")
    good = tokens_of(21, 81)
    kv = fill(KVBuffers.allocate(spec, 81), 1)
    await client.store(good, kv)
    rows = [np.zeros((5, size), np.uint8) for size in client.chunk_nbytes]
    assert (await client.fetch(good, ChunkBuffers(rows))).hit_tokens == 80
    rows[1][3, :2] = (0x00, 0x7E)  # the first scale of block 3: NaN
    bad = tokens_of(22, 81)
    assert (await client.store(bad, ChunkBuffers(rows))).stored == 5
    into = poisoned(spec, 81)
    result = await client.fetch(bad, into)
    assert result.hit_tokens == 0 and "cannot be decoded" in result.reason and "scale nan" in result.reason
    assert (await client.match(good)).hit_blocks == 5


async def test_an_encoder_that_fails_ends_its_store_and_no_other(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J11: the store says why, the channel and its other requests live on."""
    client = await connect(make_spec(layers=6))
    a, b = tokens_of(23, 65), tokens_of(24, 65)
    kv = fill(KVBuffers.allocate(client.model, 65), 1)
    other = client.start_store(b, kv, ready_layers=3)
    await asyncio.sleep(0.02)
    with monkeypatch.context() as patch:

        def fail(*args: object) -> None:
            raise SpecError("no")

        patch.setattr(client._coder.codec, "encode", fail)
        result = await client.store(a, kv)
    assert (result.outcome, result.reason) == ({"aborted": 4}, "cannot be encoded: no")
    other.layer_ready(5)
    assert (await other).stored == 4
    assert not any(await client.contains(a))
    assert client._coder.outgoing._out == 0


async def test_nothing_is_remembered_of_what_ended(connect: Connect) -> None:
    client = await connect()
    tokens = tokens_of(25, 65)
    kv = fill(KVBuffers.allocate(client.model, 65), 1)
    for _ in range(20):
        await client.store(tokens, kv)
        await client.match(tokens)
        await client.fetch(tokens, kv)
        client.start_fetch(tokens, kv).cancel()
        client.start_store(tokens, kv).cancel()
        await client.contains(tokens)
        await client.evict(tokens)
    assert client._link._operations == {}
    assert (client._coder.incoming._out, client._coder.outgoing._out) == (0, 0)


async def test_long_prompts_are_stored_in_several_requests(connect: Connect, node: Node) -> None:
    """M07: reserving for a long prompt must not hold up others; what was split comes out as one."""
    spec = make_spec(layers=2, heads=1, dim=8)
    client = await connect(spec)
    blocks = 2 * protocol.MAX_STORE_BLOCKS + 5
    tokens = tokens_of(26, blocks * 16 + 1)
    kv = fill(KVBuffers.allocate(spec, len(tokens)), 1)
    saving = client.start_store(tokens, kv, ready_layers=1)
    await asyncio.sleep(0.05)
    saving.layer_ready(1)
    assert await saving == StoreResult(blocks, {"stored": blocks}, blocks * 16 * spec.token_nbytes())
    into = poisoned(spec, len(tokens))
    assert (await client.fetch(tokens, into)).hit_tokens == blocks * 16
    assert same(kv, into, 0, blocks * 16)
    assert (await client.store(tokens, kv)).outcome == {"exists": blocks}
    other = tokens_of(27, blocks * 16)
    saving = client.start_store(other, kv, ready_layers=1)
    saving.cancel()
    assert await saving == StoreResult(blocks, {"aborted": blocks}, 0, "cancelled")
    assert node.status()["store"]["blocks"] == blocks


async def test_servers_that_take_small_frames_only() -> None:
    """The frame limit of the server binds both ways: more frames, never a lost connection."""
    spec = make_spec(layers=3)  # 4 KiB a chunk: 64 KiB take sixteen
    async with running_node(max_frame_payload=64 << 10) as node:
        client = await hypercache.connect(node.uris[0], model=spec, codec="raw", tenant=TenantKey.public())
        tokens = tokens_of(28, 16 * 40 + 1)
        kv = fill(KVBuffers.allocate(spec, len(tokens)), 1)
        assert (await client.store(tokens, kv)).outcome == {"stored": 40}
        into = poisoned(spec, len(tokens))
        result = await client.fetch(tokens, into)
        assert (result.hit_tokens, result.reason) == (640, "")
        assert same(kv, into, 0, 640)
        await client.close()
