"""Which reused tokens are worth recomputing: policies that rank them by what is known at the check layer.

Layers before the check layer were computed for all of them, so its fresh K/V are exact: the deviation from
the cached ones is known there, and so is where the tokens look. A policy is any object with the attributes
of :class:`Policy`; :data:`POLICIES` are those with names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hypercache.errors import HyperCacheError, SpecError

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of ``n`` reused tokens at the check layer. Arrays are in the tokens' order, read-only.

    positions: ``(n,)`` in the prompt. place: ``(n,)``, tokens from the start of its segment.
    segment: ``(n,)``, index of its segment, of ``segments``.
    deviation: float32 ``(n, kv_heads, 2)``, L2 norm of fresh minus cached K (0) and V (1) there.
    mass: by layer, float32 ``(n, heads)``: share of the token's attention that falls on tokens before its
        segment, the prompt's first token left out (it is attended to by all in any context).
    What a policy did not ask for is absent: no heads in ``deviation``, no layer in ``mass``.
    """

    positions: Array
    place: Array
    segment: Array
    segments: int
    deviation: Array
    mass: Mapping[int, Array]


class Policy(Protocol):
    """Ranks reused tokens.

    name: for reports and messages.
    probes: whether it looks at anything beside places. If not, its choice is made before layer 0, and no
        layer is computed for the others.
    mass_layers: layers up to the check layer whose ``Seen.mass`` it needs: each costs the attention scores
        of all reused tokens once more.
    """

    @property
    def name(self) -> str: ...
    @property
    def probes(self) -> bool: ...
    @property
    def mass_layers(self) -> tuple[int, ...]: ...

    def scores(self, seen: Seen) -> Array:
        """Numbers ``(n,)``, finite: the highest are recomputed."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """Squared distance of fresh from cached K, V or both ("k", "v", "kv"), all heads together: CacheBlend
    (Yao et al. 2024, arXiv:2405.16444)."""

    name: str = "kv"
    probes: bool = True
    mass_layers: tuple[int, ...] = ()

    def scores(self, seen: Seen) -> Array:
        parts = {"k": slice(0, 1), "v": slice(1, 2), "kv": slice(0, 2)}[self.name]
        out: Array = np.square(seen.deviation[:, :, parts], dtype=np.float64).sum(axis=(1, 2))
        return out


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """Attention of layer 1 onto what stands before the token's segment, all heads together, after
    Cache-Craft's inter-chunk attention (Agarwal et al. 2025, arXiv:2502.15734)."""

    name: str = "attention"
    probes: bool = True
    mass_layers: tuple[int, ...] = (1,)

    def scores(self, seen: Seen) -> Array:
        out: Array = seen.mass[1].sum(axis=1)
        return out


@dataclass(frozen=True, slots=True)
class Boundary:
    """The first tokens of each segment, as many in each (Hu et al. 2024, EPIC, arXiv:2410.15332)."""

    name: str = "boundary"
    probes: bool = False
    mass_layers: tuple[int, ...] = ()

    def scores(self, seen: Seen) -> Array:
        out: Array = -seen.place
        return out


@dataclass(frozen=True, slots=True)
class Random:
    """The control: the same work as those that look, so that the choice alone differs."""

    seed: int = 0
    name: str = "random"
    probes: bool = True
    mass_layers: tuple[int, ...] = ()

    def scores(self, seen: Seen) -> Array:
        return np.random.Generator(np.random.PCG64(self.seed)).random(len(seen.positions))


def mass_layers(features: Sequence[str]) -> tuple[int, ...]:
    """The layers whose :attr:`Seen.mass` they need, ascending. Raises SpecError for what is no feature."""
    return tuple(sorted({numbers[0] for kind, numbers in map(_parse, features) if kind == "mass"}))


def feature(seen: Seen, name: str) -> Array:
    """Feature ``name`` of all tokens, float64 ``(n,)``:

    ``mass.LAYER.HEAD``: :attr:`Seen.mass` of one query head; ``k.HEAD``, ``v.HEAD``: :attr:`Seen.deviation`
    of one K/V head; ``place``: log2(1 + place); ``lead``: 1 for a segment's first two tokens, else 0;
    ``segment``: index of its segment over their count. Raises SpecError for other names, heads and layers.
    """
    kind, numbers = _parse(name)
    try:
        match kind:
            case "mass":
                column = seen.mass[numbers[0]][:, numbers[1]]
            case "k" | "v":
                column = seen.deviation[:, numbers[0], "kv".index(kind)]
            case "place":
                column = np.log2(1 + seen.place)
            case "lead":
                column = seen.place < 2
            case _:
                column = seen.segment / seen.segments
    except (KeyError, IndexError):
        raise SpecError(
            f"feature {name!r}: this model has no such head, or the layer was not probed"
        ) from None
    return column.astype(np.float64)


_NUMBERS = {"mass": 2, "k": 1, "v": 1, "place": 0, "lead": 0, "segment": 0}


def _parse(name: str) -> tuple[str, tuple[int, ...]]:
    kind, *rest = str(name).split(".")
    if _NUMBERS.get(kind) != len(rest) or not all(part.isascii() and part.isdigit() for part in rest):
        raise SpecError(
            f"{name!r} is no feature; they are mass.LAYER.HEAD, k.HEAD, v.HEAD, place, lead, segment"
        )
    return kind, tuple(map(int, rest))


POLICIES: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Deviation("k"),
        Deviation("v"),
        Deviation("kv"),
        CrossAttention(),
        Boundary(),
        Random(),
    )
}


def scored(policy: Policy, seen: Seen) -> Array:
    """What ``policy`` scores the tokens in ``seen``: float64 ``(n,)``, finite.

    Raises SpecError that names the policy where it raises something, and for scores that rank nothing: of
    another shape, not real numbers, NaN or infinite.
    """
    try:
        with np.errstate(all="ignore"):  # what overflows is refused below
            given = np.asarray(policy.scores(seen))
            scores = given.astype(np.float64) if given.dtype.kind in "biuf" else None
    except HyperCacheError:
        raise
    except Exception as error:  # a policy is the caller's: it may raise anything
        raise SpecError(
            f"policy {policy.name!r} did not score the tokens: {type(error).__name__}: {error}"
        ) from error
    n = len(seen.positions)
    if given.shape != (n,):
        raise SpecError(
            f"policy {policy.name!r} must give one score for each of {n} tokens, got shape {given.shape}"
        )
    if scores is None:
        raise SpecError(f"policy {policy.name!r} must give real numbers as scores, got {given.dtype}")
    if len(wrong := np.flatnonzero(~np.isfinite(scores))):
        raise SpecError(
            f"policy {policy.name!r} must give finite scores: {len(wrong)} of {n} are not, the first "
            f"({scores[wrong[0]]}) that of the token at position {seen.positions[wrong[0]]}"
        )
    return scores


def choose(scores: Array, place: Array, count: int, lead: int) -> Array:
    """Indices, ascending, of the ``count`` tokens to recompute: first the first ``lead`` of each segment, by
    place, then the others by score. Ties go to the earlier token."""
    led = np.where(place < lead, place, lead)
    order = np.lexsort((-scores, led))
    return np.sort(order[:count])
