"""TCP when the network or the peer fails: every account is settled, everyone else is served on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
import struct
import subprocess
import sys
import time
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from fabric_kit import DATA, PUSH, SMALL, Frames, Ledger, Pair, Party, Received, pattern
from proxy import Proxy, proxied

from fabrics import Channel, Limits, Outgoing, fabric_for
from fabrics.errors import (
    BadMagic,
    ChannelClosed,
    ChannelStalled,
    FabricError,
    FrameChecksum,
    FrameError,
    FrameTooLarge,
    FrameVersionMismatch,
)
from fabrics.framing import HEADER_NBYTES, FabricType, encode_head, goodbye_body

QUICK = Limits(stall_timeout=0.3)
SIZE = 3_000_000


def answer(ledger: Ledger, size: int) -> Callable[[Channel, Received], None]:
    """A server that answers each small frame with one payload."""

    def frames(request_id: int) -> Iterator[Outgoing]:
        yield ledger.lend(DATA, request_id, b"", [pattern(size, request_id)])

    def act(channel: Channel, came: Received) -> None:
        if came.type == SMALL:
            channel.add_source(Frames(frames(came.request_id)))

    return act


@contextlib.asynccontextmanager
async def through_proxy(limits: Limits | None = None, size: int = SIZE) -> AsyncIterator[tuple[Pair, Proxy]]:
    """A pair with a proxy between. All accounts are settled at the end, whatever happened."""
    ledger = Ledger()
    near, far = Party(ledger), Party(ledger)
    accepted: list[Channel] = []
    far.on_each = answer(ledger, size)

    def accept(channel: Channel) -> Party:
        accepted.append(channel)
        far.events.set()
        return far

    fabric = fabric_for("tcp://", limits)
    listener = await fabric.listen("tcp://127.0.0.1:0", accept)
    async with proxied(listener.uris[0]) as proxy:
        client = await fabric.connect(proxy.uri, near, timeout=5)
        await far.until(lambda: accepted)
        try:
            yield Pair(listener, client, near, far, ledger, accepted), proxy
        finally:
            for channel in (client, *accepted):
                channel.abort()
            await listener.close()
            await near.lost()
            await far.lost()
    ledger.assert_settled()


STEPS = [0, 1, 3, 5, 31, 32, 33, 40, 1000, 262_144, SIZE + 31, SIZE + 32, SIZE + 33]


@pytest.mark.parametrize("fault", ["cut_at", "end_at", "freeze_at"])
@pytest.mark.parametrize("way", ["there", "back"])
async def test_g04_the_connection_breaks_at_every_step(fault: str, way: str) -> None:
    """G04: RST, FIN or silence after any number of bytes, while both sides send: both hear of it in time."""
    for step in STEPS:
        async with through_proxy(QUICK) as (pair, proxy):
            setattr(getattr(proxy, way), fault, step)
            pair.client.send(pair.ledger.lend(DATA, 1, b"12345678", [pattern(SIZE, 1)]))
            pair.client.send(Outgoing(SMALL, 2, b"get"))
            pair.server.send(pair.ledger.lend(DATA, 3, b"12345678", [pattern(SIZE, 3)]))
            pair.server.send(pair.ledger.lend(PUSH, 4))
            losses: list[Exception | None] = []
            if fault == "freeze_at":  # silence is noticed by those who wait for something
                with contextlib.suppress(TimeoutError):
                    await pair.near.until(lambda: pair.near.losses, timeout=0.8)
                with contextlib.suppress(TimeoutError):
                    await pair.far.until(lambda: pair.far.losses, timeout=0.1)
                losses = pair.near.losses + pair.far.losses
                if 0 < step < SIZE + 40:  # in the middle of something
                    assert losses, f"frozen after {step} bytes: nobody noticed"
            else:
                losses = [await pair.near.lost(), await pair.far.lost()]
            assert all(isinstance(error, ChannelClosed) for error in losses), losses


async def test_g04_garbage_at_every_step() -> None:
    for step in (0, 32, 40, SIZE + 40):
        for way in ("there", "back"):
            async with through_proxy(QUICK) as (pair, proxy):
                getattr(proxy, way).inject_at = (step, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 8)
                for channel in (pair.client, pair.server):
                    channel.send(pair.ledger.lend(DATA, 1, b"12345678", [pattern(SIZE, 1)]))
                    channel.send(pair.ledger.lend(PUSH, 2, b"12345678"))
                errors = [await pair.near.lost(), await pair.far.lost()]
                assert any(isinstance(error, FrameError) for error in errors), errors
                assert any(isinstance(error, ChannelClosed) for error in errors), errors


async def test_a_flipped_bit_in_a_head_is_noticed_and_told() -> None:
    for at in range(0, HEADER_NBYTES + 8, 3):
        async with through_proxy(QUICK) as (pair, proxy):
            proxy.there.corrupt_at = at
            pair.client.send(pair.ledger.lend(PUSH, 1, b"12345678"))
            pair.client.send(pair.ledger.lend(PUSH, 2, b"12345678"))
            error = await pair.far.lost()
            assert isinstance(error, FrameError | ChannelStalled), (at, error)
            assert await pair.near.lost() is not None
            if isinstance(error, FrameChecksum):
                assert "checksum" in str(pair.near.losses[0])
            assert pair.far.received == []


async def test_slow_and_late_networks_change_nothing() -> None:
    async with through_proxy() as (pair, proxy):
        proxy.there.delay = proxy.back.delay = 0.005
        proxy.back.rate = 30e6
        for number in range(3):
            pair.client.send(Outgoing(SMALL, number, b"get"))
        for came in await pair.near.count(3):
            assert came.payload == pattern(SIZE, came.request_id)
        await pair.client.close()
        assert await pair.far.lost() is None


async def test_h01_cancel_through_a_slow_network() -> None:
    """H01: with milliseconds on the way, cancel at random moments; the next request gets its own bytes."""
    rng, size = random.Random(7), 500_000
    async with through_proxy(size=size) as (pair, proxy):
        proxy.there.delay = proxy.back.delay = 0.002
        for number in range(0, 60, 2):
            pair.client.send(Outgoing(SMALL, number, b"get"))
            await asyncio.sleep(rng.random() * 0.03)
            pair.client.cancel(number)
            pair.near.refuse.add(number)
            parts = pair.near.placed.pop(number, None)
            if parts is not None:
                parts[0][:] = b"\xee" * len(parts[0])
            pair.client.send(Outgoing(SMALL, number + 1, b"get"))
            await pair.near.until(
                lambda number=number: any(item.request_id == number + 1 for item in pair.near.received)  # type: ignore[misc]
            )
            assert pair.near.received[-1].payload == pattern(size, number + 1)
            if parts is not None:
                assert parts[0].count(0xEE) == len(parts[0])


async def test_e05_a_cancelled_sink_is_never_written_though_the_bytes_come_late() -> None:
    """E05: the peer's bytes come after the cancel; the memory has a new owner and stays as that left it."""
    async with through_proxy() as (pair, proxy):
        proxy.back.freeze_at = SIZE // 3
        pair.client.send(Outgoing(SMALL, 1, b"get"))
        await pair.near.until(lambda: pair.near.landings and pair.near.landings[0][-1] > SIZE // 4)
        pair.client.cancel(1)
        assert [calls for calls in pair.ledger.closed.values() if calls] == [[False]]
        memory = pair.near.placed[1][0]
        memory[:] = b"\xaa" * SIZE
        proxy.back.thaw()
        pair.client.send(Outgoing(SMALL, 2, b"get"))
        assert (await pair.near.count(1))[0].payload == pattern(SIZE, 2)
        assert pair.client.stats.bytes_dropped > SIZE // 2
        assert memory == b"\xaa" * SIZE


async def test_h07_a_reader_that_stops_is_dropped_and_costs_no_memory() -> None:
    """H07: twenty answers of 64 MiB to a peer that reads nothing: bounded memory, then the channel ends."""
    ledger = Ledger()
    far = Party(ledger)
    block = bytearray(64 << 20)
    pulled = 0

    class Answers:
        def next_frame(self) -> Outgoing | None:
            nonlocal pulled
            pulled += 1
            return ledger.lend(DATA, pulled, b"", [block]) if pulled <= 20 else None

    far.on_each = lambda channel, came: channel.add_source(Answers())
    listener = await fabric_for("tcp://", QUICK).listen("tcp://127.0.0.1:0", lambda channel: far)
    tracemalloc.start()
    try:
        with socket.create_connection(("127.0.0.1", int(listener.uris[0].rpartition(":")[2]))) as reader:
            reader.sendall(encode_head(SMALL, 0, 1, b"", 0))
            error = await far.lost()
        assert isinstance(error, ChannelStalled)
        assert "took too little of the bytes" in str(error)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert pulled == 1
    await listener.close()
    ledger.assert_settled()


async def test_a_slow_but_moving_peer_is_not_stalled() -> None:
    async with through_proxy(Limits(stall_timeout=0.4)) as (pair, proxy):
        proxy.back.rate = 1.2e6  # 3 MB in 2.5 s: six times the limit in all, but never without progress
        pair.client.send(Outgoing(SMALL, 1, b"get"))
        assert (await pair.near.count(1))[0].payload == pattern(SIZE, 1)


async def test_an_idle_channel_is_not_stalled() -> None:
    async with through_proxy(Limits(stall_timeout=0.1)) as (pair, _):
        await asyncio.sleep(0.4)
        pair.client.send(Outgoing(SMALL, 1, b"get"))
        await pair.near.count(1)


async def test_closing_ends_in_time_though_the_peer_is_frozen() -> None:
    async with through_proxy(QUICK) as (pair, proxy):
        proxy.there.freeze_at = 0
        pair.client.send(pair.ledger.lend(DATA, 1, b"", [bytearray(64 << 20)]))
        await asyncio.wait_for(pair.client.close(), timeout=5)
        assert isinstance(await pair.near.lost(), ChannelStalled)


async def test_closing_ends_when_its_own_time_is_over() -> None:
    """The stall limit of 30 s is too long for someone who stops and has other peers to say goodbye to."""
    async with through_proxy() as (pair, proxy):
        proxy.there.freeze_at = 0
        pair.client.send(pair.ledger.lend(DATA, 1, b"", [bytearray(64 << 20)]))
        await asyncio.wait_for(pair.client.close(timeout=0.05), timeout=5)
        assert isinstance(await pair.near.lost(), ChannelStalled)
        pair.ledger.assert_settled()


async def test_hanging_up_on_a_frozen_peer_ends_though_nobody_waits_for_it() -> None:
    async with through_proxy(QUICK) as (pair, proxy):
        proxy.there.freeze_at = 0
        pair.client.send(pair.ledger.lend(DATA, 1, b"", [bytearray(64 << 20)]))
        pair.client.hang_up()
        assert pair.client.state == "closing"
        assert isinstance(await pair.near.lost(), ChannelStalled)


async def test_a_cancelled_close_is_an_abort() -> None:
    async with through_proxy() as (pair, proxy):
        proxy.there.freeze_at = 0
        pair.client.send(pair.ledger.lend(DATA, 1, b"", [bytearray(64 << 20)]))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pair.client.close(), timeout=0.05)
        assert pair.client.state == "closed"


