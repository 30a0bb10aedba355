"""Token ids, tenants, namespaces and block digests (cases A01, A02, A04, A05, A08, A09, B01, B02, C01, C03,
C04, C10)."""

from __future__ import annotations

import array
import dataclasses
import hashlib
import hmac
import os
import struct
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypercache.errors import ConfigError, SpecError, TokenError
from hypercache.keys import (
    BLOCK_SIZES,
    HASH_VERSION,
    MediaSpan,
    Namespace,
    TenantKey,
    canonical_tokens,
    causal_digests,
    context_name,
    modular_digests,
    seal,
    unseal,
    usable_blocks,
)
from hypercache.model import Adapter, KVDtype, KVLayout, LayerGroup, ModelSpec, Part, RopeSpec

SECRET = b"sixteen byte key"
ACME = TenantKey.from_secret(SECRET, "acme")
LAYOUT = KVLayout("split", 2, (Part("k", 8), Part("v", 8)), KVDtype.BF16)
SPEC = ModelSpec(weights=b"w" * 32, groups=(LayerGroup((0, 1), LAYOUT, RopeSpec("default", 1e4, 8)),))
TOKENS = [(index * 2654435761) % 2**32 for index in range(130)]


def namespace(spec: ModelSpec = SPEC, **given: Any) -> Namespace:
    return Namespace.build(spec, **({"block_size": 16, "codec": "raw", "tenant": ACME} | given))


NS = namespace()

# --- digests are the same everywhere -----------------------------------------------------------------

GOLDEN_FINGERPRINT = "8d7e1fc1e4d763eebac09e6749d919d3a3802b965d07afdeb2b348aa6d845ec0"
GOLDEN_KEY = "7fc532247de68caf46b6f52081ab03fdad31c9e2ba66ad003f3048ab71f46eb9"
GOLDEN = {  # block size -> namespace, H_0 H_1, M_0 M_1, and H_0 H_1 with an image at tokens 10..20
    8: (
        "043eed976296ae7b505f3931e89910ae36b24e46893111baebd19b222f0f5533",
        ["190198c61c16bd0757fea04474cb9041", "980c1805dc05ecb3de807c621c4f86c1"],
        ["4e1f3e5d0f82eb36939089cb9abb9967", "54f0adbbbfe8192133518344bdd79565"],
        ["190198c61c16bd0757fea04474cb9041", "8e51dd8b8c40bb7e276dfff5f5cf5c47"],
    ),
    16: (
        "d35cc59080cd0a9a731f2f55cf0e3c14451dc1dda71a5c6b5def00c0fd4ccc89",
        ["a2f7fc6a449ac9508b8782f894ccfb0c", "d622606632c3408e65e4ce5e68b79311"],
        ["96f5ad915d0fa15d9f6d35ec1ce4d263", "3bc48a1d6b36ab3a1b66f73d60594ece"],
        ["a39fe97b689f63cc4c95a1a850f07372", "f26c1e53c5afdf85b34de01914233477"],
    ),
    64: (
        "c4ed2ea27661cc2c9860c40b4ae0a4c3521d2887be5edeceeadf03a96c905455",
        ["22d7831c1fccfa2ab61e1105d8f09f99", "cc4ade11e131de1388a7fd9df2f4d0f9"],
        ["8516e29befc1e96c09cae8f7132308c2", "6e4ac5ad130960d15ed5ae9310af1e09"],
        ["879d22df2807237712bc1529f30e6001", "6bb80a9e0d4daee9801cecf505c44e81"],
    ),
}


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_golden_vectors(block_size: int) -> None:
    """A failure here means that no running fleet shares anything any more: raise HASH_VERSION instead."""
    ns = namespace(block_size=block_size)
    root, causal, modular, with_image = GOLDEN[block_size]
    assert SPEC.fingerprint().hex() == GOLDEN_FINGERPRINT
    assert ACME.key.hex() == GOLDEN_KEY
    assert ns.digest.hex() == root
    assert [d.hex() for d in causal_digests(ns, ACME, TOKENS, blocks=2)] == causal
    assert [d.hex() for d in modular_digests(ns, ACME, TOKENS)[:2]] == modular
    image = [MediaSpan(10, 20, b"m" * 16)]
    assert [d.hex() for d in causal_digests(ns, ACME, TOKENS, blocks=2, media=image)] == with_image


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_digests_are_what_the_documentation_says(block_size: int) -> None:
    """Written out with hashlib, so that another implementation can be made from the documentation alone."""
    ns = namespace(block_size=block_size)
    label = b"acme"
    key = hmac.new(SECRET, b"hypercache tenant key v1" + struct.pack("<Q", 4) + label, "sha256").digest()
    version = str(HASH_VERSION).encode()

    def digest(kind: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=key, digest_size=16, person=b"HC" + version + b" " + kind).digest()

    previous = digest(b"ROOT", ns.digest)
    for block, (causal, modular) in enumerate(
        zip(causal_digests(ns, ACME, TOKENS), modular_digests(ns, ACME, TOKENS), strict=True)
    ):
        words = struct.pack(f"<{block_size}I", *TOKENS[block * block_size : (block + 1) * block_size])
        previous = digest(b"CAUSAL", previous + words)
        assert causal == previous
        assert modular == digest(b"MODULAR", ns.digest + words)


