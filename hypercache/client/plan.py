"""What a match says of a prompt, span by span, and which of a server's answers are believed. No I/O."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from hypercache import protocol
from hypercache.checks import count
from hypercache.errors import SpecError
from hypercache.keys import SEAL_NBYTES, context_name, unseal

MIN_RUN = 64  # tokens: shorter runs out of context cost more quality than they save work
MAX_RUN = protocol.MAX_PROBES // 2  # or one request could not find it

Segment = tuple[int, int]
Fingerprints = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ExactSpan:
    """Tokens ``start..stop-1``: stored with the very prefix that they have here."""

    kind: ClassVar = "exact"
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class MissingSpan:
    """Tokens ``start..stop-1``: to be computed."""

    kind: ClassVar = "missing"
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ModularSpan:
    """Tokens ``start..stop-1``: stored, but computed in another prompt, from its token ``source`` on.

    Their K/V approximate those of this prompt, once the keys are turned by ``delta`` positions (a fetch into
    KVBuffers does that). context: names what stood before them there (``keys.context_name``), b"" if nothing
    did. chain: the causal digests of their blocks there, end to end; by the last of them they are fetched.
    """

    kind: ClassVar = "modular"
    start: int
    stop: int
    source: int
    context: bytes
    chain: bytes = field(repr=False)

    def __repr__(self) -> str:
        where = f"behind {self.context.hex()[:12]}" if self.context else "isolated"
        return f"ModularSpan(start={self.start}, stop={self.stop}, source={self.source}, {where})"

    @property
    def blocks(self) -> int:
        return len(self.chain) // protocol.DIGEST_BYTES

    @property
    def tail(self) -> bytes:
        """Causal digest of the last block."""
        return self.chain[-protocol.DIGEST_BYTES :]

    @property
    def delta(self) -> int:
        """By how many positions they moved."""
        return self.start - self.source

    @property
    def isolated(self) -> bool:
        """Whether they were computed at the head of their prompt: nothing foreign is in their K/V."""
        return not self.context

    def clip(self, start: int, stop: int, block_size: int) -> ModularSpan:
        """The part of it within ``start..stop``, which must not be empty; whole blocks at the end.

        What is cut off in front does not change the context: it stands before the rest in both prompts.
        """
        first = max(start, self.start)
        spare = max(0, -(-(self.stop - stop) // block_size))
        skipped = self.blocks + (first - self.stop) // block_size
        chain = self.chain[skipped * protocol.DIGEST_BYTES : (self.blocks - spare) * protocol.DIGEST_BYTES]
        return replace(
            self, start=first, stop=self.stop - spare * block_size, source=first - self.delta, chain=chain
        )


Span = ExactSpan | ModularSpan | MissingSpan


def whole(tokens: int, exact: int, modular: Sequence[ModularSpan]) -> tuple[Span, ...]:
    """The spans of a prompt of ``tokens`` tokens, in order, without a gap."""
    spans: list[Span] = [ExactSpan(0, exact)] if exact else []
    at = exact
    for span in modular:
        if at < span.start:
            spans.append(MissingSpan(at, span.start))
        spans.append(span)
        at = span.stop
    if at < tokens:
        spans.append(MissingSpan(at, tokens))
    return tuple(spans)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Blocks that a request names one after another: a part of a prompt in place, or of a modular span.

    begin: the token at which the first of them stands here. span: what of it is wanted, None for blocks in
    place.
    """

    blocks: int
    begin: int
    span: ModularSpan | None = None

    @property
    def delta(self) -> int:
        return self.span.delta if self.span else 0


