"""The life of a client: closed while in use, forked, cancelled, on the wrong loop, lied to."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

import hypercache
from fabrics import Channel, Frame, Listener, Outgoing, Sink, fabric_for
from hypercache import ChunkBuffers, KVBuffers, SyncClient, TenantKey, protocol
from hypercache.client import link
from hypercache.errors import HyperCacheError, ProtocolError, TokenError, Unavailable

from .conftest import fill, make_spec, poisoned, running_node, same, tokens_of
from .test_faults import Server, until

SPEC = make_spec()
BIG = make_spec(layers=32, heads=8, dim=128)  # 128 KiB a token
OPTIONS: dict[str, Any] = {"model": SPEC, "codec": "raw", "tenant": TenantKey.public()}
HANGS_S = 20.0  # far beyond what anything here takes: only what never ends reaches it


@pytest.fixture
async def frozen() -> Any:
    """A listener that accepts and reads nothing: to its clients a server that hangs from the start."""
    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    yield server
    for writer in held:
        writer.transport.abort()
    server.close()
    await server.wait_closed()


def uri_of(server: asyncio.Server) -> str:
    return f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@contextlib.asynccontextmanager
async def hanging_client() -> AsyncIterator[hypercache.Client]:
    """A client of a model so large that its output fills every buffer, and a server that stops reading."""
    server = await asyncio.to_thread(Server)
    try:
        client = await hypercache.connect(server.uri, **{**OPTIONS, "model": BIG})
        server.signal(signal.SIGSTOP)
        yield client
        await client.close()
    finally:
        server.stop()


def link_tasks() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if "hypercache link" in task.get_name()]


# --- the blocking face


async def test_threads_that_call_while_another_closes_all_end() -> None:
    async with running_node() as node:
        for _ in range(8):
            await asyncio.to_thread(_close_under_load, node.uris[0])


def _close_under_load(uri: str) -> None:
    client = hypercache.connect_sync(uri, **OPTIONS)
    prompt = client.prompt(tokens_of(1, 65))
    ended: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                client.match(prompt)
        except BaseException as error:
            ended.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(0.03)
    client.close()
    for thread in threads:
        thread.join(HANGS_S)
    assert not any(thread.is_alive() for thread in threads)
    assert len(ended) == len(threads)
    assert all(type(error) is HyperCacheError and "closed" in str(error) for error in ended)


async def test_what_waits_when_the_loop_is_stopped_gets_a_miss_and_later_calls_a_typed_error(
    frozen: asyncio.Server,
) -> None:
    def script() -> None:
        client = hypercache.connect_sync(uri_of(frozen), **OPTIONS, deadline=0.2)
        saving = client.start_store(tokens_of(1, 65), KVBuffers.allocate(SPEC, 65), ready_layers=1)
        client.close()
        client.close()
        saving.layer_ready(2)  # the engine goes on with its layers: that is no fault
        for call in (saving.result, saving.cancel, lambda: client.match(tokens_of(1, 65)), client.clear):
            with pytest.raises(HyperCacheError, match="closed"):
                call()

    await asyncio.to_thread(script)


FORK_SCRIPT = """
    import os, sys, time, warnings
    warnings.simplefilter("ignore")  # fork with threads, on purpose
    import hypercache
    from tests.e2e.conftest import *
    options = dict(model=make_spec(), codec="raw", tenant=hypercache.TenantKey.public())
    client = hypercache.connect_sync({uri!r}, **options)
    kv = fill(KVBuffers.allocate(make_spec(), 65), 1)
    assert client.store(tokens_of(1, 65), kv).stored == 4
    transfer = client.start_fetch(tokens_of(1, 65), poisoned(make_spec(), 65))
    saving = client.start_store(tokens_of(2, 65), kv, ready_layers=1, deadline=60)
    calls = {{
        "exit": lambda: sys.exit(0),
        "close": lambda: client.close(),
        "with": lambda: client.__exit__(None, None, None),
        "match": lambda: client.match(tokens_of(1, 65)),
        "layer": lambda: transfer.layer(0),
        "fetched": lambda: transfer.result(),
        "cancel fetch": lambda: transfer.cancel(),
        "layer_ready": lambda: saving.layer_ready(1),
        "stored": lambda: saving.result(),
        "cancel store": lambda: saving.cancel(),
    }}
    transfer.result()
    children = []
    for name, call in calls.items():
        children.append(os.fork())
        if not children[-1]:
            try:
                call()
                os.write(1, f"{{name}} returned\\n".encode())  # whole lines, from all children at once
            except hypercache.HyperCacheError as error:
                os.write(1, f"{{name}} raised {{'in the child' in str(error)}}\\n".encode())
            sys.exit(0)  # atexit must not wait for the parent's thread either
    for pid in children:
        os.waitpid(pid, 0)
    assert transfer.result().hit_tokens == 64  # the parent's, unharmed
    saving.layer_ready(3)
    saving.cancel()
    assert client.match(tokens_of(1, 65), deadline=60).hit_tokens == 64
    client.close()
    print("parent done")
