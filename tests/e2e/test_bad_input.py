"""Peers that speak nonsense, politely framed: typed refusals, closed channels, counters, others served."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hypercache
from fabrics import Channel, Frame, Outgoing, Sink, fabric_for
from fabrics.errors import ChannelClosed
from hypercache import KVBuffers, TenantKey, protocol
from hypercache.checksum import checksum
from hypercache.errors import HyperCacheError, SpecError, StoreFull, TooLarge
from hypercache.keys import HASH_VERSION
from hypercache.protocol import Op

from .conftest import Node, fill, make_spec, poisoned, running_node, same, tokens_of, untouched

SIZES = (96, 64)  # chunk bytes of the raw peer's two layers
D = [bytes([i]) * 16 for i in range(8)]


class Peer:
    """A client written by hand: sends any message, keeps every answer."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.channel: Channel

    def on_frame(self, channel: Channel, frame: Frame) -> Sink | None:
        self.answers.put_nowait(protocol.decode(frame.type, bytes(frame.body)))
        if not frame.payload_nbytes:
            return None
        memory = bytearray(frame.payload_nbytes)
        return Sink([memoryview(memory)], closed=lambda complete: self.answers.put_nowait(bytes(memory)))

    def on_payload(self, channel: Channel, frame: Frame, sink: Sink) -> None: ...

    def on_cancel(self, channel: Channel, request_id: int) -> None: ...

    def on_lost(self, channel: Channel, error: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(error)

    def send(self, message: protocol.Message, request_id: int = 1, payload: bytes = b"") -> None:
        op, body = protocol.encode(message)
        self.raw(op, body, request_id, payload)

    def raw(self, op: int, body: bytes, request_id: int = 1, payload: bytes = b"") -> None:
        views = (memoryview(payload),) if payload else ()
        self.channel.send(Outgoing(op, request_id, body, views))

    async def answer(self) -> Any:
        return await asyncio.wait_for(self.answers.get(), 5)

    async def closed(self) -> Exception | None:
        return await asyncio.wait_for(asyncio.shield(self.lost), 5)


HELLO = protocol.Hello(1, 1, "by hand", HASH_VERSION, ("crc32",), "public", TenantKey.public().tenant_id)
OPEN = protocol.Open(b"n" * 32, 16, "raw", SIZES, "by hand")
LAYOUT = protocol.Layout("split", 1, (2, 1), "fp8_e4m3")


async def meet(node: Node, *, greet: bool = True) -> Peer:
    peer = Peer()
    peer.channel = await fabric_for(node.uris[0]).connect(node.uris[0], peer, timeout=5)
    if greet:
        peer.send(HELLO)
        assert isinstance(await peer.answer(), protocol.HelloOk)
        peer.send(OPEN)
        opened = await peer.answer()
        assert isinstance(opened, protocol.Opened) and opened.handle == 0
    return peer


def error_count(node: Node) -> float:
    return sum(
        v for k, v in node.status()["counters"].items() if k.startswith("hypercache_protocol_errors_total")
    )


async def still_serves(node: Node) -> None:
    spec = make_spec()
    client = await hypercache.connect(node.uris[0], model=spec, codec="raw", tenant=TenantKey.public())
    try:
        kv = fill(KVBuffers.allocate(spec, 33), 1)
        tokens = tokens_of(np.random.default_rng().integers(1 << 30), 33)
        assert (await client.store(tokens, kv)).stored == 2
        into = poisoned(spec, 33)
        assert (await client.fetch(tokens, into)).hit_tokens == 32
        assert same(kv, into, 0, 32)
    finally:
        await client.close()


SERVER_ONLY = [op for op in Op if op not in protocol.REQUESTS and op != Op.ERROR]

CLOSES: dict[str, Callable[[Peer], None]] = {
    "second hello": lambda peer: peer.send(HELLO),
    "answer instead of question": lambda peer: peer.send(protocol.Matched(3)),
    "truncated body": lambda peer: peer.raw(Op.MATCH, protocol.encode(protocol.Match(0, D[0]))[1][:-3]),
    "empty body": lambda peer: peer.raw(Op.FETCH, b""),
    "wrong type": lambda peer: peer.raw(Op.MATCH, b"\x92\xa1x\xa1y"),
    "pickle": lambda peer: peer.raw(Op.MATCH, pickle.dumps({"a": 1})),
    "deep nesting": lambda peer: peer.raw(Op.MATCH, b"\x91" * 100_000),
    "length bomb": lambda peer: peer.raw(Op.MATCH, b"\x92\x00\xc6\xff\xff\xff\xff"),
    "array bomb": lambda peer: peer.raw(Op.OPEN, b"\xdd\xff\xff\xff\xff"),
    "digest of 15 bytes": lambda peer: peer.send(protocol.Match(0, b"x" * 15)),
    "no digest": lambda peer: peer.send(protocol.Match(0, b"")),
    "too many digests": lambda peer: peer.send(protocol.Match(0, b"x" * 16 * (protocol.MAX_BLOCKS + 1))),
    "parent of 3 bytes": lambda peer: peer.send(protocol.Store(0, b"abc", D[0], 1000)),
    "payload where none belongs": lambda peer: peer.send(protocol.Match(0, D[0]), payload=b"x" * 1000),
    "locate with half a fingerprint": lambda peer: peer.send(protocol.Locate(0, D[0], 0, b"x" * 9, 4)),
    "locate without a question": lambda peer: peer.send(protocol.Locate(0, b"", 0, b"", 4)),
    "locate before the prompt": lambda peer: peer.send(protocol.Locate(0, b"", -5, bytes(16), 4)),
    "locate far behind it": lambda peer: peer.send(protocol.Locate(0, b"", 1 << 60, bytes(16), 4)),
    "locate of no blocks": lambda peer: peer.send(protocol.Locate(0, b"", 0, bytes(16), 0)),
    "locate with half a digest": lambda peer: peer.send(protocol.Locate(0, b"x" * 15, 0, bytes(16), 4)),
    "too many fingerprints": lambda peer: peer.send(
        protocol.Locate(0, b"", 0, bytes(8 * protocol.MAX_PROBES + 8), 4)
    ),
    "fetch of nothing": lambda peer: peer.send(protocol.Fetch(0, b"", (0, 2), 1000, 1)),
    "chain of no blocks": lambda peer: peer.send(protocol.Fetch(0, D[0], (0, 2), 1000, 1, ((D[1], 0),))),
    "chain of minus one": lambda peer: peer.send(protocol.Fetch(0, D[0], (0, 2), 1000, 1, ((D[1], -1),))),
    "chain without a name": lambda peer: peer.send(protocol.Fetch(0, D[0], (0, 2), 1000, 1, ((b"", 1),))),
    "chain of a billion": lambda peer: peer.send(protocol.Fetch(0, b"", (0, 2), 1000, 1, ((D[1], 1 << 30),))),
    "chains of too many": lambda peer: peer.send(
        protocol.Fetch(0, b"", (0, 2), 1000, 1, ((D[1], protocol.MAX_BLOCKS),) * 2)
    ),
    "half a mark": lambda peer: peer.send(protocol.Store(0, None, D[0], 1000, b"x" * 23)),
    "one mark for two": lambda peer: peer.send(protocol.Store(0, None, D[0] + D[1], 1000, b"x" * 24)),
    "negative integer for bytes": lambda peer: peer.raw(Op.EVICT, b"\x92\xff\xff"),
}


@pytest.mark.parametrize("op", SERVER_ONLY)
async def test_what_only_servers_say_is_not_even_decoded(
    node: Node, op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = await meet(node)
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "decode", _all_but(op))
        peer.raw(op, b"\x91" * 1000)
        await asyncio.sleep(0.05)
    assert (await peer.answer()).code == "malformed"
    await peer.closed()


@pytest.mark.parametrize("op", protocol.REQUESTS)
async def test_bodies_have_a_limit_of_their_own(node: Node, op: int, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = await meet(node)
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "decode", _all_but(op))
        peer.raw(op, b"\x91" * (protocol.REQUESTS[op] + 1))
        await asyncio.sleep(0.05)
    refusal = await peer.answer()
    assert refusal.code == "malformed" and "at most" in refusal.message
    await peer.closed()


async def test_nothing_behind_a_violation_is_obeyed(node: Node) -> None:
    """A bad frame and a CLEAR in one segment: the second must not happen."""
    peer = await meet(node)
    peer.send(protocol.Store(0, None, D[0], 5000), request_id=3)
    assert isinstance(await peer.answer(), protocol.Storing)
    peer.send(*_swap(put(0, 0, [b"a" * 96]), 3))
    peer.send(*_swap(put(1, 0, [b"b" * 64]), 3))
    assert await peer.answer() == protocol.Stored({"stored": 1})
    peer.send(protocol.Match(0, b"bad"))
    for _ in range(100):
        peer.send(protocol.Clear(0))
    assert (await peer.answer()).code == "malformed"
    await peer.closed()
    assert peer.answers.empty()
    assert node.status()["store"]["blocks"] == 1


async def test_a_peer_that_hangs_up_by_a_violation_stops_no_housekeeping() -> None:
    """A fetch that nobody reads, then a violation: the sweep goes on for everybody else."""
    spec = make_spec(layers=8, heads=8, dim=128)
    async with running_node(memory=64 << 20) as node:
        client = await hypercache.connect(node.uris[0], model=spec, codec="raw", tenant=TenantKey.public())
        tokens = tokens_of(1, 16 * 40 + 1)
        kv = fill(KVBuffers.allocate(spec, len(tokens)), 1)
        assert (await client.store(tokens, kv)).stored == 40
        peer = await meet(node)
        peer.send(client._link._opening, request_id=2)
        assert (await peer.answer()).handle == 1
        digests = protocol.join_digests(client.prompt(tokens).digests)
        peer.channel._loop.remove_reader(peer.channel._sock)  # type: ignore[attr-defined]
        peer.send(protocol.Fetch(1, digests, (0, 8), 300, 1 << 20), request_id=8)
        await asyncio.sleep(0.1)
        peer.send(protocol.Match(1, b"abc"), request_id=9)
        await asyncio.sleep(0.5)
        other = await meet(node)
        other.send(protocol.Store(0, None, D[0], 200), request_id=5)
        assert isinstance(await other.answer(), protocol.Storing)
        assert await other.answer() == protocol.Stored({"aborted": 1})
        peer.channel.abort()
        await client.close()


async def test_a_store_that_ended_lets_go_of_what_is_still_arriving() -> None:
    """A writer that trickles a frame keeps no memory once its store is over."""
    async with running_node(store_stall_s=0.3, memory=64 << 20) as node:
        peer = await meet(node)
        big = 1 << 20
        peer.send(protocol.Open(b"b" * 32, 16, "raw", (big,), "big"), request_id=2)
        assert (await peer.answer()).handle == 1
        peer.send(protocol.Store(1, None, D[0], 400), request_id=3)
        assert isinstance(await peer.answer(), protocol.Storing)
        op, body = protocol.encode(protocol.Put(((0, 0, 1),), (0,)))
        from fabrics.framing import encode_head

        sock = peer.channel._sock  # type: ignore[attr-defined]
        sock.send(encode_head(op, 0, 3, body, big) + body + b"x" * 1000)
        assert await peer.answer() == protocol.Stored({"aborted": 1})
        await asyncio.sleep(0.2)
        stats = node.status()["store"]
        assert stats["bytes_held"] == 0 and stats["reservations"] == 0
        peer.channel.abort()


async def test_errors_of_the_store_are_refusals(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the store raises is answered, and whatever is our own fault closes only this channel."""
    peer = await meet(node)
    for error, code in (
        (SpecError("other geometry"), "spec"),
        (StoreFull("no room"), "busy"),
        (TooLarge("too large"), "too_large"),
        (HyperCacheError("?"), "internal"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(node._store, "match", _raises(error))
            peer.send(protocol.Match(0, D[0]))
            refusal = await peer.answer()
            assert refusal.code == code
    with monkeypatch.context() as patch:
        patch.setattr(node._store, "match", _raises(RuntimeError("a bug that names a secret")))
        peer.send(protocol.Match(0, D[0]))
        refusal = await peer.answer()
        assert refusal.code == "internal" and "secret" not in refusal.message
        await peer.closed()
    await still_serves(node)


def _all_but(op: int) -> Callable[..., Any]:
    real = protocol.decode

    def decode(frame_type: int, body: bytes) -> Any:
        assert frame_type != op, "decoded"
        return real(frame_type, body)

    return decode


def _raises(error: Exception) -> Callable[..., Any]:
    def fail(*args: object) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("what", CLOSES)
async def test_what_breaks_the_protocol_closes_the_channel(node: Node, what: str) -> None:
    peer = await meet(node)
    before = error_count(node)
    CLOSES[what](peer)
    refusal = await peer.answer()
    assert isinstance(refusal, protocol.Error) and refusal.code == "malformed", refusal
    await peer.closed()
    assert error_count(node) == before + 1
    assert node.status()["store"]["reservations"] == 0
    await still_serves(node)


@pytest.mark.parametrize("first", [OPEN, protocol.Match(0, D[0]), protocol.Clear(0)])
async def test_nothing_is_served_before_hello(node: Node, first: protocol.Message) -> None:
    peer = await meet(node, greet=False)
    peer.send(first)
    assert (await peer.answer()).code == "malformed"
    await peer.closed()


REFUSED: dict[str, tuple[str, protocol.Message]] = {
    "handle": ("handle", protocol.Match(7, D[0])),
    "negative handle": ("handle", protocol.Match(-1, D[0])),
    "handle of a locate": ("handle", protocol.Locate(7, b"", 0, bytes(8), 1)),
    "layers": ("spec", protocol.Fetch(0, D[0], (0, 3), 1000, 1 << 20)),
    "empty layers": ("spec", protocol.Fetch(0, D[0], (1, 1), 1000, 1 << 20)),
    "codec": ("codec", protocol.Open(b"m" * 32, 16, "zip", SIZES, "")),
    "block size": ("spec", protocol.Open(b"m" * 32, 32, "raw", SIZES, "")),
    "no layers": ("spec", protocol.Open(b"m" * 32, 16, "raw", (), "")),
    "too many layers": ("spec", protocol.Open(b"m" * 32, 16, "raw", (8,) * 5000, "")),
    "empty chunk": ("too_large", protocol.Open(b"m" * 32, 16, "raw", (8, 0), "")),
    "huge chunk": ("too_large", protocol.Open(b"m" * 32, 16, "raw", (1 << 50,), "")),
    "codec on disk": ("codec", protocol.Open(b"m" * 32, 16, "raw", SIZES, "", below="zip")),
    "codec on disk without layouts": ("spec", protocol.Open(b"m" * 32, 16, "raw", SIZES, "", below="int4")),
    **{
        f"layouts: {what}": ("spec", protocol.Open(b"m" * 32, 16, "raw", SIZES, "", layouts, layers, "int4"))
        for what, layouts, layers in (
            ("fewer than layers", (LAYOUT,), (0,)),
            ("of no layer", (LAYOUT,), ()),
            ("none for a layer", (), (0, 0)),
            ("unknown number", (LAYOUT,), (0, 1)),
            ("negative number", (LAYOUT,), (0, -1)),
            ("too many", (LAYOUT,) * 513, (0, 0)),
            ("unknown kind", (protocol.Layout("ring", 1, (8, 8), "bf16"),), (0, 0)),
            ("unknown dtype", (protocol.Layout("split", 1, (8, 8), "fp4"),), (0, 0)),
            ("no heads", (protocol.Layout("split", 0, (8, 8), "bf16"),), (0, 0)),
            ("negative dim", (protocol.Layout("split", 1, (8, -8), "bf16"),), (0, 0)),
            ("huge dim", (protocol.Layout("split", 1, (8, 1 << 63), "bf16"),), (0, 0)),
            ("one part", (protocol.Layout("split", 1, (8,), "bf16"),), (0, 0)),
            ("many parts", (protocol.Layout("split", 1, (8,) * 9000, "bf16"),), (0, 0)),
            ("latent heads", (protocol.Layout("mla", 2, (8, 8), "bf16"),), (0, 0)),
        )
    },
}


@pytest.mark.parametrize("what", REFUSED)
async def test_what_cannot_be_served_is_refused_and_the_channel_lives_on(node: Node, what: str) -> None:
    """C10, J05 on the server's side."""
    peer = await meet(node)
    code, message = REFUSED[what]
    peer.send(
        protocol.Store(0, None, D[0], 5000), request_id=3
    )  # the first to store says what a digest means
    assert isinstance(await peer.answer(), protocol.Storing)
    peer.send(message, request_id=9)
    refusal = await peer.answer()
    assert isinstance(refusal, protocol.Error) and refusal.code == code, refusal
    peer.send(protocol.Match(0, D[0]))
    assert await peer.answer() == protocol.Matched(0)


async def test_other_geometry_than_what_is_stored_is_refused(node: Node) -> None:
    """J05, C10: the same namespace with other sizes: at OPEN, and for a handle opened before, at its use."""
    early = await meet(node)
    early.send(protocol.Open(b"n" * 32, 16, "raw", (96, 65), "early"))
    assert (await early.answer()).handle == 1  # nothing is stored yet: who stores first decides
    peer = await meet(node)
    peer.send(protocol.Store(0, None, D[0], 5000), request_id=3)
    assert isinstance(await peer.answer(), protocol.Storing)
    peer.send(*_swap(put(0, 0, [b"a" * 96]), 3))
    peer.send(*_swap(put(1, 0, [b"b" * 64]), 3))
    assert await peer.answer() == protocol.Stored({"stored": 1})
    for other in (
        protocol.Open(b"n" * 32, 16, "raw", (96, 65), ""),
        protocol.Open(b"n" * 32, 64, "raw", SIZES, ""),
        protocol.Open(b"n" * 32, 16, "int8", SIZES, ""),
        protocol.Open(b"n" * 32, 16, "raw", SIZES, "", (LAYOUT,), (0, 0)),
        protocol.Open(b"n" * 32, 16, "raw", SIZES, "", (LAYOUT,), (0, 0), "int4"),
    ):
        peer.send(other)
        assert (await peer.answer()).code == "spec"
    for question in (
        protocol.Match(1, D[0]),
        protocol.Contains(1, D[0]),
        protocol.Fetch(1, D[0], (0, 2), 1000, 1 << 20),
        protocol.Locate(1, D[0], 0, bytes(8), 1),
        protocol.Store(1, None, D[1], 1000),
    ):
        early.send(question, request_id=50)
        assert (await early.answer()).code == "spec"
    peer.send(protocol.Match(0, D[0]))
    assert await peer.answer() == protocol.Matched(1)
    assert node.status()["store"]["reservations"] == 0


async def test_unknown_requests_are_skipped_by_length(node: Node) -> None:
    peer = await meet(node)
    peer.raw(200, b"from the future", 5, b"y" * 100_000)
    assert (await peer.answer()).code == "unsupported"
    peer.send(protocol.Match(0, D[0]))
    assert await peer.answer() == protocol.Matched(0)


def put(layer: int, first: int, chunks: list[bytes], *, lie: bool = False) -> tuple[protocol.Put, bytes]:
    crcs = tuple(checksum(memoryview(chunk)) ^ lie for chunk in chunks)
    return protocol.Put(((layer, first, len(chunks)),), crcs), b"".join(chunks)


async def test_bad_puts_store_nothing(node: Node) -> None:
    """Sizes, layers, blocks that do not fit close the channel; a wrong checksum refuses the block (E01)."""
    wrong: list[tuple[protocol.Put, bytes]] = [
        (protocol.Put(((2, 0, 1),), (0,)), b"x" * 96),
        (protocol.Put(((-1, 0, 1),), (0,)), b"x" * 96),
        (protocol.Put(((0, 4, 1),), (0,)), b"x" * 96),
        (protocol.Put(((0, -1, 1),), (0,)), b"x" * 96),
        (protocol.Put(((0, 0, 1),), (0,)), b"x" * 95),
        (protocol.Put(((0, 0, 2),), (0, 0)), b"x" * 96),
        (protocol.Put(((0, 0, 0),), ()), b"x" * 96),
        (protocol.Put(((1, 0, 1),), (0,)), b"x" * 96),
        (protocol.Put(((0, 0, 1), (0, 0, 1), (9999, 0, 1)), (1,)), b"x" * 96),
        (protocol.Put(((0, 0, 1), (9999, 0, 1)), (1, 1)), b"x" * 96),
        (protocol.Put(((0, 0, 1), (0, 0, 1)), (1, 1)), b"x" * 192),
        (protocol.Put(((0, 0, 1),) * 513, (1,) * 513), b"x" * 96 * 513),
        (protocol.Put(((0, 0, 1 << 40),), (1,)), b"x" * 96),
    ]
    for message, payload in wrong:
        peer = await meet(node)
        peer.send(protocol.Store(0, None, b"".join(D[:4]), 5000), request_id=3)
        assert isinstance(await peer.answer(), protocol.Storing)
        peer.send(message, 3, payload)
        assert (await peer.answer()).code == "malformed", message
        await peer.closed()
    peer = await meet(node)
    peer.send(protocol.Contains(0, b"".join(D)))
    assert await peer.answer() == protocol.Contained(bytes(8))
    assert node.status()["store"]["reservations"] == 0

    peer.send(protocol.Store(0, None, b"".join(D[:4]), 5000), request_id=4)
    assert await peer.answer() == protocol.Storing(((0, 4),))
    peer.send(*_swap(put(0, 0, [bytes([i]) * 96 for i in range(4)]), 4))
    peer.send(*_swap(put(1, 0, [bytes([i]) * 64 for i in range(2)]), 4))
    peer.send(*_swap(put(1, 2, [b"z" * 64], lie=True), 4))
    assert await peer.answer() == protocol.Stored({"stored": 2, "corrupt": 1, "aborted": 1})
    peer.send(protocol.Match(0, b"".join(D[:4])))
    assert await peer.answer() == protocol.Matched(2)
    peer.send(protocol.Fetch(0, b"".join(D[:4]), (0, 2), 5000, 1), request_id=6)
    assert await peer.answer() == protocol.Fetching(2)
    chunks = [bytes([block]) * size for size in SIZES for block in range(2)]
    crcs = tuple(checksum(memoryview(chunk)) for chunk in chunks)
    assert await peer.answer() == protocol.Layers(((0, 0, 2), (1, 0, 2)), crcs)
    assert await peer.answer() == b"".join(chunks)
    assert await peer.answer() == protocol.Fetched(2)


def _swap(pair: tuple[protocol.Put, bytes], request_id: int) -> tuple[protocol.Put, int, bytes]:
    return pair[0], request_id, pair[1]


async def test_puts_nobody_waits_for_are_dropped(node: Node) -> None:
    peer = await meet(node)
    peer.send(*_swap(put(0, 0, [b"a" * 96]), 77))
    peer.send(protocol.Store(0, None, D[0], 5000), request_id=5)
    assert await peer.answer() == protocol.Storing(((0, 1),))
    for _ in range(3):  # the same chunk again and again is no harm
        peer.send(*_swap(put(0, 0, [b"a" * 96]), 5))
    peer.send(*_swap(put(1, 0, [b"b" * 64]), 5))
    assert await peer.answer() == protocol.Stored({"stored": 1})
    peer.send(*_swap(put(1, 0, [b"c" * 64]), 5))
    peer.send(protocol.Match(0, D[0]))
    assert await peer.answer() == protocol.Matched(1)


async def test_a_store_past_its_deadline_ends(node: Node) -> None:
    peer = await meet(node)
    peer.send(protocol.Store(0, None, D[0], 200), request_id=5)
    assert await peer.answer() == protocol.Storing(((0, 1),))
    assert await peer.answer() == protocol.Stored({"aborted": 1})
    assert node.status()["store"]["reservations"] == 0


async def test_reused_request_id_is_a_violation(node: Node) -> None:
    peer = await meet(node)
    peer.send(protocol.Store(0, None, D[0], 5000), request_id=5)
    assert isinstance(await peer.answer(), protocol.Storing)
    peer.send(protocol.Store(0, None, D[1], 5000), request_id=5)
    assert (await peer.answer()).code == "malformed"
    await peer.closed()
    assert node.status()["store"]["reservations"] == 0


async def test_limits_on_what_one_channel_may_have_open() -> None:
    async with running_node(max_connections=2) as node:
        peer = await meet(node)
        for i in range(300):
            peer.send(protocol.Store(0, None, i.to_bytes(16, "little"), 5000), request_id=10 + i)
        answers = [await peer.answer() for _ in range(300)]
        assert [a.code for a in answers if isinstance(a, protocol.Error)] == ["busy"] * 44
        other = await meet(node)
        third = await meet(node, greet=False)
        third.send(HELLO)
        assert (await third.answer()).code == "busy"
        await other.channel.close()
        for number in range(256):
            peer.send(protocol.Open(number.to_bytes(32, "little"), 16, "raw", SIZES, ""), request_id=999)
        codes = [getattr(await peer.answer(), "code", "") for _ in range(256)]
        assert codes == [""] * 255 + ["busy"]


async def test_silent_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hypercache.server.node.HANDSHAKE_S", 0.2)
    async with running_node() as node:
        peer = await meet(node, greet=False)
        await peer.closed()
        assert node.status()["connections"] == 0


# --- servers that lie


class Liar:
    """A server written by hand."""

    def __init__(self, script: Callable[[Liar, Channel, int, protocol.Message], None]) -> None:
        self.script = script
        self.size = 0

    def on_frame(self, channel: Channel, frame: Frame) -> Sink | None:
        message = protocol.decode(frame.type, bytes(frame.body))
        if isinstance(message, protocol.Hello):
            answer: protocol.Message = protocol.HelloOk(1, "liar", "crc32", protocol.CODECS, 1 << 17, 1 << 28)
        elif isinstance(message, protocol.Open):
            self.size = message.chunk_nbytes[0]
            answer = protocol.Opened(0, 9, ())
        elif message is None:
            return None
        else:
            try:
                self.script(self, channel, frame.request_id, message)
            except ChannelClosed:
                return None
            return None
        self.say(channel, frame.request_id, answer)
        return None

    def say(self, channel: Channel, request_id: int, message: protocol.Message, payload: bytes = b"") -> None:
        op, body = protocol.encode(message)
        channel.send(Outgoing(op, request_id, body, (memoryview(payload),) if payload else ()))

    def on_payload(self, channel: Channel, frame: Frame, sink: Sink) -> None: ...
    def on_cancel(self, channel: Channel, request_id: int) -> None: ...
    def on_lost(self, channel: Channel, error: Exception | None) -> None: ...


def answers(*replies: Callable[[Liar], tuple[protocol.Message, bytes]]) -> Callable[..., None]:
    def script(liar: Liar, channel: Channel, request_id: int, message: protocol.Message) -> None:
        for reply in replies:
            liar.say(channel, request_id, *reply(liar))

    return script


FETCHING = lambda liar: (protocol.Fetching(4), b"")  # noqa: E731


def layer(number: int, first: int, count: int, *, extra: int = 0) -> Any:
    def make(liar: Liar) -> tuple[protocol.Message, bytes]:
        crc = checksum(memoryview(bytes(liar.size)))
        return protocol.Layers(((number, first, count),), (crc,) * count), bytes(liar.size * count + extra)

    return make


LIES: dict[str, Callable[..., None]] = {
    "more blocks than asked": answers(lambda liar: (protocol.Fetching(5), b"")),
    "negative blocks": answers(lambda liar: (protocol.Fetching(-1), b"")),
    "layer before fetching": answers(layer(0, 0, 4)),
    "layers out of order": answers(FETCHING, layer(1, 0, 4)),
    "blocks out of order": answers(FETCHING, layer(0, 2, 2)),
    "more chunks than blocks": answers(FETCHING, layer(0, 0, 5)),
    "no chunks": answers(FETCHING, layer(0, 0, 0)),
    "payload too long": answers(FETCHING, layer(0, 0, 4, extra=1)),
    "payload too short": answers(FETCHING, layer(0, 0, 4, extra=-1)),
    "one layer too many": answers(FETCHING, *[layer(i, 0, 4) for i in range(5)]),
    "end too early": answers(FETCHING, layer(0, 0, 4), lambda liar: (protocol.Fetched(4), b"")),
    "another answer": answers(lambda liar: (protocol.Stored({}), b"")),
    "fetching twice": answers(FETCHING, FETCHING),
    "a chain that nobody asked for": answers(lambda liar: (protocol.Fetching(4, (1,)), b"")),
    "a question": answers(lambda liar: (protocol.Match(0, D[0]), b"")),
    "an endless answer": answers(lambda liar: (protocol.Error("busy", "x" * 100_000), b"")),
    "nonsense": lambda liar, channel, request_id, message: channel.send(
        Outgoing(Op.FETCHING, request_id, b"\xc1")
    ),
    "an error": answers(lambda liar: (protocol.Error("internal", "boom"), b"")),
    "a hang": lambda *_: None,
    "silence after half": answers(FETCHING, layer(0, 0, 4), layer(1, 0, 2)),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lying_server_is_a_miss(lie: str) -> None:
    """G04: every fetch ends in time, without an exception, and no unverified byte is called a hit."""
    spec = make_spec()
    uri = f"loop://liar-{lie}"
    listener = await fabric_for(uri).listen(uri, lambda channel: Liar(LIES[lie]))
    client = await hypercache.connect(uri, model=spec, codec="raw", tenant=TenantKey.public())
    try:
        into = poisoned(spec, 80)
        transfer = client.start_fetch(tokens_of(1, 65), into, deadline=0.5)
        assert not await transfer.layer(3) or lie == "one layer too many"  # that is known one frame later
        result = await transfer
        assert result.hit_tokens == 0 and result.reason
        assert untouched(into, 64, 80)
        stored = await client.store(tokens_of(1, 65), into, deadline=0.5)
        assert stored.stored == 0 and (stored.reason or not stored.outcome)
        match = await client.match(tokens_of(1, 65), deadline=0.5)
        assert match.hit_blocks == 0 and match.reason
    finally:
        await client.close()
        await listener.close()
