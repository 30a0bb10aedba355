"""Hints and pins: what a client says of blocks decides which of them stay when room is needed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hypercache
from hypercache import Client, HintResult, KVBuffers, PinResult, TenantKey, UnpinResult, protocol
from hypercache.client.hashing import SPENT
from hypercache.errors import ConfigError, Unavailable
from hypercache.server.node import Node
from hypercache.server.session import Session

from .conftest import Connect, fill, make_spec, running_node, tokens_of
from .test_bad_input import D, meet
from .test_faults import OPTIONS, Server, client_of, until

BIG = make_spec(layers=4, heads=8)  # 128 KiB a block
BLOCKS = 80  # of a prompt: 10 MiB, of which a node of 64 MiB keeps five
TENANT = TenantKey.public()


def prompt(seed: int) -> Any:
    return tokens_of(seed, 16 * BLOCKS)


async def put(client: Client, *seeds: int) -> None:
    kv = KVBuffers.allocate(client.model, 16 * BLOCKS)
    for seed in seeds:
        assert (await client.store(prompt(seed), kv)).stored == BLOCKS


async def there(client: Client, seed: int) -> int:
    return sum(await client.contains(prompt(seed)))


def big_client(node: Node, **options: Any) -> Any:
    return hypercache.connect(node.uris[0], **{"model": BIG, "codec": "raw", "tenant": TENANT, **options})


@pytest.mark.parametrize(
    ("hints", "stays"),
    [
        ({}, 2),  # neither is hinted: the older one goes
        ({1: {"priority": 3}}, 1),
        ({2: {"priority": -3}}, 1),
        ({1: {"steps": 0}, 2: {"steps": 10_000}}, 1),
        ({1: {"steps": 10_000}, 2: {"steps": 0}}, 2),
    ],
)
async def test_hints_decide_who_goes_first(hints: dict[int, dict[str, int]], stays: int) -> None:
    async with running_node() as node, await big_client(node) as client:
        await put(client, 1)
        await asyncio.sleep(1.1)  # a use is counted once a second
        await put(client, 2)
        for seed, hint in hints.items():
            assert await client.hint(prompt(seed), **hint) == HintResult(BLOCKS)
        await asyncio.sleep(1.1)
        await put(client, 3, 4, 5)
        for seed in range(6, 12):
            await client.hint(prompt(3), priority=3)
            await put(client, seed)
            left = {seed: await there(client, seed) for seed in (1, 2)}
            if min(left.values()) < BLOCKS:
                break
        assert max(left, key=left.__getitem__) == stays, left


async def test_a_pinned_prompt_stays_and_outlives_its_client() -> None:
    async with running_node() as node, await big_client(node) as client:
        async with await big_client(node) as other:
            await put(other, 1)
            assert await other.pin(prompt(1)[: 16 * 20], 60) == PinResult(20, 60.0, 20)
        await put(client, *range(2, 12))
        assert (await client.contains(prompt(1)))[:20] == [True] * 20
        assert await there(client, 2) == 0
        assert await client.unpin(prompt(1)) == UnpinResult(20)
        assert await client.unpin(prompt(1)) == UnpinResult(0)
        await put(client, *range(12, 22))
        assert await there(client, 1) == 0


async def test_a_pin_ends_with_its_time() -> None:
    async with running_node() as node, await big_client(node) as client:
        await put(client, 1)
        granted = await client.pin(prompt(1)[: 16 * 20], 0.25)
        assert granted == PinResult(20, 0.25, 20)
        await asyncio.sleep(0.6)  # the sweep runs each 0.1 s
        await put(client, *range(2, 12))
        assert await there(client, 1) == 0


async def test_the_server_grants_as_much_as_its_limits_allow() -> None:
    async with running_node() as node, await big_client(node) as client:
        await put(client, 1, 2, 3)
        granted = await client.pin(prompt(1)[: 16 * 8], 1e6)
        assert (granted.blocks, granted.seconds) == (8, node.config.pin_limit_s)
        grants = [await client.pin(prompt(seed), 60) for seed in (1, 2, 3)]
        assert all(grant.stored == BLOCKS for grant in grants)
        assert 0 < sum(grant.blocks for grant in grants) < BLOCKS
        assert all("pin_share" in grant.reason for grant in grants)
        assert grants[-1] == PinResult(0, 0.0, BLOCKS, grants[-1].reason)


async def test_pinned_blocks_go_by_name(connect: Connect) -> None:
    client = await connect()
    tokens = tokens_of(1, 65)
    kv = fill(KVBuffers.allocate(client.model, 65), 1)
    for remove in (client.evict, lambda _: client.clear()):
        assert (await client.store(tokens, kv)).stored == 4
        assert (await client.pin(tokens, 60)).blocks == 4
        assert await remove(tokens) == 4
        assert (await client.match(tokens)).hit_blocks == 0
        assert await client.pin(tokens, 60) == PinResult(0, 0.0, 0, "not stored")
        assert await client.hint(tokens, steps=1) == HintResult(0, "not stored")


async def test_only_what_is_stored_is_told_of(connect: Connect, node: Node) -> None:
    client = await connect()
    tokens = tokens_of(1, 96)
    await client.store(tokens[:65], fill(KVBuffers.allocate(client.model, 65), 1))
    assert await client.hint(tokens, steps=3, priority=1) == HintResult(4, "not stored beyond this")
    assert await client.pin(tokens, 60) == PinResult(4, 60.0, 4, "not stored beyond this")
    match = await client.match(tokens)
    for asked in (client.prompt(tokens), match):
        assert (await client.hint(asked)).blocks == 4
    for short in ([], tokens[:15]):
        assert await client.hint(short) == HintResult(0, "below block size")
        assert await client.pin(short, 1) == PinResult(0, 0.0, 0, "below block size")
        assert await client.unpin(short) == UnpinResult(0, "below block size")
    other = await connect(tenant=TenantKey.from_secret(b"a secret of sixteen bytes", "acme"))
    assert await other.unpin(tokens) == UnpinResult(0)  # of another tenant: not theirs to end
    assert await client.unpin(tokens) == UnpinResult(4)
    assert node.status()["counters"]['hypercache_requests_total{op="hint",outcome="ok"}'] == 6


async def test_a_long_prompt_takes_several_hints(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_HINT_BLOCKS", 3)
    told: list[tuple[int, int]] = []
    answered = Session._hint
    monkeypatch.setattr(
        Session,
        "_hint",
        lambda self, channel, number, hint: (
            told.append((len(hint.digests) // 16, hint.pin_ms)),
            answered(self, channel, number, hint),
        ),
    )
    client = await connect()
    tokens = tokens_of(1, 16 * 8)
    kv = fill(KVBuffers.allocate(client.model, len(tokens)), 1)
    await client.store(tokens, kv)
    assert await client.hint(tokens, steps=2) == HintResult(8)
    assert (await client.pin(tokens, 1.5)).blocks == 8
    assert told == [(3, 0), (3, 0), (2, 0), (8, 1500)]
    await client.evict(client.prompt(tokens[: 16 * 5]))
    await client.store(tokens[: 16 * 5], kv)
    assert await client.hint(tokens) == HintResult(5, "not stored beyond this")


Misuse = Callable[[Client], Any]
MISUSES: dict[str, tuple[str, Misuse]] = {
    "steps below 0": ("steps=-1 must be a whole number, 0..10000", lambda c: c.hint([1], steps=-1)),
    "steps too far": ("steps=10001", lambda c: c.hint([1], steps=10_001)),
    "half a step": ("steps=0.5", lambda c: c.hint([1], steps=0.5)),
    "no step": ("steps=True", lambda c: c.hint([1], steps=True)),
    "priority too low": ("priority=-4 must be a whole number, -3..3", lambda c: c.hint([1], priority=-4)),
    "priority too high": ("priority=4", lambda c: c.hint([1], priority=4)),
    "priority in words": ("priority='high'", lambda c: c.hint([1], priority="high")),
    "no time": ("seconds=0 must be a number, above 0 and finite; unpin ends", lambda c: c.pin([1], 0)),
    "time before now": ("seconds=-1", lambda c: c.pin([1], -1)),
    "for ever": ("seconds=inf", lambda c: c.pin([1], math.inf)),
    "not a number": ("seconds=nan", lambda c: c.pin([1], math.nan)),
    "time in words": ("seconds='1 h'", lambda c: c.pin([1], "1 h")),
}


@pytest.mark.parametrize("what", MISUSES)
async def test_misuse_is_named(connect: Connect, what: str) -> None:
    message, misuse = MISUSES[what]
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        await misuse(await connect())


async def test_numbers_of_numpy_are_numbers(connect: Connect) -> None:
    client = await connect()
    tokens = tokens_of(1, 33)
    await client.store(tokens, fill(KVBuffers.allocate(client.model, 33), 1))
    assert await client.hint(tokens, steps=np.int64(1), priority=np.int8(-3)) == HintResult(2)
    assert await client.pin(tokens, np.float32(0.5)) == PinResult(2, 0.5, 2)


async def test_a_dead_server_costs_a_reason_and_no_exception() -> None:
    server = await asyncio.to_thread(Server)
    tokens = tokens_of(1, 65)
    async with client_of(server.uri, deadline=2.0) as client:
        await client.store(tokens, fill(KVBuffers.allocate(client.model, 65), 1))
        assert (await client.pin(tokens, 60)).blocks == 4
        server.stop()

        async def noticed() -> bool:
            return client.state == "down"

        await until(noticed)
        hint, pin, unpin = await client.hint(tokens), await client.pin(tokens, 60), await client.unpin(tokens)
        assert (hint.blocks, pin.blocks, pin.seconds, pin.stored, unpin.blocks) == (0, 0, 0.0, 0, 0)
        for result in (hint, pin, unpin):
            assert "127.0.0.1" in result.reason
        with pytest.raises(Unavailable):  # as with evict, what must have happened is another matter
            await client.clear()


async def test_a_call_without_time_left_is_not_made(connect: Connect) -> None:
    client = await connect()
    assert (await client.hint(tokens_of(1, 65), deadline=1e-9)).reason == SPENT


def test_the_blocking_face_has_them_too() -> None:
    server = Server()
    try:
        with hypercache.connect_sync(server.uri, **OPTIONS) as client:
            tokens = tokens_of(1, 65)
            client.store(tokens, fill(KVBuffers.allocate(client.model, 65), 1))
            assert client.hint(tokens, steps=5, priority=-1, deadline=5.0) == HintResult(4)
            assert client.pin(tokens, 2, deadline=5.0) == PinResult(4, 2.0, 4)
            assert client.unpin(tokens, deadline=5.0) == UnpinResult(4)
    finally:
        server.stop()


BAD: dict[str, protocol.Hint] = {
    "steps": protocol.Hint(0, D[0], 10_001),
    "fewer than no steps": protocol.Hint(0, D[0], -2),
    "priority": protocol.Hint(0, D[0], 0, 4),
    "pin": protocol.Hint(0, D[0], 0, 0, -2),
    "no digests": protocol.Hint(0, b"", 1),
    "half a digest": protocol.Hint(0, D[0][:7], 1),
    "more blocks than it may be about": protocol.Hint(0, D[0] * (protocol.MAX_HINT_BLOCKS + 1), 1),
    "likewise, and a pin": protocol.Hint(0, D[0] * (protocol.MAX_HINT_BLOCKS + 1), -1, 1, 1),
    "steps of 65 bits": protocol.Hint(0, D[0], 1 << 63),
}


@pytest.mark.parametrize("what", BAD)
async def test_a_hint_out_of_range_breaks_the_protocol(node: Node, what: str) -> None:
    peer = await meet(node)
    peer.send(BAD[what])
    assert (await peer.answer()).code == "malformed"
    await peer.closed()


async def test_a_hint_of_all_that_there_may_be_is_answered(node: Node) -> None:
    peer = await meet(node)
    peer.send(protocol.Hint(0, D[0] * protocol.MAX_HINT_BLOCKS, 1, 1, 1))
    assert await peer.answer() == protocol.Hinted(0, 0, 0)
    peer.send(protocol.Hint(0, D[0] * protocol.MAX_BLOCKS, pin_ms=(1 << 63) - 1))
    assert await peer.answer() == protocol.Hinted(0, 0, 0)
    peer.send(protocol.Hint(7, D[0]))
    assert (await peer.answer()).code == "handle"
