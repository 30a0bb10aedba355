"""Blocks that change their codec on the way to disk: the bytes, the checksums, and what is refused."""

from __future__ import annotations

import itertools
import threading
import zlib

import numpy as np
import pytest

from hypercache import codecs
from hypercache.errors import CodecError, ConfigError, HyperCacheError, SpecError
from hypercache.model import KVDtype, KVLayout, Part
from hypercache.store import transcode
from hypercache.store.namespace import NamespaceInfo

TOKENS = 4
FLOATS = (KVDtype.BF16, KVDtype.FP16, KVDtype.FP32)
PAIRS = [pair for pair in itertools.product(codecs.names(), repeat=2) if pair[0] != pair[1]]


def split(heads, k, v=None, dtype=KVDtype.BF16):
    return KVLayout("split", heads, (Part("k", k), Part("v", v or k)), dtype)


def mla(dtype=KVDtype.BF16):
    return KVLayout("mla", 1, (Part("latent", 64), Part("rope", 16)), dtype)


def mixed(dtype=KVDtype.BF16):
    """Runs of several lengths, dims that are odd, no power of two, and unlike for keys and values."""
    return (split(2, 128, None, dtype),) * 3 + (split(3, 33, 80, dtype),) + (mla(dtype),) * 2


def info(layouts, wire, below, tokens=TOKENS):
    codec = codecs.get(wire)
    digest = zlib.crc32(repr((layouts, wire, below, tokens)).encode()).to_bytes(16, "big")
    nbytes = tuple(codec.chunk_nbytes(layout, tokens) for layout in layouts)
    return NamespaceInfo(digest, nbytes, tokens, wire, f"{wire} to {below}", tuple(layouts), below)


def gaussian(layout, tokens, seed):
    random = np.random.default_rng(seed)
    parts = []
    for part in layout.parts:
        values = random.standard_normal((layout.heads, tokens, part.dim), np.float32)
        if layout.dtype is KVDtype.BF16:
            parts.append((values.view(np.uint32) >> 16).astype(np.uint16))
        else:
            parts.append(values.astype(layout.dtype.storage))
    return parts


def empty(layout, tokens):
    return [np.empty((layout.heads, tokens, part.dim), layout.dtype.storage) for part in layout.parts]


def encoded(name, layout, parts):
    """One chunk, by the codec alone."""
    codec = codecs.get(name)
    tokens = parts[0].shape[1]
    out = np.empty((1, codec.chunk_nbytes(layout, tokens)), np.uint8)
    codec.encode(layout, parts, out)
    return out.tobytes()


def decoded(name, layout, chunk, tokens):
    parts = empty(layout, tokens)
    codecs.get(name).decode(layout, np.frombuffer(chunk, np.uint8).reshape(1, -1), parts)
    return parts


def stored(space):
    """A block as clients send it: Gaussian K/V in the wire codec, a chunk for each layer."""
    return [
        encoded(space.codec, layout, gaussian(layout, space.block_size, seed))
        for seed, layout in enumerate(space.layouts)
    ]


def laid(chunks, gap=0):
    """Copies of chunks in one buffer, as in an arena; ``gap`` bytes between them."""
    memory = memoryview(bytearray(sum(map(len, chunks)) + gap * len(chunks) + gap))
    views, at = [], gap
    for chunk in chunks:
        views.append(memory[at : at + len(chunk)])
        views[-1][:] = chunk
        at += len(chunk) + gap
    return views


def crcs_of(chunks):
    return [zlib.crc32(chunk) for chunk in chunks]


def down(space, chunks):
    out = memoryview(bytearray(sum(space.below_nbytes)))
    crcs = transcode.down(space, chunks, crcs_of(chunks), out)
    return out, crcs


def pieces(space, out):
    ends = list(itertools.accumulate(space.below_nbytes))
    return [bytes(out[end - nbytes : end]) for end, nbytes in zip(ends, space.below_nbytes, strict=True)]


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize(("wire", "below"), PAIRS)
@pytest.mark.parametrize("gap", [0, 3], ids=["together", "apart"])
def test_each_layer_is_what_the_codecs_give(wire, below, dtype, gap):
    space = info(mixed(dtype), wire, below)
    transcode.check(space)
    chunks = stored(space)
    out, crcs = down(space, laid(chunks, gap))
    found = pieces(space, out)
    for layout, chunk, piece in zip(space.layouts, chunks, found, strict=True):
        assert piece == encoded(below, layout, decoded(wire, layout, chunk, TOKENS))
    assert list(crcs) == crcs_of(found)

    back = laid([bytes(len(chunk)) for chunk in chunks], gap)
    crcs = transcode.up(space, out, back)
    for layout, chunk, piece in zip(space.layouts, back, found, strict=True):
        assert bytes(chunk) == encoded(wire, layout, decoded(below, layout, piece, TOKENS))
    assert list(crcs) == crcs_of(back)


