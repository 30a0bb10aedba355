"""The blocking face, for engines without an event loop: the same client, on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

from hypercache.client.client import Client, Tokens, connect
from hypercache.client.finding import Reuse
from hypercache.client.handles import Saving, Transfer
from hypercache.client.moving import Buffers
from hypercache.client.plan import ModularSpan
from hypercache.client.results import (
    FetchResult,
    HintResult,
    Match,
    PinResult,
    Prompt,
    StoreResult,
    UnpinResult,
)
from hypercache.errors import HyperCacheError
from hypercache.keys import MediaSpan

T = TypeVar("T")

CLOSED = "the client is closed"
LAST_CALLS_S = 1.0  # for what runs when the loop is stopped


class _LoopThread:
    """An event loop in a daemon thread: it never keeps a program from ending.

    Whatever was submitted before :meth:`stop` ends before the loop does; what comes later is refused. So
    nobody waits for a loop that is gone.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()  # around check and submit, so that no stop comes between
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="hypercache", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:  # also where a callback raised SystemExit
            with self._lock:
                self._stopping = True
            self._loop.run_until_complete(_end_tasks())
            self._loop.close()

    @property
    def forked(self) -> bool:
        """Whether this is a forked child: the thread stayed behind, nothing here would ever run."""
        return os.getpid() != self._pid

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it on the loop and wait. Raises HyperCacheError where nobody would run it."""
        try:
            self._check_process()
            if threading.current_thread() is self._thread:
                raise HyperCacheError(
                    "a blocking call from the client's own thread (an on_layer callback?) would never end"
                )
            with self._lock:
                if self._stopping:
                    raise HyperCacheError(CLOSED)
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except HyperCacheError:
            coroutine.close()
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise HyperCacheError(CLOSED) from None
        except BaseException:
            future.cancel()  # an interrupted wait: what was asked must not go on in the caller's buffers
            raise

    def post(self, function: Callable[..., None], *args: object) -> None:
        """Call it on the loop, without waiting; nothing once that is stopped."""
        self._check_process()
        with self._lock:
            if not self._stopping:
                self._loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """Calling it twice is harmless."""
        if self.forked:
            return
        with self._lock:
            if not self._stopping:
                self._stopping = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        if (
            threading.current_thread() is not self._thread
        ):  # closed by an on_layer callback: it ends by itself
            self._thread.join(2 * LAST_CALLS_S)

    def _check_process(self) -> None:
        if self.forked:
            raise HyperCacheError(
                "this client was made in another process and is not fork-safe; "
                "call hypercache.connect_sync in the child"
            )


async def _end_tasks() -> None:
    """Let the tasks of this loop end, for a while; then cancel them."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if not others:
        return
    _, late = await asyncio.wait(others, timeout=LAST_CALLS_S)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)


class SyncTransfer:
    """Blocking face of :class:`Transfer`."""

    def __init__(self, thread: _LoopThread, transfer: Transfer) -> None:
        self._thread = thread
        self._transfer = transfer

    @property
    def tokens(self) -> int:
        """:attr:`Transfer.tokens`."""
        return self._transfer.tokens

    @property
    def modular(self) -> tuple[ModularSpan, ...]:
        """:attr:`Transfer.modular`."""
        return self._transfer.modular

    def layer(self, index: int) -> bool:
        """:meth:`Transfer.layer`, waited for."""
        return self._thread.call(self._transfer.layer(index))

    def result(self) -> FetchResult:
        """:meth:`Transfer.result`, waited for."""
        return self._thread.call(self._transfer.result())

    def cancel(self) -> None:
        """:meth:`Transfer.cancel`."""
        self._thread.call(_call(self._transfer.cancel))


class SyncSaving:
    """Blocking face of :class:`Saving`. ``layer_ready`` does not block."""

    def __init__(self, thread: _LoopThread, saving: Saving) -> None:
        self._thread = thread
        self._saving = saving

    def layer_ready(self, index: int) -> None:
        """:meth:`Saving.layer_ready`."""
        self._thread.post(self._saving.layer_ready, index)

    def result(self) -> StoreResult:
        """:meth:`Saving.result`, waited for."""
        return self._thread.call(self._saving.result())

    def cancel(self) -> None:
        """:meth:`Saving.cancel`."""
        self._thread.call(_call(self._saving.cancel))


