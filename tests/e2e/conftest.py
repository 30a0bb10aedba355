"""A real node on a real fabric, clients of any shape, and K/V whose every byte says where it belongs."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import structlog

import hypercache
from hypercache import KVBuffers
from hypercache.model import KVDtype, KVLayout, LayerGroup, ModelSpec, Part, RopeSpec
from hypercache.server.config import ServerConfig
from hypercache.server.node import Node

ROPE = RopeSpec("default", 10000.0, 64)
_names = itertools.count()


def make_spec(
    layers: int = 4,
    heads: int = 2,
    dim: int = 64,
    *,
    v_dim: int | None = None,
    dtype: KVDtype = KVDtype.FP16,
    weights: bytes = b"weights-of-the-test-model",
    **more: Any,
) -> ModelSpec:
    layout = KVLayout("split", heads, (Part("k", dim), Part("v", v_dim or dim)), dtype)
    group = LayerGroup(tuple(range(layers)), layout, RopeSpec("default", 10000.0, dim))
    return ModelSpec(weights=hashlib.sha256(weights).digest(), groups=(group,), name="test", **more)


def fill(kv: KVBuffers, seed: int) -> KVBuffers:
    """Random finite K/V that depend on seed, layer and part."""
    for layer in range(kv.spec.num_layers):
        for index, part in enumerate(kv.layer(layer)):
            rng = np.random.default_rng([seed, layer, index])
            values = rng.standard_normal(part.shape, np.float32)
            if part.dtype == np.uint16:  # bf16: the upper half of a float32
                part[...] = (values.view(np.uint32) >> 16).astype(np.uint16)
            elif part.dtype == np.uint8:
                part[...] = rng.integers(0, 0x7E, part.shape, np.uint8)
            else:
                part[...] = values.astype(part.dtype)
    return kv


def poisoned(spec: ModelSpec, tokens: int) -> KVBuffers:
    kv = KVBuffers.allocate(spec, tokens)
    for layer in range(spec.num_layers):
        for part in kv.layer(layer):
            part.view(np.uint8)[...] = 0xA5
    return kv


def same(a: KVBuffers, b: KVBuffers, first: int, stop: int) -> bool:
    return all(
        np.array_equal(x[:, first:stop].view(np.uint8), y[:, first:stop].view(np.uint8))
        for layer in range(a.spec.num_layers)
        for x, y in zip(a.layer(layer), b.layer(layer), strict=True)
    )


def untouched(kv: KVBuffers, first: int, stop: int) -> bool:
    return all(
        bool((part[:, first:stop].view(np.uint8) == 0xA5).all())
        for layer in range(kv.spec.num_layers)
        for part in kv.layer(layer)
    )


def floats(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """K/V as float64; uint16 is bf16."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def tokens_of(seed: int, count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.int64)


@contextlib.asynccontextmanager
async def running_node(**settings: Any) -> AsyncIterator[Node]:
    settings.setdefault("listen", ("tcp://127.0.0.1:0",))
    settings.setdefault("memory", 64 << 20)
    settings.setdefault("admin", "")
    node = Node(ServerConfig(**settings), log=structlog.get_logger("test"))
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


@pytest.fixture(params=["tcp", "loop"])
async def node(request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    uri = "tcp://127.0.0.1:0" if request.param == "tcp" else f"loop://node{next(_names)}"
    async with running_node(listen=(uri,)) as node:
        yield node


Connect = Callable[..., Any]


@pytest.fixture
async def connect(node: Node) -> AsyncIterator[Connect]:
    """Makes clients of ``node`` and closes them."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(spec: ModelSpec | None = None, **options: Any) -> hypercache.Client:
            options.setdefault("codec", "raw")
            options.setdefault("tenant", hypercache.TenantKey.public())
            client = await hypercache.connect(node.uris[0], model=spec or make_spec(), **options)
            return await stack.enter_async_context(client)

        yield make
