"""The admin port: health, readiness, metrics and status over HTTP/1.1, for probes and scrapers.

One answer per connection, then it is closed: nothing to pipeline, no idle peers to keep. Requests are
parsed by h11 (RFC 9112) and only GET and HEAD are known, so nothing here changes the node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
import msgspec
import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from fabrics.errors import AddressError
from hypercache.server.settings import host_port

MAX_HEADER_BYTES = 16 << 10
MAX_CONNECTIONS = 64
REQUEST_TIMEOUT_S = 10.0  # for the whole of: read a request, answer it, see the peer close

log = structlog.get_logger("hypercache.admin")

Answer = tuple[int, str, bytes]


class AdminServer:
    """Serves /healthz, /readyz, /metrics and /status on ``HOST:PORT`` (port 0: any free one).

    status: the content of /status; what it returns must be JSON-able. ready: whether /readyz says 200.
    """

    def __init__(
        self,
        address: str,
        *,
        status: Callable[[], dict[str, Any]],
        ready: Callable[[], bool],
        registry: CollectorRegistry,
    ) -> None:
        self._asked = address
        self._status = status
        self._ready = ready
        self._registry = registry
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._pages: dict[str, Callable[[], Answer]] = {
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/metrics": self._metrics,
            "/status": self._status_page,
        }

    @property
    def address(self) -> str:
        """``HOST:PORT`` with the port really bound; the asked one while not started."""
        if self._server is None or not self._server.sockets:
            return self._asked
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def start(self) -> None:
        """Bind and serve. Raises AddressError with address and errno."""
        another = "choose another: admin, or --admin HOST:PORT"
        try:
            host, port = host_port(self._asked)
            self._server = await asyncio.start_server(
                self._connected, host, port, limit=MAX_HEADER_BYTES, backlog=MAX_CONNECTIONS
            )
        except ValueError as error:
            raise AddressError(f"admin address {self._asked!r}: {error}") from None
        except socket.gaierror as error:
            reason = f"cannot resolve {host!r}: {error.strerror}; check the name, or {another}"
            raise AddressError(f"admin address {self._asked}: {reason}") from error
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)  # asyncio's words are its own
            raise AddressError(
                f"admin address {self._asked}: {reason} (errno {error.errno}); {another}"
            ) from error

    async def close(self) -> None:
        """Stop serving; open connections are cut. May be called again."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                if len(self._tasks) > MAX_CONNECTIONS:
                    http: h11.Connection = h11.Connection(h11.SERVER)
                    await _send(http, writer, _text(503, "too many connections"), body=True)
                else:
                    await self._serve(reader, writer)
                await _part(reader, writer)
        except (TimeoutError, ConnectionError):
            pass  # the peer is slow or gone: it loses its answer, nobody else does
        except Exception:
            log.exception("admin_request_failed")
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        try:
            while (event := http.next_event()) is h11.NEED_DATA:
                http.receive_data(await reader.read(MAX_HEADER_BYTES))
        except h11.RemoteProtocolError as error:
            await _send(http, writer, _text(error.error_status_hint, str(error)), body=True)
            return
        if isinstance(event, h11.Request):
            await _send(http, writer, self._answer(event), body=event.method != b"HEAD")

    def _answer(self, request: h11.Request) -> Answer:
        """What to say to a request, or why not."""
        headers = dict(request.headers)
        if headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers:
            return _text(413, "requests have no body here")
        path = request.target.partition(b"?")[0].decode("latin-1")
        page = self._pages.get(path)
        if page is None:
            return _text(404, "known: " + " ".join(self._pages))
        if request.method not in (b"GET", b"HEAD"):
            return _text(405, "only GET and HEAD")
        try:
            return page()
        except Exception:
            log.exception("admin_page_failed", path=path)
            return _text(500, f"{path} failed; the log has the reason")

    def _healthz(self) -> Answer:
        return _text(200, "ok")  # that the event loop came to answer is the check

    def _readyz(self) -> Answer:
        return _text(200, "ready") if self._ready() else _text(503, "not ready: starting or draining")

    def _metrics(self) -> Answer:
        return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)

    def _status_page(self) -> Answer:
        return 200, "application/json", msgspec.json.format(msgspec.json.encode(self._status())) + b"\n"


def _text(status: int, text: str) -> Answer:
    return status, "text/plain; charset=utf-8", text.encode() + b"\n"


async def _send(http: h11.Connection, writer: asyncio.StreamWriter, answer: Answer, *, body: bool) -> None:
    status, content_type, content = answer
    headers = [
        ("content-type", content_type),
        ("content-length", str(len(content))),
        ("cache-control", "no-store"),
        ("connection", "close"),
    ]
    if status == 405:
        headers.append(("allow", "GET, HEAD"))
    data = (
        http.send(h11.Response(status_code=status, reason=HTTPStatus(status).phrase, headers=headers)) or b""
    )
    if body:
        data += http.send(h11.Data(data=content)) or b""
    data += http.send(h11.EndOfMessage()) or b""
    writer.write(data)
    await writer.drain()


async def _part(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Say that nothing follows and read what is still coming, so that a reset does not eat the answer."""
    with contextlib.suppress(OSError):
        writer.write_eof()
    left = 1 << 20
    while left > 0 and (data := await reader.read(64 << 10)):
        left -= len(data)