class SyncClient:
    """Same calls and values as :class:`Client`; usable from several threads. See :func:`connect_sync`."""

    def __init__(self, thread: _LoopThread, client: Client) -> None:
        self._thread = thread
        self._client = client
        self.model = client.model
        self.codec = client.codec
        self.block_size = client.block_size
        self.chunk_nbytes = client.chunk_nbytes
        self.modular_refusal = client.modular_refusal
        self.reuse: Reuse = client.reuse
        _open.add(self)

    @property
    def state(self) -> str:
        """:attr:`Client.state`."""
        return self._client.state

    def prompt(self, tokens: Tokens, *, media: Sequence[MediaSpan] = ()) -> Prompt:
        """:meth:`Client.prompt`: hash a prompt once for several calls. Hashes on the calling thread."""
        return self._client.prompt(tokens, media=media)

    def match(self, prompt: Tokens | Prompt, **options: Any) -> Match:
        """:meth:`Client.match`, same options: the longest usable prefix, and modular spans; a hint."""
        return self._thread.call(self._client.match(prompt, **options))

    def start_fetch(self, prompt: Tokens | Prompt | Match, into: Buffers, **options: Any) -> SyncTransfer:
        """:meth:`Client.start_fetch`, same options: begin to fetch, wait by layer or for the end."""
        transfer = self._thread.call(_call(lambda: self._client.start_fetch(prompt, into, **options)))
        return SyncTransfer(self._thread, transfer)

    def fetch(self, prompt: Tokens | Prompt | Match, into: Buffers, **options: Any) -> FetchResult:
        """:meth:`Client.fetch`, same options: fetch the longest usable prefix into ``into``."""
        return self._thread.call(self._client.fetch(prompt, into, **options))

    def start_store(self, prompt: Tokens | Prompt | Match, kv: Buffers, **options: Any) -> SyncSaving:
        """:meth:`Client.start_store`, same options: begin to store, layer by layer."""
        saving = self._thread.call(_call(lambda: self._client.start_store(prompt, kv, **options)))
        return SyncSaving(self._thread, saving)

    def store(self, prompt: Tokens | Prompt | Match, kv: Buffers, **options: Any) -> StoreResult:
        """:meth:`Client.store`, same options: store the full blocks of the prompt."""
        return self._thread.call(self._client.store(prompt, kv, **options))

    def contains(self, prompt: Tokens | Prompt | Match, *, deadline: float | None = None) -> list[bool]:
        """:meth:`Client.contains`: for each full block, whether it is stored."""
        return self._thread.call(self._client.contains(prompt, deadline=deadline))

    def hint(
        self,
        prompt: Tokens | Prompt | Match,
        *,
        steps: int | None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> HintResult:
        """:meth:`Client.hint`: when the prompt's blocks will be used again, and what they are worth."""
        return self._thread.call(self._client.hint(prompt, steps=steps, priority=priority, deadline=deadline))

    def pin(
        self, prompt: Tokens | Prompt | Match, seconds: float, *, deadline: float | None = None
    ) -> PinResult:
        """:meth:`Client.pin`: keep the prompt's blocks for a while."""
        return self._thread.call(self._client.pin(prompt, seconds, deadline=deadline))

    def unpin(self, prompt: Tokens | Prompt | Match, *, deadline: float | None = None) -> UnpinResult:
        """:meth:`Client.unpin`: end the pin of the prompt, or of the longest that it begins with."""
        return self._thread.call(self._client.unpin(prompt, deadline=deadline))

    def evict(self, prompt: Tokens | Prompt | Match, *, deadline: float | None = None) -> int:
        """:meth:`Client.evict`: remove the prompt's blocks and what follows them; how many went."""
        return self._thread.call(self._client.evict(prompt, deadline=deadline))

    def clear(self, *, deadline: float | None = None) -> int:
        """:meth:`Client.clear`: remove the whole namespace; the blocks gone."""
        return self._thread.call(self._client.clear(deadline=deadline))

    def close(self) -> None:
        """:meth:`Client.close`. Harmless when closed already, and in a forked child, which owns nothing."""
        if not self._thread.forked:
            with contextlib.suppress(HyperCacheError):
                self._thread.call(self._client.close())
            self._thread.stop()
        _open.discard(self)

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Sync{repr(self._client)[1:]}"


def connect_sync(uri: str | None = None, **options: Any) -> SyncClient:
    """:func:`connect` for code without an event loop; same arguments, same errors."""
    thread = _LoopThread()
    try:
        client = thread.call(connect(uri, **options))
    except BaseException:
        thread.stop()
        raise
    return SyncClient(thread, client)


async def _call(function: Callable[[], T]) -> T:
    return function()


_open: weakref.WeakSet[SyncClient] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for client in list(_open):
        client.close()