# -- raw peers


def dial(uri: str) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", int(uri.rpartition(":")[2])), timeout=5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


async def read_to_end(sock: socket.socket) -> bytes:
    sock.setblocking(False)
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 65536), 5):
            data += piece
    return data


@pytest.mark.parametrize(
    ("hello", "kind", "text"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: kv\r\n\r\n", BadMagic, "an HTTP request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", BadMagic, "a TLS hello"),
        (b"*1\r\n$4\r\nPING\r\n", BadMagic, "Redis"),
        (encode_head(1, 0, 1, b"", 0, version=2), FrameVersionMismatch, "version 2, this side 1"),
        (struct.pack("<4sBBHQIQI", b"HYPC", 1, 1, 0, 0, 2**31, 0, 0), FrameTooLarge, "2147483648"),
    ],
)
async def test_g14_strangers_are_told_at_once(hello: bytes, kind: type[FrameError], text: str) -> None:
    """G14: the listener raises a typed error and the peer gets a goodbye in the layout of all versions."""
    far = Party(Ledger())
    listener = await fabric_for("tcp://").listen("tcp://127.0.0.1:0", lambda channel: far)
    with dial(listener.uris[0]) as sock:
        began = time.monotonic()
        sock.sendall(hello)
        said = await read_to_end(sock)
        assert time.monotonic() - began < 5, "the stall limit is 30 s: this was not told at once"
    error = await far.lost()
    assert type(error) is kind
    assert text in str(error)
    assert said[:6] == b"HYPC\x01\xf1"
    assert text in said[HEADER_NBYTES:].decode()
    await listener.close()


