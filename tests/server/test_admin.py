"""The admin port over real sockets: pages, refusals, caps and bind errors (G12, L07)."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fabrics.errors import AddressError
from hypercache.server import admin
from hypercache.server.admin import AdminServer
from hypercache.server.metrics import Metrics


class Node:
    """The two facts that the admin port asks a node for."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.is_ready = False
        self.status: dict[str, Any] = {"uris": ["tcp://127.0.0.1:1"], "blocks": 3}
        self.admin = AdminServer(
            "127.0.0.1:0",
            status=lambda: self.status,
            ready=lambda: self.is_ready,
            registry=self.metrics.registry,
        )


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    node = Node()
    await node.admin.start()
    yield node
    await node.admin.close()


async def talk(address: str, data: bytes) -> bytes:
    """Send bytes, return all that comes back until the server closes."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def get(address: str, path: str, method: str = "GET", headers: str = "") -> tuple[int, str, str]:
    """(status, head, body) of one request."""
    answer = await talk(address, f"{method} {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())
    head, _, body = answer.decode().partition("\r\n\r\n")
    return int(head.split()[1]), head.lower(), body


async def test_health_and_readiness(node: Node) -> None:
    assert (await get(node.admin.address, "/healthz"))[0] == 200
    status, _, body = await get(node.admin.address, "/readyz")
    assert (status, body) == (503, "not ready: starting or draining\n")
    node.is_ready = True
    assert (await get(node.admin.address, "/readyz"))[0] == 200
    assert (await get(node.admin.address, "/healthz?verbose=1"))[0] == 200


async def test_metrics_page_is_prometheus_text(node: Node) -> None:
    node.metrics.matched(asked=5, hit=3)
    node.metrics.watch_store(lambda: {"bytes_used": 42, "evicted_blocks": 7}, totals=["evicted_blocks"])
    status, head, body = await get(node.admin.address, "/metrics")
    assert status == 200
    assert "content-type: text/plain; version=" in head
    assert 'hypercache_blocks_hit_total{op="match"} 3.0' in body
    assert "hypercache_store_bytes_used 42.0" in body
    assert "hypercache_store_evicted_blocks_total 7.0" in body
    assert "process_resident_memory_bytes" in body


async def test_status_page_is_json(node: Node) -> None:
    status, head, body = await get(node.admin.address, "/status")
    assert status == 200
    assert "content-type: application/json" in head
    assert json.loads(body) == node.status


async def test_a_page_that_fails_is_a_500_and_the_next_is_served(node: Node) -> None:
    node.status = {"bad": object()}
    status, _, body = await get(node.admin.address, "/status")
    assert (status, body) == (500, "/status failed; the log has the reason\n")
    assert (await get(node.admin.address, "/healthz"))[0] == 200


async def test_head_has_the_headers_only(node: Node) -> None:
    whole = await get(node.admin.address, "/healthz")
    status, head, body = await get(node.admin.address, "/healthz", "HEAD")
    assert (status, body) == (200, "")
    assert f"content-length: {len(whole[2])}" in head


@pytest.mark.parametrize(
    ("path", "method", "headers", "status", "words"),
    [
        ("/", "GET", "", 404, "known: /healthz /readyz /metrics /status"),
        ("/metrics/", "GET", "", 404, "known"),
        ("/../status", "GET", "", 404, "known"),
        ("/status", "POST", "", 405, "only GET and HEAD"),
        ("/status", "DELETE", "", 405, "only GET and HEAD"),
        ("/status", "POST", "Content-Length: 4\r\n", 413, "no body"),
        ("/status", "GET", "Content-Length: 99999999999\r\n", 413, "no body"),
        ("/status", "GET", "Transfer-Encoding: chunked\r\n", 413, "no body"),
    ],
)
async def test_refusals(node: Node, path: str, method: str, headers: str, status: int, words: str) -> None:
    got, head, body = await get(node.admin.address, path, method, headers)
    assert got == status
    assert words in body
    assert "connection: close" in head
    assert ("allow: get, head" in head) == (status == 405)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"HYPC\x01\x02\x03\x04\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * (admin.MAX_HEADER_BYTES + 1), 431),
        (b"GET /" + b"a" * (admin.MAX_HEADER_BYTES * 4) + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    ],
)
async def test_what_is_not_a_request_is_refused_within_the_cap(node: Node, data: bytes, status: int) -> None:
    assert (await talk(node.admin.address, data)).startswith(b"HTTP/1.1 %d " % status)
    assert (await get(node.admin.address, "/healthz"))[0] == 200


async def test_one_answer_for_each_connection(node: Node) -> None:
    """Pipelined requests and keep-alive get one answer and an orderly end, not a second reading."""
    one = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n"
    answer = await talk(node.admin.address, one * 3)
    assert answer.count(b"HTTP/1.1 200") == 1
    assert answer.endswith(b"ok\n")


async def test_silent_peers_are_cut(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "REQUEST_TIMEOUT_S", 0.1)
    for part in (b"", b"GET /healthz HT"):
        assert await talk(node.admin.address, part) == b""


async def test_connections_are_capped(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "MAX_CONNECTIONS", 3)
    host, _, port = node.admin.address.rpartition(":")
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
    assert (await get(node.admin.address, "/healthz"))[0] == 503
    for _, writer in idle:
        writer.close()
        await writer.wait_closed()
    for _ in range(200):  # the server sees the closes a little later
        if (await get(node.admin.address, "/healthz"))[0] == 200:
            return
        await asyncio.sleep(0.01)
    pytest.fail("slots of closed connections were not given back")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:70000", "::1:0", "no.such.host.invalid:0"])
async def test_g12_bad_address_is_a_typed_error(address: str) -> None:
    node = Node()
    server = AdminServer(address, status=dict, ready=bool, registry=node.metrics.registry)
    with pytest.raises(AddressError, match=re.escape(address)):
        await server.start()
    await server.close()


async def test_a_host_that_does_not_resolve_is_said_to_be_that(node: Node) -> None:
    server = AdminServer("no.such.host.invalid:0", status=dict, ready=bool, registry=node.metrics.registry)
    with pytest.raises(AddressError, match=r"cannot resolve 'no\.such\.host\.invalid': .+; check .+--admin"):
        await server.start()


async def test_g12_port_in_use_names_address_and_errno(node: Node) -> None:
    second = AdminServer(node.admin.address, status=dict, ready=bool, registry=node.metrics.registry)
    with pytest.raises(
        AddressError,
        match=rf"{node.admin.address}: Address already in use \(errno {errno.EADDRINUSE}\); .* --admin",
    ):
        await second.start()
    assert (await get(node.admin.address, "/healthz"))[0] == 200


async def test_ipv6_address_is_written_in_brackets(node: Node) -> None:
    server = AdminServer("[::1]:0", status=dict, ready=bool, registry=node.metrics.registry)
    try:
        await server.start()
    except AddressError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    assert re.fullmatch(r"\[::1\]:[1-9]\d*", server.address)
    assert (await get(server.address, "/healthz"))[0] == 200
    await server.close()


async def test_l07_close_twice_and_in_the_middle_of_a_request(node: Node) -> None:
    host, _, port = node.admin.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /healthz HTTP/1.1\r\n")
    await asyncio.sleep(0.02)
    await node.admin.close()
    await node.admin.close()
    with pytest.raises(ConnectionError):
        if await asyncio.wait_for(reader.read(), 5) == b"":
            raise ConnectionResetError("an end of file will do as well")
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def test_l07_a_script_that_never_closes_ends() -> None:
    script = """
import asyncio
from hypercache.server.admin import AdminServer
from hypercache.server.metrics import Metrics

async def main():
    metrics = Metrics()
    server = AdminServer("127.0.0.1:0", status=dict, ready=bool, registry=metrics.registry)
    await server.start()
    host, _, port = server.address.rpartition(":")
    await asyncio.open_connection(host, int(port))
    sampler = asyncio.create_task(metrics.sample_lag())
    await asyncio.sleep(0.1)

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
