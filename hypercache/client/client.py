"""The asynchronous client: match, fetch, store, contains, hint, pin, evict, clear.

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
from hypercache.checks import typed
from hypercache.client import disk, environment, hints
from hypercache.client.buffers import Coder
from hypercache.client.finding import Finder, Reuse
from hypercache.client.handles import Saving, Transfer
from hypercache.client.hashing import SPENT, Hasher, aside
from hypercache.client.link import AGENT, Link, why
from hypercache.client.moving import FRAME_BYTES, Buffers, Mover
from hypercache.client.place import Place
from hypercache.client.plan import MIN_RUN, Segment, least_blocks
from hypercache.client.results import (
    FetchResult,
    HintResult,
    Match,
    PinResult,
    Prompt,
    StoreResult,
    UnpinResult,
)
from hypercache.errors import ConfigError, Unavailable
from hypercache.keys import HASH_VERSION, MediaSpan, Namespace, TenantKey
from hypercache.model import ModelSpec
from hypercache.segments import check as check_segments

DEFAULT_URI = "tcp://127.0.0.1:7440"
DEFAULT_CODEC = "int8"
DEADLINE_S = 5.0
SWITCHED_OFF = "switched off for this client: connect(modular=False)"

Tokens = Any  # any integer sequence or array that keys.canonical_tokens takes


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
    disk_codec: str | None = None,
) -> Client:
    """Connect an engine to a cache.

    uri: ``tcp://host:port``; default HYPERCACHE_URI, else tcp://127.0.0.1:7440.
    codec: how K/V travel and are kept ("raw" is lossless; see docs/codecs.md for the error of the others).
    block_size: tokens per block, 8, 16 or 64. Small ones lose less of short prompts, and cost more a token.
    tenant: default from HYPERCACHE_TENANT and HYPERCACHE_SECRET_FILE, else the public tenant.
    salt: separates what must not be shared although model and tokens are equal.
    modular: whether what this client stores can be found out of its context, and whether it may look for such
        blocks itself; a match does so only where it is asked to. See :attr:`Client.modular_refusal`.
    deadline: seconds that a call may take unless it says otherwise.
    disk_codec: how blocks are kept on the server's disk, if it has one: "raw" as they travel, with nothing
        more lost; "int4", "int8" or "fp8" in that codec. Default HYPERCACHE_DISK_CODEC, else "int4" for what
        travels as "int8" or "fp8", and "raw" for all else. Who chooses differently shares no blocks.

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
        disk_codec=disk_codec if disk_codec is not None else os.environ.get("HYPERCACHE_DISK_CODEC") or None,
    )
    try:
        await client._start()
    except BaseException:  # cancelled, too: nobody else could close it
        await client.close()
        raise
    return client


