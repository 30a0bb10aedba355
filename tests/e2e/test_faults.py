"""Servers that die, freeze, lie or are not there yet: every call ends in time, and what it says is true."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hypercache
from hypercache import KVBuffers, TenantKey
from hypercache.errors import HyperCacheError, ProtocolError, Refused, Unavailable

from .conftest import fill, make_spec, poisoned, running_node, same, tokens_of, untouched

SPEC = make_spec()
OPTIONS: dict[str, Any] = {"model": SPEC, "codec": "raw", "tenant": TenantKey.public()}


class Server:
    """A ``hypercache-serve`` process."""

    def __init__(self, port: int = 0, *flags: str) -> None:
        command = [sys.executable, "-m", "hypercache.cli.main", "serve"]
        command += ["--listen", f"tcp://127.0.0.1:{port}", "--admin", "", "--memory", "64MiB", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        ready = json.loads(self.process.stdout.readline())
        self.uri: str = ready["uris"][0]
        self.port = int(self.uri.rpartition(":")[2])

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@contextlib.asynccontextmanager
async def client_of(uri: str, **options: Any) -> AsyncIterator[hypercache.Client]:
    client = await hypercache.connect(uri, **{**OPTIONS, **options})
    try:
        yield client
    finally:
        await client.close()


async def until(condition: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < end, "did not come true in time"
        await asyncio.sleep(0.02)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def test_kill_and_restart(server: Server) -> None:
    """G01: put, SIGKILL, restart, get: a miss in between, hits afterwards, no restart of the client."""
    tokens = tokens_of(1, 65)
    kv = fill(KVBuffers.allocate(SPEC, 65), 1)
    async with client_of(server.uri) as client:
        assert (await client.store(tokens, kv)).stored == 4
        server.stop()
        for _ in range(5):
            began = time.monotonic()
            match = await client.match(tokens, deadline=2.0)
            assert match.hit_blocks == 0 and match.reason
            assert time.monotonic() - began < 2.5
        again = Server(server.port)
        try:

            async def stored() -> bool:
                return (await client.store(tokens, kv)).stored == 4

            await until(stored)
            into = poisoned(SPEC, 65)
            assert (await client.fetch(tokens, into)).hit_tokens == 64
            assert same(kv, into, 0, 64)
        finally:
            again.stop()


async def test_client_first(tmp_path: Path) -> None:
    """G02: no server yet is a miss with its reason at once; when it appears there are hits."""
    port = free_port()
    async with client_of(f"tcp://127.0.0.1:{port}", deadline=2.0) as client:
        assert client.state == "down"
        tokens = tokens_of(2, 65)
        kv = fill(KVBuffers.allocate(SPEC, 65), 1)
        slowest = 0.0
        for _ in range(100):
            began = time.monotonic()
            assert (await client.match(tokens)).reason.startswith("unreachable: ")
            result = await client.fetch(tokens, kv)
            assert result.hit_tokens == 0 and "127.0.0.1" in result.reason
            assert (await client.store(tokens, kv)).stored == 0
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < 1.0  # nothing waited for a connection
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1"):
            await client.clear()
        server = Server(port)
        try:

            async def stored() -> bool:
                return (await client.store(tokens, kv)).stored == 4

            await until(stored)
            assert (await client.match(tokens)).hit_blocks == 4
        finally:
            server.stop()


async def test_frozen_server(server: Server) -> None:
    """G06: SIGSTOP leaves the connection up; calls end at their deadline; late answers reach nobody else."""
    a, b = tokens_of(3, 65), tokens_of(4, 65)
    kv_a, kv_b = fill(KVBuffers.allocate(SPEC, 65), 3), fill(KVBuffers.allocate(SPEC, 65), 4)
    async with client_of(server.uri) as client:
        await client.store(a, kv_a)
        await client.store(b, kv_b)
        server.signal(signal.SIGSTOP)
        into = poisoned(SPEC, 65)
        began = time.monotonic()
        results = await asyncio.gather(
            client.match(a, deadline=0.3),
            client.fetch(a, into, deadline=0.3),
            client.store(a, kv_a, deadline=0.3),
        )
        assert time.monotonic() - began < 2.0
        assert results[0].hit_blocks == 0 and results[0].reason.startswith("deadline")
        assert results[1].hit_tokens == 0 and results[1].reason == "deadline"
        assert results[2].stored == 0 and results[2].reason == "deadline"
        # It hangs: from now on nothing waits for it.
        assert client.state == "stalled"
        began = time.monotonic()
        for _ in range(50):
            match = await client.match(a)
            assert match.hit_blocks == 0 and match.reason == f"unreachable: {server.uri} does not answer"
        assert time.monotonic() - began < client.deadline  # fifty calls, in less than one would have waited
        server.signal(signal.SIGCONT)

        async def answers() -> bool:
            return client.state == "ready"

        await until(answers)
        other = poisoned(SPEC, 65)
        assert (await client.fetch(b, other)).hit_tokens == 64
        assert same(kv_b, other, 0, 64)
        assert untouched(into, 0, 65)


async def test_cancelled_calls_never_leave_their_answer_to_the_next(server: Server) -> None:
    """H01: cancel at random moments, then ask for something else."""
    spec = make_spec(layers=24)
    prompts = [tokens_of(20 + i, 257) for i in range(2)]
    truth = [fill(KVBuffers.allocate(spec, 257), i) for i in range(2)]
    rng = random.Random(1)
    async with client_of(server.uri, model=spec) as client:
        for prompt, kv in zip(prompts, truth, strict=True):
            assert (await client.store(prompt, kv)).stored == 16
        finished = 0
        for round_ in range(150):
            one, two = round_ % 2, 1 - round_ % 2
            into = poisoned(spec, 257)
            task = asyncio.ensure_future(client.fetch(prompts[one], into))
            await asyncio.sleep(rng.random() * 0.006)
            finished += task.done()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            snapshot = [part.copy() for layer in range(24) for part in into.layer(layer)]
            other = poisoned(spec, 257)
            result = await client.fetch(prompts[two], other)
            assert result.hit_tokens == 256
            assert same(truth[two], other, 0, 256)
            after = [part for layer in range(24) for part in into.layer(layer)]
            assert all(np.array_equal(x, y) for x, y in zip(snapshot, after, strict=True))
        assert finished < 150


async def test_abort_at_any_time_gives_everything_back() -> None:
    """L01, L03: before, during, after and twice; leases, reservations and pins return to zero."""
    spec = make_spec(layers=8)
    rng = random.Random(2)
    async with running_node() as node, client_of(node.uris[0], model=spec) as client:
        prompts = [tokens_of(40 + i, 129) for i in range(8)]
        kv = fill(KVBuffers.allocate(spec, 129), 1)

        async def one(i: int) -> None:
            prompt = prompts[rng.randrange(8)]
            if i % 2:
                running: Any = client.start_fetch(prompt, poisoned(spec, 129))
            else:
                running = client.start_store(prompt, kv, ready_layers=rng.choice([0, 4, 8]))
            if rng.random() < 0.3:
                running.cancel()
            await asyncio.sleep(rng.random() * 0.01)
            running.cancel()
            running.cancel()
            await running

        for _ in range(20):
            await asyncio.gather(*(one(i) for i in range(16)))

        async def empty() -> bool:
            stats = node.status()["store"]
            return stats["leases"] == stats["reservations"] == stats["bytes_held"] == 0

        await until(empty, 3.0)
        assert (await client.store(prompts[0], kv)).reason == ""


async def test_a_writer_that_dies_leaves_nothing(server: Server) -> None:
    """E02, E03: killed between first and last layer; the next writer of the same block succeeds."""
    tokens = tokens_of(60, 65)
    script = f"""
        import asyncio, hypercache
        from tests.e2e.conftest import *
        async def main():
            client = await hypercache.connect({server.uri!r}, model=make_spec(), codec="raw",
                                              tenant=hypercache.TenantKey.public())
            kv = fill(KVBuffers.allocate(make_spec(), 65), 1)
            client.start_store(tokens_of(60, 65), kv, ready_layers=2)
            await asyncio.sleep(0.2)
            print("half", flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert writer.stdout is not None
    try:
        assert await asyncio.to_thread(writer.stdout.readline) == "half\n"
        async with client_of(server.uri) as client:
            kv = fill(KVBuffers.allocate(SPEC, 65), 1)
            assert (await client.store(tokens, kv)).outcome == {"pending": 4}
            assert not any(await client.contains(tokens))
            writer.kill()

            async def stored() -> bool:
                return (await client.store(tokens, kv)).stored == 4

            await until(stored)
            assert (await client.match(tokens)).hit_blocks == 4
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()


async def test_many_writers_of_one_prompt() -> None:
    """E04: 64 clients at once: one copy, everybody has an answer, right bytes."""
    async with running_node() as node, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(node.uris[0])) for _ in range(64)]
        tokens = tokens_of(61, 65)
        kv = fill(KVBuffers.allocate(SPEC, 65), 1)
        results = await asyncio.gather(*(client.store(tokens, kv) for client in clients))
        assert sum(result.stored for result in results) == 4
        assert all(sum(result.outcome.values()) == 4 and not result.reason for result in results)
        into = poisoned(SPEC, 65)
        assert (await clients[-1].fetch(tokens, into)).hit_tokens == 64
        assert same(kv, into, 0, 64)
        assert node.status()["store"]["blocks"] == 4