"""


async def test_a_forked_child_never_waits_for_the_parents_thread() -> None:
    async with running_node() as node:
        script = textwrap.dedent(FORK_SCRIPT.format(uri=node.uris[0]))
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines.pop() == "parent done"
    assert sorted(line for line in lines if "returned" in line) == ["close returned", "with returned"]
    assert len([line for line in lines if line.endswith("raised True")]) == 7 and len(lines) == 9, lines


def test_help_says_what_each_blocking_call_does() -> None:
    public = [getattr(SyncClient, name) for name in dir(SyncClient) if not name.startswith("_")]
    assert len(public) >= 10 and all(inspect.getdoc(call) for call in public)


# --- closing and cancelling


async def test_close_ends_operations_first_and_does_not_wait_for_a_server_that_hangs() -> None:
    """Output of megabytes is pending when the server stops reading; a fetch waits for its answer."""
    async with hanging_client() as client:
        kv = KVBuffers.allocate(BIG, 513)
        storing = asyncio.create_task(client.store(tokens_of(1, 513), kv, deadline=60))
        fetching = client.start_fetch(tokens_of(2, 65), poisoned(BIG, 65), deadline=60)
        await asyncio.sleep(0.1)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        assert (await fetching.result()).reason == "the client is closed"
        assert not closing.done()
        async with asyncio.timeout(HANGS_S):
            await closing
            assert (await storing).reason == "the client is closed"
    assert link_tasks() == []


async def test_a_cancelled_connect_leaves_neither_task_nor_socket(frozen: asyncio.Server) -> None:
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await hypercache.connect(uri_of(frozen), **OPTIONS)
    assert link_tasks() == []


async def test_a_cancelled_close_still_closes() -> None:
    async with hanging_client() as client:
        saving = client.start_store(tokens_of(1, 513), KVBuffers.allocate(BIG, 513))
        await asyncio.sleep(0.1)
        channel = client._link.channel
        assert channel is not None and channel.state == "open"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.close()
        assert channel.state == "closed" and link_tasks() == []
        assert (await saving).reason == "the client is closed"


# --- memory that is lent


@pytest.mark.parametrize("way", ["cancel", "deadline", "cancelled wait", "close"])
async def test_the_result_of_a_store_comes_when_nobody_reads_the_buffers(way: str) -> None:
    """Chunks are sent from where they are; the server hangs, so some of them stay with the channel."""
    async with hanging_client() as client:
        chunks = ChunkBuffers([np.ones((32, size), np.uint8) for size in client.chunk_nbytes])
        deadline = 0.3 if way == "deadline" else 60
        saving = client.start_store(tokens_of(1, 513), chunks, deadline=deadline)
        waiting = asyncio.create_task(saving.result())
        await asyncio.sleep(0.1)
        assert any(operation.lent for operation in saving._operations)
        if way == "cancel":
            saving.cancel()
        elif way == "cancelled wait":
            waiting.cancel()
        elif way == "close":
            await client.close()
        async with asyncio.timeout(HANGS_S):
            await asyncio.wait([waiting])
        assert waiting.cancelled() == (way == "cancelled wait")
        assert not any(operation.lent for operation in saving._operations)
        assert (await saving).outcome == {"aborted": 32}


async def test_kv_buffers_are_free_as_soon_as_a_store_is_cancelled() -> None:
    async with hanging_client() as client:
        saving = client.start_store(tokens_of(1, 513), KVBuffers.allocate(BIG, 513), deadline=60)
        await asyncio.sleep(0.1)
        channel = client._link.channel
        saving.cancel()
        async with asyncio.timeout(0):  # does not wait for the server
            assert (await saving.result()).reason == "cancelled"
        assert client._link.channel is channel and channel is not None and channel.state == "open"


async def test_a_cancelled_store_of_chunks_leaves_a_line_that_works_open() -> None:
    async with running_node() as node, await hypercache.connect(node.uris[0], **OPTIONS) as client:
        chunks = ChunkBuffers([np.ones((512, size), np.uint8) for size in client.chunk_nbytes])
        channel = client._link.channel
        saving = client.start_store(tokens_of(1, 8193), chunks)
        await asyncio.sleep(0)
        saving.cancel()
        assert (await saving).reason == "cancelled"
        assert client._link.channel is channel and client.state == "ready"


# --- the wrong loop


def test_on_another_loop_every_call_says_so_at_once() -> None:
    async def first() -> tuple[Any, ...]:
        async with running_node() as node:
            client = await hypercache.connect(node.uris[0], **OPTIONS)
            kv = fill(KVBuffers.allocate(SPEC, 65), 1)
            transfer = client.start_fetch(tokens_of(1, 65), poisoned(SPEC, 65))
            saving = client.start_store(tokens_of(1, 65), kv, ready_layers=1)
            prompt = client.prompt(tokens_of(1, 65))

            async def elsewhere() -> None:
                for call in (
                    lambda: client.match(prompt),
                    lambda: client.fetch(prompt, poisoned(SPEC, 65)),
                    lambda: client.store(prompt, kv),
                    lambda: client.contains(prompt),
                    lambda: client.evict(prompt),
                    client.clear,
                    client.close,
                    transfer.result,
                    lambda: transfer.layer(1),
                    saving.result,
                ):
                    with pytest.raises(HyperCacheError, match="connect in each loop"):
                        async with asyncio.timeout(HANGS_S):
                            await call()
                for plain in (
                    lambda: client.start_fetch(prompt, poisoned(SPEC, 65)),
                    lambda: client.start_store(prompt, kv),
                    transfer.cancel,
                    saving.cancel,
                    lambda: saving.layer_ready(3),
                ):
                    with pytest.raises(HyperCacheError, match="connect in each loop"):
                        plain()

            await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
            with pytest.raises(HyperCacheError, match="connect in each loop"):
                await asyncio.to_thread(saving.layer_ready, 3)  # no loop at all
            saving.layer_ready(3)
            assert (await saving).stored == 4 and (await transfer).hit_tokens in (0, 64)
            assert (await client.match(prompt)).hit_tokens == 64
            await client.close()
        return ()

    asyncio.run(first())


# --- code of the caller that raises


class Odd(BaseException):
    """Like what test frameworks raise: no Exception."""


@pytest.mark.parametrize("kind", [ZeroDivisionError, Odd, asyncio.CancelledError])
async def test_an_on_layer_that_raises_ends_its_own_fetch_and_no_other(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    async with running_node() as node, await hypercache.connect(node.uris[0], **OPTIONS) as client:
        kv, tokens = fill(KVBuffers.allocate(SPEC, 1025), 1), tokens_of(1, 1025)
        await client.store(tokens, kv)
        channel = client._link.channel

        def bad(layer: int) -> None:
            if layer == 1:
                raise kind("mine")

        good = poisoned(SPEC, 1025)
        other = asyncio.create_task(client.fetch(tokens, good))
        result = await client.fetch(tokens, poisoned(SPEC, 1025), on_layer=bad)
        assert result.hit_tokens == 0
        assert "on_layer failed" in result.reason and kind.__name__ in result.reason
        assert any(record.exc_info and record.exc_info[0] is kind for record in caplog.records)
        assert (await other).hit_tokens == 1024 and same(kv, good, 0, 1024)
        assert client._link.channel is channel and client.state == "ready"


class Broken(ChunkBuffers):
    """Memory that is gone when it is needed."""

    def layer(self, index: int) -> memoryview:
        raise MemoryError("no more")


async def test_buffers_that_fail_end_their_own_operation_and_no_other() -> None:
    async with running_node() as node, await hypercache.connect(node.uris[0], **OPTIONS) as client:
        kv, tokens = fill(KVBuffers.allocate(SPEC, 1025), 1), tokens_of(1, 1025)
        await client.store(tokens, kv)
        channel = client._link.channel
        good, frozen = poisoned(SPEC, 1025), poisoned(SPEC, 1025)
        other = asyncio.create_task(client.fetch(tokens, good))
        undecodable = client.start_fetch(tokens, frozen)
        for layer in range(SPEC.num_layers):
            for part in frozen.layer(layer):
                part.setflags(write=False)  # after the check
        broken = Broken([np.zeros((64, size), np.uint8) for size in client.chunk_nbytes])
        assert "decoding failed: SpecError" in (await undecodable).reason
        assert "MemoryError" in (await client.fetch(tokens, broken)).reason
        stored = await client.store(tokens_of(2, 1025), broken)
        assert "encoding failed: MemoryError" in stored.reason and stored.outcome == {"aborted": 64}
        assert (await other).hit_tokens == 1024 and same(kv, good, 0, 1024)
        assert client._link.channel is channel and client.state == "ready"


# --- servers that lie


class Liar:
    """A server on a real fabric that answers what a script says. None closes the connection."""

    def __init__(self, answer: Callable[[protocol.Message], protocol.Message | None]) -> None:
        self._answer = answer
        self.connections = 0

    def accept(self, channel: Channel) -> Liar:
        self.connections += 1
        return self

    def on_frame(self, channel: Channel, frame: Frame) -> Sink | None:
        message = protocol.decode(frame.type, frame.body)
        assert message is not None
        if not isinstance(message, protocol.Put):
            answer = self._answer(message)
            if answer is None:
                channel.abort(None)
            else:
                op, body = protocol.encode(answer)
                channel.send(Outgoing(op, frame.request_id, body))
        return None

    def on_payload(self, channel: Channel, frame: Frame, sink: Sink) -> None: ...

    def on_cancel(self, channel: Channel, request_id: int) -> None: ...

    def on_lost(self, channel: Channel, error: Exception | None) -> None: ...


@contextlib.asynccontextmanager
async def lying(
    answer: Callable[[protocol.Message], protocol.Message | None],
) -> AsyncIterator[tuple[str, Liar]]:
    liar = Liar(answer)
    listener: Listener = await fabric_for("tcp://").listen("tcp://127.0.0.1:0", liar.accept)
    try:
        yield listener.uris[0], liar
    finally:
        await listener.close()


def greeting(message: protocol.Message, version: int = 1, crc: str = "crc32") -> protocol.Message | None:
    match message:
        case protocol.Hello():
            return protocol.HelloOk(version, "liar", crc, ("raw",), 1 << 17, 1 << 28)
        case protocol.Open():
            return protocol.Opened(0, 5, ())
    return None


@pytest.mark.parametrize(("version", "crc"), [(77, "crc32"), (0, "crc32"), (-1, "crc32"), (1, "xxh3")])
async def test_a_server_that_chooses_what_was_not_offered_is_refused(version: int, crc: str) -> None:
    async with lying(lambda message: greeting(message, version, crc)) as (uri, _):
        with pytest.raises(ProtocolError, match=rf"version {version} with checksum '{crc}'"):
            await hypercache.connect(uri, **OPTIONS)
    assert link_tasks() == []


@pytest.mark.parametrize("outcome", [{"stored": -5}, {"x": 2**63}, {"stored": 4, "exists": 1}])
async def test_a_store_outcome_that_cannot_be_is_a_breach_and_not_counted(outcome: dict[str, int]) -> None:
    def answer(message: protocol.Message) -> protocol.Message | None:
        return protocol.Stored(outcome) if isinstance(message, protocol.Store) else greeting(message)

    async with lying(answer) as (uri, _), await hypercache.connect(uri, **OPTIONS) as client:
        result = await client.store(tokens_of(1, 65), KVBuffers.allocate(SPEC, 65))
        assert result.stored == 0 and "STORED counts" in result.reason


async def test_a_negative_number_removed_is_none() -> None:
    def answer(message: protocol.Message) -> protocol.Message | None:
        return protocol.Removed(-5, -1) if isinstance(message, protocol.Clear) else greeting(message)

    async with lying(answer) as (uri, _), await hypercache.connect(uri, **OPTIONS) as client:
        assert await client.clear() == 0


async def test_a_server_that_greets_and_drops_is_tried_ever_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each greeting used to reset the pause: 22 connections a second, for ever."""

    assert await _pause_after_drops(5) > 8 * link.FIRST_PAUSE_S
    monkeypatch.setattr(link, "SETTLED_S", 0.0)  # every line that was ready was a good one
    assert await _pause_after_drops(3) <= 2 * link.FIRST_PAUSE_S