class Client:
    """See :func:`connect`. Belongs to the event loop and the process that made it.

    modular_refusal: why nothing is reused out of its context here; "" if it can be. reuse: what such reuse
    brought so far, in counts.
    """

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
        disk_codec: str | None,
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
        below = disk.disk_codec(disk_codec, self.codec, model)
        self.namespace = Namespace.build(
            model, block_size=block_size, codec=codec, tenant=tenant, salt=salt, disk_codec=below
        )
        self.modular_refusal = rope.refusal(model) or ("" if modular else SWITCHED_OFF)
        self.reuse = Reuse()
        self._hasher = Hasher(self.namespace, tenant)
        self._tenant = tenant
        self._place = Place()
        lying = codecs.get(below) if below else None
        self._coder = Coder(self.codec, model, block_size, FRAME_BYTES, lying)
        self.chunk_nbytes = self._coder.chunk_nbytes
        self._label = _label(model, self.namespace, salt)
        layouts, layer_layouts = protocol.tell_layouts(self._coder.layouts)
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
            protocol.Open(
                self.namespace.digest,
                block_size,
                codec,
                self.chunk_nbytes,
                self._label,
                layouts,
                layer_layouts,
                below,
            ),
        )
        self._mover = Mover(self._place, self._link, self._coder, self._hasher, model, self.reuse)

    async def _start(self) -> None:
        await asyncio.to_thread(self._warm)  # or the first call compiles
        await self._link.start(self.deadline)
        error = self._link.permanent_error
        if error is not None:
            raise error

    def _warm(self) -> None:
        for codec in filter(None, (self.codec, self._coder.below)):
            codecs.warm(codec, self._coder.layouts)
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
        typed("modular", modular, bool)
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
        short = within is not None and all(b - a < least * self.block_size for a, b in within)
        why = refusal or (f"no segment has the {least * self.block_size} tokens of a run" if short else "")
        if modular and why and match.reason:
            match = replace(match, reason=f"{match.reason}; no modular reuse: {why}")
        if modular:
            cause = partial(self._likely_cause, refusal, min_run)
            self.reuse.matched(match, least * self.block_size, cause)
        return match

    async def _match(self, hashed: Prompt, usable: int, until: float) -> Match | str:
        """The prefix; a string says why there is no answer."""
        question = protocol.Match(self._link.handle, protocol.join_digests(hashed.digests[:usable]))
        answer = await self._ask(question, until)
        if not isinstance(answer, protocol.Matched):
            return why(answer)
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
                return why(answer)
            else:
                rest = f"; the rest was not looked at: {why(answer)}"
        if not finder.complete and not rest:
            rest = "; the server did not look at everything: it spends a bounded time on one search"
        full = finder.hit == min(hashed.usable_blocks, protocol.MAX_BLOCKS)
        reason = "" if full else self._why_not(finder.hit) + rest
        return Match(hashed, finder.hit, reason, finder.found)

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
            What they have no room for is not fetched. From the first modular token on that came, they are
            not ``exact`` any more; the prefix that a fetch of all layers from token 0 brought is.
        start: tokens the engine holds already; nothing before it is written.
        layers: contiguous range of layers, default all.
        on_layer: called on the loop's thread with each layer that is in place. If it raises, the fetch ends
            as a miss whose reason names the exception, which is logged.
        Raises SpecError when the buffers do not fit the model. Long prompts should be hashed before, see
        :meth:`match`.
        """
        self._place.check()
        until = time.monotonic() + self._budget(deadline)
        return self._mover.fetch(self._hashed(prompt), into, start, layers, on_layer, until)

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
        hashed = self._hashed(await self._hash(prompt))
        return await self._mover.fetch(hashed, into, start, layers, on_layer, until)

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
            block stored. It must not change before the store ends. What is not ``exact`` in them, or is not
            any more when it is to be read, is left out: stored under this prompt's name it would be handed
            out as exact.
        start: tokens that are known to be stored (``match.hit_tokens``); a multiple of the block size.
        ready_layers: layers that stand in ``kv`` already, default all; see :meth:`Saving.layer_ready`.
        Long prompts should be hashed before, see :meth:`match`; what its blocks are found by out of context
        is hashed here in any case.
        """
        self._place.check()
        until = time.monotonic() + self._budget(deadline)
        hashed = self._hasher.hashed(prompt)
        marks = self._marks(hashed, start // self.block_size)
        return self._mover.store(hashed, kv, start, ready_layers, until, marks)

    async def store(
        self, prompt: Tokens | Prompt | Match, kv: Buffers, *, start: int = 0, deadline: float | None = None
    ) -> StoreResult:
        """:meth:`start_store`, waited for."""
        self._place.check()
        until = time.monotonic() + self._budget(deadline)
        hashed = self._hasher.hashed(await self._hash(prompt))
        marks = await aside(hashed.tokens - start, partial(self._marks, hashed, start // self.block_size))
        return await self._mover.store(hashed, kv, start, None, until, marks)

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

    async def hint(
        self,
        prompt: Tokens | Prompt | Match,
        *,
        steps: int | None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> HintResult:
        """Tell when the stored blocks of a prompt will be used again, and what they are worth. Until their
        next use the server's policy takes that into account; it promises nothing (for that, see :meth:`pin`).

        steps: of the caller's workflow until then, 0..10,000; None: not known. A server takes a step for some
            seconds, so what counts is who comes sooner.
        priority: -3 (the first to go) .. 3, 0 for no wish.
        Raises ConfigError for values out of range.
        """
        self._place.check()
        until = time.monotonic() + self._budget(deadline)
        tell = hints.use(steps, priority)
        hashed = self._hasher.hashed(await self._hash(prompt))
        return await hints.hint(partial(self._ask, until=until), self._link.handle, hashed, tell)

    async def pin(
        self, prompt: Tokens | Prompt | Match, seconds: float, *, deadline: float | None = None
    ) -> PinResult:
        """Keep the stored blocks of a prompt for ``seconds``, whoever needs the room. Of a prompt that is
        pinned already the time changes.

        The server grants less where its limits are (``pin_limit_s``, ``pin_share``); the result says how
        much. A pin is its tenant's: it outlives the client that asked for it; what is evicted or cleared by
        name goes all the same. Raises ConfigError unless ``seconds`` is a number, above 0 and finite.
        """
        self._place.check()
        until = time.monotonic() + self._budget(deadline)
        tell = hints.keep(seconds)
        hashed = self._hasher.hashed(await self._hash(prompt))
        return await hints.pin(partial(self._ask, until=until), self._link.handle, hashed, tell)

    async def unpin(self, prompt: Tokens | Prompt | Match, *, deadline: float | None = None) -> UnpinResult:
        """End this tenant's pin of the prompt, or of the longest prompt that it begins with and that is
        pinned: one pin, no other."""
        self._place.check()
        until = time.monotonic() + self._budget(deadline)
        hashed = self._hasher.hashed(await self._hash(prompt))
        return await hints.unpin(partial(self._ask, until=until), self._link.handle, hashed)

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

    def _budget(self, deadline: float | None) -> float:
        return self.deadline if deadline is None else _seconds(deadline)

    async def _ask(self, question: protocol.Message, until: float) -> protocol.Message | str:
        left = until - time.monotonic()
        return await self._link.call(question, left) if left > 0 else SPENT

    async def _hash(self, prompt: Tokens | Prompt | Match) -> Tokens | Prompt | Match:
        """Hashed, in a thread if that takes long."""
        if isinstance(prompt, Prompt | Match):
            return prompt
        return await aside(operator.length_hint(prompt), partial(self.prompt, prompt))

    def _hashed(self, prompt: Tokens | Prompt | Match) -> Prompt | Match:
        """As it is, if it is one of this client's blocks; tokens are hashed."""
        hashed = self._hasher.hashed(prompt)
        return prompt if isinstance(prompt, Match) else hashed

    def _marks(self, hashed: Prompt, first: int) -> list[bytes]:
        return [] if self.modular_refusal else self._hasher.marks(hashed, first)

    def _removed(self, answer: protocol.Message | str) -> protocol.Removed:
        if isinstance(answer, protocol.Removed):
            return protocol.Removed(max(0, answer.blocks), max(0, answer.nbytes))
        raise Unavailable(why(answer))

    def _likely_cause(self, refusal: str, min_run: int) -> str:
        opened = self._link.opened
        if refusal or not (self._mover.has_stored or opened is None or opened.blocks):
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
        if self._mover.has_stored or opened is None or opened.blocks:
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


def _seconds(deadline: float) -> float:
    if not isinstance(deadline, int | float) or not 0 < deadline <= 3600:
        raise ConfigError(f"deadline={deadline!r} must be a number of seconds, more than 0 and at most 3600")
    return deadline


def _label(model: ModelSpec, namespace: Namespace, salt: str | None) -> str:
    """A namespace in words, for people: what differs most often between those who wonder why nothing hits."""
    dtype = model.groups[0].layout.dtype.value
    parts = [model.name or "model", f"weights={model.weights.hex()[:8]}", f"codec={namespace.codec}"]
    if namespace.disk_codec:
        parts.append(f"disk={namespace.disk_codec}")
    parts += [f"block={namespace.block_size}", f"dtype={dtype}"]
    if model.tp_size > 1:
        parts.append(f"rank={model.tp_rank}/{model.tp_size}")
    if model.adapter is not None:
        parts.append(f"adapter={model.adapter.name}")
    if salt:
        parts.append("salted")
    return " ".join(parts)[: protocol.MAX_LABEL]