async def test_eviction_between_match_and_fetch_shortens_the_hit() -> None:
    """D01: fewer tokens than promised is a value, not a failure."""
    async with running_node() as node, client_of(node.uris[0]) as client:
        tokens = tokens_of(62, 161)
        kv = fill(KVBuffers.allocate(SPEC, 161), 1)
        await client.store(tokens, kv)
        match = await client.match(tokens)
        assert match.hit_blocks == 10
        tail = client.prompt(tokens)
        await client.evict(type(tail)(tail.tokens, 16, tail.digests[6:]))
        into = poisoned(SPEC, 161)
        result = await client.fetch(match, into)
        assert (result.hit_tokens, result.reason) == (96, "evicted since the match")
        assert same(kv, into, 0, 96) and untouched(into, 96, 161)
        await client.evict(tokens)
        result = await client.fetch(match, into)
        assert (result.hit_tokens, result.reason) == (0, "not stored")


async def test_small_memory_under_load_serves_right_bytes_or_misses() -> None:
    """D01, L09: everything is evicted all the time; no wrong byte, no exception."""
    spec = make_spec(layers=4, heads=4)  # 64 KiB a block
    async with running_node(memory=8 << 20) as node, client_of(node.uris[0], model=spec) as client:
        prompts = [tokens_of(200 + i, 129) for i in range(32)]
        truth = [fill(KVBuffers.allocate(spec, 129), i) for i in range(32)]
        rng = random.Random(3)
        hits = 0

        async def one() -> None:
            nonlocal hits
            i = rng.randrange(32)
            into = poisoned(spec, 129)
            result = await client.fetch(prompts[i], into)
            assert same(truth[i], into, 0, result.hit_tokens)
            hits += result.hit_tokens > 0
            if result.hit_tokens < 128:
                stored = await client.store(prompts[i], truth[i])
                assert set(stored.outcome) <= {"stored", "exists", "pending", "full", "orphan", "aborted"}

        for _ in range(40):
            await asyncio.gather(*(one() for _ in range(16)))
        stats = node.status()["store"]
        assert hits > 0 and stats["evicted_total"] > 0
        assert stats["bytes_used"] <= stats["bytes_data"]


