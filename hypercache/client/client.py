"""The asynchronous client: match, fetch, store, contains, evict, clear.

One client serves one namespace (model, adapter, codec, block size, tenant, salt) on one server. Every
call ends before its deadline with a value: a dead, frozen or empty server is a miss with a reason. What
raises is misuse (wrong shapes, wrong tokens) and, at :func:`connect`, a server that can never fit.
"""

from __future__ import annotations

import asyncio
import operator
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from hypercache import codecs, fingerprint, protocol, rope
from hypercache.client import environment
from hypercache.client.buffers import ChunkBuffers, ChunkPort, CodecPort, Coder, taint
from hypercache.client.finding import Finder, Reuse
from hypercache.client.handles import Saving, Transfer
from hypercache.client.hashing import SPENT, Hasher, aside
from hypercache.client.link import AGENT, Link
from hypercache.client.operations import FetchOperation, StoreOperation
from hypercache.client.place import Place
from hypercache.client.plan import MIN_RUN, Segment, Stretch, least_blocks, wanted
from hypercache.client.results import FetchResult, Match, Prompt, StoreResult
from hypercache.errors import ConfigError, SpecError, Unavailable
from hypercache.keys import HASH_VERSION, MediaSpan, Namespace, TenantKey
from hypercache.kv import KVBuffers
from hypercache.model import ModelSpec
from hypercache.segments import check as check_segments

DEFAULT_URI = "tcp://127.0.0.1:7440"
DEFAULT_CODEC = "int8"
DEADLINE_S = 5.0
FRAME_BYTES = protocol.MAX_FRAME_BYTES  # of payload; a frame costs both ends tens of microseconds

SWITCHED_OFF = "switched off for this client: connect(modular=False)"
APPROXIMATE = "approximate K/V are not stored"

Tokens = Any  # any integer sequence or array that keys.canonical_tokens takes
Buffers = KVBuffers | ChunkBuffers


async def connect(
    uri: str | None = None,
    *,
    model: ModelSpec,
    codec: str = DEFAULT_CODEC,
    block_size: int = 16,
    tenant: TenantKey | None = None,
    salt: str | None = None,
    modular: bool = True,
    deadline: float = DEADLINE_S,
) -> Client:
    """Connect an engine to a cache.

    uri: ``tcp://host:port``; default HYPERCACHE_URI, else tcp://127.0.0.1:7440.
    codec: how K/V travel and are kept ("raw" is lossless; see docs/codecs.md for the error of the others).
    block_size: tokens per block, 16 or 64.
    tenant: default from HYPERCACHE_TENANT and HYPERCACHE_SECRET_FILE, else the public tenant.
    salt: separates what must not be shared although model and tokens are equal.
    modular: whether what this client stores can be found out of its context, and whether it may look for such
        blocks itself; a match does so only where it is asked to. See :attr:`Client.modular_refusal`.
    deadline: seconds that a call may take unless it says otherwise.

    A server that cannot be reached is not an error: calls miss (``client.state`` and each result's reason
    say so) until it can. Raises SpecError or ConfigError for arguments that make no sense, and Refused or
    ProtocolError when the server answers and can never serve this client (versions, geometry).
    """
    environment.check()
    client = Client(
        uri or os.environ.get("HYPERCACHE_URI") or DEFAULT_URI,
        model=model,
        codec=codec,
        block_size=block_size,
        tenant=tenant or environment.tenant_from_environment(),
        salt=salt,
        modular=modular,
        deadline=deadline,
    )
    try:
        await client._start()
    except BaseException:  # cancelled, too: nobody else could close it
        await client.close()
        raise
    return client


