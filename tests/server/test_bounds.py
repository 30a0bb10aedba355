"""What a session may cost the node, however small its requests are: faults of class B."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable

import pytest
import structlog

from fabrics import Channel, Frame, Outgoing, Sink, fabric_for
from fabrics.framing import encode_head
from hypercache import protocol
from hypercache.checksum import checksum
from hypercache.keys import HASH_VERSION
from hypercache.server.config import ServerConfig
from hypercache.server.node import Node
from hypercache.store.ledger import LEASES_LEAST

HELLO = protocol.Hello(1, 1, "by hand", HASH_VERSION, ("crc32",), "t", b"t" * 16)
OPEN = protocol.Open(b"n" * 32, 8, "raw", (64,), "by hand")
DIGESTS = [n.to_bytes(16, "little") for n in range(1000)]
DATA = b"x" * 64


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    config = ServerConfig(listen=("tcp://127.0.0.1:0",), memory=64 << 20, admin="", store_stall_s=60.0)
    node = Node(config, log=structlog.get_logger("test"))
    await node.start()
    yield node
    await node.stop()


class Peer:
    """A client written by hand that waits for one answer at a time."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[protocol.Message | None] = asyncio.Queue()
        self.channel: Channel

    def on_frame(self, channel: Channel, frame: Frame) -> Sink | None:
        self.answers.put_nowait(protocol.decode(frame.type, bytes(frame.body)))
        return None

    def on_payload(self, channel: Channel, frame: Frame, sink: Sink) -> None: ...

    def on_cancel(self, channel: Channel, request_id: int) -> None: ...

    def on_lost(self, channel: Channel, error: Exception | None) -> None: ...

    async def ask(self, message: protocol.Message, request_id: int = 1) -> protocol.Message | None:
        op, body = protocol.encode(message)
        self.channel.send(Outgoing(op, request_id, body))
        return await asyncio.wait_for(self.answers.get(), 10)


async def meet(node: Node) -> Peer:
    peer = Peer()
    peer.channel = await fabric_for(node.uris[0]).connect(node.uris[0], peer, timeout=5)
    assert isinstance(await peer.ask(HELLO), protocol.HelloOk)
    assert isinstance(await peer.ask(OPEN), protocol.Opened)
    return peer


async def store_all(peer: Peer) -> None:
    """One prompt of 1000 blocks."""
    assert isinstance(await peer.ask(protocol.Store(0, None, b"".join(DIGESTS), 9000), 7), protocol.Storing)
    crc = checksum(memoryview(DATA))
    for first in (0, 500):
        op, body = protocol.encode(protocol.Put(((0, first, 500),), (crc,) * 500))
        peer.channel.send(Outgoing(op, 7, body, [memoryview(DATA * 500)]))
    assert await asyncio.wait_for(peer.answers.get(), 10) == protocol.Stored({"stored": 1000})


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not what():  # noqa: ASYNC110 (what a node counts tells nobody)
            await asyncio.sleep(0.01)


def numbers(node: Node) -> dict[str, int]:
    return dict(node.status()["store"])


def frame(message: protocol.Message, request_id: int) -> bytes:
    op, body = protocol.encode(message)
    return encode_head(op, 0, request_id, body, 0) + body


async def test_small_fetches_that_name_one_chain_again_and_again_fill_no_server(node: Node) -> None:
    """The peers take nothing of what is sent to them, so all that was granted stays."""
    peer = await meet(node)
    await store_all(peer)
    host, port = node.uris[0].removeprefix("tcp://").split(":")
    fetch = protocol.Fetch(0, b"", (0, 1), 20_000, 1 << 20, ((DIGESTS[-1], 1000),) * 60)
    loop = asyncio.get_running_loop()
    peers: list[socket.socket] = []
    for _ in range(4):
        other = socket.socket()
        other.setblocking(False)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peers.append(other)
        await loop.sock_connect(other, (host, int(port)))
        await loop.sock_sendall(other, frame(HELLO, 1) + frame(OPEN, 2))
        await loop.sock_sendall(other, b"".join([frame(fetch, 10 + n) for n in range(50)]))
    refused = 'hypercache_refused_total{code="busy"}'
    await until(lambda: node.status()["counters"][refused] >= 4 * 50 - 8)
    stats = numbers(node)
    assert 1 <= stats["leases"] <= 8 and 0 < stats["bytes_leases"] <= LEASES_LEAST
    for other in peers:
        other.close()
    await until(lambda: not numbers(node)["leases"] and not numbers(node)["bytes_held"])
    assert numbers(node)["bytes_leases"] == 0
    peer.channel.abort(None)


async def test_a_peer_that_leaves_its_stores_behind_is_forgotten_in_steps(node: Node) -> None:
    peer = await meet(node)
    for n in range(2):
        names = b"".join([(n * 1024 + k + 5000).to_bytes(16, "little") for k in range(1024)])
        answer = await peer.ask(protocol.Store(0, None, names, 20_000), 20 + n)
        assert isinstance(answer, protocol.Storing) and answer.wanted == ((0, 1024),)
    assert numbers(node)["reservations"] == 2048
    peer.channel.abort(None)
    await until(lambda: numbers(node)["reservations"] < 2048)
    await until(lambda: not numbers(node)["reservations"])
    assert (numbers(node)["bytes_index"], numbers(node)["aborted_total"]) == (0, 2048)
    aborted = node.status()["counters"]['hypercache_blocks_skipped_total{reason="aborted"}']
    assert aborted == 2048


def test_the_largest_answer_to_a_locate_is_within_its_cap() -> None:
    """A question for 131,072 tokens is answered with at most 16,384 blocks of 8, in runs of any length."""
    blocks, runs = protocol.MAX_PROBES // 8, protocol.MAX_CHAINS
    size = 2 * protocol.DIGEST_BYTES
    lengths = [blocks // runs] * runs
    spans = tuple([protocol.Span(1 << 31, 1 << 31, bytes(16), bytes(size * n)) for n in lengths])
    one = (protocol.Span(1 << 31, 1 << 31, bytes(16), bytes(size * blocks)),)
    for answer in (spans, one):
        op, body = protocol.encode(protocol.Located(1 << 17, answer, True))
        assert len(body) <= protocol.ANSWERS[op]