def test_layers_in_any_order_in_memory_and_a_read_only_source():
    space = info((split(2, 64),) * 3, "fp8", "int4")
    chunks = stored(space)
    want = down(space, laid(chunks))
    assert down(space, laid(chunks[::-1])[::-1]) == want
    assert down(space, [memoryview(chunk) for chunk in chunks]) == want


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_a_run_longer_than_one_call(tokens):
    """Layers beyond what fits in one call, and the last call shorter than the others."""
    layout = split(8, 128)
    fit = max(1, transcode.RUN_NBYTES // layout.chunk_nbytes(tokens))
    layers = min(2 * fit + 1, 300)
    space = info((layout,) * layers, "int8", "int4", tokens)
    chunks = [encoded("int8", layout, gaussian(layout, tokens, seed)) for seed in range(3)]
    chunks = [chunks[i % 3] for i in range(layers)]
    out, _ = down(space, laid(chunks))
    want = [encoded("int4", layout, decoded("int8", layout, chunk, tokens)) for chunk in chunks[:3]]
    assert pieces(space, out) == [want[i % 3] for i in range(layers)]


@pytest.mark.parametrize(("below", "least"), [("int4", 0.993), ("int8", 0.9999), ("fp8", 0.999)])
def test_what_comes_back_is_close(below, least):
    layout = split(8, 128)
    space = info((layout,) * 2, "raw", below, 16)
    chunks = stored(space)
    out, _ = down(space, laid(chunks))
    back = laid([bytes(len(chunk)) for chunk in chunks])
    transcode.up(space, out, back)
    a, b = (
        (np.frombuffer(b"".join(map(bytes, each)), np.uint16).astype(np.uint32) << 16).view(np.float32)
        for each in (chunks, back)
    )
    assert float(a @ b / np.sqrt((a @ a) * (b @ b))) >= least


@pytest.mark.parametrize("layer", range(6))
def test_damage_in_memory_gets_no_valid_checksum(layer):
    space = info(mixed(), "fp8", "int4")
    chunks = laid(stored(space))
    crcs = crcs_of(chunks)
    chunks[layer][-1] ^= 1
    out = memoryview(bytearray(sum(space.below_nbytes)))
    with pytest.raises(transcode.CorruptChunk, match=f"layer {layer} changed") as caught:
        transcode.down(space, chunks, crcs, out)
    assert isinstance(caught.value, HyperCacheError)
    chunks[layer][-1] ^= 1
    transcode.down(space, chunks, crcs, out)  # and nothing of it stays behind
    assert out == down(space, chunks)[0]


def test_bytes_that_no_encoder_writes_are_refused_both_ways():
    space = info((split(2, 64),) * 2, "fp8", "int4")
    chunks = laid(stored(space))
    out, _ = down(space, chunks)
    out[:2] = b"\xff\xff"  # a scale: NaN
    with pytest.raises(CodecError, match="int4"):
        transcode.up(space, out, chunks)
    chunks = laid(stored(space))
    chunks[1][:2] = b"\xff\xff"
    with pytest.raises(CodecError, match="fp8"):
        down(space, chunks)


def test_sizes_that_do_not_fit_are_refused():
    space = info((split(2, 64),) * 2, "fp8", "int4")
    chunks = laid(stored(space))
    out, _ = down(space, chunks)
    bad = (chunks[:1], [*chunks, chunks[0]], [chunks[0], chunks[1][:-1]], [])
    for wrong in bad:
        with pytest.raises(SpecError, match="a block has 2 chunks"):
            transcode.down(space, wrong, crcs_of(wrong), out)
        with pytest.raises(SpecError, match="a block has 2 chunks"):
            transcode.up(space, out, wrong)
    with pytest.raises(SpecError, match="on disk"):
        transcode.down(space, chunks, crcs_of(chunks), out[:-1])
    with pytest.raises(SpecError, match="on disk"):
        transcode.up(space, out[:-1], chunks)
    with pytest.raises(SpecError, match="1 checksums for 2"):
        transcode.down(space, chunks, crcs_of(chunks)[:1], out)


def test_memory_that_is_read_only_is_not_written():
    space = info((split(2, 64),) * 2, "fp8", "int4")
    chunks = laid(stored(space))
    out, _ = down(space, chunks)
    with pytest.raises(SpecError, match="read-only"):
        transcode.down(space, chunks, crcs_of(chunks), out.toreadonly())
    before = [bytes(chunk) for chunk in chunks]
    with pytest.raises(SpecError, match="read-only"):
        transcode.up(space, out, [chunks[0], chunks[1].toreadonly()])
    assert [bytes(chunk) for chunk in chunks] == before


def test_what_cannot_be_transcoded_is_refused_by_check():
    for dtype in (KVDtype.FP8_E4M3, KVDtype.FP8_E5M2):
        engines_own = split(2, 64, dtype=dtype)
        for below in ("int4", "fp8"):
            with pytest.raises(SpecError, match=f"'{below}' does not take {dtype.value} K/V"):
                transcode.check(info((engines_own,), "raw", below))
        transcode.check(info((engines_own,), "raw", ""))  # as it came
        transcode.check(info((engines_own,), "raw", "raw"))
    layout = split(2, 64)
    with pytest.raises(SpecError, match="have 100 bytes, with codec 'raw'"):
        transcode.check(NamespaceInfo(b"\1" * 16, (100,), TOKENS, "raw", "x", (layout,), "int4"))
    with pytest.raises(SpecError, match="layer 1 have"):
        nbytes = layout.chunk_nbytes(TOKENS)
        transcode.check(NamespaceInfo(b"\2" * 16, (nbytes, 9), TOKENS, "raw", "x", (layout,) * 2, "int4"))
    with pytest.raises((SpecError, ConfigError), match="'int5' is unknown"):
        transcode.check(NamespaceInfo(b"\3" * 16, (64,), TOKENS, "raw", "x", (layout,), "int5"))
    with pytest.raises(SpecError, match="'zip' is unknown"):
        transcode.check(NamespaceInfo(b"\4" * 16, (64,), TOKENS, "zip", "x", (layout,), "int4"))


def test_one_digest_with_another_geometry_is_another_form():
    """A digest names one geometry, but a restart with other settings may keep it elsewhere below."""
    one, two = info((split(2, 64),), "fp8", "int4"), info((split(2, 64),), "fp8", "int8")
    other = NamespaceInfo(
        one.digest, two.chunk_nbytes, two.block_size, two.codec, two.label, two.layouts, "int8"
    )
    chunks = laid(stored(one))
    assert [len(down(space, chunks)[0]) for space in (one, other, one)] == [
        sum(space.below_nbytes) for space in (one, other, one)
    ]
    assert down(other, chunks) == down(two, chunks)


def test_threads_do_not_disturb_each_other():
    spaces = [
        info((split(8, 128),) * 9, "int8", "int4", 16),
        info(mixed(), "fp8", "int4"),
        info(mixed(), "raw", "fp8"),
    ]
    blocks = [laid(stored(space)) for space in spaces]
    wanted = []
    for space, chunks in zip(spaces, blocks, strict=True):
        out, crcs = down(space, chunks)
        back = laid([bytes(len(chunk)) for chunk in chunks])
        wanted.append((bytes(out), crcs, transcode.up(space, out, back)))
    wrong: list[object] = []
    start = threading.Barrier(6)

    def work(first):
        try:
            start.wait(30)
            for turn in range(40):
                index = (first + turn) % 3
                space, chunks = spaces[index], blocks[index]
                out, crcs = down(space, chunks)
                back = laid([bytes(len(chunk)) for chunk in chunks])
                if (bytes(out), crcs, transcode.up(space, out, back)) != wanted[index]:
                    wrong.append(space)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_warm_takes_what_check_takes():
    transcode.warm(info(mixed(), "int8", "int4"))
    transcode.warm(info(mixed(), "int8", ""))
    with pytest.raises(SpecError, match="does not take"):
        transcode.warm(info((split(2, 64, dtype=KVDtype.FP8_E4M3),), "raw", "int4"))
