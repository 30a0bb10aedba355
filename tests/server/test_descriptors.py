"""F15: connections and the disk tier's files have one pool of descriptors, and neither eats the other's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import hypercache
from hypercache import KVBuffers, TenantKey, protocol
from hypercache.server import descriptors
from tests.e2e.conftest import fill, make_spec, poisoned, same, tokens_of
from tests.e2e.test_bad_input import HELLO, Peer, fabric_for
from tests.e2e.test_faults import until

LIMIT = 64
CROWD = 200


def limited(soft: int, hard: int, program: str) -> tuple[list[str], str]:
    """Lines of output, and the log, of a program under a limit of open files."""
    lines = "from hypercache.server import descriptors\nimport resource\n" + program
    command = f"ulimit -Sn {soft} && ulimit -Hn {hard} && exec {sys.executable} -c '{lines}'"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    return done.stdout.split("\n"), done.stderr


SHOW = "print(descriptors.reserve({}, {}), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"


@pytest.mark.parametrize(
    ("soft", "hard", "connections", "files", "limit"),
    [
        (1024, 4096, 200, 10, 1024),  # enough: nothing is touched
        (64, 4096, 200, 10, 4096),
        (64, 4096, 3000, 10, 4096),
    ],
)
def test_the_limit_is_raised_where_that_helps(
    soft: int, hard: int, connections: int, files: int, limit: int
) -> None:
    lines, _ = limited(soft, hard, SHOW.format(connections, files))
    assert lines[-2] == f"{connections} {limit}"
    assert len(lines) == 2 + (soft != limit)  # the log says that it was raised


@pytest.mark.parametrize(("hard", "files"), [(64, 10), (100, 30), (64, 1000), (40, 39)])
def test_what_cannot_be_had_is_said(hard: int, files: int) -> None:
    lines, _ = limited(hard, hard, "print(descriptors._open_now())\n" + SHOW.format(200, files))
    others = int(lines[0]) + files + descriptors.SPARE + descriptors.REFUSED
    room = max(1, hard - others)
    assert lines[-2] == f"{room} {hard}"
    assert "fewer connections than max_connections" in lines[1]
    for part in ("asked=200", f"now={room}", f"limit={hard}", "ulimit -n"):
        assert part in lines[1]


@pytest.mark.parametrize(("hard", "most"), [(40, 10), (64, 16), (255, 63), (4096, descriptors.SEGMENTS)])
def test_of_few_descriptors_the_disk_tier_gets_a_quarter(hard: int, most: int) -> None:
    lines, _ = limited(min(hard, 64), hard, "print(descriptors.segments())")
    assert lines[-2] == str(most)


class Crowded:
    """A server process that has few descriptors."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        serve = [sys.executable, "-m", "hypercache.cli.main", "serve", "--listen", "tcp://127.0.0.1:0"]
        serve += ["--admin", "127.0.0.1:0", "--memory", "64MiB", "--l3-dir", str(folder / "l3")]
        serve += ["--max-connections", str(CROWD), "--log-format", "json"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", f'ulimit -n {LIMIT}; exec "$@"', "-", *serve],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        ready = json.loads(self.process.stdout.readline())
        self.uri: str = ready["uris"][0]
        self.admin: str = ready["admin"]

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://{self.admin}/status", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[Crowded]:
    server = Crowded(tmp_path)
    yield server
    server.process.terminate()
    assert server.process.wait(20) == 0
    assert server.process.stdout is not None
    server.process.stdout.close()


@contextlib.asynccontextmanager
async def client_of(server: Crowded) -> AsyncIterator[hypercache.Client]:
    options = {"codec": "raw", "tenant": TenantKey.public()}
    async with await hypercache.connect(server.uri, model=make_spec(), **options) as client:
        yield client


async def is_served(client: hypercache.Client, seed: int) -> None:
    """Stored and fetched as ever."""
    tokens = tokens_of(seed, 65)
    kv = fill(KVBuffers.allocate(client.model, 65), seed)
    assert (await client.store(tokens, kv)).stored == 4
    into = poisoned(client.model, 65)
    assert (await client.fetch(tokens, into)).hit_tokens == 64
    assert same(kv, into, 0, 64)


async def greet(uri: str) -> tuple[Peer, protocol.Message]:
    peer = Peer()
    peer.channel = await fabric_for(uri).connect(uri, peer, timeout=20)
    peer.send(HELLO)
    return peer, await asyncio.wait_for(peer.answers.get(), 20)


async def test_those_that_are_too_many_are_told_so(crowded: Crowded) -> None:
    async with client_of(crowded) as client:
        await is_served(client, 1)
        most = (await asyncio.to_thread(crowded.status))["max_connections"]
        assert 1 < most < LIMIT
        assert "fewer connections than max_connections" in crowded.log.read_text()
        guests = await asyncio.gather(*(greet(crowded.uri) for _ in range(CROWD)))
        welcome = [answer for _, answer in guests if isinstance(answer, protocol.HelloOk)]
        assert len(welcome) == most - 1  # and the client
        refused = [answer for _, answer in guests if isinstance(answer, protocol.Error)]
        assert len(refused) == CROWD - len(welcome)
        assert {answer.code for answer in refused} == {"busy"}
        await is_served(client, 2)
        assert (await asyncio.to_thread(crowded.status))["connections"] >= most
        for peer, _ in guests:
            assert peer.channel is not None
            peer.channel.abort(None)
        await left(crowded, 1)
    async with client_of(crowded) as client:
        await is_served(client, 3)
    assert "cannot accept" not in crowded.log.read_text()  # it never ran out of descriptors


async def test_a_silent_crowd_takes_nothing_from_who_is_served(crowded: Crowded) -> None:
    """They say no HELLO, so nobody can tell them anything; they wait in the kernel, and cost no time."""
    host, _, port = crowded.uri.removeprefix("tcp://").rpartition(":")
    async with client_of(crowded) as client:
        await is_served(client, 1)
        silent = [socket.create_connection((host, int(port)), timeout=10) for _ in range(CROWD)]
        await is_served(client, 2)
        status = await asyncio.to_thread(crowded.status)
        assert status["connections"] <= status["max_connections"] + descriptors.REFUSED
        before = crowded.cpu_s()
        await asyncio.sleep(2)
        assert crowded.cpu_s() - before < 1.0  # of 2: whoever spins on accept takes all of it
        await is_served(client, 3)
        for sock in silent:
            sock.close()
        await left(crowded, 1)
        async with client_of(crowded) as another:
            await is_served(another, 4)
    assert "cannot accept" not in crowded.log.read_text()


async def left(server: Crowded, connections: int) -> None:
    async def have_left() -> bool:
        return (await asyncio.to_thread(server.status))["connections"] <= connections

    await until(have_left, 20)
