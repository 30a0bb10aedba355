"""The blocking face, for engines without an event loop: the same client, on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

from hypercache.client.client import Buffers, Client, Tokens, connect
from hypercache.client.handles import Saving, Transfer
from hypercache.client.results import FetchResult, Match, Prompt, StoreResult
from hypercache.errors import HyperCacheError
from hypercache.keys import MediaSpan

T = TypeVar("T")


class _LoopThread:
    """An event loop in a daemon thread: it never keeps a program from ending."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="hypercache", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise HyperCacheError(
                "a blocking call from the client's own thread (an on_layer callback?) would never end"
            )
        if self.loop.is_closed():
            coroutine.close()
            raise HyperCacheError("the client is closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def stop(self) -> None:
        if not self.loop.is_closed() and self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(2)


class SyncTransfer:
    """Blocking face of :class:`Transfer`."""

    def __init__(self, thread: _LoopThread, transfer: Transfer) -> None:
        self._thread = thread
        self._transfer = transfer

    @property
    def tokens(self) -> int:
        return self._transfer.tokens

    def layer(self, index: int) -> bool:
        return self._thread.call(self._transfer.layer(index))

    def result(self) -> FetchResult:
        return self._thread.call(self._transfer.result())

    def cancel(self) -> None:
        self._thread.call(_call(self._transfer.cancel))


class SyncSaving:
    """Blocking face of :class:`Saving`. ``layer_ready`` does not block."""

    def __init__(self, thread: _LoopThread, saving: Saving) -> None:
        self._thread = thread
        self._saving = saving

    def layer_ready(self, index: int) -> None:
        self._thread.loop.call_soon_threadsafe(self._saving.layer_ready, index)

    def result(self) -> StoreResult:
        return self._thread.call(self._saving.result())

    def cancel(self) -> None:
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
        _open.add(self)

    @property
    def state(self) -> str:
        return self._client.state

    def prompt(self, tokens: Tokens, *, media: Sequence[MediaSpan] = ()) -> Prompt:
        return self._client.prompt(tokens, media=media)

    def match(self, prompt: Tokens | Prompt, *, deadline: float | None = None) -> Match:
        return self._call(lambda: self._client.match(prompt, deadline=deadline))

    def start_fetch(self, prompt: Tokens | Prompt | Match, into: Buffers, **options: Any) -> SyncTransfer:
        return SyncTransfer(
            self._thread, self._call(lambda: _call(lambda: self._client.start_fetch(prompt, into, **options)))
        )

    def fetch(self, prompt: Tokens | Prompt | Match, into: Buffers, **options: Any) -> FetchResult:
        return self._call(lambda: self._client.fetch(prompt, into, **options))

    def start_store(self, prompt: Tokens | Prompt | Match, kv: Buffers, **options: Any) -> SyncSaving:
        return SyncSaving(
            self._thread, self._call(lambda: _call(lambda: self._client.start_store(prompt, kv, **options)))
        )

    def store(self, prompt: Tokens | Prompt | Match, kv: Buffers, **options: Any) -> StoreResult:
        return self._call(lambda: self._client.store(prompt, kv, **options))

    def contains(self, prompt: Tokens | Prompt | Match, *, deadline: float | None = None) -> list[bool]:
        return self._call(lambda: self._client.contains(prompt, deadline=deadline))

    def evict(self, prompt: Tokens | Prompt | Match, *, deadline: float | None = None) -> int:
        return self._call(lambda: self._client.evict(prompt, deadline=deadline))

    def clear(self, *, deadline: float | None = None) -> int:
        return self._call(lambda: self._client.clear(deadline=deadline))

    def close(self) -> None:
        """Calling it twice is harmless."""
        if not self._thread.loop.is_closed():
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

    def _call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._client._check_process()  # a forked child has no loop thread: it would wait for ever
        return self._thread.call(make())


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
