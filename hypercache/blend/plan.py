"""What a blend is asked for, what it plans, and what it reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hypercache.blend.policies import POLICIES, Policy
from hypercache.checks import count, tuple_of, typed
from hypercache.errors import SpecError

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Reused:
    """One segment: tokens ``start..stop-1`` of the prompt whose K/V are there, rotated to their place, but
    were computed in another context."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Blend:
    """How reused tokens are repaired.

    ratio: share of them, 0..1, that is recomputed from the check layer on, rounded up to whole tokens. 1 is
        a full prefill, 0 takes them as they are.
    policy: which ones: a name in ``POLICIES`` or a :class:`Policy`. "auto" is ``selector``, else "kv".
    selector: a policy calibrated for the model, for "auto".
    check_layer: layers before it are computed for all reused tokens, and K/V in it; there the policy ranks.
        A policy that has a ``check_layer`` of its own, as a calibrated selector has, is asked there instead:
        its numbers mean something in that layer alone.
    lead: so many first tokens of each segment come before what the policy ranks highest, within the ratio.
    narrow: 0..1: the set chosen at the check layer is larger by this share, and shrinks evenly to one that
        is smaller by it, dropping what the policy ranked last, or for a deviation what deviates least there;
        ``ratio`` is the average (CacheBlend, arXiv:2405.16444, section 4.3).
    """

    ratio: float = 0.15
    policy: str | Policy = "auto"
    selector: Policy | None = None
    check_layer: int = 1
    lead: int = 1
    narrow: float = 0.3

    def __post_init__(self) -> None:
        for name in ("ratio", "narrow"):
            value = getattr(self, name)
            typed(f"Blend.{name}", value, (int, float, np.integer, np.floating))
            if not 0 <= value <= 1:
                raise SpecError(f"Blend.{name} must be in 0..1, got {value}")
            object.__setattr__(self, name, float(value))
        object.__setattr__(self, "check_layer", count("Blend.check_layer", self.check_layer, 1))
        object.__setattr__(self, "lead", count("Blend.lead", self.lead, 0))
        if isinstance(self.policy, str) and self.policy not in ("auto", *POLICIES):
            raise SpecError(f"Blend.policy {self.policy!r} is unknown; use {', '.join(('auto', *POLICIES))}")
        if not isinstance(self.policy, str):
            _check_policy("policy", self.policy)
        if self.selector is not None:
            _check_policy("selector", self.selector)
            if self.policy != "auto":
                raise SpecError("Blend.selector is what policy 'auto' means; leave out one of the two")
        policy = self.chosen_policy
        if (own := getattr(policy, "check_layer", None)) is not None:
            object.__setattr__(self, "check_layer", count(f"check_layer of policy {policy.name!r}", own, 1))
        _check_mass_layers(policy, self.check_layer)

    @property
    def chosen_policy(self) -> Policy:
        """The policy that is meant."""
        if isinstance(self.policy, str):
            return self.selector or POLICIES["kv"] if self.policy == "auto" else POLICIES[self.policy]
        return self.policy

    def counts(self, reused: int, layers: int) -> list[int]:
        """How many of ``reused`` tokens to recompute in each of ``layers`` layers; never rises."""
        narrow = min(self.narrow, 1 / self.ratio - 1) if self.ratio else 0.0
        if layers < 2:
            narrow = 0.0
        shares = [self.ratio * (1 + narrow * (1 - 2 * i / max(layers - 1, 1))) for i in range(layers)]
        return [min(reused, math.ceil(share * reused - 1e-9)) for share in shares]


def _check_policy(field: str, value: Any) -> None:
    parts = ("name", "probes", "mass_layers", "scores")
    named = isinstance(getattr(value, "name", None), str) and not isinstance(value, type)
    if not named or not all(hasattr(value, part) for part in parts):
        raise SpecError(
            f"Blend.{field} must be a policy, got {type(value).__name__}; one has {', '.join(parts)}"
        )


def _check_mass_layers(policy: Policy, check_layer: int) -> None:
    what = f"mass_layers of policy {policy.name!r}"
    layers = tuple_of(what, policy.mass_layers, (int, np.integer))
    if layers and not policy.probes:
        raise SpecError(f"{what} must be (): it does not probe, so no layer is computed before it ranks")
    if any(not 0 <= layer <= check_layer for layer in layers):
        raise SpecError(f"{what} must be in 0..{check_layer}, the check layer, got {layers}")