async def _pause_after_drops(drops: int) -> float:
    async with lying(greeting) as (uri, liar), await hypercache.connect(uri, **OPTIONS) as client:
        for number in range(1, drops + 2):

            async def ready(number: int = number) -> bool:
                return liar.connections == number and client.state == "ready"

            await until(ready)
            assert client._link.channel is not None
            if number <= drops:
                client._link.channel.abort(None)
        return client._link.pause


async def test_calls_beyond_the_bound_miss_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_IN_FLIGHT", 3)

    def answer(message: protocol.Message) -> protocol.Message | None:
        return greeting(message) or protocol.Fetching(0)  # no answer that ends a fetch

    async with lying(answer) as (uri, _), await hypercache.connect(uri, **OPTIONS) as client:
        kv, tokens = KVBuffers.allocate(SPEC, 65), tokens_of(1, 65)
        waiting = [client.start_fetch(tokens, kv) for _ in range(3)]
        assert (await client.match(tokens)).reason.startswith("busy: 3 calls")
        assert (await client.fetch(tokens, kv)).reason.startswith("busy: 3 calls")
        stored = await client.store(tokens, kv)
        assert stored.reason.startswith("busy: 3 calls") and stored.outcome == {"aborted": 4}
        waiting[0].cancel()
        assert "busy" not in (await client.match(tokens, deadline=0.2)).reason