def wanted(
    hit_blocks: int, modular: Sequence[ModularSpan], start: int, block_size: int, tokens: int, rows: int
) -> list[Stretch]:
    """What a fetch asks for: the prefix (maybe of 0 blocks), then the modular spans, from token ``start`` on.

    tokens: how many there is room for, rows: blocks likewise. What does not fit is left out.
    """
    first = start // block_size
    prefix = max(0, min(hit_blocks - first, tokens // block_size - first, rows))
    stretches = [Stretch(prefix, first * block_size)]
    rows -= prefix
    for span in modular[: protocol.MAX_CHAINS]:
        begin = span.start + max(0, start - span.start) // block_size * block_size
        blocks = min((min(span.stop, tokens) - begin) // block_size, rows)
        if blocks > 0:
            part = span.clip(start, begin + blocks * block_size, block_size)
            stretches.append(Stretch(blocks, begin, part))
            rows -= blocks
    return stretches


def arrived(stretches: Sequence[Stretch], good: Sequence[int], block_size: int) -> tuple[ModularSpan, ...]:
    """The modular spans of which the first ``good`` blocks came, as far as they did."""
    return tuple(
        stretch.span.clip(0, stretch.begin + blocks * block_size, block_size)
        for stretch, blocks in zip(stretches, good, strict=True)
        if stretch.span is not None and blocks
    )


def least_blocks(min_run: int, block_size: int) -> int:
    """Blocks of a run of ``min_run`` tokens, rounded up. Raises SpecError for what can be no run."""
    tokens = count("min_run (tokens)", min_run, block_size)
    if tokens > MAX_RUN:
        raise SpecError(f"min_run={tokens} tokens, at most {MAX_RUN}")
    return -(-tokens // block_size)


def allowed(
    first: int, windows: int, block_size: int, segments: Sequence[Segment] | None, fixed: Sequence[Segment]
) -> npt.NDArray[np.bool_] | None:
    """Which of the windows at tokens ``first``, ``first + 1``, ... may be looked for; None: all.

    segments: a window must lie within one of them; None: anywhere. fixed: tokens that no window may touch.
    """
    if segments is None and not fixed:
        return None
    inside = np.full(windows, segments is None)
    for start, stop in segments or ():
        inside[max(0, start - first) : max(0, stop - block_size + 1 - first)] = True
    for start, stop in fixed:
        inside[max(0, start - block_size + 1 - first) : max(0, stop - first)] = False
    return inside


class Borders:
    """Where segments meet: no run goes across."""

    def __init__(self, segments: Sequence[Segment] | None) -> None:
        self._at = sorted({border for segment in segments or () for border in segment})

    def at(self, token: int) -> bool:
        index = bisect.bisect_left(self._at, token)
        return index < len(self._at) and self._at[index] == token

    def cut(self, start: int, stop: int) -> Iterator[Segment]:
        """``start..stop`` in pieces that lie between two borders."""
        low, high = bisect.bisect_right(self._at, start), bisect.bisect_left(self._at, stop)
        points = [start, *self._at[low:high], stop]
        return itertools.pairwise(points)


@dataclass(frozen=True, slots=True)
class Search:
    """What was asked in one LOCATE, to hold the answer against.

    first: the token of the first window. asked: the windows, 0 where none was looked for. floor: where runs
    may begin. own: the causal digests of the prompt. least: blocks of a run. modular: ``(start, stop)`` ->
    the modular digests of the blocks that begin there, ours.
    """

    block_size: int
    first: int
    asked: Fingerprints
    floor: int
    own: Sequence[bytes]
    least: int
    borders: Borders
    modular: Callable[[int, int], Sequence[bytes]]

    def believe(self, answer: Sequence[protocol.Span]) -> list[ModularSpan]:
        """What of ``answer`` holds: each run as far as our own digests say that it has the prompt's tokens.

        A run that overlaps another, lies where nothing was asked for or contradicts itself is dropped.
        """
        believed: list[ModularSpan] = []
        floor = self.floor
        for span in answer:
            blocks = self._plausible(span, floor)
            if not blocks:
                continue
            size = self.block_size
            stop = span.at + blocks * size
            chain = unseal(span.seals, self.modular(span.at, stop))
            if self._in_place(span.at, chain):
                continue
            floor = stop
            for start, stop in self.borders.cut(span.at, span.at + len(chain) * size):
                head, end = (start - span.at) // size, (stop - span.at) // size
                if end - head >= self.least:
                    context = context_name(chain[head - 1]) if head else span.context
                    source, part = start - span.at + span.source, b"".join(chain[head:end])
                    believed.append(ModularSpan(start, stop, source, context, part))
        return believed

    def _plausible(self, span: protocol.Span, floor: int) -> int:
        """How many blocks a run has, 0 if it cannot be what was asked for."""
        size = self.block_size
        blocks, rest = divmod(len(span.seals), SEAL_NBYTES)
        at = span.at - self.first
        if rest or not blocks or span.at < floor or at < 0:
            return 0
        wanted = self.asked[at : at + blocks * size : size]
        if len(wanted) != blocks or not wanted.all():
            return 0
        if span.source % size or not 0 <= span.source <= protocol.MAX_TOKENS - blocks * size:
            return 0
        return blocks if len(span.context) == (protocol.DIGEST_BYTES if span.source else 0) else 0

    def _in_place(self, at: int, chain: Sequence[bytes]) -> bool:
        """Whether it is the prompt itself, in its original context: stored since its prefix was looked up."""
        index, rest = divmod(at, self.block_size)
        return not rest and index < len(self.own) and chain[:1] == [self.own[index]]
