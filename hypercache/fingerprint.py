"""Fingerprints of token windows: what a known block is found by, at any token offset.

A window of ``block_size`` tokens t_0 .. t_(n-1) has the polynomial t_0 b^(n-1) + ... + t_(n-1) over the field
of 2**61 - 1 elements, b secret: Karp and Rabin's rolling hash (1987), so that all windows of a prompt cost
one pass. For any two different windows at most n - 1 of all b make them equal, whatever their structure.
(Modulo 2**64 that does not hold: Thue-Morse words of 64 tokens lose 26 bits there.) SipHash-2-4 (Aumasson
and Bernstein, 2012) under a second secret makes of it what is sent: it shows which windows of a namespace
are equal, and neither tokens nor anything that can be added up.

Both secrets come from the tenant's key and the namespace's digest: windows of two tenants, models, adapters,
salts or block sizes never meet. A fingerprint finds, it proves nothing: whoever uses a block compares its
modular digest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from hypercache.errors import TokenError
from hypercache.keys import (
    HASH_VERSION,
    MediaSpan,
    Namespace,
    TenantKey,
    canonical_tokens,
    keyed,
    modular_digests,
)

FINGERPRINT_NBYTES: int = 8
MARK_NBYTES: int = 24  # fingerprint and modular digest
NOT_ASKED: int = 0  # no window has this fingerprint: it marks an offset that need not be looked up

_PERSON = f"HC{HASH_VERSION} WINDOW".encode()

Fingerprints = npt.NDArray[np.uint64]

_U = np.uint64
_PRIME = _U((1 << 61) - 1)
_LOW30, _LOW31 = _U((1 << 30) - 1), _U((1 << 31) - 1)
_1, _13, _16, _17, _21, _30, _31, _32, _61, _64 = map(_U, (1, 13, 16, 17, 21, 30, 31, 32, 61, 64))
_V0, _V1, _V2, _V3 = map(_U, (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573))
_LENGTH = _U(8 << 56)  # SipHash's last word for a message of eight bytes
_FF = _U(0xFF)


def _kernel(function: Callable[..., Any]) -> Any:
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no directory for the cache is writable: compile in every process instead
        return numba.njit(nogil=True)(function)


def _inline(function: Callable[..., Any]) -> Any:
    return numba.njit(inline="always")(function)


@_inline
def _reduce(x: Any) -> Any:
    x = (x & _PRIME) + (x >> _61)
    return x if x < _PRIME else x - _PRIME


@_inline
def _times(a: Any, b: Any) -> Any:
    """a * b modulo 2**61 - 1 from products of 31-bit halves: none of them leaves 64 bits."""
    high, low = a >> _31, a & _LOW31
    b_high, b_low = b >> _31, b & _LOW31
    middle = low * b_high + high * b_low
    return _reduce(
        ((high * b_high) << _1) + (middle >> _30) + ((middle & _LOW30) << _31) + low * b_low  # < 2**64
    )


@_inline
def _rotate(x: Any, bits: Any) -> Any:
    return (x << bits) | (x >> (_64 - bits))


@_inline
def _sip_round(a: Any, b: Any, c: Any, d: Any) -> Any:
    a = a + b
    b = _rotate(b, _13) ^ a
    a = _rotate(a, _32)
    c = c + d
    d = _rotate(d, _16) ^ c
    a = a + d
    d = _rotate(d, _21) ^ a
    c = c + b
    b = _rotate(b, _17) ^ c
    c = _rotate(c, _32)
    return a, b, c, d


@_kernel
def _roll(tokens: Any, width: int, base: Any, out: Any) -> None:
    """out[i] = polynomial of tokens[i : i + width]."""
    top = _1  # base ** width: what a token weighs when it leaves
    value = _U(0)
    for i in range(width):
        top = _times(top, base)
        value = _reduce(_times(value, base) + _U(tokens[i]))
    out[0] = value
    for i in range(1, out.size):
        leaving = _PRIME - _times(_U(tokens[i - 1]), top)
        value = _reduce(_times(value, base) + (leaving + _U(tokens[i - 1 + width])))
        out[i] = value


@_kernel
def _seal(values: Any, key0: Any, key1: Any) -> None:
    """SipHash-2-4 of each value as eight little-endian bytes, in place; 0 becomes 1."""
    for i in range(values.size):
        m = values[i]
        a, b, c, d = key0 ^ _V0, key1 ^ _V1, key0 ^ _V2, key1 ^ _V3 ^ m
        a, b, c, d = _sip_round(a, b, c, d)
        a, b, c, d = _sip_round(a, b, c, d)
        a, d = a ^ m, d ^ _LENGTH
        a, b, c, d = _sip_round(a, b, c, d)
        a, b, c, d = _sip_round(a, b, c, d)
        a, c = a ^ _LENGTH, c ^ _FF
        a, b, c, d = _sip_round(a, b, c, d)
        a, b, c, d = _sip_round(a, b, c, d)
        a, b, c, d = _sip_round(a, b, c, d)
        a, b, c, d = _sip_round(a, b, c, d)
        sealed = a ^ b ^ c ^ d
        values[i] = sealed if sealed else _1


def fingerprints(ns: Namespace, tenant: TenantKey, tokens: Any, first: int = 0) -> Fingerprints:
    """The fingerprint of ``tokens[i : i + block_size]`` for i = first, first + 1, ... up to the last window.

    Returns uint64 [max(0, len(tokens) - block_size + 1 - first)], never 0 (see ``NOT_ASKED``). Raises
    TokenError for bad tokens or a negative ``first``, SpecError where ``tenant`` is not the namespace's.
    """
    ids = canonical_tokens(tokens)
    if first < 0:
        raise TokenError(f"first={first} is negative; windows are counted from token 0")
    base, key0, key1 = _secrets(ns, tenant)
    out = np.empty(max(0, len(ids) - ns.block_size + 1 - first), np.uint64)
    if out.size:
        # One compiled version serves all callers: aligned and read-only, whatever came.
        ids = np.require(ids[first:], np.uint32, "A").view()
        ids.flags.writeable = False
        _roll(ids, ns.block_size, base, out)
        _seal(out, key0, key1)
    return out


def marks(ns: Namespace, tenant: TenantKey, tokens: Any, *, media: Sequence[MediaSpan] = ()) -> list[bytes]:
    """What a store keeps of each full block on the grid, so that it can be found out of context.

    24 bytes a block: the fingerprint of its tokens (uint64, little-endian), then its modular digest. Media in
    a block count in the digest alone. Raises as :func:`hypercache.keys.modular_digests`.
    """
    ids = canonical_tokens(tokens)
    digests = modular_digests(ns, tenant, ids, media=media)
    found = fingerprints(ns, tenant, ids)[:: ns.block_size].astype("<u8").tobytes()
    width = FINGERPRINT_NBYTES
    return [found[at * width : (at + 1) * width] + digest for at, digest in enumerate(digests)]


def warm() -> None:
    """Compile, or load from numba's cache, what :func:`fingerprints` needs: seconds on a machine that never
    ran this version, a fraction of one afterwards. Call it at start, so that no request waits for it."""
    out = np.empty(1, np.uint64)
    tokens = np.zeros(1, np.uint32)
    tokens.flags.writeable = False
    _roll(tokens, 1, _1, out)
    _seal(out, _1, _1)


def _secrets(ns: Namespace, tenant: TenantKey) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Base of the polynomial (2 .. 2**61 - 2), key of SipHash."""
    state = keyed(ns, tenant, _PERSON, 32)
    state.update(ns.digest)
    secret = state.digest()
    base = 2 + int.from_bytes(secret[:16], "little") % (int(_PRIME) - 3)
    key0, key1 = (_U(int.from_bytes(part, "little")) for part in (secret[16:24], secret[24:]))
    return _U(base), key0, key1