class Client:
    """See :func:`connect`. Belongs to the event loop and the process that made it."""

    def __init__(
        self,
        uri: str,
        *,
        model: ModelSpec,
        codec: str,
        block_size: int,
        tenant: TenantKey,
        salt: str | None,
        modular: bool,
        deadline: float,
    ) -> None:
        for name, value, kind in (
            ("model", model, ModelSpec),
            ("tenant", tenant, TenantKey),
            ("codec", codec, str),
            ("modular", modular, bool),
        ):
            if not isinstance(value, kind):
                raise ConfigError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
        self.deadline = _seconds(deadline)
        self.model = model
        self.block_size = block_size
        self.codec = codecs.get(codec)
        self.namespace = Namespace.build(model, block_size=block_size, codec=codec, tenant=tenant, salt=salt)
        self.modular_refusal = rope.refusal(model) or ("" if modular else SWITCHED_OFF)
        self.reuse = Reuse()
        self._hasher = Hasher(self.namespace, tenant)
        self._tenant = tenant
        self._place = Place()
        self._coder = Coder(self.codec, model, block_size, FRAME_BYTES)
        self.chunk_nbytes = self._coder.chunk_nbytes
        self._has_stored = False
        self._label = _label(model, codec, block_size, salt)
        self._link = Link(
            uri,
            protocol.Hello(
                protocol.VERSION,
                protocol.VERSION,
                AGENT,
                HASH_VERSION,
                (protocol.CHECKSUM,),
                tenant.name,
                tenant.tenant_id,
            ),
            protocol.Open(self.namespace.digest, block_size, codec, self.chunk_nbytes, self._label),
        )

    async def _start(self) -> None:
        await asyncio.to_thread(self._warm)  # or the first call compiles
        await self._link.start(self.deadline)
        error = self._link.permanent_error
        if error is not None:
            raise error

    def _warm(self) -> None:
        codecs.warm(self.codec, self._coder.layouts)
        if not self.modular_refusal:
            fingerprint.warm()

    @property
    def state(self) -> str:
        """One of connecting, ready, stalled (the server hangs), down, closed."""
        return self._link.state

    async def close(self) -> None:
        """End what runs (as misses) and close, within about a second even if the server hangs.

        Calling it twice is harmless, and so is calling it in a forked child, which owns nothing here."""
        if not self._place.forked:
            self._place.check()
            await self._link.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Client {self.state} {self._link.uri} {self.codec.name} block={self.block_size}>"

    # --- calls

    def prompt(self, tokens: Tokens, *, media: Sequence[MediaSpan] = ()) -> Prompt:
        """Hash a prompt, without asking the server. ``media``: images and the like, by content."""
        return self._hasher.prompt(tokens, media)

    async def match(
        self,
        prompt: Tokens | Prompt,
        *,
        modular: bool = False,
        segments: Sequence[Segment] | None = None,
        min_run: int = MIN_RUN,
        deadline: float | None = None,
    ) -> Match:
        """Longest usable prefix, and on request what is stored of the rest: a hint, it takes no lease.

        modular: look, behind the prefix, for runs that are stored anywhere in other prompts, too, however
            they are placed here. Their K/V were computed in another context: they approximate, and are for
            engines that repair them. Where :attr:`modular_refusal` says why not, there are none.
        segments: spans ``(start, stop)`` of tokens that may move (documents); nothing outside them is looked
            for, and no run crosses their borders. None: anywhere.
        min_run: tokens that a modular run has at least, rounded up to whole blocks.

        Tokens are hashed first (about 0.1 s a million): above 65,536 of them in a thread, so that the loop is
        free. That counts against the deadline but is not interrupted by it. It is the same in all calls that
        are waited for; what is hashed once by :meth:`prompt` costs nothing.
        Raises SpecError for segments that overlap or lie outside, and for a ``min_run`` below a block.
        """
        self._place.check()
        until = time.monotonic() + self._budget(deadline)
        least = least_blocks(min_run, self.block_size)
        hashed = self._hasher.hashed(await self._hash(prompt))
        within = None if segments is None else check_segments(segments, hashed.tokens)
        usable = min(hashed.usable_blocks, protocol.MAX_BLOCKS)
        if usable == 0:
            return Match(hashed, 0, "below block size" if hashed.tokens else "no tokens")
        refusal = self.modular_refusal or ("" if hashed.ids is not None else "the prompt has no tokens")
        if modular and not refusal:
            match = await self._locate(hashed, Finder(self._hasher, hashed, usable, within, least), until)
        else:
            match = await self._match(hashed, usable, until)
        if isinstance(match, str):
            return Match(hashed, 0, match)
        if modular and refusal and match.reason:
            match = replace(match, reason=f"{match.reason}; no modular reuse: {refusal}")
        if modular:
            cause = partial(self._likely_cause, refusal, min_run)
            self.reuse.matched(match, least * self.block_size, cause)
        return match

    async def _match(self, hashed: Prompt, usable: int, until: float) -> Match | str:
        """The prefix; a string says why there is no answer."""
        question = protocol.Match(self._link.handle, protocol.join_digests(hashed.digests[:usable]))
        answer = await self._ask(question, until)
        if not isinstance(answer, protocol.Matched):
            return _why(answer)
        hit = max(0, min(answer.blocks, usable))
        return Match(hashed, hit, "" if hit == usable else self._why_not(hit))

    async def _locate(self, hashed: Prompt, finder: Finder, until: float) -> Match | str:
        """The prefix and what is behind it, likewise."""
        rest = ""
        while finder.left and not rest:
            question = await aside(finder.left, partial(finder.question, self._link.handle))
            answer = await self._ask(question, until)
            if isinstance(answer, protocol.Located):
                await aside(finder.left, partial(finder.answered, answer))
            elif not finder.begun:
                return _why(answer)
            else:
                rest = f"; the rest was not looked at: {_why(answer)}"
        if not finder.complete and not rest:
            rest = "; the server did not look at everything: it spends a bounded time on one search"
        full = finder.hit == min(hashed.usable_blocks, protocol.MAX_BLOCKS)
        reason = "" if full else self._why_not(finder.hit) + rest
        return Match(hashed, finder.hit, reason, tuple(finder.spans))

    def start_fetch(
        self,
        prompt: Tokens | Prompt | Match,
        into: Buffers,
        *,
        start: int = 0,
        layers: range | None = None,
        on_layer: Callable[[int], None] | None = None,
        deadline: float | None = None,
    ) -> Transfer:
        """Begin to fetch the longest usable prefix into caller memory, layer after layer; of a match, its
        modular spans as well.

        into: KVBuffers that hold at least the tokens wanted (they are decoded, and what moved is turned to
            its new place), or ChunkBuffers whose row 0 is the first block fetched (bytes as they travel).
            What they have no room for is not fetched, a span wholly or not at all. From the first modular
            token on, KVBuffers are not ``exact`` any more; a fetch of all layers from token 0 begins anew.
        start: tokens the engine holds already; nothing before it is written.
        layers: contiguous range of layers, default all.
        on_layer: called on the loop's thread with each layer that is in place. If it raises, the fetch ends
            as a miss whose reason names the exception, which is logged.
        Raises SpecError when the buffers do not fit the model. Long prompts should be hashed before, see
        :meth:`match`.
        """
        self._place.check()
        until = time.monotonic() + self._budget(deadline)
        return self._start_fetch(prompt, into, start, layers, on_layer, until)

    def _start_fetch(
        self,
        prompt: Tokens | Prompt | Match,
        into: Buffers,
        start: int,
        layers: range | None,
        on_layer: Callable[[int], None] | None,
        until: float,
    ) -> Transfer:
        hashed = self._hasher.hashed(prompt)
        every = range(self.model.num_layers)
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
        stretches = wanted(match.hit_blocks, match.modular, start, self.block_size, tokens, rows)
        port = self._port(into, stretches, start)
        port.check_writable()
        transfer = Transfer(self._place, start, layers, stretches, self.block_size)
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

        first, frame_bytes = start // self.block_size, self._frame_bytes()
        untaint = taint(into, stretches, start, whole=layers == every)

        def ended() -> None:
            timer.cancel()
            result = transfer.outcome(operation)
            self.reuse.tokens_fetched += sum(span.stop - span.start for span in result.modular)
            if not result.modular:
                untaint()
            transfer.finish(result)

        operation = FetchOperation(
            port,
            self.chunk_nbytes,
            asked,
            layers,
            frame_bytes,
            transfer.layer_done,
            ended,
            lambda reason: self._give_up(operation, reason),
        )
        timer = asyncio.get_running_loop().call_later(budget, lambda: self._give_up(operation, "deadline"))
        transfer.begin(operation, lambda: self._give_up(operation, "cancelled"))
        message = protocol.Fetch(
            self._link.handle,
            protocol.join_digests(hashed.digests[first : first + asked[0]]),
            (layers.start, layers.stop),
            max(1, int(budget * 1000)),
            frame_bytes,
            tuple([(stretch.span.tail, stretch.blocks) for stretch in stretches if stretch.span is not None]),
        )
        self._link.begin(message, operation)
        return transfer

    async def fetch(
        self,
        prompt: Tokens | Prompt | Match,
        into: Buffers,
        *,
        start: int = 0,
        layers: range | None = None,
        on_layer: Callable[[int], None] | None = None,
        deadline: float | None = None,
    ) -> FetchResult:
        """:meth:`start_fetch`, waited for."""
        self._place.check()
        until = time.monotonic() + self._budget(deadline)
        prompt = await self._hash(prompt)
        return await self._start_fetch(prompt, into, start, layers, on_layer, until)

    def start_store(
        self,
        prompt: Tokens | Prompt | Match,
        kv: Buffers,
        *,
        start: int = 0,
        ready_layers: int | None = None,
        deadline: float | None = None,
    ) -> Saving:
        """Begin to store the full blocks of a prompt; nothing is visible before all layers of a block are.

        kv: KVBuffers with the prompt's K/V (position 0 is token 0), or ChunkBuffers whose row 0 is the first
            block stored. It must not change before the store ends. What is not ``exact`` in them is left
            out: stored under this prompt's name it would be handed out as exact.
        start: tokens that are known to be stored (``match.hit_tokens``); a multiple of the block size.
        ready_layers: layers that stand in ``kv`` already, default all; see :meth:`Saving.layer_ready`.
        Long prompts should be hashed before, see :meth:`match`.
        """
        self._place.check()
        until = time.monotonic() + self._budget(deadline)
        return self._start_store(prompt, kv, start, ready_layers, until)

    def _start_store(
        self,
        prompt: Tokens | Prompt | Match,
        kv: Buffers,
        start: int,
        ready_layers: int | None,
        until: float,
        marks: Sequence[bytes] | None = None,
    ) -> Saving:
        hashed = self._hasher.hashed(prompt)
        if not 0 <= start <= hashed.tokens or start % self.block_size:
            raise SpecError(
                f"start={start} must be a multiple of the block size {self.block_size} within the prompt's "
                f"{hashed.tokens} tokens"
            )
        first = start // self.block_size
        self._check_buffers(kv)
        room = kv.tokens // self.block_size - first if isinstance(kv, KVBuffers) else kv.blocks
        port = self._port(kv, [Stretch(max(0, room), start)], start)
        self._has_stored = True
        offered = min(len(hashed.digests) - first, port.blocks)
        inexact = APPROXIMATE if port.exact < offered else ""
        offered = min(offered, port.exact)
        if offered <= 0:
            why = "nothing new" if first and first == len(hashed.digests) else "no full block to store"
            return Saving.of(self._place, StoreResult(0, {}, 0, inexact or why))
        budget = until - time.monotonic()
        if budget <= 0:
            return Saving.of(self._place, StoreResult(offered, {"aborted": offered}, 0, SPENT))
        ready = self.model.num_layers if ready_layers is None else ready_layers
        # A server reserves all that one request names at once; long prompts take several: others get on.
        parts = range(0, offered, protocol.MAX_STORE_BLOCKS)
        saving = Saving(self._place, len(parts), self._give_up, budget, inexact)
        if marks is None:
            marks = self._marks(hashed, first)
        frame_bytes = self._frame_bytes()
        for begin in parts:
            count = min(protocol.MAX_STORE_BLOCKS, offered - begin)
            at = first + begin
            message = protocol.Store(
                self._link.handle,
                hashed.digests[at - 1] if at else None,
                protocol.join_digests(hashed.digests[at : at + count]),
                max(1, int(budget * 1000)),
                b"".join(marks[begin : begin + count]),
            )
            blocks = range(begin, begin + count)
            operation = StoreOperation(port, self.chunk_nbytes, blocks, ready, frame_bytes, saving)
            saving.add(operation)
            channel = self._link.begin(message, operation)
            if channel is not None:
                operation.begin(channel)
        return saving

    async def store(
        self, prompt: Tokens | Prompt | Match, kv: Buffers, *, start: int = 0, deadline: float | None = None
    ) -> StoreResult:
        """:meth:`start_store`, waited for."""
        self._place.check()
        until = time.monotonic() + self._budget(deadline)
        hashed = self._hasher.hashed(await self._hash(prompt))
        marks = await aside(hashed.tokens - start, partial(self._marks, hashed, start // self.block_size))
        return await self._start_store(hashed, kv, start, None, until, marks)

    async def contains(self, prompt: Tokens | Prompt | Match, *, deadline: float | None = None) -> list[bool]:
        """For each full block, whether it is stored; all False when no server answers. Renews nothing.

        Blocks beyond ``protocol.MAX_BLOCKS`` (2 million tokens) are never hits and count as not stored."""
        self._place.check()
        until = time.monotonic() + self._budget(deadline)
        hashed = self._hasher.hashed(await self._hash(prompt))
        if not hashed.digests:
            return []
        asked = hashed.digests[: protocol.MAX_BLOCKS]
        question = protocol.Contains(self._link.handle, protocol.join_digests(asked))
        answer = await self._ask(question, until)
        present = answer.present if isinstance(answer, protocol.Contained) else b""
        if len(present) != len(asked):
            present = bytes(len(asked))
        return [bool(byte) for byte in present] + [False] * (len(hashed.digests) - len(asked))

    async def evict(self, prompt: Tokens | Prompt | Match, *, deadline: float | None = None) -> int:
        """Remove the prompt's blocks and all that follow them; returns how many went. Raises Unavailable."""
        self._place.check()
        until = time.monotonic() + self._budget(deadline)
        hashed = self._hasher.hashed(await self._hash(prompt))
        if not hashed.digests:
            return 0
        first = hashed.digests[: protocol.MAX_BLOCKS]  # what follows them goes with them
        question = protocol.Evict(self._link.handle, protocol.join_digests(first))
        return self._removed(await self._ask(question, until)).blocks

    async def clear(self, *, deadline: float | None = None) -> int:
        """Remove the whole namespace, running stores included; returns the blocks gone (or Unavailable)."""
        self._place.check()
        until = time.monotonic() + self._budget(deadline)
        return self._removed(await self._ask(protocol.Clear(self._link.handle), until)).blocks

    # --- helpers

    def _check_buffers(self, buffers: Buffers) -> None:
        if isinstance(buffers, ChunkBuffers):
            buffers.check(self.chunk_nbytes)
        elif not isinstance(buffers, KVBuffers):
            raise SpecError(
                f"K/V go in and out by KVBuffers or ChunkBuffers, got {type(buffers).__name__}; "
                "KVBuffers.wrap takes the engine's own arrays"
            )
        elif buffers.spec != self.model:
            raise SpecError(
                f"the buffers belong to model {_who(buffers.spec)}, the client to {_who(self.model)}"
            )

    def _port(self, buffers: Buffers, stretches: Sequence[Stretch], start: int) -> ChunkPort:
        if isinstance(buffers, ChunkBuffers):
            return buffers
        return CodecPort(self._coder, buffers, stretches, start)

    def _frame_bytes(self) -> int:
        """Payload of a frame: ours, or less where the server takes less."""
        server = self._link.server
        return FRAME_BYTES if server is None else min(FRAME_BYTES, server.max_payload)

    def _budget(self, deadline: float | None) -> float:
        return self.deadline if deadline is None else _seconds(deadline)

    def _give_up(self, operation: FetchOperation | StoreOperation, reason: str) -> None:
        if not operation.ended:
            if reason == "deadline":
                self._link.timed_out(operation)
            operation.end(reason)
            self._link.forget(operation)
        if isinstance(operation, StoreOperation):
            operation.reclaim()

    async def _ask(self, question: protocol.Message, until: float) -> protocol.Message | str:
        left = until - time.monotonic()
        return await self._link.call(question, left) if left > 0 else SPENT

    async def _hash(self, prompt: Tokens | Prompt | Match) -> Tokens | Prompt | Match:
        """Hashed, in a thread if that takes long."""
        if isinstance(prompt, Prompt | Match):
            return prompt
        return await aside(operator.length_hint(prompt), partial(self.prompt, prompt))

    def _marks(self, hashed: Prompt, first: int) -> list[bytes]:
        return [] if self.modular_refusal else self._hasher.marks(hashed, first)

    def _removed(self, answer: protocol.Message | str) -> protocol.Removed:
        if isinstance(answer, protocol.Removed):
            return protocol.Removed(max(0, answer.blocks), max(0, answer.nbytes))
        raise Unavailable(_why(answer))

    def _likely_cause(self, refusal: str, min_run: int) -> str:
        opened = self._link.opened
        if refusal or not (self._has_stored or opened is None or opened.blocks):
            return refusal or self._why_not(0)
        return (
            f"no run of {min_run} tokens of them is stored so that it can be found; either their token ids "
            "differ from those stored (separators, BOS), or who stored them has connect(modular=False)"
        )

    def _why_not(self, hit: int) -> str:
        """What follows "not stored: " is for people who wonder why nothing hits, as old as the connection."""
        opened = self._link.opened
        if hit:
            return "not stored beyond this"
        if self._has_stored or opened is None or opened.blocks:
            return "not stored"
        others = list(dict.fromkeys(opened.others))[-3:]
        if others:
            return (
                f"not stored: when this connection was made there was nothing under ({self._label}); "
                f"of this tenant there was: {'; '.join(others)}"
            )
        return (
            f"not stored: when this connection was made the server had nothing of tenant "
            f"{self._tenant.name!r} (with another secret it is another tenant)"
        )


def _why(answer: protocol.Message | str) -> str:
    return answer if isinstance(answer, str) else _refusal(answer)


def _seconds(deadline: float) -> float:
    if not isinstance(deadline, int | float) or not 0 < deadline <= 3600:
        raise ConfigError(f"deadline={deadline!r} must be a number of seconds, more than 0 and at most 3600")
    return deadline


def _label(model: ModelSpec, codec: str, block_size: int, salt: str | None) -> str:
    """A namespace in words, for people: what differs most often between those who wonder why nothing hits."""
    dtype = model.groups[0].layout.dtype.value
    parts = [model.name or "model", f"weights={model.weights.hex()[:8]}", f"codec={codec}"]
    parts += [f"block={block_size}", f"dtype={dtype}"]
    if model.tp_size > 1:
        parts.append(f"rank={model.tp_rank}/{model.tp_size}")
    if model.adapter is not None:
        parts.append(f"adapter={model.adapter.name}")
    if salt:
        parts.append("salted")
    return " ".join(parts)[: protocol.MAX_LABEL]


def _who(spec: ModelSpec) -> str:
    return f"{spec.name!r} (fingerprint {spec.fingerprint().hex()[:8]})"


def _refusal(answer: protocol.Message) -> str:
    return f"{answer.code}: {answer.message}" if isinstance(answer, protocol.Error) else "unexpected answer"