async def test_a_server_that_never_fits_is_an_error_at_connect() -> None:
    """G14: wrong product and wrong version are named at once; a dead port is not an error."""

    async def answer(reply: bytes) -> tuple[Any, str]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(reply)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
                await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        return server, f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    server, uri = await answer(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 64)
    async with server, client_of(uri, deadline=2.0) as client:
        assert client.state == "down"
        assert "HTTP" in (await client.match(tokens_of(1, 33))).reason


async def test_refusals_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """B04, G14: other hash version or protocol version: refused at connect with both versions."""
    async with running_node() as node:
        with monkeypatch.context() as patch:
            patch.setattr("hypercache.client.client.HASH_VERSION", 99)
            with pytest.raises(Refused, match="hash version 1, the client by 99") as caught:
                await hypercache.connect(node.uris[0], **OPTIONS)
            assert caught.value.code == "hash_version"
        with monkeypatch.context() as patch:
            patch.setattr("hypercache.client.client.protocol.VERSION", 7)
            client = None
            patch.setattr("hypercache.server.session.protocol.VERSION", 7)
            client = await hypercache.connect(node.uris[0], **OPTIONS)
            await client.close()
        assert (await hypercache.connect(node.uris[0], **OPTIONS)).state == "ready"


def _in_child(client: hypercache.Client, out: Any) -> None:
    async def use() -> None:
        await client.match([1] * 40)

    try:
        asyncio.run(use())
    except HyperCacheError as error:
        out.send(str(error))
    else:
        out.send("no error")
    os._exit(0)


async def test_fork_is_refused_in_the_child_and_harmless_in_the_parent(server: Server) -> None:
    """H18."""
    async with client_of(server.uri) as client:
        ours, theirs = multiprocessing.Pipe()
        pid = os.fork()
        if pid == 0:
            _in_child(client, theirs)
        os.waitpid(pid, 0)
        assert "not fork-safe" in ours.recv()
        assert (await client.match(tokens_of(1, 33))).reason.startswith("not stored")


