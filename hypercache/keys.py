"""Tokens -> blocks -> digests: who may share which bytes.

A digest is keyed BLAKE2b (RFC 7693, 16 bytes) under the tenant's key, with the kind of digest in the
personalisation field, so that digests of two tenants, kinds or versions never meet. What is hashed has a
fixed size for a given block size, and what may follow it (media) delimits itself. Token ids are hashed
as little-endian 32-bit words: one result in every process, on every platform, for every integer dtype.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hypercache.errors import ConfigError, SpecError, TokenError
from hypercache.identity import Value, canonical, commit
from hypercache.model import ModelSpec

HASH_VERSION: int = 1
BLOCK_SIZES: tuple[int, ...] = (8, 16, 64)
DIGEST_NBYTES: int = 16
SEAL_NBYTES: int = 32
MAX_TOKEN: int = 2**32 - 1

# Changing anything that is hashed here means a new HASH_VERSION, and with it new personalisations.
_ROOT, _CAUSAL, _MODULAR, _SEAL, _CONTEXT = (
    f"HC{HASH_VERSION} {kind}".encode() for kind in ("ROOT", "CAUSAL", "MODULAR", "SEAL", "CONTEXT")
)
_TENANT_LABEL = b"hypercache tenant key v1"
_PUBLIC_SECRET = b"hypercache public tenant: this key is no secret"
_TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_CODEC_NAME = re.compile(r"[a-z0-9][a-z0-9+_.-]{0,63}")
_SPAN = struct.Struct("<qQQ")  # first token of the span relative to the block, tokens, digest bytes

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class TenantKey:
    """The key under which a tenant's digests are made.

    name: the tenant's name. tenant_id: 16 bytes that name the tenant in public; they tell nothing of the
    key. key: 32 bytes, HMAC-SHA256 (RFC 2104) of label, length and name under the tenant's secret: the
    same secret under two names makes two tenants. Never shown by ``repr``.
    """

    name: str
    tenant_id: bytes
    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        fields = (("name", self.name, str), ("tenant_id", self.tenant_id, bytes), ("key", self.key, bytes))
        for what, value, kind in fields:
            if not isinstance(value, kind) or (kind is bytes and not 16 <= len(value) <= 64):
                raise ConfigError(
                    f"TenantKey.{what} must be {'a str' if kind is str else 'bytes, 16 to 64 of them'}; "
                    "make a key with TenantKey.from_secret(secret, name) or TenantKey.public()"
                )

    @classmethod
    def from_secret(cls, secret: bytes, name: str) -> TenantKey:
        """Derive the key of tenant ``name``. Raises ConfigError for a bad name or a secret under 16 bytes.

        No message shows an argument: given in the wrong order, either may be the secret.
        """
        for what, value, kind in (("secret", secret, bytes), ("name", name, str)):
            if not isinstance(value, kind):
                raise ConfigError(
                    f"TenantKey.from_secret: {what} must be {kind.__name__}, got {type(value).__name__}; "
                    'call from_secret(secret=b"...", name="...")'
                )
        if len(secret) < 16:
            raise ConfigError(
                f"the tenant's secret must be at least 16 random bytes, got {len(secret)}; "
                "make one with `openssl rand -hex 32`, or use the public tenant"
            )
        if not _TENANT_NAME.fullmatch(name):
            raise ConfigError(
                "the tenant name must be 1 to 64 letters, digits, '.', '_' or '-' "
                "(not shown here: it might be the secret)"
            )
        if name == "public":
            raise ConfigError(
                "tenant name 'public' is taken by the tenant without a secret; use another name"
            )
        return cls._derive(secret, name)

    @classmethod
    def public(cls) -> TenantKey:
        """The tenant of everyone who chose no tenant: its key is fixed and no secret."""
        return cls._derive(_PUBLIC_SECRET, "public")

    @classmethod
    def _derive(cls, secret: bytes, name: str) -> TenantKey:
        label = name.encode()
        key = hmac.digest(secret, _TENANT_LABEL + struct.pack("<Q", len(label)) + label, "sha256")
        return cls(name, commit("hypercache.tenant_id.v1", {}, key=key, size=16), key)


@dataclass(frozen=True, slots=True)
class Namespace:
    """A key space: all blocks whose bytes differ by their tokens alone.

    digest: 32 bytes that commit to model fingerprint, block size, codecs, tenant, salt, extra and
        HASH_VERSION. The other fields say, for messages, what went into it.
    disk_codec: of the blocks on disk; "" where they lie there as they travel.
    """

    digest: bytes
    block_size: int
    codec: str
    fingerprint: bytes
    tenant_id: bytes
    label: str = field(default="", compare=False)
    disk_codec: str = ""

    @classmethod
    def build(
        cls,
        spec: ModelSpec,
        *,
        block_size: int,
        codec: str,
        tenant: TenantKey,
        salt: str | None = None,
        extra: Mapping[str, Value] | None = None,
        disk_codec: str = "",
    ) -> Namespace:
        """The key space of ``spec`` for ``tenant``.

        salt: splits a tenant's key space, for example by end user; None and "" are no salt.
        extra: further things that K/V depend on; None and {} are one, and an entry of None is absent.
        disk_codec: what blocks have been through when they come from disk; "": nothing but ``codec``.
        Raises SpecError for a block size or codec name that cannot be.
        """
        for name in (codec, disk_codec or codec):
            if not _CODEC_NAME.fullmatch(name):
                raise SpecError(
                    f"codec name {name!r} must be lower-case letters, digits, '+', '_', '.' or '-'"
                )
        fingerprint = spec.fingerprint()
        block_size = check_block_size(block_size)
        try:
            fields: dict[str, Value] = {
                "hash_version": HASH_VERSION,
                "fingerprint": fingerprint,
                "block_size": block_size,
                "codec": codec,
                "tenant": tenant.tenant_id,
                "salt": salt or None,
                "extra": canonical(extra or {}),
            }
            if disk_codec:
                fields["disk_codec"] = disk_codec
            digest = commit("hypercache.namespace.v1", fields)
        except (TypeError, UnicodeEncodeError) as error:
            raise SpecError(f"namespace of {spec.name!r}: salt or extra cannot be hashed: {error}") from None
        return cls(digest, block_size, codec, fingerprint, tenant.tenant_id, spec.name, disk_codec)


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Placeholder tokens ``start..stop`` stand for an image, sound or embedding with this content digest."""

    start: int
    stop: int
    digest: bytes


