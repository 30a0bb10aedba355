"""A match that looks for blocks at any place, question by question; and what came of such matches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hypercache import protocol
from hypercache.client.hashing import Hasher
from hypercache.client.plan import Borders, Fingerprints, ModularSpan, Search, Segment
from hypercache.client.results import Match, Prompt
from hypercache.keys import context_name

_log = logging.getLogger("hypercache.client")

WARN_AFTER = 50  # matches that could have brought something and did not


class Finder:
    """Looks for a prompt's prefix and, behind it, for what is stored of the rest: one LOCATE for each
    ``protocol.MAX_PROBES`` tokens. Questions out, answers in, no I/O.

    begun: whether a question was answered. hit: blocks of the prefix. complete: whether the server looked at
    all that it was asked for.
    """

    def __init__(
        self, hasher: Hasher, prompt: Prompt, usable: int, segments: Sequence[Segment] | None, least: int
    ) -> None:
        self.hit = 0
        self.complete = True
        self._hasher = hasher
        self._prompt = prompt
        self._own = prompt.digests[:usable]
        self._segments = segments
        self._borders = Borders(segments)
        self._least = least
        self._first = 0
        self._spans: list[ModularSpan] = []
        self.begun = False
        self._asked: Fingerprints

    @property
    def left(self) -> int:
        """Tokens that no question was asked about yet; 0: done."""
        return max(0, self._prompt.tokens - self._hasher.block_size - self._first)

    @property
    def found(self) -> tuple[ModularSpan, ...]:
        """The modular spans behind the prefix, as far as the answers go."""
        return tuple(span for span in self._spans if span.blocks >= self._least)

    def question(self, handle: int) -> protocol.Locate:
        """What to ask next, while something is left. Fingerprints are made here: milliseconds for many."""
        self._asked = self._hasher.windows(self._prompt, self._first, self._segments)
        own = b"" if self.begun else protocol.join_digests(self._own)
        return protocol.Locate(
            handle, own, self._first, self._asked.astype("<u8", copy=False).tobytes(), self._least
        )

    def answered(self, answer: protocol.Located) -> None:
        """Takes of the answer to the last question what our own digests confirm."""
        size, spans = self._hasher.block_size, self._spans
        if not self.begun:
            self.begun = True
            self.hit = max(0, min(answer.blocks, len(self._own)))
        floor = max(self.hit * size, spans[-1].stop if spans else 0)
        search = Search(
            block_size=size,
            first=self._first,
            asked=self._asked,
            floor=floor,
            own=self._prompt.digests,
            least=self._least,
            borders=self._borders,
            modular=lambda start, stop: self._hasher.modular(self._prompt, start, stop),
        )
        found = search.believe(answer.spans)
        if spans and found and self._continues(spans[-1], found[0]):
            last = spans.pop()
            found[0] = replace(last, stop=found[0].stop, chain=last.chain + found[0].chain)
        spans += found
        self.complete = self.complete and answer.complete
        end = self._first + len(self._asked)
        self._first = self._next(end) if self.left > len(self._asked) else end

    def _next(self, end: int) -> int:
        """Where the next question begins, ``end`` being where the windows of the last one do.

        A run that reaches it may go on behind it, but with fewer blocks than make a run: its last ones are
        looked for again. So is where one may have begun that is too short up to there.
        """
        size, spans = self._hasher.block_size, self._spans
        if spans and spans[-1].stop >= end:
            last = spans.pop()
            keep = last.blocks - self._least
            if keep > 0:
                spans.append(last.clip(0, last.start + keep * size, size))
            return last.start + max(keep, 0) * size
        return max(end - (self._least - 1) * size, self.hit * size, spans[-1].stop if spans else 0)

    def _continues(self, last: ModularSpan, span: ModularSpan) -> bool:
        """Whether two questions found one run, end to end."""
        joined = last.stop == span.start and last.delta == span.delta
        joined = joined and context_name(last.tail) == span.context
        return joined and not self._borders.at(span.start)


@dataclass(slots=True)
class Reuse:
    """What modular reuse brought one client.

    matches: asked for it and were answered. eligible: of these, had as many uncovered tokens as a run needs.
    found: of those, found a run. tokens_found, tokens_fetched: in modular spans of matches, of fetches.
    """

    matches: int = 0
    eligible: int = 0
    found: int = 0
    tokens_found: int = 0
    tokens_fetched: int = 0
    _warned: bool = field(default=False, repr=False)

    def matched(self, match: Match, least_tokens: int, cause: Callable[[], str]) -> None:
        """Count one match; after ``WARN_AFTER`` in vain, warn once, with the likely ``cause``."""
        self.matches += 1
        if match.prompt.tokens - 1 - match.hit_tokens < least_tokens:
            return
        self.eligible += 1
        self.found += bool(match.modular)
        self.tokens_found += match.modular_tokens
        if self.eligible >= WARN_AFTER and not self.found and not self._warned:
            self._warned = True
            _log.warning(
                "modular reuse was asked for in %d matches and found nothing: %s", self.eligible, cause()
            )