SYNC_SCRIPT = """
    import hypercache, sys
    from tests.e2e.conftest import *
    tenant = hypercache.TenantKey.public()
    client = hypercache.connect_sync({uri!r}, model=make_spec(), codec="raw", tenant=tenant)
    kv = fill(KVBuffers.allocate(make_spec(), 65), 1)
    assert client.store(tokens_of(1, 65), kv).stored == 4
    into = poisoned(make_spec(), 65)
    running = client.start_fetch(tokens_of(1, 65), into)
    assert all(running.layer(i) for i in range(4)) and running.result().hit_tokens == 64
    assert same(kv, into, 0, 64)
    {ending}
    print("done")
"""


@pytest.mark.parametrize(
    "ending", ["", "client.close(); client.close()", "client.start_fetch(tokens_of(1, 65), into)"]
)
def test_programs_end_without_close(server: Server, ending: str) -> None:
    """L07: exits with status 0 and says nothing; closing twice is harmless."""
    script = textwrap.dedent(SYNC_SCRIPT.format(uri=server.uri, ending=ending))
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    assert time.monotonic() - began < 50


async def test_async_programs_end_without_close(server: Server) -> None:
    script = f"""
        import asyncio, hypercache
        from tests.e2e.conftest import *
        async def main():
            client = await hypercache.connect({server.uri!r}, model=make_spec(), codec="raw",
                                              tenant=hypercache.TenantKey.public())
            await client.match(tokens_of(1, 33))
        asyncio.run(main())
    """
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stderr) == (0, "")


async def test_drain_lets_running_streams_end(server: Server) -> None:
    """SIGTERM under load: what runs ends whole or as a miss, then exit status 0."""
    spec = make_spec(layers=24, heads=4)
    tokens = tokens_of(70, 513)
    kv = fill(KVBuffers.allocate(spec, 513), 1)
    async with client_of(server.uri, model=spec) as client:
        assert (await client.store(tokens, kv)).stored == 32
        fetches = [asyncio.ensure_future(client.fetch(tokens, poisoned(spec, 513))) for _ in range(4)]
        await asyncio.sleep(0.003)
        server.signal(signal.SIGTERM)
        results = await asyncio.gather(*fetches)
        assert all(result.hit_tokens in (0, 512) for result in results)
        assert await asyncio.to_thread(server.process.wait, 20) == 0
        assert (await client.match(tokens)).hit_blocks == 0


async def test_slow_readers_cost_the_server_no_memory() -> None:
    """D12, H07: asked for much, not reading: output waits in the arena, not in buffers; nobody is evicted."""
    spec = make_spec(layers=8, heads=8, dim=128)
    async with running_node(memory=128 << 20) as node, client_of(node.uris[0], model=spec) as client:
        tokens = tokens_of(80, 1025)
        kv = fill(KVBuffers.allocate(spec, 1025), 1)
        assert (await client.store(tokens, kv)).stored == 64
        from hypercache import protocol

        digests = protocol.join_digests(client.prompt(tokens).digests[:64])
        hello = protocol.Hello(1, 1, "slow", 1, ("crc32",), "public", TenantKey.public().tenant_id)
        opening = client._link._opening
        from fabrics.framing import encode_head

        socks = []
        before = _rss()
        for _ in range(10):
            sock = socket.create_connection(("127.0.0.1", int(node.uris[0].rpartition(":")[2])))
            for number, message in enumerate(
                [hello, opening] + [protocol.Fetch(0, digests, (0, 8), 20_000, 1 << 20)] * 20
            ):
                op, body = protocol.encode(message)
                sock.sendall(encode_head(op, 0, number + 1, body, 0) + body)
            socks.append(sock)
        await asyncio.sleep(0.5)
        asked = 10 * 20 * 64 * 16 * spec.token_nbytes()
        assert asked > 5 << 30
        assert _rss() - before < 64 << 20
        assert node.status()["store"]["blocks"] == 64
        assert (await client.match(tokens)).hit_blocks == 64
        for sock in socks:
            sock.close()

        async def released() -> bool:
            return bool(node.status()["store"]["leases"] == 0)

        await until(released)