GOLDEN_SEALS = (
    "1567a68825cda5c1df74f635e990c84a8dbb709adf0181fcba6c38dbffe48e12"
    "9c54d42342383e2bdb0d78754ae7311d7291080eb033eda41ceda26b43e132c5"
)
GOLDEN_CONTEXT = "ba9763175ce099efae031311a32dab84"


def test_seals_are_the_same_everywhere_and_what_the_documentation_says() -> None:
    causal, modular = causal_digests(NS, ACME, TOKENS, blocks=2), modular_digests(NS, ACME, TOKENS)[:2]
    sealed = seal(modular, causal)
    assert sealed.hex() == GOLDEN_SEALS
    assert context_name(causal[0]).hex() == GOLDEN_CONTEXT
    assert (
        context_name(causal[0]) == hashlib.blake2b(causal[0], digest_size=16, person=b"HC1 CONTEXT").digest()
    )
    for block in range(2):
        pad = hashlib.blake2b(modular[block], digest_size=32, person=b"HC1 SEAL").digest()
        hidden = bytes(a ^ b for a, b in zip(pad[16:], causal[block], strict=True))
        assert sealed[block * 32 :][:32] == pad[:16] + hidden


@given(st.integers(0, 12), st.integers(0, 12), st.randoms(use_true_random=False))
def test_seals_open_for_who_has_the_tokens_and_up_to_there(blocks: int, wrong: int, random: Any) -> None:
    causal, modular = ([random.randbytes(16) for _ in range(blocks)] for _ in range(2))
    sealed = seal(modular, causal)
    assert len(sealed) == blocks * 32 and unseal(sealed, modular) == causal
    assert not any(digest in sealed for digest in causal + modular)
    if wrong < blocks:
        others = [*modular]
        others[wrong] = bytes([others[wrong][0] ^ 1]) + others[wrong][1:]
        assert unseal(sealed, others) == causal[:wrong]
        bent = bytearray(sealed)
        bent[wrong * 32 + random.randrange(16)] ^= 1 << random.randrange(8)
        assert unseal(bytes(bent), modular) == causal[:wrong]
    with pytest.raises(ValueError, match="do not seal"):
        seal(modular, [*causal, bytes(16)])
    with pytest.raises(ValueError, match="do not open"):
        unseal(sealed + b"x", modular)


