"""Fingerprints of token windows: rolled right, keyed, and free of collisions (cases N03, K15)."""

from __future__ import annotations

import array
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypercache import fingerprint
from hypercache.errors import SpecError, TokenError
from hypercache.fingerprint import MARK_NBYTES, fingerprints, marks
from hypercache.keys import MAX_TOKEN, MediaSpan, Namespace, TenantKey, modular_digests
from hypercache.model import KVDtype, KVLayout, LayerGroup, ModelSpec, Part, RopeSpec

SECRET = b"sixteen byte key"
ACME = TenantKey.from_secret(SECRET, "acme")
LAYOUT = KVLayout("split", 2, (Part("k", 8), Part("v", 8)), KVDtype.BF16)
SPEC = ModelSpec(weights=b"w" * 32, groups=(LayerGroup((0, 1), LAYOUT, RopeSpec("default", 1e4, 8)),))
M61, M64 = (1 << 61) - 1, (1 << 64) - 1


def namespace(spec: ModelSpec = SPEC, **given: Any) -> Namespace:
    return Namespace.build(spec, **({"block_size": 16, "codec": "raw", "tenant": ACME} | given))


NS = namespace()
NS64 = namespace(block_size=64)
SPACES = st.sampled_from([NS, NS64])
TOKEN_LISTS = st.lists(st.integers(0, MAX_TOKEN) | st.sampled_from([0, 1, MAX_TOKEN]), max_size=200)


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    fingerprint.warm()  # or the first example of a property would take as long as compiling does


# --- an independent reading of the papers ------------------------------------------------------------


def siphash24(key: bytes, message: bytes) -> int:
    """SipHash-2-4 as its paper has it (Aumasson and Bernstein, 2012), for any message."""
    k0, k1 = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    words = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
    v = [key ^ word for key, word in zip((k0, k1) * 2, words, strict=True)]

    def rotate(x: int, bits: int) -> int:
        return (x << bits | x >> (64 - bits)) & M64

    def rounds(count: int) -> None:
        for _ in range(count):
            v[0], v[2] = (v[0] + v[1]) & M64, (v[2] + v[3]) & M64
            v[1], v[3] = rotate(v[1], 13) ^ v[0], rotate(v[3], 16) ^ v[2]
            v[0] = rotate(v[0], 32)
            v[2], v[0] = (v[2] + v[1]) & M64, (v[0] + v[3]) & M64
            v[1], v[3] = rotate(v[1], 17) ^ v[2], rotate(v[3], 21) ^ v[0]
            v[2] = rotate(v[2], 32)

    whole = message + bytes(-(len(message) + 1) % 8) + bytes([len(message) % 256])
    for at in range(0, len(whole), 8):
        word = int.from_bytes(whole[at : at + 8], "little")
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xFF
    rounds(4)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def expected(ns: Namespace, tokens: list[int]) -> list[int]:
    """Every window on its own, in Python's integers."""
    base, *key = (int(secret) for secret in fingerprint._secrets(ns, ACME))
    sip = b"".join(part.to_bytes(8, "little") for part in key)
    out = []
    for at in range(len(tokens) - ns.block_size + 1):
        value = 0
        for token in tokens[at : at + ns.block_size]:
            value = (value * base + token) % M61
        out.append(siphash24(sip, value.to_bytes(8, "little")) or 1)
    return out


def test_the_finish_is_siphash_of_the_paper() -> None:
    key = bytes(range(16))
    assert siphash24(key, bytes(range(15))) == 0xA129CA6149BE45E5  # appendix A of the paper
    k0, k1 = (np.uint64(int.from_bytes(key[at : at + 8], "little")) for at in (0, 8))
    words = np.array([0, 1, 2**61 - 2, 0x0706050403020100], np.uint64)
    want = [siphash24(key, int(word).to_bytes(8, "little")) for word in words]
    fingerprint._seal(words, k0, k1)
    assert words.tolist() == want


@given(SPACES, TOKEN_LISTS)
def test_each_window_is_what_it_is_alone(ns: Namespace, tokens: list[int]) -> None:
    found = fingerprints(ns, ACME, tokens)
    assert found.dtype == np.uint64 and found.tolist() == expected(ns, tokens)
    for at in range(0, len(found), 7):
        assert fingerprints(ns, ACME, tokens[at : at + ns.block_size]).tolist() == [found[at]]


