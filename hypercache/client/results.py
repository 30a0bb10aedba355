"""What the client's calls give back. Plain values; a miss is a value with a reason, never an exception."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hypercache.client.plan import ModularSpan, Span, whole
from hypercache.keys import MediaSpan, Tokens, usable_blocks


@dataclass(frozen=True, slots=True)
class Prompt:
    """A hashed prompt, to hand to ``match``, ``fetch`` and ``store`` in place of tokens: no hashing again.

    digests: causal digests of every full block. ids: the tokens themselves, ``<u4``, for what is keyed by
    them alone; None: such a prompt is neither looked for nor found out of its context. media: as hashed.
    """

    tokens: int
    block_size: int
    digests: tuple[bytes, ...] = field(repr=False)
    ids: Tokens | None = field(default=None, repr=False, compare=False)
    media: tuple[MediaSpan, ...] = ()

    @property
    def usable_blocks(self) -> int:
        """Blocks that a hit may have at most: the last token is always left to compute."""
        return usable_blocks(self.tokens, self.block_size)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest usable prefix of a prompt: a hint, for a block may be evicted before it is fetched.

    hit_blocks: whole blocks from the first token on, never all tokens: one is left to compute.
    reason: "" for a full hit, else why the run ends where it does.
    modular: what is stored behind that, computed in another context; only where it was asked for.
    """

    prompt: Prompt
    hit_blocks: int
    reason: str = ""
    modular: tuple[ModularSpan, ...] = ()

    @property
    def hit_tokens(self) -> int:
        return self.hit_blocks * self.prompt.block_size

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.tokens

    @property
    def modular_tokens(self) -> int:
        return sum(span.stop - span.start for span in self.modular)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The plan: exact, modular and missing spans of all tokens, in order."""
        return whole(self.prompt.tokens, self.hit_tokens, self.modular)


@dataclass(frozen=True, slots=True)
class FetchResult:
    """Outcome of a fetch. Tokens ``start..hit_tokens`` are in place in every layer asked for; use no others.

    hit_tokens: 0, or the end of a whole number of blocks that are complete and verified.
    wire_bytes: payload received.
    reason: "" when everything asked for came, else why not.
    modular: the modular spans that are in place, likewise; a block that is lost ends its span there.
    """

    start: int
    hit_tokens: int
    wire_bytes: int
    reason: str = ""
    modular: tuple[ModularSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class HintResult:
    """Outcome of a hint. blocks: of the prompt, from its first on, that are stored and so were told of."""

    blocks: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PinResult:
    """Outcome of a pin: of the prompt's blocks ``stored`` are there, ``blocks`` stay for ``seconds``."""

    blocks: int
    seconds: float
    stored: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class UnpinResult:
    """Outcome of an unpin. blocks: how many the pin kept that has ended; 0: there was none."""

    blocks: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StoreResult:
    """Outcome of a store. ``outcome`` counts blocks under "stored", "exists", "pending" (another writer is at
    it), "orphan", "full", "too_large", "corrupt" and "aborted"; wire_bytes is the payload sent."""

    blocks: int
    outcome: Mapping[str, int]
    wire_bytes: int
    reason: str = ""

    @property
    def stored(self) -> int:
        return self.outcome.get("stored", 0)