@pytest.mark.parametrize(
    ("reply", "kind", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", BadMagic, "an HTTP answer"),
        (b"-ERR unknown command\r\n", BadMagic, "Redis"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", BadMagic, "SSH"),
        (
            encode_head(FabricType.GOODBYE, 0, 0, b"version\nhere is 9", 0, version=9)
            + b"version\nhere is 9",
            FrameVersionMismatch,
            "version 9, this side 1",
        ),
        (
            encode_head(FabricType.GOODBYE, 0, 0, b"magic\nno", 0) + b"magic\nno",
            ChannelClosed,
            "(magic): no",
        ),
    ],
)
async def test_g14_a_client_that_reached_a_stranger(reply: bytes, kind: type[FabricError], text: str) -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        near = Party(Ledger())
        channel = await fabric_for("tcp://").connect(
            f"tcp://127.0.0.1:{listening.getsockname()[1]}", near, timeout=5
        )
        sock, _ = await loop.sock_accept(listening)
        with sock:
            channel.send(Outgoing(SMALL, 1, b"hello"))
            await loop.sock_recv(sock, 100)
            await loop.sock_sendall(sock, reply)
            error = await near.lost()
    assert isinstance(error, kind)
    assert text in str(error)


async def test_why_the_peer_left_is_heard_though_our_output_broke() -> None:
    """The peer says goodbye and resets while we send: the reason counts, not the broken pipe."""
    loop = asyncio.get_running_loop()
    ledger = Ledger()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        near = Party(ledger)
        channel = await fabric_for("tcp://").connect(
            f"tcp://127.0.0.1:{listening.getsockname()[1]}", near, timeout=5
        )
        sock, _ = await loop.sock_accept(listening)
        channel.send(ledger.lend(DATA, 1, b"", [bytearray(32 << 20)]))
        await asyncio.sleep(0.02)
        body = goodbye_body(FrameTooLarge("far too large"))
        sock.send(encode_head(FabricType.GOODBYE, 0, 0, body, 0) + body)
        sock.close()  # with unread data: a reset
        error = await near.lost()
    assert "far too large" in str(error)
    ledger.assert_settled()


async def test_unknown_fabric_frames_are_skipped_by_length() -> None:
    far = Party(Ledger())
    listener = await fabric_for("tcp://").listen("tcp://127.0.0.1:0", lambda channel: far)
    with dial(listener.uris[0]) as sock:
        for kind in (0xF2, 0xFF):
            sock.sendall(encode_head(kind, 7, 7, b"future", 300_000) + b"future" + bytes(300_000))
        sock.sendall(encode_head(SMALL, 0, 5, b"", 0))
        assert [item.request_id for item in await far.count(1)] == [5]
    await far.lost()
    await listener.close()


async def test_h10_fuzzing_a_live_listener_hurts_only_the_fuzzer() -> None:
    """H10: hundreds of broken streams; each channel ends alone, memory stays small, others are served on."""
    rng = random.Random(42)
    ledger = Ledger()
    lost: list[Exception | None] = []
    limits = Limits(max_body=64 << 10, max_payload=1 << 20, stall_timeout=2.0)

    class Served(Party):
        def on_lost(self, channel: Channel, error: Exception | None) -> None:
            super().on_lost(channel, error)
            lost.append(error)
            near.events.set()

    def accept(channel: Channel) -> Party:
        party = Served(ledger)
        party.on_each = answer(ledger, 10_000)
        return party

    fabric = fabric_for("tcp://", limits)
    listener = await fabric.listen("tcp://127.0.0.1:0", accept)
    near = Party(ledger)
    steady = await fabric.connect(listener.uris[0], near, timeout=5)
    tracemalloc.start()
    streams = 300
    try:
        for number in range(streams):
            stream = bytearray()
            for _ in range(rng.randrange(1, 4)):
                body, payload = rng.randbytes(rng.randrange(80)), rng.randbytes(rng.randrange(200))
                stream += encode_head(
                    rng.choice((SMALL, DATA, PUSH, 0xF0, 0xF1, 0xF7)), 0, number, body, len(payload)
                )
                stream += body + payload
            for _ in range(rng.randrange(1, 5)):
                at = rng.randrange(len(stream))
                match rng.randrange(5):
                    case 0:
                        stream[at] ^= 1 << rng.randrange(8)
                    case 1:
                        del stream[max(1, at) :]
                    case 2:
                        stream[at:at] = rng.randbytes(5)
                    case 3:
                        struct.pack_into("<I", stream.ljust(32, b"\0"), 16, rng.choice((0, 2**31, 2**32 - 1)))
                    case 4:
                        stream = bytearray(rng.randbytes(60))
            with dial(listener.uris[0]) as sock:
                sock.sendall(stream)
                if rng.random() < 0.5:
                    sock.shutdown(socket.SHUT_WR)
                await asyncio.sleep(0)
            if number % 50 == 0:
                steady.send(Outgoing(SMALL, number, b"get"))
                await near.until(lambda number=number: any(c.request_id == number for c in near.received))  # type: ignore[misc]
                assert near.received[-1].payload == pattern(10_000, number)
        await near.until(lambda: len(lost) == streams)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert all(isinstance(error, FabricError) or error is None for error in lost), lost
    assert sum(isinstance(error, FrameError) for error in lost) > 30
    assert steady.state == "open"
    await steady.close()
    await listener.close()
    await near.until(lambda: len(lost) == streams + 1)
    ledger.assert_settled()


async def test_accept_callbacks_that_fail_cost_one_connection() -> None:
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    far = Party(Ledger())
    far.on_each = lambda channel, came: channel.send(Outgoing(PUSH, came.request_id, b""))
    failures = [RuntimeError("not today")]

    def accept(channel: Channel) -> Party:
        if failures:
            raise failures.pop()
        return far

    listener = await fabric_for("tcp://").listen("tcp://127.0.0.1:0", accept)
    first, second = Party(Ledger()), Party(Ledger())
    await fabric_for("tcp://").connect(listener.uris[0], first, timeout=5)
    assert isinstance(await first.lost(), ChannelClosed)
    channel = await fabric_for("tcp://").connect(listener.uris[0], second, timeout=5)
    channel.send(Outgoing(SMALL, 1, b""))
    await second.count(1)
    await channel.close()
    await listener.close()
    assert len(reported) == 1


def test_l07_a_program_may_end_without_closing() -> None:
    """L07: no thread, no task and no exit handler holds a program that forgot to close."""
    program = """
import asyncio
from fabrics import Outgoing, fabric_for

class Quiet:
    def on_frame(self, channel, frame): return None
    def on_payload(self, channel, frame, sink): pass
    def on_cancel(self, channel, request_id): pass
    def on_lost(self, channel, error): pass

async def main():
    for uri in ("tcp://127.0.0.1:0", "loop://here"):
        fabric = fabric_for(uri)
        listener = await fabric.listen(uri, lambda channel: Quiet())
        channel = await fabric.connect(listener.uris[0], Quiet(), timeout=5)
        channel.send(Outgoing(1, 1, b"", [memoryview(bytes(50_000_000))]))
        await asyncio.sleep(0.01)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30, check=False)
    assert done.returncode == 0
    assert done.stderr == b""


async def test_a_closed_channel_needs_no_garbage_collector():
    """A server may run with its collector off: what a connection took must go with it."""

    class Quiet:
        def on_frame(self, channel, frame): ...
        def on_payload(self, channel, frame, sink): ...
        def on_cancel(self, channel, request_id): ...
        def on_lost(self, channel, error): ...

    class Keeper(Quiet):
        def __init__(self, channel):
            self.channel = channel

    seen = []

    def accept(channel):
        seen.append(weakref.ref(channel))
        return Keeper(channel)

    fabric = fabric_for("tcp://")
    listener = await fabric.listen("tcp://127.0.0.1:0", accept)
    gc.collect()
    gc.disable()
    try:
        for how in ("close", "abort", "garbage", "vanish"):
            if how in ("garbage", "vanish"):
                host, port = listener.uris[0].removeprefix("tcp://").split(":")
                _, writer = await asyncio.open_connection(host, int(port))
                if how == "garbage":
                    writer.write(b"GET / HTTP/1.1\r\n\r\n" * 4)
                    await writer.drain()
                await asyncio.sleep(0.05)
                writer.close()
                await writer.wait_closed()
                continue
            channel = await fabric.connect(listener.uris[0], Quiet(), timeout=5)
            seen.append(weakref.ref(channel))
            channel.send(Outgoing(1, 1, b"hello"))
            await asyncio.sleep(0.05)
            await channel.close() if how == "close" else channel.abort()
            del channel
        await asyncio.sleep(0.2)
        assert len(seen) == 6
        assert [ref() for ref in seen] == [None] * 6
    finally:
        gc.enable()
        await listener.close()


@pytest.mark.parametrize("way", ["sends", "takes"])
@pytest.mark.parametrize(("nbytes", "lives"), [(1, False), (6000, True)])
async def test_a_peer_that_trickles_is_dropped_and_a_slow_one_is_not(
    way: str, nbytes: int, lives: bool
) -> None:
    """A byte now and then is no progress: it would hold our memory for ever. A slow link's pace is."""
    limits = Limits(stall_timeout=0.6, min_rate_bytes=20_000)
    far = Party(Ledger())
    listener = await fabric_for("tcp://", limits).listen("tcp://127.0.0.1:0", lambda channel: far)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", int(listener.uris[0].rpartition(":")[2])))
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    block = bytearray(200_000)
    far.answers = lambda channel, frame: far.ledger.sink([block])
    if way == "takes":
        far.answers = lambda channel, frame: channel.add_source(  # type: ignore[func-returns-value]
            Frames(far.ledger.lend(DATA, number, b"", [bytes(8 << 20)]) for number in range(9))
        )
    await loop.sock_sendall(sock, encode_head(DATA, 0, 1, b"", 0 if way == "takes" else len(block)))
    for _ in range(30):  # 1.8 s, three stall limits
        await asyncio.sleep(0.06)
        if far.losses:
            break
        with contextlib.suppress(ConnectionError):
            if way == "sends":
                await loop.sock_sendall(sock, bytes(nbytes))
            else:
                for _ in range(1 if nbytes == 1 else 40):
                    await loop.sock_recv(sock, nbytes)
    assert bool(far.losses) is not lives, far.losses
    if not lives:
        assert isinstance(far.losses[0], ChannelStalled)
    sock.close()
    await far.lost()
    await listener.close()
    far.ledger.assert_settled()


def test_out_of_descriptors_is_reported_once_and_ends() -> None:
    """The listener tries again and again: that must not fill a log. The limit is that of its own process."""
    program = """
import asyncio, os, resource, socket
import fabrics.tcp
from fabrics import fabric_for

fabrics.tcp._ACCEPT_PAUSE = 0.02

class Quiet:
    def on_frame(self, channel, frame): return None
    def on_payload(self, channel, frame, sink): pass
    def on_cancel(self, channel, request_id): pass
    def on_lost(self, channel, error): pass

async def main():
    reports, accepted = [], []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))

    def accept(channel):
        accepted.append(channel)
        return Quiet()

    listener = await fabric_for("tcp://").listen("tcp://127.0.0.1:0", accept)
    waiting = [socket.socket() for _ in range(20)]
    top = os.dup(0)
    os.close(top)
    resource.setrlimit(resource.RLIMIT_NOFILE, (top + 2, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    for sock in waiting:
        sock.connect(("127.0.0.1", int(listener.uris[0].rpartition(":")[2])))
    while not reports:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)  # some twenty tries
    assert len(accepted) == 2, accepted
    for sock in waiting[:2]:
        sock.close()
    while len(accepted) < 5:
        await asyncio.sleep(0.01)
    print(len(reports), "ulimit" in reports[0]["message"], type(reports[0]["exception"]).__name__)
    await listener.close()

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=30, check=False, text=True
    )
    assert (done.stdout, done.stderr) == ("1 True OSError\n", "")
