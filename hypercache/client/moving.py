"""Fetches and stores of one client: what is asked of the server, for which buffers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from hypercache import protocol
from hypercache.client.buffers import ChunkBuffers, ChunkPort, CodecPort, Coder, RowPort, arriving
from hypercache.client.finding import Reuse
from hypercache.client.handles import Saving, Transfer
from hypercache.client.hashing import SPENT, Hasher
from hypercache.client.link import Link
from hypercache.client.operations import APPROXIMATE, FetchOperation, StoreOperation
from hypercache.client.place import Place
from hypercache.client.plan import Stretch, wanted
from hypercache.client.results import FetchResult, Match, Prompt, StoreResult
from hypercache.errors import SpecError
from hypercache.kv import KVBuffers
from hypercache.model import ModelSpec

FRAME_BYTES = protocol.MAX_FRAME_BYTES  # of payload; a frame costs both ends tens of microseconds

Buffers = KVBuffers | ChunkBuffers


class Mover:
    """has_stored: whether a store was begun."""

    def __init__(
        self, place: Place, link: Link, coder: Coder, hasher: Hasher, model: ModelSpec, reuse: Reuse
    ) -> None:
        self.has_stored = False
        self._place = place
        self._link = link
        self._coder = coder
        self._hasher = hasher
        self._model = model
        self._reuse = reuse
        self._block_size = coder.block_size

    def fetch(
        self,
        prompt: Prompt | Match,
        into: Buffers,
        start: int,
        layers: range | None,
        on_layer: Callable[[int], None] | None,
        until: float,
    ) -> Transfer:
        """See ``Client.start_fetch``; ``until`` by the monotonic clock."""
        hashed = prompt.prompt if isinstance(prompt, Match) else prompt
        every = range(self._model.num_layers)
        layers = every if layers is None else layers
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= every.stop:
            raise SpecError(f"layers {layers} must be a contiguous part of 0..{every.stop - 1}")
        if start < 0:
            raise SpecError(f"start={start} must not be negative")
        self._check_buffers(into)
        match = prompt if isinstance(prompt, Match) else Match(hashed, hashed.usable_blocks)
        tokens, rows = hashed.tokens, protocol.MAX_BLOCKS
        if isinstance(into, ChunkBuffers):
            rows = min(rows, into.blocks)
        else:
            tokens = into.tokens
        stretches = wanted(match.hit_blocks, match.modular, start, self._block_size, tokens, rows)
        port = self._port(into, stretches, start)
        port.check_writable()
        transfer = Transfer(self._place, start, layers, stretches, self._block_size)
        transfer.on_layer = on_layer
        asked = [stretch.blocks for stretch in stretches]
        if not any(asked):
            why = prompt.reason if isinstance(prompt, Match) else "no full block to fetch"
            transfer.finish(FetchResult(start, 0, 0, why or "nothing beyond start"))
            return transfer
        budget = until - time.monotonic()
        if budget <= 0:
            transfer.finish(FetchResult(start, 0, 0, SPENT))
            return transfer

        first, frame_bytes = start // self._block_size, self._frame_bytes()

        def layer_done(layer: int) -> None:
            if layer == layers.stop - 1:
                arrival.placed(
                    operation.good[0] * (1 if isinstance(into, ChunkBuffers) else self._block_size)
                )
            transfer.layer_done(layer)

        def ended() -> None:
            timer.cancel()
            arrival.over()
            result = transfer.outcome(operation)
            self._reuse.tokens_fetched += sum(span.stop - span.start for span in result.modular)
            transfer.finish(result)

        operation = FetchOperation(
            port,
            self._coder.chunk_nbytes,
            asked,
            layers,
            frame_bytes,
            layer_done,
            ended,
            lambda reason: self.give_up(operation, reason),
            "evicted since the match" if isinstance(prompt, Match) else "not stored beyond this",
        )
        timer = asyncio.get_running_loop().call_later(budget, lambda: self.give_up(operation, "deadline"))
        transfer.begin(operation, lambda: self.give_up(operation, "cancelled"))
        message = protocol.Fetch(
            self._link.handle,
            protocol.join_digests(hashed.digests[first : first + asked[0]]),
            (layers.start, layers.stop),
            max(1, int(budget * 1000)),
            frame_bytes,
            tuple([(stretch.span.tail, stretch.blocks) for stretch in stretches if stretch.span is not None]),
            bool(port.below),
        )
        arrival = arriving(into, stretches, start, whole=layers == every)
        self._link.begin(message, operation)
        return transfer

    def store(
        self,
        prompt: Prompt,
        kv: Buffers,
        start: int,
        ready_layers: int | None,
        until: float,
        marks: Sequence[bytes],
    ) -> Saving:
        """See ``Client.start_store``. marks: of the blocks from ``start`` on, or none."""
        if not 0 <= start <= prompt.tokens or start % self._block_size:
            raise SpecError(
                f"start={start} must be a multiple of the block size {self._block_size} within the prompt's "
                f"{prompt.tokens} tokens"
            )
        first = start // self._block_size
        self._check_buffers(kv)
        room = kv.tokens // self._block_size - first if isinstance(kv, KVBuffers) else kv.blocks
        port = self._port(kv, [Stretch(max(0, room), start)], start)
        self.has_stored = True
        offered = min(len(prompt.digests) - first, port.blocks)
        inexact = APPROXIMATE if port.exact < offered else ""
        offered = min(offered, port.exact)
        if offered <= 0:
            why = "nothing new" if first and first == len(prompt.digests) else "no full block to store"
            return Saving.of(self._place, StoreResult(0, {}, 0, inexact or why))
        budget = until - time.monotonic()
        if budget <= 0:
            return Saving.of(self._place, StoreResult(offered, {"aborted": offered}, 0, SPENT))
        ready = self._model.num_layers if ready_layers is None else ready_layers
        # A server reserves all that one request names at once; long prompts take several: others get on.
        parts = range(0, offered, protocol.MAX_STORE_BLOCKS)
        saving = Saving(self._place, len(parts), self.give_up, budget, inexact)
        frame_bytes = self._frame_bytes()
        for begin in parts:
            count = min(protocol.MAX_STORE_BLOCKS, offered - begin)
            at = first + begin
            message = protocol.Store(
                self._link.handle,
                prompt.digests[at - 1] if at else None,
                protocol.join_digests(prompt.digests[at : at + count]),
                max(1, int(budget * 1000)),
                b"".join(marks[begin : begin + count]),
            )
            blocks = range(begin, begin + count)
            operation = StoreOperation(port, self._coder.chunk_nbytes, blocks, ready, frame_bytes, saving)
            saving.add(operation)
            channel = self._link.begin(message, operation)
            if channel is not None:
                operation.begin(channel)
        return saving

    def give_up(self, operation: FetchOperation | StoreOperation, reason: str) -> None:
        if not operation.ended:
            if reason == "deadline":
                self._link.timed_out(operation)
            operation.end(reason)
            self._link.forget(operation)
        if isinstance(operation, StoreOperation):
            operation.reclaim()

    def _check_buffers(self, buffers: Buffers) -> None:
        if isinstance(buffers, ChunkBuffers):
            buffers.check(self._coder.chunk_nbytes)
        elif not isinstance(buffers, KVBuffers):
            raise SpecError(
                f"K/V go in and out by KVBuffers or ChunkBuffers, got {type(buffers).__name__}; "
                "KVBuffers.wrap takes the engine's own arrays"
            )
        elif buffers.spec != self._model:
            raise SpecError(
                f"the buffers belong to model {_who(buffers.spec)}, the client to {_who(self._model)}"
            )

    def _port(self, buffers: Buffers, stretches: Sequence[Stretch], start: int) -> ChunkPort:
        if isinstance(buffers, ChunkBuffers):
            return RowPort(buffers, stretches[0].blocks if len(stretches) > 1 else None)
        return CodecPort(self._coder, buffers, stretches, start)

    def _frame_bytes(self) -> int:
        """Payload of a frame: ours, or less where the server takes less."""
        server = self._link.server
        return FRAME_BYTES if server is None else min(FRAME_BYTES, server.max_payload)


def _who(spec: ModelSpec) -> str:
    return f"{spec.name!r} (fingerprint {spec.fingerprint().hex()[:8]})"