def _rss() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_corruption_on_the_wire_and_in_memory_is_a_miss() -> None:
    """E07: a wrong byte ends the hit before its block, is counted, and never reaches the engine."""
    async with running_node() as node, client_of(node.uris[0]) as client:
        tokens = tokens_of(90, 161)
        kv = fill(KVBuffers.allocate(SPEC, 161), 1)
        await client.store(tokens, kv)
        store = node._store
        tree = next(iter(store._trees.values()))
        block = tree.blocks[client.prompt(tokens).digests[5]]
        first, _ = tree.space.span(2)
        memory = store._arena.view(block.slab, block.slot, first, first + 1)
        memory[0] ^= 1
        into = poisoned(SPEC, 161)
        result = await client.fetch(tokens, into)
        assert (result.hit_tokens, result.reason) == (80, "checksum mismatch on arrival")
        assert same(kv, into, 0, 80)


def test_protocol_error_is_not_a_miss() -> None:
    assert issubclass(ProtocolError, HyperCacheError) and not issubclass(Unavailable, ProtocolError)


async def test_too_little_memory_makes_a_smaller_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """I06: the system gives less than was asked for: said, and served on with what there is."""
    import mmap

    real = mmap.mmap

    def scarce(fileno: int, length: int, *more: Any, **options: Any) -> mmap.mmap:
        if length > 20 << 20:
            raise OSError(12, "Cannot allocate memory")
        return real(fileno, length, *more, **options)

    monkeypatch.setattr("hypercache.store.arena.mmap.mmap", scarce)
    async with running_node(memory=128 << 20) as node, client_of(node.uris[0]) as client:
        assert 0 < node.status()["store"]["capacity"] <= 20 << 20
        tokens = tokens_of(91, 65)
        assert (await client.store(tokens, fill(KVBuffers.allocate(SPEC, 65), 1))).stored == 4
        assert (await client.match(tokens)).hit_blocks == 4


async def test_fifty_requests_on_a_lost_connection_all_end(server: Server) -> None:
    """H17: nothing waits for an upper timeout."""
    async with client_of(server.uri, deadline=30.0) as client:
        tokens = tokens_of(92, 65)
        kv = fill(KVBuffers.allocate(SPEC, 65), 1)
        server.signal(signal.SIGSTOP)
        waiting: list[Any] = [asyncio.ensure_future(client.match(tokens)) for _ in range(20)]
        waiting += [asyncio.ensure_future(client.fetch(tokens, poisoned(SPEC, 65))) for _ in range(20)]
        waiting += [asyncio.ensure_future(client.store(tokens, kv)) for _ in range(10)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        server.process.kill()
        began = time.monotonic()
        results = await asyncio.gather(*waiting)
        assert time.monotonic() - began < 10.0  # of a deadline of 30
        assert all("lost" in result.reason for result in results)
        assert client._link._operations == {}


async def test_without_rdma_everything_else_works() -> None:
    """H12: no pyverbs and no device is no matter until somebody asks for them."""
    script = """
        import sys
        sys.modules["pyverbs"] = None  # importing it fails
        import hypercache.client, hypercache.server.node, fabrics
        assert not [name for name in sys.modules if "verbs" in name and sys.modules[name]]
        print(fabrics.schemes())
    """
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    with pytest.raises(HyperCacheError, match="unknown scheme; known here: loop, tcp"):
        async with running_node(listen=("roce://127.0.0.1:7440",)):
            pass


async def test_long_replay_does_not_grow() -> None:
    """I07: a trace of 2,000 requests with shared prefixes, twice: the second pass costs no memory."""
    spec = make_spec(layers=1, heads=1, dim=4)
    rng = np.random.default_rng(7)
    heads = [rng.integers(0, 50_000, 64 * 12) for _ in range(40)]
    rows = [
        (int(rng.zipf(1.5)) % 40, int(rng.integers(1, 12)), int(rng.integers(0, 1 << 30)))
        for _ in range(2000)
    ]
    async with (
        running_node(memory=16 << 20) as node,
        client_of(node.uris[0], model=spec, block_size=64) as client,
    ):

        async def play() -> None:
            for head, shared, seed in rows:
                tokens = np.concatenate([heads[head][: 64 * shared], tokens_of(seed, 64 * 8)])
                kv = KVBuffers.allocate(spec, len(tokens))
                match = await client.match(tokens)
                await client.fetch(match, kv)
                await client.store(tokens, kv, start=match.hit_tokens)

        await play()
        before = _rss()
        await play()
        grown = _rss() - before
        assert grown < 20 << 20, f"{grown >> 20} MiB over 2,000 rows"
        stats = node.status()["store"]
        assert stats["evicted_total"] > 0 and stats["leases"] == stats["reservations"] == 0