def check_block_size(block_size: int) -> int:
    """``block_size`` if it is one of BLOCK_SIZES, else SpecError."""
    if not isinstance(block_size, (int, np.integer)) or block_size not in BLOCK_SIZES:
        allowed = " or ".join(map(str, BLOCK_SIZES))
        raise SpecError(f"block size {block_size!r} is not supported; use {allowed} tokens")
    return int(block_size)


def usable_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks of a prompt that a cache may fill: whole ones, and one token is always left to compute."""
    return max(0, (num_tokens - 1) // check_block_size(block_size))


def canonical_tokens(tokens: Any) -> Tokens:
    """Token ids as a contiguous 1-D '<u4' array; None is empty. A suitable array is not copied.

    Takes sequences of ints, ``array.array``, NumPy arrays of any integer dtype and byte order, and tensors
    (through ``__array__``, or ``tolist`` where they live on a device). Raises TokenError, naming the first
    offending index, for floats, bools, nested sequences and ids outside 0..2**32-1.
    """
    if tokens is None:
        return np.empty(0, "<u4")
    if isinstance(tokens, (str, bytes, bytearray, memoryview)):
        raise TokenError(f"token ids must be integers, got {type(tokens).__name__}; tokenize the text first")
    if not isinstance(tokens, np.ndarray):
        tokens = _as_array(tokens)
    if tokens.ndim != 1:
        raise TokenError(
            f"token ids must be one flat sequence, got shape {tokens.shape}; pass one prompt at a time"
        )
    if tokens.size == 0:
        return np.empty(0, "<u4")
    if tokens.dtype.kind not in "iu":
        raise TokenError(f"token 0 is of type {tokens.dtype}; token ids must be integers in 0..{MAX_TOKEN}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high > MAX_TOKEN:
        index = next(i for i, token in enumerate(tokens.tolist()) if not 0 <= token <= MAX_TOKEN)
        raise TokenError(f"token {index} is {int(tokens[index])}; token ids must be in 0..{MAX_TOKEN}")
    return np.ascontiguousarray(tokens, dtype="<u4")


def _as_array(tokens: Any) -> npt.NDArray[Any]:
    if hasattr(tokens, "__array__"):
        try:
            return np.asarray(tokens)
        except (TypeError, RuntimeError):  # a tensor on a device, or of a dtype that NumPy lacks
            tokens = tokens.tolist()
    elif hasattr(tokens, "typecode"):
        return np.asarray(tokens)
    if not isinstance(tokens, Sequence):
        raise TokenError(f"token ids must be a sequence of integers, got {type(tokens).__name__}")
    kinds = set(map(type, tokens))
    if kinds <= {int}:
        try:
            return np.fromiter(tokens, np.int64, len(tokens))
        except OverflowError:
            pass
    for index, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
            raise TokenError(f"token {index} is of type {type(token).__name__}; token ids must be integers")
        if not 0 <= token <= MAX_TOKEN:
            raise TokenError(f"token {index} is {token}; token ids must be in 0..{MAX_TOKEN}")
    return np.fromiter(tokens, np.int64, len(tokens))


def causal_digests(
    ns: Namespace,
    tenant: TenantKey,
    tokens: Any,
    *,
    blocks: int | None = None,
    media: Sequence[MediaSpan] = (),
) -> list[bytes]:
    """H_0, H_1, ... of the full blocks of ``tokens`` (at most ``blocks`` of them), 16 bytes each.

    H_k commits to H_{k-1}, the tokens of block k and the media in it; H_{-1} to the namespace. Equal H_k
    means an equal prefix. A trailing part of a block has no digest. Raises TokenError for bad tokens or
    media, SpecError where ``tenant`` is not the namespace's.
    """
    ids = canonical_tokens(tokens)
    count = len(ids) // ns.block_size
    if blocks is not None:
        if blocks < 0:
            raise TokenError(f"blocks={blocks} is negative; ask for 0 or more, or None for all")
        count = min(count, blocks)
    root = keyed(ns, tenant, _ROOT)
    root.update(ns.digest)
    previous = root.digest()
    fresh = keyed(ns, tenant, _CAUSAL).copy  # copying a keyed state is 2-3 times cheaper than keying one
    inside = _media_by_block(media, len(ids), 0, count, ns.block_size)
    raw, width = ids.tobytes(), ns.block_size * 4
    digests = []
    for block in range(count):
        state = fresh()
        state.update(previous + raw[block * width : (block + 1) * width] + inside.get(block, b""))
        previous = state.digest()
        digests.append(previous)
    return digests


def modular_digests(
    ns: Namespace, tenant: TenantKey, tokens: Any, *, media: Sequence[MediaSpan] = (), start: int = 0
) -> list[bytes]:
    """M_0, M_1, ... of the full blocks of the segment that begins at token ``start``, 16 bytes each.

    M_k commits to the namespace, the tokens of block k and the media in it, and to nothing before them:
    the same segment has the same digests at any position. ``media`` count from the first of ``tokens``.
    Raises as :func:`causal_digests`, and TokenError for a ``start`` outside the tokens.
    """
    ids = canonical_tokens(tokens)
    if not 0 <= start <= len(ids):
        raise TokenError(f"start={start} is outside 0..{len(ids)}")
    count = (len(ids) - start) // ns.block_size
    base = keyed(ns, tenant, _MODULAR)
    base.update(ns.digest)
    inside = _media_by_block(media, len(ids), start, count, ns.block_size)
    raw, width = ids[start:].tobytes(), ns.block_size * 4
    digests = []
    for block in range(count):
        state = base.copy()
        state.update(raw[block * width : (block + 1) * width] + inside.get(block, b""))
        digests.append(state.digest())
    return digests


def seal(modular: Sequence[bytes], causal: Sequence[bytes]) -> bytes:
    """Causal digests for those alone who know the tokens of the blocks: SEAL_NBYTES each, end to end.

    A causal digest is the right to read a block, so it is not told to whoever names the block's fingerprint,
    which has 64 bits. S = BLAKE2b(M, 32 bytes), M being the modular digest of the block: the first half of S
    stands as it is, to be compared, the second half hides the causal digest (XOR). M follows only from the
    tokens and the tenant's key, and is not to be had from S. Raises ValueError for unequal numbers.
    """
    if len(modular) != len(causal):
        raise ValueError(f"{len(modular)} modular digests do not seal {len(causal)} causal ones")
    sealed = _pads(modular)
    sealed[:, DIGEST_NBYTES:] ^= np.frombuffer(b"".join(causal), np.uint8).reshape(-1, DIGEST_NBYTES)
    return sealed.tobytes()


def unseal(sealed: bytes, modular: Sequence[bytes]) -> list[bytes]:
    """The causal digests of the blocks whose modular digests are ``modular``, as far as these open the seals:
    they end before the first that another block closed. Raises ValueError for unequal numbers."""
    if len(sealed) != len(modular) * SEAL_NBYTES:
        raise ValueError(f"{len(modular)} modular digests do not open {len(sealed)} bytes of seals")
    opened = _pads(modular) ^ np.frombuffer(sealed, np.uint8).reshape(-1, SEAL_NBYTES)
    other = np.flatnonzero(opened[:, :DIGEST_NBYTES].any(axis=1))
    raw = opened[: other[0] if other.size else None, DIGEST_NBYTES:].tobytes()
    return [raw[at : at + DIGEST_NBYTES] for at in range(0, len(raw), DIGEST_NBYTES)]


def _pads(modular: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    """S of each block, a row each."""
    fresh = hashlib.blake2b(digest_size=SEAL_NBYTES, person=_SEAL).copy
    pads = []
    for digest in modular:
        state = fresh()
        state.update(digest)
        pads.append(state.digest())
    return np.frombuffer(bytearray().join(pads), np.uint8).reshape(-1, SEAL_NBYTES)


def context_name(causal: bytes) -> bytes:
    """By what the block with this causal digest may be told apart by those who may not read it: 16 bytes."""
    return hashlib.blake2b(causal, digest_size=DIGEST_NBYTES, person=_CONTEXT).digest()


def keyed(ns: Namespace, tenant: TenantKey, person: bytes, nbytes: int = DIGEST_NBYTES) -> hashlib.blake2b:
    """BLAKE2b of ``nbytes`` under the tenant's key, ``person`` saying for what.

    Raises SpecError where ``tenant`` is not the namespace's.
    """
    if tenant.tenant_id != ns.tenant_id:
        raise SpecError(
            f"the namespace belongs to tenant id {ns.tenant_id.hex()}, got the key of {tenant.name!r} "
            f"({tenant.tenant_id.hex()}); build the namespace with the same tenant"
        )
    return hashlib.blake2b(key=tenant.key, digest_size=nbytes, person=person)


def _media_by_block(
    media: Sequence[MediaSpan], num_tokens: int, start: int, blocks: int, block_size: int
) -> dict[int, bytes]:
    """For each block with media in it: every span's place relative to the block, length and digest."""
    inside: dict[int, bytes] = {}
    end = 0
    for index, span in enumerate(sorted(media, key=lambda span: span.start)):
        if not 0 <= span.start < span.stop <= num_tokens:
            raise TokenError(f"media span {span.start}..{span.stop} does not fit into {num_tokens} tokens")
        if index and span.start < end:
            raise TokenError(f"media span {span.start}..{span.stop} overlaps the one that ends at {end}")
        if not isinstance(span.digest, bytes) or len(span.digest) < 16:
            got = len(span.digest) if isinstance(span.digest, bytes) else type(span.digest).__name__
            raise TokenError(
                f"media span {span.start}..{span.stop} needs a content digest of >= 16 bytes, "
                f"got {got}: a name is not an identity"
            )
        end = span.stop
        first = max(0, (span.start - start) // block_size)
        last = min(blocks, -(-(span.stop - start) // block_size))
        for block in range(first, last):
            place = span.start - start - block * block_size
            entry = _SPAN.pack(place, span.stop - span.start, len(span.digest)) + span.digest
            inside[block] = inside.get(block, b"") + entry
    return inside
