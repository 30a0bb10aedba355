"""Addresses of all families (H09), and what listening and connecting say when they cannot."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from fabric_kit import SMALL, Ledger, Party

from fabrics import Channel, Outgoing, fabric_for, schemes
from fabrics import tcp as tcp_module
from fabrics.address import Endpoint, HostPort, parse, resolve, sockaddr_uri
from fabrics.errors import AddressError, ConnectFailed, FabricError


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback address")


@pytest.mark.parametrize(
    ("uri", "host", "port"),
    [
        ("tcp://127.0.0.1:7000", "127.0.0.1", 7000),
        ("tcp://kv-0.kv.svc:7000", "kv-0.kv.svc", 7000),
        ("tcp://kv", "kv", 7440),
        ("tcp://kv/", "kv", 7440),
        ("tcp://[::1]:65535", "::1", 65535),
        ("tcp://[2605:340:cd51::1]", "2605:340:cd51::1", 7440),
        ("tcp://[fe80::1%lo]:1", "fe80::1%lo", 1),
        ("tcp://[fe80::1%25lo]:1", "fe80::1%lo", 1),
        ("tcp://0.0.0.0:1", "0.0.0.0", 1),
        ("tcp://[::]:1", "::", 1),
    ],
)
def test_h09_what_can_be_written(uri: str, host: str, port: int) -> None:
    assert parse(uri, "tcp") == HostPort("tcp", host, port)


@pytest.mark.parametrize(
    ("uri", "complaint"),
    [
        ("tcp://::1:6379", "needs brackets"),
        ("tcp://2605:340:cd51::1", "needs brackets"),
        ("tcp://fe80::1%lo:80", "needs brackets"),
        ("tcp://[::1:6379", "brackets do not match"),
        ("tcp://[::1]6379", "brackets do not match"),
        ("tcp://[[::1]]:1", "brackets do not match"),
        ("tcp://[127.0.0.1]:1", "brackets are for IPv6"),
        ("tcp://[::zz]:1", "not an IPv6 address"),
        ("tcp://", "names no host"),
        ("tcp://:7440", "names no host"),
        ("tcp://[]:1", "names no host"),
        ("tcp://kv:0", "1..65535"),
        ("tcp://kv:70000", "1..65535"),
        ("tcp://kv:-1", "1..65535"),
        ("tcp://kv:", "1..65535"),
        ("tcp://kv:http", "1..65535"),
        ("tcp://kv:\u0663", "1..65535"),
        ("tcp://user@kv:1", "'@' has no place"),
        ("tcp://kv:1/path", "'/' has no place"),
        ("tcp://kv:1?x=1", "has no place"),
        ("tcp://k v:1", "has no place"),
        ("http://kv:1", "not a tcp address"),
    ],
)
def test_h09_what_cannot(uri: str, complaint: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse(uri, "tcp")
    assert complaint in str(caught.value)
    assert uri in str(caught.value)


def test_port_0_is_for_listening() -> None:
    assert parse("tcp://kv:0", "tcp", listening=True).port == 0


@pytest.mark.parametrize("uri", ["tcp//x", "nosuch://x", "://x", ""])
def test_unknown_schemes_are_answered_with_the_known_ones(uri: str) -> None:
    with pytest.raises(AddressError, match="tcp"):
        fabric_for(uri)
    assert {"tcp", "loop"} <= set(schemes())


async def test_names_that_do_not_resolve() -> None:
    with pytest.raises(AddressError, match="cannot resolve"):
        await resolve(parse("tcp://no-such-host.invalid:1", "tcp"))
    with pytest.raises(AddressError):
        await resolve(parse(f"tcp://{'x' * 70}.invalid:1", "tcp"))
    with pytest.raises(AddressError, match="zone"):
        await resolve(parse("tcp://[fe80::1%nosuchif0]:1", "tcp"))


async def reach(listening: str, connecting: str) -> tuple[str, str]:
    """Listen on one URI, connect to another with the listener's port, exchange a frame; both ends' names."""
    far, near = Party(Ledger()), Party(Ledger())
    far.on_each = lambda channel, came: channel.send(Outgoing(came.type, came.request_id, came.body))
    fabric = fabric_for("tcp://")
    listener = await fabric.listen(listening, lambda channel: far)
    try:
        port = listener.uris[0].rpartition(":")[2]
        channel = await fabric.connect(f"{connecting}:{port}", near, timeout=3)
        channel.send(Outgoing(SMALL, 1, b"hello"))
        assert (await near.count(1))[0].body == b"hello"
        await channel.close()
        return listener.uris[0], channel.peer
    finally:
        await listener.close()


async def test_h09_ipv4() -> None:
    uri, peer = await reach("tcp://127.0.0.1:0", "tcp://127.0.0.1")
    assert uri == peer
    assert uri.startswith("tcp://127.0.0.1:")
    assert not uri.endswith(":0")
    await reach("tcp://0.0.0.0:0", "tcp://127.0.0.1")
    await reach("tcp://localhost:0", "tcp://localhost")


@needs_ipv6
async def test_h09_ipv6() -> None:
    uri, peer = await reach("tcp://[::1]:0", "tcp://[::1]")
    assert uri == peer
    assert uri.startswith("tcp://[::1]:")
    await reach("tcp://[::]:0", "tcp://[::1]")


@needs_ipv6
async def test_h09_the_ipv6_wildcard_takes_ipv4_too() -> None:
    _, peer = await reach("tcp://[::]:0", "tcp://127.0.0.1")
    assert peer.startswith("tcp://127.0.0.1:")


def link_local() -> str | None:
    """An address with its zone, if an interface here has one."""
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, *_, name = line.split()
        if digits.startswith("fe80"):
            return f"{socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))}%{name}"
    return None


@pytest.mark.skipif(link_local() is None, reason="no interface here has a link-local IPv6 address")
async def test_h09_zone_of_a_link_local_address() -> None:
    address = link_local()
    uri, _ = await reach(f"tcp://[{address}]:0", f"tcp://[{address}]")
    assert f"[{address}]" in uri


@needs_ipv6
async def test_h09_a_name_of_both_families_listens_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [Endpoint(socket.AF_INET6, ("::1", 0, 0, 0)), Endpoint(socket.AF_INET, ("127.0.0.1", 0))]

    async def resolved(address: HostPort) -> list[Endpoint]:
        return both

    monkeypatch.setattr(tcp_module, "resolve", resolved)
    listener = await fabric_for("tcp://").listen("tcp://localhost:0", lambda channel: Party(Ledger()))
    monkeypatch.undo()
    assert len({uri.rpartition(":")[2] for uri in listener.uris}) == 1, "one port for all"
    assert [uri.rpartition(":")[0] for uri in listener.uris] == ["tcp://[::1]", "tcp://127.0.0.1"]
    for uri in listener.uris:
        channel = await fabric_for(uri).connect(uri, Party(Ledger()), timeout=2)
        await channel.close()
    await listener.close()


@needs_ipv6
async def test_h09_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first address refuses, or says nothing at all: the second answers within the deadline."""
    far = Party(Ledger())
    listener = await fabric_for("tcp://").listen("tcp://127.0.0.1:0", lambda channel: far)
    port = int(listener.uris[0].rpartition(":")[2])
    with socket.socket() as silent:  # a full backlog answers no SYN
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        crowd = []
        for _ in range(8):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(silent.getsockname())
            crowd.append(sock)
        for first in (("::1", port, 0, 0), silent.getsockname()):
            family = socket.AF_INET6 if len(first) == 4 else socket.AF_INET
            endpoints = [Endpoint(family, first), Endpoint(socket.AF_INET, ("127.0.0.1", port))]

            async def resolved(address: HostPort, found: list[Endpoint] = endpoints) -> list[Endpoint]:
                return found

            monkeypatch.setattr(tcp_module, "resolve", resolved)
            channel = await fabric_for("tcp://").connect(f"tcp://twice:{port}", Party(Ledger()), timeout=5)
            assert channel.peer == f"tcp://127.0.0.1:{port}"
            await channel.close()
        endpoints.pop()
        with pytest.raises(ConnectFailed, match=r"within 0\.3 s"):
            await fabric_for("tcp://").connect(f"tcp://silent:{port}", Party(Ledger()), timeout=0.3)
        for sock in crowd:
            sock.close()
    await listener.close()
    await asyncio.sleep(0)


async def test_a_refused_connection_names_the_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ConnectFailed, match=f"127.0.0.1.*{port}.*is the server running"):
            await fabric_for("tcp://").connect(f"tcp://127.0.0.1:{port}", Party(Ledger()), timeout=2)


async def test_bind_errors_name_address_and_errno() -> None:
    def accept(channel: Channel) -> Party:
        return Party(Ledger())

    fabric = fabric_for("tcp://")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        uri = sockaddr_uri("tcp", taken.getsockname())
        with pytest.raises(AddressError, match=rf"{uri}.*EADDRINUSE \(errno \d+\)"):
            await fabric.listen(uri, accept)
    with pytest.raises(AddressError, match=r"192\.0\.2\.77.*EADDRNOTAVAIL"):
        await fabric.listen("tcp://192.0.2.77:0", accept)
    with pytest.raises(FabricError):
        await fabric.listen("tcp://no-such-host.invalid:0", accept)
