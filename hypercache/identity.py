"""Canonical commitments: one way to turn named fields into bytes that no other fields turn into.

Every field is written as tag, type and length before its bytes, so that moving a byte from one field
to its neighbour, or leaving a field out, always changes the result (bare concatenation would not).
"""

from __future__ import annotations

import hashlib
import numbers
import struct
from collections.abc import Iterable, Mapping

Scalar = None | bool | int | float | str | bytes
Value = Scalar | Iterable["Value"] | Mapping[str, "Value"]

_LEN = struct.Struct("<Q")


def _frame(kind: bytes, data: bytes) -> bytes:
    return kind + _LEN.pack(len(data)) + data


def encode(value: Value) -> bytes:
    """Injective encoding of a value tree. Mappings are ordered by key; ``None``, ``()`` and ``{}`` differ."""
    match value:
        case None:
            return _frame(b"N", b"")
        case bool():
            return _frame(b"B", b"\x01" if value else b"\x00")
        case int():
            return _frame(b"I", str(value).encode())
        case float():
            return _frame(b"F", struct.pack("<d", value))
        case str():
            return _frame(b"S", value.encode())
        case bytes():
            return _frame(b"Y", value)
        case Mapping():
            parts = [encode(key) + encode(value[key]) for key in sorted(value)]
            return _frame(b"M", b"".join(parts))
        case Iterable():
            return _frame(b"L", b"".join([encode(item) for item in value]))
    raise TypeError(f"cannot commit to a value of type {type(value).__name__}")


def canonical(value: object) -> Value:
    """One form for values that mean the same: 8, 8.0 and a NumPy 8 are one number, lists and tuples one
    sequence, and a mapping's ``None`` entries are absent. Raises TypeError for anything else."""
    match value:
        case None | bool() | str() | bytes():
            return value
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            number = float(value)
            return int(number) if number.is_integer() else number
        case Mapping():
            return {str(key): canonical(item) for key, item in value.items() if item is not None}
        case list() | tuple():
            return [canonical(item) for item in value]
    raise TypeError(f"cannot commit to a value of type {type(value).__name__}")


def commit(tag: str, fields: Mapping[str, Value], *, key: bytes = b"", size: int = 32) -> bytes:
    """BLAKE2b (RFC 7693) of ``fields`` under a domain ``tag``; ``key`` <= 64 bytes, ``size`` bytes out."""
    state = hashlib.blake2b(key=key, digest_size=size)
    state.update(_frame(b"T", tag.encode()))
    state.update(encode(fields))
    return state.digest()
