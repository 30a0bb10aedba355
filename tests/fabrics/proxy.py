"""A TCP proxy that does harm on purpose. Real sockets on both sides; use it as an async context manager."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

_PIECE = 64 << 10


@dataclass
class Direction:
    """What happens to the bytes that flow one way. ``passed`` counts them. Offsets count from the start."""

    delay: float = 0.0  # seconds before each piece goes on
    rate: float | None = None  # bytes per second, by token bucket
    cut_at: int | None = None  # after this many bytes both connections are reset
    end_at: int | None = None  # after this many bytes the receiver sees an orderly end (half-close)
    freeze_at: int | None = None  # after this many bytes nothing goes on, and nothing is closed
    corrupt_at: int | None = None  # this byte is flipped
    inject_at: tuple[int, bytes] | None = None  # these bytes are put in at an offset
    passed: int = 0
    _thawed: asyncio.Event = field(default_factory=asyncio.Event)

    def thaw(self) -> None:
        """Let the bytes go on."""
        self.freeze_at = None
        self._thawed.set()

    def until_event(self) -> int:
        """How many bytes may pass before something has to happen."""
        marks = [self.cut_at, self.end_at, self.freeze_at, self.inject_at and self.inject_at[0]]
        return min(
            [mark - self.passed for mark in marks if mark is not None and mark >= self.passed] or [_PIECE]
        )


@dataclass
class Proxy:
    """``there`` is client to server, ``back`` is server to client; change them at any time."""

    uri: str
    there: Direction = field(default_factory=Direction)
    back: Direction = field(default_factory=Direction)
    links: list[tuple[socket.socket, socket.socket]] = field(default_factory=list)

    def cut(self) -> None:
        """Reset every connection now."""
        for link in self.links:
            for sock in link:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.close()
        self.links.clear()


async def _pass(proxy: Proxy, way: Direction, source: socket.socket, target: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    tokens, filled = 0.0, loop.time()
    while True:
        if way.inject_at is not None and way.passed == way.inject_at[0]:
            await loop.sock_sendall(target, way.inject_at[1])
            way.inject_at = None
        if way.passed == way.freeze_at and not way._thawed.is_set():
            await way._thawed.wait()
        if way.passed == way.cut_at:
            proxy.cut()
            return
        if way.passed == way.end_at:
            target.shutdown(socket.SHUT_WR)
            return
        data = bytearray(await loop.sock_recv(source, min(_PIECE, way.until_event() or _PIECE)))
        if not data:
            target.shutdown(socket.SHUT_WR)
            return
        if way.corrupt_at is not None and way.passed <= way.corrupt_at < way.passed + len(data):
            data[way.corrupt_at - way.passed] ^= 0x40
        if way.delay:
            await asyncio.sleep(way.delay)
        if way.rate is not None:
            now = loop.time()
            tokens = min(way.rate / 20, tokens + (now - filled) * way.rate) - len(data)
            filled = now
            if tokens < 0:
                await asyncio.sleep(-tokens / way.rate)
        await loop.sock_sendall(target, data)
        way.passed += len(data)


@contextlib.asynccontextmanager
async def proxied(uri: str) -> AsyncIterator[Proxy]:
    """A proxy before a ``tcp://127.0.0.1:PORT`` listener."""
    loop = asyncio.get_running_loop()
    upstream = ("127.0.0.1", int(uri.rpartition(":")[2]))
    tasks: set[asyncio.Task[None]] = set()

    async def pump(way: Direction, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            await _pass(proxy, way, source, target)

    async def accept() -> None:
        while True:
            near, _ = await loop.sock_accept(listening)
            far = socket.socket()
            proxy.links.append((near, far))
            for sock in (near, far):
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(far, upstream)
            for way, source, target in ((proxy.there, near, far), (proxy.back, far, near)):
                tasks.add(asyncio.create_task(pump(way, source, target)))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        proxy = Proxy(f"tcp://127.0.0.1:{listening.getsockname()[1]}")
        tasks.add(asyncio.create_task(accept()))
        try:
            yield proxy
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            proxy.cut()
