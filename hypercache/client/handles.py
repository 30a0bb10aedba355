"""Handles of what runs: a fetch to be waited for layer by layer, a store that follows the engine's layers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any

from hypercache.client.operations import FetchOperation, StoreOperation
from hypercache.client.place import Place
from hypercache.client.plan import ModularSpan, Stretch, arrived
from hypercache.client.results import FetchResult, StoreResult
from hypercache.errors import SpecError


class Transfer:
    """A fetch that runs: wait for one layer, or for the end. Made by :meth:`Client.start_fetch`."""

    def __init__(
        self, place: Place, start: int, layers: range, stretches: Sequence[Stretch], block_size: int
    ) -> None:
        self._place = place
        self._start = start
        self._layers = layers
        self._stretches = stretches
        self._block_size = block_size
        self._operation: FetchOperation | None = None
        self._result: FetchResult | None = None
        self._waiters: list[tuple[int, asyncio.Future[bool]]] = []
        self._stop: Callable[[], None] = _nothing
        self.on_layer: Callable[[int], None] | None = None

    @property
    def tokens(self) -> int:
        """End of the tokens that are good in every layer in place so far. Falls when a block is lost, so an
        engine that runs ahead can stop as soon as it built on tokens that did not come."""
        if self._result is not None or self._operation is None:
            return 0 if self._result is None else self._result.hit_tokens
        return self._stretches[0].begin + self._operation.good[0] * self._block_size

    @property
    def modular(self) -> tuple[ModularSpan, ...]:
        """The modular spans as far as they are good in every layer in place so far; likewise."""
        if self._result is not None or self._operation is None:
            return () if self._result is None else self._result.modular
        return arrived(self._stretches, self._operation.good, self._block_size)

    async def layer(self, index: int) -> bool:
        """True when layer ``index`` is in place for all blocks still good, False when it never will be.

        What is in place may be fewer tokens than asked for: only the result says how many may be used.
        """
        self._place.check()
        if index not in self._layers:
            raise SpecError(
                f"layer {index} is not among the layers {self._layers.start}..{self._layers.stop - 1}"
            )
        if self._operation is not None and self._operation.layers_done > index and not self._failed:
            return True
        if self._result is not None:
            return not self._failed
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters.append((index, future))
        return await future

    def __await__(self) -> Generator[Any, None, FetchResult]:
        return self.result().__await__()

    async def result(self) -> FetchResult:
        """The outcome. Cancelling this wait cancels the fetch."""
        self._place.check()
        try:
            while self._result is None:
                future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
                self._waiters.append((self._layers.stop, future))
                await future
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._result

    def cancel(self) -> None:
        """Stop; nothing is written to the buffers after this returns. Harmless when it has ended."""
        self._place.check()
        self._stop()

    @property
    def _failed(self) -> bool:
        result = self._result
        return result is not None and result.hit_tokens <= self._start and not result.modular

    # --- for the client

    def begin(self, operation: FetchOperation, stop: Callable[[], None]) -> None:
        self._operation = operation
        self._stop = stop

    def outcome(self, operation: FetchOperation) -> FetchResult:
        """What came, of an operation that has ended."""
        start, good, size = self._start, operation.good, self._block_size
        hit = self._stretches[0].begin + good[0] * size if good[0] else 0
        modular = arrived(self._stretches, good, size)
        return FetchResult(start, hit if hit > start else 0, operation.wire_bytes, operation.reason, modular)

    def layer_done(self, index: int) -> None:
        if self.on_layer is not None:
            self.on_layer(index)
        still = []
        for layer, future in self._waiters:
            if layer <= index and not future.done():
                future.set_result(True)
            else:
                still.append((layer, future))
        self._waiters = still

    def finish(self, result: FetchResult) -> None:
        self._result = result
        self._stop = _nothing
        waiters, self._waiters = self._waiters, []
        for _, future in waiters:
            if not future.done():
                future.set_result(not self._failed)


class Saving:
    """A store that runs, layer by layer as the engine computes. Made by :meth:`Client.start_store`."""

    def __init__(
        self,
        place: Place,
        parts: int,
        give_up: Callable[[StoreOperation, str], None],
        budget: float,
        reason: str = "",
    ) -> None:
        """reason: what the result says unless something worse happens."""
        self._place = place
        self._parts = parts
        self._give_up = give_up
        self._reason = reason
        self._operations: list[StoreOperation] = []
        self._result: StoreResult | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._timer = asyncio.get_running_loop().call_later(budget, self.abandon, "deadline")

    @classmethod
    def of(cls, place: Place, result: StoreResult) -> Saving:
        """A store that has ended before it began."""
        saving = cls(place, 0, _ignore, 0)
        saving._finish(result)
        return saving

    def layer_ready(self, index: int) -> None:
        """Layers up to and with ``index`` stand in the buffers and change no more until the store ends."""
        self._place.check()
        for operation in self._operations:
            operation.layer_ready(index)

    def __await__(self) -> Generator[Any, None, StoreResult]:
        return self.result().__await__()

    async def result(self) -> StoreResult:
        """The outcome, once the buffers are free. Cancelling this wait cancels the store, and still waits
        until they are."""
        self._place.check()
        try:
            return await self._settled()
        except asyncio.CancelledError:
            self.cancel()
            await self._settled()
            raise

    async def _settled(self) -> StoreResult:
        while self._result is None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(future)
            await future
        return self._result

    def cancel(self) -> None:
        """Give up; what is not complete is not stored.

        KVBuffers are free when this returns. ChunkBuffers are sent from where they are and may be read until
        :meth:`result` returns: soon, or after about a second if the server takes nothing more.
        """
        self._place.check()
        self.abandon("cancelled")

    # --- for operations and the client

    def add(self, operation: StoreOperation) -> None:
        self._operations.append(operation)

    def abandon(self, reason: str, part: StoreOperation | None = None) -> None:
        """End all parts that still run, or one of them."""
        if self._result is None:
            for operation in self._operations if part is None else [part]:
                self._give_up(operation, reason)

    def part_ended(self) -> None:
        done = self._operations
        if self._result is not None or len(done) < self._parts:
            return
        if not all(operation.settled for operation in done):
            return
        outcome: Counter[str] = Counter()
        for operation in done:
            outcome.update(operation.outcome or {"aborted": len(operation.blocks)})
        blocks = sum(len(operation.blocks) for operation in done)
        nbytes = sum(operation.wire_bytes for operation in done)
        reason = next((operation.reason for operation in done if operation.reason), self._reason)
        self._finish(StoreResult(blocks, dict(outcome), nbytes, reason))

    def _finish(self, result: StoreResult) -> None:
        self._result = result
        self._timer.cancel()
        waiters, self._waiters = self._waiters, []
        for future in waiters:
            if not future.done():
                future.set_result(None)


def _nothing() -> None:
    return None


def _ignore(operation: StoreOperation, reason: str) -> None:
    return None
