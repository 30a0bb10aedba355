"""``tcp://host:port``: frames over kernel TCP, IPv4 and IPv6."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Sequence

from fabrics.address import Endpoint, HostPort, parse, resolve, sockaddr_uri
from fabrics.base import AcceptCallback, Channel, Fabric, Handler, Limits, Listener
from fabrics.errors import AddressError, ConnectFailed
from fabrics.stream import StreamChannel

_HEAD_START = 0.25  # seconds an address has before the next one is tried beside it (RFC 8305)
_BACKLOG = 1024
_ACCEPTS = 16  # connections taken per callback, so that a flood of them does not hold up the loop
_ACCEPT_PAUSE = 0.5  # seconds without accepting after the process ran out of descriptors
_REPORT_PAUSE = 60.0  # seconds between two reports of that: it may last, and a log is on a disk of some size
_PORT_TRIES = 8  # "any port" must be free in every family of a name
_LOCAL_SEND_BUFFER = 384 << 10  # see _tune
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))  # an idle peer that vanished


class TcpChannel(StreamChannel):
    """A channel over one TCP connection."""


def _tune(sock: socket.socket, limits: Limits) -> tuple[str, str]:
    """Set the socket's options; returns its ends as URIs. Raises OSError if the peer is gone already."""
    local, peer = sock.getsockname(), sock.getpeername()
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = (*_KEEPALIVE, ("TCP_USER_TIMEOUT", max(1, int(limits.stall_timeout * 1000))))
    for name, value in options:
        if (option := getattr(socket, name, None)) is not None:  # not on every platform
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    if local[0] == peer[0]:
        # Within one machine there is no round trip to fill, and megabytes of buffer (which the kernel would
        # grow to) only push the bytes out of the cache before the other side reads them: half the speed.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_SEND_BUFFER)
    return sockaddr_uri("tcp", local), sockaddr_uri("tcp", peer)


class TcpFabric(Fabric):
    scheme = "tcp"

    def check(self, uri: str) -> None:
        parse(uri, self.scheme)

    async def connect(self, uri: str, handler: Handler, *, timeout: float) -> Channel:  # noqa: ASYNC109
        address = parse(uri, self.scheme)
        try:
            async with asyncio.timeout(timeout):
                sock = await _connect_any(address, await resolve(address))
        except TimeoutError:
            raise ConnectFailed(f"{address}: no connection within {timeout} s") from None
        try:
            local, peer = _tune(sock, self.limits)
        except OSError as error:  # the peer is gone already
            sock.close()
            raise ConnectFailed(f"{address}: {error}") from error
        channel = TcpChannel(sock, local, peer, self.limits)
        channel.start(handler)
        return channel

    async def listen(self, uri: str, accept: AcceptCallback) -> Listener:
        address = parse(uri, self.scheme, listening=True)
        return TcpListener(_bind_all(address, await resolve(address)), accept, self.limits)


async def _connect_any(address: HostPort, endpoints: Sequence[Endpoint]) -> socket.socket:
    """The first connection to any of a host's addresses; each gets a head start over the next."""
    waiting = list(endpoints)
    running: set[asyncio.Task[socket.socket]] = set()
    failures: list[str] = []
    try:
        while waiting or running:
            if waiting:
                running.add(asyncio.create_task(_connect_one(waiting.pop(0))))
            done, running = await asyncio.wait(
                running, timeout=_HEAD_START if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                if (error := task.exception()) is None:
                    running |= done - {task}
                    return task.result()
                if not isinstance(error, OSError):
                    raise error
                failures.append(str(error))
    finally:
        for task in running:
            task.cancel()
            task.add_done_callback(_close_unused)
    raise ConnectFailed(f"{address}: no connection ({'; '.join(failures)}); is the server running there?")


async def _connect_one(endpoint: Endpoint) -> socket.socket:
    sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, endpoint.sockaddr)
        if sock.getsockname() == sock.getpeername():  # nobody listens, and the kernel chose that very port
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"Connect call failed {endpoint.sockaddr}")
    except BaseException:
        sock.close()
        raise
    return sock