_CHILD = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from test_keys import ACME, NS, TOKENS, causal_digests, namespace
given = [{}, {"extra": None}, {"extra": ()}, {"extra": {}}]
print(*{namespace(**extra).digest.hex() for extra in given})
print(*[digest.hex() for digest in causal_digests(NS, ACME, TOKENS)])
"""


def test_b01_b02_every_process_makes_the_same_digests() -> None:
    here = Path(__file__).parent
    seeds = (None, None, "0", "1", "4294967295", "random")
    children = []
    for seed in seeds:
        env = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
        env |= {} if seed is None else {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", _CHILD, str(here.parent), str(here)]
        children.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [child.communicate()[0].split() for child in children]
    assert [child.returncode for child in children] == [0] * len(seeds)
    own = [NS.digest.hex(), *[d.hex() for d in causal_digests(NS, ACME, TOKENS)]]
    assert outputs == [own] * len(seeds)


# --- tokens ------------------------------------------------------------------------------------------

SMALL = [5, 0, 127, 1, 2] * 4


@pytest.mark.parametrize(
    "given",
    [
        tuple(SMALL),
        deque(SMALL),
        array.array("q", SMALL),
        array.array("B", SMALL),
        [np.int64(token) for token in SMALL],
        *[np.array(SMALL, dtype) for dtype in "bBhHiIqQ"],
        *[np.array(SMALL, dtype) for dtype in (">u2", ">i4", ">u4", ">i8", "<u8")],
        np.repeat(np.array(SMALL, np.int32), 2)[::2],
        np.array(SMALL)[::-1][::-1],
    ],
    ids=lambda given: f"{type(given).__name__}-{getattr(given, 'dtype', '')}",
)
def test_container_dtype_and_byte_order_do_not_count(given: Any) -> None:
    ids = canonical_tokens(given)
    assert (ids.dtype.str, ids.tolist(), ids.flags.c_contiguous) == ("<u4", SMALL, True)
    assert causal_digests(NS, ACME, given) == causal_digests(NS, ACME, SMALL)


def test_range_is_a_sequence_and_the_right_array_is_not_copied() -> None:
    assert canonical_tokens(range(3)).tolist() == [0, 1, 2]
    ids = np.arange(5, dtype="<u4")
    assert np.shares_memory(canonical_tokens(ids), ids)


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra")
    assert canonical_tokens(torch.tensor(SMALL)).tolist() == SMALL
    for bad in (torch.tensor([1.5]), torch.tensor([True]), torch.tensor([1.0], dtype=torch.bfloat16)):
        with pytest.raises(TokenError, match="token 0 is of type"):
            canonical_tokens(bad)


def test_tensor_on_a_device() -> None:
    class OnDevice:
        """What torch does for a tensor in accelerator memory."""

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            raise TypeError("can't convert device type tensor to numpy")

        def tolist(self) -> list[int]:
            return SMALL

    assert canonical_tokens(OnDevice()).tolist() == SMALL


@pytest.mark.parametrize("nothing", [None, [], (), np.array([]), np.empty(0, np.int64)], ids=repr)
def test_a05_no_tokens_make_no_keys(nothing: Any) -> None:
    """A prompt of embeddings has no ids: nothing to look up, nothing to store, nothing shared."""
    assert canonical_tokens(nothing).shape == (0,)
    assert causal_digests(NS, ACME, nothing) == modular_digests(NS, ACME, nothing) == []
    assert usable_blocks(0, 16) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1, 2, -1, -2], "token 2 is -1;"),
        ([1, 2**32], "token 1 is 4294967296;"),
        ([1, 2**64, -1], "token 1 is 18446744073709551616;"),
        (np.array([1, 2, -7, 2**40]), "token 2 is -7;"),
        (np.array([0, 2**32], np.uint64), "token 1 is 4294967296;"),
        (np.array([1, -1], np.int8), "token 1 is -1;"),
        ([1, 2.0], "token 1 is of type float"),
        ([1, True], "token 1 is of type bool"),
        ([1, None], "token 1 is of type NoneType"),
        ([1, "2"], "token 1 is of type str"),
        ([1, np.float32(2)], "token 1 is of type float32"),
        ([1, np.True_], "token 1 is of type bool"),
        ([[1, 2]], "token 0 is of type list"),
        (np.array([1.0]), "token 0 is of type float64"),
        (np.array([True]), "token 0 is of type bool"),
        (np.array(["1"]), "token 0 is of type <U1"),
        (np.array([1], object), "token 0 is of type object"),
        (array.array("d", [1.0]), "token 0 is of type float64"),
        (np.zeros((1, 4), int), r"got shape \(1, 4\)"),
        (np.int64(4), r"got shape \(\)"),
        ("text", "got str; tokenize"),
        (b"\x01\x02", "got bytes; tokenize"),
        (7, "must be a sequence of integers, got int"),
        ({1, 2}, "must be a sequence of integers, got set"),
        ((token for token in SMALL), "got generator"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_bad_tokens_are_named(given: Any, message: str) -> None:
    with pytest.raises(TokenError, match=message):
        canonical_tokens(given)


# --- block arithmetic --------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_c01_c03_usable_blocks(block_size: int) -> None:
    for tokens in range(300):
        hit = usable_blocks(tokens, block_size) * block_size
        assert 0 <= hit <= max(0, tokens - 1)
        assert hit + block_size > tokens - 1  # and no block is given away
    for tokens in (block_size, 2 * block_size, 1024):
        assert usable_blocks(tokens, block_size) * block_size == tokens - block_size
        assert usable_blocks(tokens + 1, block_size) * block_size == tokens
    assert usable_blocks(40, 16) == 2
    assert usable_blocks(-16, block_size) == 0


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 63, 64, 65])
def test_c04_only_full_blocks_have_keys(block_size: int, tokens: int) -> None:
    ns = namespace(block_size=block_size)
    for digests in (causal_digests(ns, ACME, TOKENS[:tokens]), modular_digests(ns, ACME, TOKENS[:tokens])):
        assert len(digests) == tokens // block_size
        assert all(len(digest) == 16 for digest in digests)


@pytest.mark.parametrize("block_size", [0, 1, -16, 32, 128, 16.0, True, "16", None])
def test_c10_other_block_sizes_are_refused(block_size: Any) -> None:
    with pytest.raises(SpecError, match=r"is not supported; use 8 or 16 or 64 tokens"):
        namespace(block_size=block_size)
    with pytest.raises(SpecError, match=r"use 8 or 16 or 64 tokens"):
        usable_blocks(100, block_size)


def test_c10_block_size_parts_namespaces() -> None:
    small, large = namespace(block_size=16), namespace(block_size=64)
    assert small.digest != large.digest
    same = [7] * 128
    assert set(causal_digests(small, ACME, same)).isdisjoint(causal_digests(large, ACME, same))
    assert set(modular_digests(small, ACME, same)).isdisjoint(modular_digests(large, ACME, same))
    assert namespace(block_size=np.int64(16)) == small


def test_limit_and_trailing_tokens() -> None:
    every = causal_digests(NS, ACME, TOKENS)
    assert len(every) == 8
    for blocks in range(10):
        assert causal_digests(NS, ACME, TOKENS, blocks=blocks) == every[:blocks]
    assert causal_digests(NS, ACME, TOKENS[:127]) == every[:7]
    with pytest.raises(TokenError, match="blocks=-1 is negative"):
        causal_digests(NS, ACME, TOKENS, blocks=-1)


# --- what a digest commits to ------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 127), st.integers(1, 2**32 - 1))
def test_causal_digests_commit_to_the_whole_prefix(index: int, change: int) -> None:
    tokens = TOKENS[:128]
    tokens[index] = (tokens[index] + change) % 2**32
    before, after = causal_digests(NS, ACME, TOKENS[:128]), causal_digests(NS, ACME, tokens)
    block = index // 16
    assert before[:block] == after[:block]
    assert set(before[block:]).isdisjoint(after[block:])


def test_modular_digests_do_not_depend_on_the_position() -> None:
    document = TOKENS[:64]
    alone = modular_digests(NS, ACME, document)
    for before in (1, 16, 37):
        assert modular_digests(NS, ACME, [9] * before + document, start=before) == alone
    assert modular_digests(NS, ACME, [9] * 16 + document)[1:] == alone
    assert set(alone).isdisjoint(causal_digests(NS, ACME, document))
    assert modular_digests(NS, ACME, document, start=64) == []
    for start in (-1, 65):
        with pytest.raises(TokenError, match=rf"start={start} is outside 0\.\.64"):
            modular_digests(NS, ACME, document, start=start)


def test_repeated_blocks_have_their_own_causal_digest() -> None:
    assert len(set(causal_digests(NS, ACME, [3] * 160))) == 10
    assert len(set(modular_digests(NS, ACME, [3] * 160))) == 1


# --- tenants and namespaces --------------------------------------------------------------------------


def test_tenants_never_meet() -> None:
    others = [
        TenantKey.from_secret(SECRET, "acme2"),
        TenantKey.from_secret(SECRET[::-1], "acme"),
        TenantKey.public(),
    ]
    for other in others:
        assert other.tenant_id != ACME.tenant_id
        ns = namespace(tenant=other)
        assert ns.digest != NS.digest
        for kind in (causal_digests, modular_digests):
            assert set(kind(ns, other, TOKENS)).isdisjoint(kind(NS, ACME, TOKENS))
            with pytest.raises(SpecError, match=f"got the key of '{other.name}'"):
                kind(NS, other, TOKENS)


def test_tenant_keys() -> None:
    again = TenantKey.from_secret(SECRET, "acme")
    assert again == ACME
    assert (len(ACME.key), len(ACME.tenant_id)) == (32, 16)
    assert TenantKey.public() == TenantKey.public()
    assert TenantKey.public().name == "public"
    for shown in (repr(ACME), str(ACME), f"{ACME}"):
        assert "acme" in shown
        for secret in (repr(ACME.key), ACME.key.hex(), repr(SECRET)[2:-1]):
            assert secret not in shown
    assert ACME.tenant_id not in (ACME.key[:16], ACME.key[16:])


@pytest.mark.parametrize("secret", [b"", b"fifteen bytes !"])
def test_weak_secrets_are_refused(secret: bytes) -> None:
    with pytest.raises(ConfigError, match=r"at least 16 random bytes, got \d+; make one with `openssl"):
        TenantKey.from_secret(secret, "acme")


@pytest.mark.parametrize("name", ["acme", "two words", b"acme", "a" * 65, None, 7, SECRET, SECRET.hex()])
@pytest.mark.parametrize(
    "secret", [SECRET, b"too short", SECRET.hex(), bytearray(SECRET), [SECRET], None, "acme"], ids=repr
)
def test_no_argument_is_shown_since_either_may_be_the_secret(secret: Any, name: Any) -> None:
    for first, second in ((secret, name), (name, secret)):
        try:
            made = TenantKey.from_secret(secret=first, name=second)
        except ConfigError as error:
            for shown in ("sixteen byte", SECRET.hex()[:12], "too short", "acme", "two words", "aaaa"):
                assert shown not in str(error)
            if not isinstance(first, bytes):
                assert f"secret must be bytes, got {type(first).__name__}" in str(error)
            elif not isinstance(second, str):
                assert f"name must be str, got {type(second).__name__}" in str(error)
        else:
            assert isinstance(first, bytes) and isinstance(second, str) and made.name == second


@pytest.mark.parametrize(
    "field", [{"name": SECRET}, {"key": SECRET.hex()}, {"key": b"x"}, {"key": b"x" * 65}, {"tenant_id": None}]
)
def test_a_key_made_by_hand_is_checked_without_being_shown(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"TenantKey\.\w+ must be .*from_secret") as raised:
        dataclasses.replace(ACME, **field)
    assert str(*field.values()) not in str(raised.value)


def test_media_without_a_digest_in_bytes_are_refused() -> None:
    with pytest.raises(TokenError, match=">= 16 bytes, got str"):
        causal_digests(NS, ACME, TOKENS, media=[MediaSpan(0, 4, "ab" * 16)])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "a b", "naïve", "a" * 65, "a\n", "public"])
def test_bad_tenant_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="tenant name"):
        TenantKey.from_secret(SECRET, name)


def test_a01_a02_adapters_part_namespaces() -> None:
    base = namespace()
    a = namespace(dataclasses.replace(SPEC, adapter=Adapter("x", b"a" * 32)))
    b = namespace(dataclasses.replace(SPEC, adapter=Adapter("x", b"b" * 32)))
    renamed = namespace(dataclasses.replace(SPEC, adapter=Adapter("y", b"a" * 32)))
    keys = [causal_digests(ns, ACME, TOKENS) for ns in (base, a, b)]
    assert len({digest for digests in keys for digest in digests}) == 3 * 8
    assert renamed.digest == a.digest


def test_a04_salt_is_not_an_adapter() -> None:
    lora = dataclasses.replace(SPEC, adapter=Adapter("S", b"S" * 16))
    assert namespace(lora).digest != namespace(salt="S" * 16).digest != namespace(salt="S").digest


def test_a04_no_two_ways_to_split_the_same_bytes_meet() -> None:
    """Over 10^5 pairs of (model, adapter, salt, media) cut differently from one string."""
    text = b"ab" * 47
    digests = set()
    cuts = [
        (model, adapter, salt)
        for model in range(16, 64, 3)
        for adapter in (0, *range(16, 48, 5))
        for salt in range(0, len(text) - 16 - model - adapter, 4)
        if len(text) - model - adapter - salt >= 16
    ]
    for model, adapter, salt in cuts:
        parts = [text[:model], text[model : model + adapter], text[model + adapter : model + adapter + salt]]
        spec = dataclasses.replace(
            SPEC, weights=parts[0], adapter=Adapter("", parts[1]) if adapter else None, name=parts[2].decode()
        )
        ns = namespace(spec, salt=parts[2].decode())
        media = [MediaSpan(0, 16, text[model + adapter + salt :])]
        digests.add(causal_digests(ns, ACME, TOKENS[:16], media=media)[0])
    assert len(cuts) * (len(cuts) - 1) // 2 >= 10**5
    assert len(digests) == len(cuts)


def test_a08_dtypes_part_namespaces() -> None:
    seen = set()
    for dtype in KVDtype:
        group = dataclasses.replace(SPEC.groups[0], layout=dataclasses.replace(LAYOUT, dtype=dtype))
        scales = ((1.0, 1.0),) * 2 if dtype.is_fp8 else None
        for codec in ("raw", "int8", "int4"):
            spec = dataclasses.replace(SPEC, groups=(group,), kv_scales=scales)
            seen |= {*causal_digests(namespace(spec, codec=codec), ACME, TOKENS, blocks=1)}
    assert len(seen) == len(KVDtype) * 3


def test_codecs_on_disk_part_namespaces() -> None:
    """Blocks that went through another codec are other bytes, whatever they travel as."""
    names = [{"codec": "int8"}, {"codec": "int8", "disk_codec": "int4"}, {"codec": "int4"}]
    names += [{"codec": "int8", "disk_codec": "fp8"}, {"codec": "int4", "disk_codec": "int8"}]
    assert len({namespace(**name).digest for name in names}) == len(names)
    assert namespace(disk_codec="").digest == namespace().digest
    with pytest.raises(SpecError, match="codec name 'In t4' must be lower-case"):
        namespace(disk_codec="In t4")


def test_b02_absent_extras_are_one() -> None:
    absent = namespace().digest
    empty: Any
    for empty in (None, {}, (), {"image": None}):
        assert namespace(extra=empty).digest == absent
    assert namespace(salt="").digest == absent
    given = [
        {"a": 1},
        {"a": "1"},
        {"a": b"1"},
        {"b": 1},
        {"a": [1]},
        {"a": {}},
        {"a": True},
        {"a": 1, "b": 1},
    ]
    assert len({namespace(extra=extra).digest for extra in given} | {absent}) == len(given) + 1
    assert namespace(extra={"a": 1, "b": 2}).digest == namespace(extra={"b": 2.0, "a": np.int8(1)}).digest


def test_namespace_says_what_went_into_it() -> None:
    named = namespace(dataclasses.replace(SPEC, name="Tiny"), salt="secret salt")
    assert (named.block_size, named.codec, named.label) == (16, "raw", "Tiny")
    assert named.fingerprint == SPEC.fingerprint()
    assert named.tenant_id == ACME.tenant_id
    assert "secret salt" not in repr(named)
    assert named.digest != NS.digest
    assert namespace(dataclasses.replace(SPEC, name="Tiny")) == NS  # a name is a label


@pytest.mark.parametrize(
    "given",
    [{"codec": ""}, {"codec": "RAW"}, {"codec": "a b"}, {"extra": {"a": object()}}, {"salt": "\ud800"}],
)
def test_bad_namespaces_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"codec name|cannot be hashed"):
        namespace(**given)


# --- media -------------------------------------------------------------------------------------------

H1, H2 = b"1" * 32, b"2" * 32


def test_a09_blocks_that_touch_or_follow_another_image_miss() -> None:
    tokens = [1] * 40 + [151655] * 256 + [2] * 56
    one = causal_digests(NS, ACME, tokens, media=[MediaSpan(40, 296, H1)])
    two = causal_digests(NS, ACME, tokens, media=[MediaSpan(40, 296, H2)])
    none = causal_digests(NS, ACME, tokens)
    assert one[:2] == two[:2] == none[:2]
    assert len({*one[2:], *two[2:], *none[2:]}) == 3 * 20
    assert causal_digests(NS, ACME, tokens, media=[MediaSpan(40, 296, H1)]) == one


def test_a09_modular_blocks_behind_an_image_are_shared() -> None:
    tokens = [1] * 40 + [151655] * 256 + [2] * 56
    one = modular_digests(NS, ACME, tokens, media=[MediaSpan(40, 296, H1)])
    two = modular_digests(NS, ACME, tokens, media=[MediaSpan(40, 296, H2)])
    assert [index for index, pair in enumerate(zip(one, two, strict=True)) if pair[0] != pair[1]] == list(
        range(2, 19)
    )
    moved = modular_digests(NS, ACME, [9] * 5 + tokens, media=[MediaSpan(45, 301, H1)], start=5)
    assert moved == one
    # The second half of an image is not its first half, though both blocks hold nothing but placeholders.
    assert len(set(one[3:18])) == 15


def test_place_and_length_of_a_span_count() -> None:
    tokens = [7] * 64
    spans = [(0, 4), (1, 5), (0, 5), (16, 20), (0, 64), (12, 20)]
    lists = [causal_digests(NS, ACME, tokens, media=[MediaSpan(*span, H1)])[-1] for span in spans]
    lists.append(causal_digests(NS, ACME, tokens, media=[MediaSpan(0, 4, H1), MediaSpan(4, 8, H1)])[-1])
    lists.append(causal_digests(NS, ACME, tokens, media=[MediaSpan(0, 4, H1), MediaSpan(4, 8, H2)])[-1])
    lists.append(causal_digests(NS, ACME, tokens, media=[MediaSpan(0, 4, H2), MediaSpan(4, 8, H1)])[-1])
    lists.append(causal_digests(NS, ACME, tokens, media=[MediaSpan(0, 4, H1[:16])])[-1])
    assert len(set(lists)) == len(lists)
    ordered = [MediaSpan(0, 4, H1), MediaSpan(4, 8, H2)]
    assert causal_digests(NS, ACME, tokens, media=ordered[::-1]) == causal_digests(
        NS, ACME, tokens, media=ordered
    )


def test_spans_beyond_the_asked_blocks_change_nothing() -> None:
    media = [MediaSpan(20, 40, H1), MediaSpan(120, 130, H2)]
    every = causal_digests(NS, ACME, TOKENS, media=media)
    assert causal_digests(NS, ACME, TOKENS, media=media, blocks=1) == causal_digests(NS, ACME, TOKENS)[:1]
    assert causal_digests(NS, ACME, TOKENS, media=media, blocks=3) == every[:3]
    # A segment that begins inside or behind a span.
    inside = modular_digests(NS, ACME, TOKENS, media=media, start=30)
    behind = modular_digests(NS, ACME, TOKENS, start=30)
    assert (inside[0] == behind[0], inside[1] == behind[1]) == (False, True)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([MediaSpan(-1, 4, H1)], r"-1\.\.4 does not fit into 130 tokens"),
        ([MediaSpan(4, 4, H1)], r"4\.\.4 does not fit"),
        ([MediaSpan(9, 4, H1)], r"9\.\.4 does not fit"),
        ([MediaSpan(120, 131, H1)], r"120\.\.131 does not fit"),
        ([MediaSpan(8, 12, H1), MediaSpan(0, 9, H2)], r"8\.\.12 overlaps the one that ends at 9"),
        (
            [MediaSpan(0, 9, b"img.png")],
            r"needs a content digest of >= 16 bytes, got 7: a name is not an identity",
        ),
    ],
)
def test_bad_spans_are_named(spans: list[MediaSpan], message: str) -> None:
    for kind in (causal_digests, modular_digests):
        with pytest.raises(TokenError, match=message):
            kind(NS, ACME, TOKENS, media=spans)
