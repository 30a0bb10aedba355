"""What a client tells the server of its layouts and of the codec on disk, and who shares blocks with whom."""

from __future__ import annotations

import hashlib

import pytest

import hypercache
from hypercache import KVBuffers, protocol
from hypercache.errors import ConfigError, SpecError
from hypercache.model import KVDtype, KVLayout, LayerGroup, ModelSpec, Part, RopeSpec
from hypercache.server.node import Node
from tests.e2e.conftest import Connect, fill, make_spec, tokens_of


def two_layouts() -> ModelSpec:
    """Layers 0 and 2 of another shape than 1 and 3."""
    wide = KVLayout("split", 2, (Part("k", 64), Part("v", 32)), KVDtype.BF16)
    flat = KVLayout("mla", 1, (Part("latent", 96), Part("rope", 32)), KVDtype.FP16)
    groups = (
        LayerGroup((0, 2), wide, RopeSpec("default", 10000.0, 64)),
        LayerGroup((1, 3), flat, RopeSpec("default", 10000.0, 32)),
    )
    return ModelSpec(weights=hashlib.sha256(b"two layouts").digest(), groups=groups, name="two")


def opened(node: Node) -> list[tuple[str, str, tuple[KVLayout, ...]]]:
    """Codec, codec on disk and layouts of what is open on the server."""
    infos = [handle.info for session in node._sessions for handle in session._handles]
    return [(info.codec, info.below, info.layouts) for info in infos]


@pytest.mark.parametrize(
    ("codec", "disk_codec", "below"),
    [
        ("raw", None, ""),
        ("int8", None, "int4"),
        ("fp8", None, "int4"),
        ("int4", None, ""),
        ("int4-plain", None, ""),
        ("raw", "int4", "int4"),
        ("raw", "raw", ""),
        ("int8", "fp8", "fp8"),
        ("int8", "int8", ""),
        ("int8", "raw", ""),
    ],
)
async def test_the_server_learns_layouts_and_codec_on_disk(
    node: Node, connect: Connect, codec: str, disk_codec: str | None, below: str
) -> None:
    spec = two_layouts()
    client = await connect(spec, codec=codec, disk_codec=disk_codec)
    assert client.namespace.disk_codec == below
    assert opened(node) == [(codec, below, tuple(spec.layout(layer) for layer in range(4)))]


async def test_who_chooses_another_codec_on_disk_shares_nothing(connect: Connect) -> None:
    tokens = tokens_of(1, 33)
    first = await connect(codec="int8")
    await first.store(tokens, fill(KVBuffers.allocate(first.model, 33), 1))
    for same in (None, "int4"):
        assert (await (await connect(codec="int8", disk_codec=same)).match(tokens)).hit_blocks == 2
    for other in ("int8", "fp8", "raw"):
        match = await (await connect(codec="int8", disk_codec=other)).match(tokens)
        assert match.hit_blocks == 0
        assert "codec=int8 disk=int4 block=16" in match.reason  # what there was, for who wonders why


async def test_the_environment_names_it_where_connect_does_not(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYPERCACHE_DISK_CODEC", "fp8")
    assert (await connect(codec="int8")).namespace.disk_codec == "fp8"
    assert (await connect(codec="int8", disk_codec="int4")).namespace.disk_codec == "int4"
    monkeypatch.setenv("HYPERCACHE_DISK_CODEC", "fp4")
    with pytest.raises(ConfigError, match=r"HYPERCACHE_DISK_CODEC\): codec 'fp4' is unknown.*'fp8'"):
        await connect(codec="int8")
    monkeypatch.setenv("HYPERCACHE_DISK_CODEC", "")
    assert (await connect(codec="int8")).namespace.disk_codec == "int4"
    monkeypatch.delenv("HYPERCACHE_DISK_CODEC")
    monkeypatch.setenv("HYPERCACHE_DISC_CODEC", "raw")
    with pytest.raises(ConfigError, match="did you mean HYPERCACHE_DISK_CODEC"):
        await connect(codec="int8")


async def test_misuse_is_refused_before_a_server_is_asked() -> None:
    nowhere = "tcp://127.0.0.1:1"
    fp8 = make_spec(dtype=KVDtype.FP8_E4M3, kv_scales=((1.0, 1.0),) * 4)
    with pytest.raises(SpecError, match=r"cannot encode layer 0: its K/V are fp8_e4m3; use disk_codec='raw'"):
        await hypercache.connect(nowhere, model=fp8, codec="raw", disk_codec="int4")
    with pytest.raises(ConfigError, match=r"disk_codec.*'int5' is unknown, known are raw, .*'int"):
        await hypercache.connect(nowhere, model=make_spec(), disk_codec="int5")
    with pytest.raises(ConfigError, match="disk_codec must be a str or None, got int"):
        await hypercache.connect(nowhere, model=make_spec(), disk_codec=4)  # type: ignore[arg-type]


def test_layouts_survive_the_wire() -> None:
    layouts = tuple(two_layouts().layout(layer) for layer in range(4))
    told, numbers = protocol.tell_layouts(layouts)
    assert (len(told), numbers) == (2, (0, 1, 0, 1))
    message = protocol.Open(bytes(32), 16, "raw", (1, 2, 1, 2), "", told, numbers, "int4")
    read = protocol.decode(*protocol.encode(message))
    assert read == message
    assert isinstance(read, protocol.Open)
    assert protocol.read_layouts(read) == layouts


def test_the_longest_open_that_is_allowed_fits_its_limit() -> None:
    told = tuple(
        protocol.Layout("split", protocol.MAX_DIM, (protocol.MAX_DIM, i + 1), "fp8_e4m3")
        for i in range(protocol.MAX_LAYOUTS)
    )
    layers = protocol.MAX_LAYERS
    message = protocol.Open(
        bytes(32),
        64,
        "int4-plain",
        (protocol.MAX_CHUNK_BYTES,) * layers,
        "\N{GREEK SMALL LETTER ALPHA}" * protocol.MAX_LABEL,
        told,
        tuple(i % len(told) for i in range(layers)),
        "int4-plain",
    )
    op, body = protocol.encode(message)
    assert len(protocol.read_layouts(message)) == layers
    assert len(body) <= protocol.REQUESTS[op]