@given(st.lists(st.integers(0, M61 - 1) | st.sampled_from([0, 1, M61 - 1]), min_size=2, max_size=2))
def test_the_product_is_that_of_the_field(pair: list[int]) -> None:
    a, b = map(np.uint64, pair)
    assert int(fingerprint._times.py_func(a, b)) == pair[0] * pair[1] % M61


@given(SPACES, TOKEN_LISTS, st.integers(0, 220))
def test_first_leaves_out_what_comes_before(ns: Namespace, tokens: list[int], first: int) -> None:
    assert fingerprints(ns, ACME, tokens, first).tolist() == fingerprints(ns, ACME, tokens)[first:].tolist()


@pytest.mark.parametrize("ns", [NS, NS64], ids=["16", "64"])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 63, 64, 65])
def test_c04_short_prompts_have_no_windows(ns: Namespace, count: int) -> None:
    assert len(fingerprints(ns, ACME, [7] * count)) == max(0, count - ns.block_size + 1)
    assert len(marks(ns, ACME, [7] * count)) == count // ns.block_size


def test_a_window_is_found_at_any_offset() -> None:
    rng = np.random.default_rng(1)
    for ns in (NS, NS64):
        document = rng.integers(0, 50_000, 200)
        want = fingerprints(ns, ACME, document)
        for before in range(20):
            moved = np.concatenate([rng.integers(0, 50_000, before), document, rng.integers(0, 9, 5)])
            assert fingerprints(ns, ACME, moved)[before : before + len(want)].tolist() == want.tolist()


def test_a_window_means_nothing_in_another_namespace() -> None:
    other = TenantKey.from_secret(SECRET, "other")
    tokens = np.arange(300)
    spaces = [
        (NS, ACME),
        (NS64, ACME),
        (namespace(salt="user 1"), ACME),
        (namespace(codec="fp8"), ACME),
        (namespace(extra={"rope": "other"}), ACME),
        (namespace(ModelSpec(weights=b"x" * 32, groups=SPEC.groups)), ACME),
        (namespace(tenant=other), other),
        (namespace(tenant=TenantKey.public()), TenantKey.public()),
    ]
    found = np.concatenate([fingerprints(ns, tenant, tokens) for ns, tenant in spaces])
    assert len(np.unique(found)) == len(found)
    with pytest.raises(SpecError, match="tenant"):
        fingerprints(NS, other, tokens)


@pytest.mark.parametrize("kind", ["<u4", ">u4", "i4", "i8", ">i8", "u8", "u2", "i2"])
def test_the_type_of_the_tokens_does_not_matter(kind: str) -> None:
    tokens = [(index * 7919) % 30_000 for index in range(100)]
    want = fingerprints(NS, ACME, tokens).tolist()
    assert fingerprints(NS, ACME, np.array(tokens, kind)).tolist() == want
    assert fingerprints(NS, ACME, array.array("I", tokens)).tolist() == want
    strided = np.zeros(200, kind)
    strided[::2] = tokens
    assert fingerprints(NS, ACME, strided[::2]).tolist() == want
    frozen = np.array(tokens, "<u4")
    frozen.flags.writeable = False
    assert fingerprints(NS, ACME, frozen).tolist() == want
    odd = np.frombuffer(b"x" + frozen.tobytes(), "<u4", offset=1)
    assert fingerprints(NS, ACME, odd).tolist() == want
    assert len(fingerprint._roll.signatures) == len(fingerprint._seal.signatures) == 1  # compiled once


@pytest.mark.parametrize("tokens", [[1.5] * 20, [True] * 20, [-1] * 20, [2**32] * 20, "text", [[1] * 20]])
def test_bad_tokens_are_refused(tokens: Any) -> None:
    with pytest.raises(TokenError):
        fingerprints(NS, ACME, tokens)


def test_a_negative_offset_is_refused() -> None:
    with pytest.raises(TokenError, match="first=-1"):
        fingerprints(NS, ACME, range(20), -1)


def thue_morse(length: int, a: int, b: int) -> npt.NDArray[np.uint32]:
    ones = np.array([index.bit_count() & 1 for index in range(length)])
    return np.where(ones, b, a).astype(np.uint32)