# --- long prompts


async def test_long_prompts_are_hashed_beside_the_loop_and_within_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_node() as node, await hypercache.connect(node.uris[0], **OPTIONS) as client:
        tokens = tokens_of(1, 500_001)
        hashing: list[threading.Thread] = []
        real = client.prompt

        def prompt(ids: Any) -> hypercache.Prompt:
            hashing.append(threading.current_thread())
            return real(ids)

        monkeypatch.setattr(client, "prompt", prompt)
        assert (await client.match(tokens[:65])).reason.startswith("not stored")
        assert hashing.pop() is threading.main_thread()  # a thread costs more than this takes
        assert (await client.match(tokens, deadline=60)).reason.startswith("not stored")
        assert hashing.pop() is not threading.main_thread()

        chunks = ChunkBuffers([np.zeros((16, size), np.uint8) for size in client.chunk_nbytes])
        match = await client.match(tokens, deadline=0.001)
        fetched = await client.fetch(tokens, chunks, deadline=0.001)
        stored = await client.store(tokens, chunks, deadline=0.001)
        reasons = [match.reason, fetched.reason, stored.reason]
        assert all(reason.startswith("deadline: hashing") for reason in reasons), reasons
        assert stored.outcome == {"aborted": 16}
        assert not any(await client.contains(tokens[:65]))
        assert not any(await client.contains(tokens, deadline=0.001))
        with pytest.raises(Unavailable, match="hashing"):
            await client.evict(tokens, deadline=0.001)
        assert client.state == "ready"  # no fault of the server
        assert len(hashing) == 6 and threading.main_thread() not in hashing[:3] + hashing[4:]
        hashed = match.prompt  # what was hashed is not lost
        assert len(hashed.digests) == 31_250
        assert (await client.store(hashed, chunks)).stored == 16
        assert (await client.match(hashed)).hit_blocks == 16
        with pytest.raises(TokenError):
            await client.match(tokens - 60_000)
