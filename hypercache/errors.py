"""The error tree of HyperCache.

Every message says what was wrong, where, and what to do about it. Bytes, tokens and secrets never
appear in a message. Transport faults are :class:`fabrics.FabricError`; the client turns them into
misses, or into :class:`Unavailable` where a miss cannot be expressed.
"""

from __future__ import annotations


class HyperCacheError(Exception):
    """Base of every error that HyperCache raises on purpose."""


class ConfigError(HyperCacheError, ValueError):
    """A setting is unknown, malformed or out of range. Names key, value, origin and allowed range."""


class SpecError(HyperCacheError, ValueError):
    """A model, layout, shape, dtype, layer count or block size does not fit. Names both sides."""


class TokenError(HyperCacheError, ValueError):
    """Token ids are not integers in 0..2**32-1, or media spans do not fit them."""


class CodecError(HyperCacheError, ValueError):
    """Encoded bytes are malformed: wrong size, or a scale that is missing, NaN, infinite or negative."""


class ProtocolError(HyperCacheError):
    """The peer speaks another protocol or version, or breaks this one. Names both versions."""


class Refused(HyperCacheError):
    """The server answered a request with a typed refusal. ``code`` is one of ``protocol.ErrorCode``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class TooLarge(HyperCacheError, ValueError):
    """An object is larger than a documented limit. Names the limit and the size."""


class StoreFull(HyperCacheError):
    """The tier cannot make room: everything left in it is leased or being written."""


class Unavailable(HyperCacheError, ConnectionError):
    """No server can be reached and the call has no meaning as a miss (for example ``clear``)."""