def test_n03_windows_that_differ_never_meet() -> None:
    """A million random windows, and many that are alike in every way that a plain sum would miss."""
    rng = np.random.default_rng(3)
    for ns in (NS, NS64):
        size = ns.block_size
        base = rng.integers(0, 50_000, size)
        swaps, shifts = [], []
        for i in range(size):
            for j in range(i):
                swaps.append(base.copy())
                swaps[-1][[i, j]] = base[[j, i]]
                shifts.append(base.copy())
                shifts[-1][[i, j]] += (1, -1)
        streams = [
            rng.integers(0, 50_000, 1_000_000),
            rng.integers(0, 2, 50_000),
            np.repeat(np.arange(2000), size),  # constant windows, and every border between two of them
            *(thue_morse(4096, a, b) for a, b in ((0, 1), (0, 1 << 31), (5, MAX_TOKEN))),
            np.arange(20_000) << 17 & MAX_TOKEN,
            *swaps,
            *shifts,
        ]
        tokens = np.concatenate(streams, dtype=np.int64).astype("<u4")
        found = fingerprints(ns, ACME, tokens)
        distinct, first, back = np.unique(found, return_index=True, return_inverse=True)
        assert len(distinct) > 1_050_000
        again = np.flatnonzero(first[back] != np.arange(len(found)))
        windows = np.lib.stride_tricks.sliding_window_view(tokens, size)
        assert np.array_equal(windows[again], windows[first[back[again]]])


def test_bits_of_fingerprints_are_spread() -> None:
    """A filter indexes by the low bits, whatever the tokens: each bit is set in half of the windows."""
    found = fingerprints(NS, ACME, np.arange(100_000))
    share = [float(np.mean(found >> np.uint64(bit) & np.uint64(1))) for bit in range(64)]
    assert max(abs(value - 0.5) for value in share) < 0.01  # six standard deviations


def test_marks_are_fingerprint_and_modular_digest() -> None:
    tokens = np.arange(70)
    media = [MediaSpan(20, 40, b"d" * 16)]
    found = marks(NS, ACME, tokens, media=media)
    assert [len(mark) for mark in found] == [MARK_NBYTES] * 4
    assert [int.from_bytes(mark[:8], "little") for mark in found] == fingerprints(NS, ACME, tokens)[
        ::16
    ].tolist()
    assert [mark[8:] for mark in found] == modular_digests(NS, ACME, tokens, media=media)
    plain = marks(NS, ACME, tokens)
    assert [a[:8] == b[:8] for a, b in zip(found, plain, strict=True)] == [
        True
    ] * 4  # media: the digest decides
    assert [a[8:] == b[8:] for a, b in zip(found, plain, strict=True)] == [True, False, False, True]


GOLDEN = [9179427781359982422, 881709823554507873]


def test_every_process_makes_the_same_fingerprints() -> None:
    """Fixed for ever under one HASH_VERSION: they are on the wire and in stores."""
    assert fingerprints(NS, ACME, range(17)).tolist() == GOLDEN


NOWHERE = """
import os, sys
import hypercache.fingerprint
hypercache.fingerprint.warm()  # loads what else is needed: it may be out of another user's reach
for name in [name for name in sys.modules if name.startswith("hypercache")]:
    del sys.modules[name]
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
sys.path.insert(0, sys.argv[1])
from hypercache import fingerprint
assert fingerprint.__file__.startswith(sys.argv[1]), fingerprint.__file__
fingerprint.warm()
print(fingerprint._roll.stats.cache_path, len(fingerprint._seal.signatures))
"""


def test_it_works_where_no_directory_is_writable() -> None:
    """Read-only site-packages and no home: kernels are then compiled anew in every process."""
    source = Path(fingerprint.__file__).parent
    env = {key: value for key, value in os.environ.items() if not key.startswith(("NUMBA_", "XDG_"))}
    env |= {"HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory() as site:  # not tmp_path: another user must be able to read it
        copy = Path(site) / "hypercache"
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "data", "engines"))
        folders = [Path(site), copy, *(path for path in copy.rglob("*") if path.is_dir())]
        for folder in folders:
            folder.chmod(0o555)
        command = [sys.executable, "-c", NOWHERE, site]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, cwd=source.parent, timeout=100, check=False
        )
        for folder in folders:
            folder.chmod(0o755)
    assert done.stdout.split() == ["None", "1"], done.stderr
