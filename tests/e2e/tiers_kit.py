"""What the tests of the disk tier share: nodes with a small memory over a directory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
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
async def client_of(
    node: Node | Process, spec: ModelSpec = SPEC, **options: Any
) -> AsyncIterator[hypercache.Client]:
    options = {"codec": "raw", "tenant": hypercache.TenantKey.public(), **options}
    async with await hypercache.connect(node.uris[0], model=spec, **options) as client:
        yield client


def kv_of(seed: int, spec: ModelSpec = SPEC, tokens: int = PROMPT) -> KVBuffers:
    return fill(KVBuffers.allocate(spec, tokens), seed)


async def put(client: hypercache.Client, seed: int, tokens: int = PROMPT) -> None:
    result = await client.store(tokens_of(seed, tokens), kv_of(seed, client.model, tokens))
    assert result.stored + result.outcome.get("exists", 0) == tokens // 16, result


async def get(
    client: hypercache.Client, seed: int, tokens: int = PROMPT, cosine: float = 1.0, of: int = 0
) -> int:
    """Tokens found of a prompt, each of them checked: bit for bit, or by its cosine. of: tokens of the prompt
    that was stored, where that is longer."""
    true_kv = kv_of(seed, client.model, of or tokens)
    into = poisoned(client.model, tokens)
    found = (await client.fetch(tokens_of(seed, tokens), into)).hit_tokens
    if cosine == 1.0:
        assert same(true_kv, into, 0, found)
    elif found:
        for layer in range(client.model.num_layers):
            for true, got in zip(true_kv.layer(layer), into.layer(layer), strict=True):
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


class Process:
    """A real ``hypercache-serve`` over a directory."""

    def __init__(self, directory: Path, **settings: str) -> None:
        flags = {
            "listen": "tcp://127.0.0.1:0",
            "admin": "127.0.0.1:0",
            "memory": "32MiB",
            "l3-dir": str(directory),
            "l3-capacity": "192MiB",
            "l3-segment": "8MiB",
            **settings,
        }
        command = [sys.executable, "-m", "hypercache.cli.main", "serve"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HYPERCACHE_")}
        self.process = subprocess.Popen(
            command, env=clean, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        self.ready = json.loads(self.process.stdout.readline())
        self.uris: list[str] = self.ready["uris"]

    async def status(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._status)

    def _status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://{self.ready['admin']}/status", timeout=30) as answer:
            return dict(json.load(answer))

    async def quiet(self) -> dict[str, Any]:
        """Wait until all is written; the numbers of the disk tier then."""
        while True:
            numbers = dict((await self.status())["l3"])
            if numbers["blocks_waiting"] == numbers["blocks_writing"] == 0:
                return numbers
            await asyncio.sleep(0.02)

    def end(self, number: int) -> int:
        """Send a signal and wait for the end; the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@contextlib.contextmanager
def serving(directory: Path, **settings: str) -> Iterator[Process]:
    process = Process(directory, **settings)
    try:
        yield process
    finally:
        if process.process.poll() is None:
            process.end(signal.SIGKILL)


_BASE = np.random.default_rng(0).integers(0, 1 << 16, 1 << 20, np.uint16)


def cheap_kv(seed: int, spec: ModelSpec = SPEC, tokens: int = PROMPT) -> KVBuffers:
    """K/V of which every element depends on the seed, made at the speed of memory. 16-bit types, ``raw``."""
    kv = KVBuffers.allocate(spec, tokens)
    for layer in range(spec.num_layers):
        for index, part in enumerate(kv.layer(layer)):
            bits = part.view(np.uint16)
            at = 977 * layer + 31 * index
            bits[...] = _BASE[at : at + bits.size].reshape(bits.shape)
            bits += np.uint16(seed * 40_503 & 0xFFFF)
    return kv