@dataclass(frozen=True, slots=True)
class Report:
    """What a blend did. Counts are tokens.

    exact: taken as they are, for they are exact. reused: taken from another context, rotated.
    ratio: share of the reused to recompute, on average over the layers. recomputed: those that were chosen,
        the set at its widest. computed: those that were missing.
    by_layer: reused tokens that went through each layer as a whole. 0 in the last: nobody reads what it
        makes of them, there their K/V are all that is computed.
    chosen: positions of the recomputed tokens, ascending.
    flops, flops_full: spent, and those of a prefill of the whole prompt (:mod:`hypercache.blend.flops`).
    flops_reused: the part of ``flops`` that the reused tokens took, probing included.
    policy: its name, "" if nothing was ranked.
    note: "" or why nothing was blended.
    """

    exact: int
    reused: int
    ratio: float
    recomputed: int
    computed: int
    by_layer: tuple[int, ...]
    chosen: Array = field(repr=False)
    flops: int
    flops_full: int
    flops_reused: int
    policy: str
    note: str

    @property
    def flops_saved(self) -> float:
        """Share of the full prefill's work that was not done."""
        return 1 - self.flops / self.flops_full

    def __str__(self) -> str:
        tokens = self.exact + self.reused + self.computed
        by = f" by {self.policy!r}" if self.policy else ""
        text = (
            f"{tokens} tokens: {self.exact} exact, {self.reused} reused ({self.ratio:.0%} of them "
            f"recomputed{by}), {self.computed} computed; {self.flops_saved:.0%} of the FLOPs saved"
        )
        return f"{text}; {self.note}" if self.note else text

    def as_dict(self) -> dict[str, Any]:
        """All of it but ``chosen``, for JSON."""
        named = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "chosen"}
        return {**named, "by_layer": list(self.by_layer), "flops_saved": self.flops_saved}


@dataclass(frozen=True, slots=True)
class Blended:
    """logits: ``(vocab,)`` after the last token. hidden: final hidden states ``(n, hidden)`` of the tokens at
    ``positions``, those that were computed in all layers."""

    logits: Array
    hidden: Array
    positions: Array
    report: Report


@dataclass(frozen=True, slots=True)
class Plan:
    """Where each token's K/V come from. reused, missing: ascending positions. place, segment: of reused."""

    tokens: int
    exact: int
    reused: Array
    missing: Array
    place: Array
    segment: Array


def plan(tokens: int, room: int, exact: int, reused: Sequence[Reused]) -> Plan:
    """Raises SpecError for spans that are empty, overlap, are out of order, begin in the exact part or reach
    the last token, which is always computed."""
    if tokens == 0:
        raise SpecError("no token to compute; the prompt is empty")
    if room < tokens:
        raise SpecError(f"K/V with room for {room} tokens cannot take a prompt of {tokens}")
    exact = count("exact tokens", exact, 0)
    if exact >= tokens:
        raise SpecError(
            f"{exact} exact tokens leave none of the prompt's {tokens} to compute; the last one always is"
        )
    at = exact
    for span in reused:
        typed("reused spans", span, Reused, "give hypercache.blend.Reused(start, stop)")
        start, stop = count("Reused.start", span.start, 0), count("Reused.stop", span.stop, 0)
        if not at <= start < stop <= tokens - 1:
            raise SpecError(
                f"reused tokens {start}..{stop} do not fit: they must begin at {at} or later (behind what is "
                f"exact and the span before), hold a token, and end by {tokens - 1} (the last is computed)"
            )
        at = stop
    sizes = [span.stop - span.start for span in reused]
    place = np.concatenate([np.arange(size) for size in sizes] or [np.empty(0, np.intp)])
    segment = np.repeat(np.arange(len(sizes)), sizes)
    positions = place + np.array([span.start for span in reused], np.intp)[segment]
    todo = np.ones(tokens, bool)
    todo[:exact] = False
    todo[positions] = False
    return Plan(tokens, exact, positions, np.flatnonzero(todo), place, segment)
