"""Addresses of the socket fabrics: parsing, resolving, and writing them back."""

from __future__ import annotations

import asyncio
import re
import socket
from dataclasses import dataclass
from typing import Any

from fabrics.errors import AddressError

DEFAULT_PORT = 7440

_AUTHORITY = re.compile(r"(?P<host>\[[^\[\]]*\]|[^:\[\]]*)(?::(?P<port>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class HostPort:
    """A host (name or literal, without brackets) and a port."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        return format_uri(self.scheme, self.host, self.port)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address that a host stands for: what ``socket`` wants."""

    family: socket.AddressFamily
    sockaddr: tuple[Any, ...]


def format_uri(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def sockaddr_uri(scheme: str, sockaddr: tuple[Any, ...]) -> str:
    """A socket's address as a URI. IPv4 peers of a dual-stack socket are written as IPv4."""
    host = socket.getnameinfo(sockaddr, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]
    return format_uri(scheme, host.removeprefix("::ffff:"), sockaddr[1])


def parse(uri: str, scheme: str, *, listening: bool = False) -> HostPort:
    """Take ``scheme://host[:port]`` apart.

    host is a name, an IPv4 literal, or an IPv6 literal in brackets, with a zone if it needs one
    (``[fe80::1%eth0]``). port is 1..65535, 7440 if left out; 0 means "any" where ``listening``.
    Raises AddressError with the remedy.
    """
    prefix = f"{scheme}://"
    if not uri.startswith(prefix):
        raise AddressError(f"{uri!r} is not a {scheme} address; write {prefix}HOST:PORT")
    rest = uri[len(prefix) :].removesuffix("/")
    if extra := re.search(r"[/?#@\s]", rest):
        raise AddressError(f"{uri!r}: {extra[0]!r} has no place in it; write {prefix}HOST:PORT")
    match = _AUTHORITY.fullmatch(rest)
    if match is None:
        raise AddressError(f"{uri!r}: brackets do not match; write {prefix}[ADDRESS]:PORT")
    host, port_text = match["host"], match["port"]
    if not host.startswith("[") and port_text is not None and ":" in port_text:
        raise AddressError(
            f"{uri!r}: an IPv6 address needs brackets, or its port cannot be told from it; "
            f"write {prefix}[ADDRESS]:PORT"
        )
    if not (bare := host.strip("[]")):
        where = "0.0.0.0 or [::] for all interfaces" if listening else "the server's name or address"
        raise AddressError(f"{uri!r} names no host; write {where}")
    if host.startswith("["):
        bare = bare.replace("%25", "%")  # RFC 6874 writes the zone's % so
        address = bare.partition("%")[0]
        if ":" not in address:
            raise AddressError(f"{uri!r}: brackets are for IPv6 addresses, {address!r} is none")
        try:
            socket.inet_pton(socket.AF_INET6, address)
        except OSError:
            raise AddressError(f"{uri!r}: {address!r} is not an IPv6 address") from None
    return HostPort(scheme, bare, _parse_port(uri, port_text, listening))


def _parse_port(uri: str, text: str | None, listening: bool) -> int:
    if text is None:
        return DEFAULT_PORT
    lowest = 0 if listening else 1
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and lowest <= int(text) <= 65535):
        raise AddressError(f"{uri!r}: port {text!r} is not a number in {lowest}..65535")
    return int(text)


async def resolve(address: HostPort) -> list[Endpoint]:
    """All addresses of a host, in the system's order. Literals ask no resolver. Raises AddressError."""
    host, port = address.host, address.port
    kind = {"type": socket.SOCK_STREAM, "proto": socket.IPPROTO_TCP}
    try:
        try:
            found = socket.getaddrinfo(host, port, flags=socket.AI_NUMERICHOST, **kind)
        except socket.gaierror:
            if ":" in host:
                raise
            found = await asyncio.get_running_loop().getaddrinfo(host, port, **kind)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        remedy = (
            "is the zone after % an interface here?" if "%" in host else "check the name and the resolver"
        )
        raise AddressError(f"{address}: cannot resolve {host!r}: {reason}; {remedy}") from None
    unique = dict.fromkeys((family, sockaddr) for family, _, _, _, sockaddr in found)
    return [Endpoint(family, sockaddr) for family, sockaddr in unique]
