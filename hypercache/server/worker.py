"""Threads for work that blocks: the disk's. Results come back into the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
NICE = 10  # of threads whose work nobody waits for
Done = Callable[[Any, Exception | None], None]


class Workers:
    """``count`` threads that take jobs in the order they were given. They are no reason for the process to
    stay alive: a disk that hangs keeps nobody from leaving.

    nice: of the threads (Linux gives each its own), 0..19.
    """

    def __init__(self, name: str, count: int, nice: int = 0) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Done] | None] = queue.SimpleQueue()
        self._nice = nice
        self._threads = [
            threading.Thread(target=self._run, name=f"{name} {number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Jobs that no thread has begun."""
        return self._jobs.qsize()

    def submit(self, job: Callable[[], Any], done: Done) -> None:
        """Run ``job`` in a thread, then ``done(result, None)`` or ``done(None, error)`` in the loop."""
        self._jobs.put((job, done))

    async def call(self, job: Callable[[], T]) -> T:
        """The same, awaited. Who is cancelled meanwhile does not stop the job."""
        future: asyncio.Future[T] = self._loop.create_future()

        def done(result: T, error: Exception | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self.submit(job, done)
        return await future

    async def close(self, limit_s: float) -> bool:
        """Let what was submitted end; False if it does not within ``limit_s``."""
        for _ in self._threads:
            self._jobs.put(None)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(contextlib.suppress(TimeoutError))
            async with asyncio.timeout(limit_s):
                while any(thread.is_alive() for thread in self._threads):  # noqa: ASYNC110 (once in a life)
                    await asyncio.sleep(0.005)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        if self._nice and hasattr(os, "setpriority"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        while (entry := self._jobs.get()) is not None:
            job, done = entry
            result, error = None, None
            try:
                result = job()
            except Exception as caught:
                error = caught
            try:
                self._loop.call_soon_threadsafe(done, result, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return
            del entry, job, done, result, error  # nothing of theirs lives until the next job