def _close_unused(task: asyncio.Task[socket.socket]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


def _bind_all(address: HostPort, endpoints: Sequence[Endpoint]) -> list[socket.socket]:
    """Listening sockets on all addresses of a host, all on one port. Raises AddressError."""
    for last in range(_PORT_TRIES)[::-1]:
        port = address.port
        with contextlib.ExitStack() as undo:
            sockets = []
            try:
                for endpoint in endpoints:
                    sock = undo.enter_context(_bind_one(endpoint, port))
                    sockets.append(sock)
                    port = sock.getsockname()[1]
            except OSError as error:
                if error.errno == errno.EADDRINUSE and address.port == 0 and last:
                    continue
                name = errno.errorcode.get(error.errno or 0, "?")
                host = endpoint.sockaddr[0]
                raise AddressError(
                    f"cannot listen on {address} (address {host}, port {port}): {name} "
                    f"(errno {error.errno}), {error.strerror}; choose another port or address, or stop who "
                    "holds it"
                ) from error
            undo.pop_all()
            return sockets
    raise AssertionError("unreachable")


def _bind_one(endpoint: Endpoint, port: int) -> socket.socket:
    sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if endpoint.family == socket.AF_INET6:
            # "[::]" means everyone, IPv4 too; every other address stands for itself
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, endpoint.sockaddr[0] != "::")
        sock.bind((endpoint.sockaddr[0], port, *endpoint.sockaddr[2:]))
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


class TcpListener(Listener):
    """Accepts on all its sockets until closed."""

    def __init__(self, sockets: Sequence[socket.socket], accept: AcceptCallback, limits: Limits) -> None:
        self.uris = [sockaddr_uri("tcp", sock.getsockname()) for sock in sockets]
        self._accept = accept
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._sockets = list(sockets)
        self._resume: asyncio.TimerHandle | None = None
        self._paused = False  # by its owner
        self._report_from = 0.0  # loop time from which a lack of descriptors is reported again
        self._listen()

    def pause(self) -> None:
        self._paused = True
        self._deafen()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._listen()

    def _listen(self) -> None:
        if self._resume is None and not self._paused:
            for sock in self._sockets:
                self._loop.add_reader(sock, self._on_ready, sock)

    def _deafen(self) -> None:
        for sock in self._sockets:
            self._loop.remove_reader(sock)

    def _try_again(self) -> None:
        self._resume = None
        self._listen()

    def _on_ready(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, _ = listening.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    # the queue stays readable: trying at once again would spin
                    if (now := self._loop.time()) >= self._report_from:
                        self._report_from = now + _REPORT_PAUSE
                        self._report(
                            error,
                            f"cannot accept for now, tries go on every {_ACCEPT_PAUSE} s; raise the limit of "
                            "open files (ulimit -n), or let fewer connect",
                        )
                    self._deafen()
                    self._resume = self._loop.call_later(_ACCEPT_PAUSE, self._try_again)
                return
            self._take(sock)
            if self._paused or not self._sockets:
                return

    def _take(self, sock: socket.socket) -> None:
        try:
            local, peer = _tune(sock, self._limits)
        except OSError:  # the peer is gone already
            sock.close()
            return
        channel = TcpChannel(sock, local, peer, self._limits, guest=True)
        try:
            handler = self._accept(channel)
        except Exception as error:
            sock.close()
            self._report(error, f"the accept callback failed for {peer}")
            return
        channel.start(handler)

    def _report(self, error: Exception, message: str) -> None:
        self._loop.call_exception_handler({"message": f"{self!r}: {message}", "exception": error})

    async def close(self) -> None:
        if self._resume is not None:
            self._resume.cancel()
        self._deafen()
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()
