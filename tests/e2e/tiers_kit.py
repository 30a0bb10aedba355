"""What the tests of the disk tier share: nodes with a small memory over a directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hypercache
from hypercache import KVBuffers
from hypercache.model import ModelSpec
from hypercache.server.node import Node
from hypercache.store.disk import System

from .conftest import fill, floats, make_spec, poisoned, running_node, same, tokens_of

MIB = 1 << 20
SPEC = make_spec(layers=4, heads=4, dim=128)  # 16 tokens: 128 KiB in fp16
PROMPT = 16 * 8 + 1  # tokens: 8 blocks, 1 MiB


@contextlib.asynccontextmanager
async def tiered(directory: Path, **settings: Any) -> AsyncIterator[Node]:
    """A node of 16 MiB of memory and a disk tier of 64 MiB in ``directory``."""
    settings = {"memory": 16 * MIB, "l3_capacity": 64 * MIB, "l3_segment": 4 * MIB, **settings}
    async with running_node(l3_dir=str(directory), **settings) as node:
        yield node


@contextlib.asynccontextmanager
async def client_of(node: Node, spec: ModelSpec = SPEC, **options: Any) -> AsyncIterator[hypercache.Client]:
    options = {"codec": "raw", "tenant": hypercache.TenantKey.public(), **options}
    async with await hypercache.connect(node.uris[0], model=spec, **options) as client:
        yield client


def kv_of(seed: int, spec: ModelSpec = SPEC, tokens: int = PROMPT) -> KVBuffers:
    return fill(KVBuffers.allocate(spec, tokens), seed)


async def put(client: hypercache.Client, seed: int, tokens: int = PROMPT) -> None:
    result = await client.store(tokens_of(seed, tokens), kv_of(seed, client.model, tokens))
    assert result.stored + result.outcome.get("exists", 0) == tokens // 16, result


async def get(client: hypercache.Client, seed: int, tokens: int = PROMPT, cosine: float = 1.0) -> int:
    """Tokens found of a prompt, each of them checked: bit for bit, or by its cosine."""
    into = poisoned(client.model, tokens)
    found = (await client.fetch(tokens_of(seed, tokens), into)).hit_tokens
    if cosine == 1.0:
        assert same(kv_of(seed, client.model, tokens), into, 0, found)
    elif found:
        for layer in range(client.model.num_layers):
            for true, got in zip(
                kv_of(seed, client.model, tokens).layer(layer), into.layer(layer), strict=True
            ):
                a, b = floats(true[:, :found]), floats(got[:, :found])
                assert float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())) > cosine
    return found


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (what is waited for gives no sign)
            await asyncio.sleep(0.01)


def l3(node: Node) -> dict[str, Any]:
    return dict(node.status()["l3"])


async def written(node: Node) -> None:
    """All that is stored has been written to the disk."""
    await until(lambda: l3(node)["blocks_waiting"] == l3(node)["blocks_writing"] == 0)


def nbytes_in(directory: Path) -> int:
    return sum(
        entry.stat().st_size for entry in os.scandir(directory) if entry.name.endswith((".hckv", ".bad"))
    )


@contextlib.contextmanager
def mounted(path: Path, nbytes: int) -> Iterator[Path]:
    """A file system of ``nbytes`` at ``path``. Skips the test where nobody may mount one."""
    path.mkdir()
    try:
        mount("-t", "tmpfs", "-o", f"size={nbytes}", "none", str(path))
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("no right to mount a file system that can get full")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], capture_output=True, check=True)


class Sick(System):
    """A disk whose calls fail (``codes``: errno by call) or hang (``hangs``), until :meth:`heal`."""

    NAMES = ("open", "preadv", "pwritev", "ftruncate", "fdatasync", "fsync", "unlink")

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}
        self.hangs: set[str] = set()
        self.hanging = 0  # calls, now
        self._well = threading.Event()
        for name in self.NAMES:
            setattr(self, name, partial(self._call, name, getattr(System, name)))

    def _call(self, name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name in self.hangs:
            self.hanging += 1
            self._well.wait()
            self.hanging -= 1
        if code := self.codes.get(name):
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    def heal(self) -> None:
        self.codes.clear()
        self.hangs.clear()
        self._well.set()
        self._well = threading.Event()


@pytest.fixture
def sick(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sick]:
    """What nodes of this test reach their files through."""
    system = Sick()
    monkeypatch.setattr("hypercache.store.disk.System", lambda: system)
    yield system
    system.heal()
