"""Run an engine over a prompt that is exact in part, in part of another context, and in part missing.

K/V of layer 0 depend on a token and its position alone: after rotation they are exact. What a token attends
to in its new context comes in from layer 1 on. So the layers before the check layer are computed for all
reused tokens, a policy ranks them there, and only the best are computed on (CacheBlend, Yao et al. 2024,
arXiv:2405.16444). K/V computed on the way are always kept: those up to the check layer are exact for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hypercache.blend.flops import Shape
from hypercache.blend.plan import Blend, Blended, Plan, Report, Reused, plan
from hypercache.blend.policies import Deviation, Seen, choose
from hypercache.checks import typed
from hypercache.errors import SpecError
from hypercache.kv import KVBuffers
from hypercache.model import ModelSpec

Array = npt.NDArray[Any]
Rows = Any
"""An engine's own record of some tokens between two layers: ascending positions, hidden states, and between
``project`` and ``attend`` also q, k and v."""


class Layered(Protocol):
    """An engine that computes layer by layer, over any tokens of a prompt whose K/V are in ``kv``."""

    spec: ModelSpec

    @property
    def shape(self) -> Shape: ...

    def embed(self, ids: Array, positions: Array) -> Rows:
        """Tokens ``ids`` at ascending ``positions``, before layer 0."""

    def project(self, layer: int, rows: Rows, /) -> Rows:
        """With q, k and v of ``layer``, rotated to their positions."""

    def deviation(self, layer: int, rows: Rows, kv: KVBuffers, /) -> Array:
        """float32 ``(n, kv_heads, 2)``: L2 norm of the rows' K (0) and V (1) minus those in ``kv``."""

    def keep(self, layer: int, rows: Rows, kv: KVBuffers, /) -> None:
        """Write the rows' K and V into ``kv``, rounded as in an ordinary run."""

    def mass(self, layer: int, rows: Rows, kv: KVBuffers, first: Array, stop: Array, /) -> Array:
        """float32 ``(n, heads)``: share of each query's causal attention that falls on keys
        ``first..stop-1``, ``(n,)`` each. Bounded memory: some queries' scores at a time."""

    def take(self, rows: Rows, which: Array, /) -> Rows:
        """Rows ``which``, ascending indices, with all they have."""

    def attend(self, layer: int, rows: Rows, kv: KVBuffers, /) -> Rows:
        """After ``layer``: each row attended to all positions in ``kv`` up to its own, then the MLP."""

    def hidden(self, rows: Rows, /) -> Array:
        """Final hidden states ``(n, hidden)``, after the last norm."""

    def logits(self, hidden: Array, /) -> Array:
        """``(..., vocab)`` of final hidden states."""


def run(
    engine: Layered,
    ids: Sequence[int] | Array,
    kv: KVBuffers,
    exact: int,
    reused: Sequence[Reused],
    settings: Blend,
    layer_ready: Callable[[int], object] | None = None,
) -> Blended:
    """Run the prompt ``ids`` and leave its K/V in ``kv``, which knows how far they are exact.

    exact: leading tokens whose K/V in ``kv`` are exact. reused: see :class:`Reused`; every other token is
        missing and computed in all layers, the last one always.
    layer_ready(i) is called before anything of layer ``i`` in ``kv`` is read or written, layers in order;
        what it raises ends the run.

    Raises SpecError for spans and settings that do not fit, and for another model's K/V.
    """
    check(engine, kv, settings)
    tokens = np.asarray(ids)
    parts = plan(len(tokens), kv.tokens, exact, reused)
    work = _Work(engine, kv, parts, settings)
    if len(parts.reused):
        kv.mark_approximate(int(parts.reused[0]))
    rows = work.begin(tokens)
    for layer in range(engine.shape.layers):
        rows = engine.project(layer, rows)
        if layer_ready is not None:
            layer_ready(layer)
        rows = work.through(layer, rows)
    if work.exact and kv.exact >= parts.exact:
        kv.mark_exact(kv.tokens)
    hidden = engine.hidden(rows)
    return Blended(engine.logits(hidden[-1]), hidden, parts.missing, work.report())


def check(engine: Any, kv: KVBuffers, settings: Blend) -> None:
    """Raises SpecError unless ``engine`` works layer by layer and ``kv`` and ``settings`` fit it."""
    typed("settings", settings, Blend)
    if not all(hasattr(engine, name) for name in ("spec", "shape", "embed", "project", "attend")):
        raise SpecError(
            f"{type(engine).__name__} does not compute layer by layer; "
            "use hypercache.engines.layered.LayeredTransformer(model) or the reference engine"
        )
    if kv.spec != engine.spec:
        raise SpecError(
            f"these K/V belong to another model ({kv.spec.name!r}; theirs, this engine's: "
            f"{kv.spec.differences(engine.spec)}); allocate them with engine.spec"
        )
    if settings.check_layer >= engine.shape.layers:
        raise SpecError(
            f"Blend.check_layer {settings.check_layer} is not among the model's layers "
            f"0..{engine.shape.layers - 1}"
        )


class _Work:
    """The rows under way: which are reused, what was seen of them, and what all of it cost."""

    def __init__(self, engine: Layered, kv: KVBuffers, parts: Plan, settings: Blend) -> None:
        self._engine, self._kv, self._plan, self._settings = engine, kv, parts, settings
        self._policy = settings.chosen_policy
        self._wanted, self._ranked_at = _schedule(settings, engine.shape.layers, len(parts.reused))
        self._mass: dict[int, Array] = {}
        self._alive = np.arange(len(parts.reused))  # which reused tokens are still computed
        self._positions, self._reused = np.empty(0, np.intp), np.empty(0, bool)  # of the rows
        self._chosen = self._alive
        self._scores = np.zeros(len(self._alive))  # the policy's, of all reused tokens
        self._by_layer: list[int] = []
        self._flops = self._flops_reused = 0

    @property
    def exact(self) -> bool:
        """Whether all that is reused is computed anew: then nothing is approximate."""
        return all(count == len(self._plan.reused) for count in self._wanted[:-1])

    def begin(self, ids: Array) -> Rows:
        """The rows that are computed in layer 0."""
        parts = self._plan
        if self._wanted[0] == 0:
            self._alive = self._chosen = self._alive[:0]
        elif self._wanted[0] < len(self._alive):  # a policy that needs no look
            unseen = np.empty((len(self._alive), 0, 2), np.float32)
            self._chosen = self._alive = self._ranked(unseen, 0)
        self._positions = np.sort(np.concatenate([parts.missing, parts.reused[self._alive]]))
        reused = np.zeros(parts.tokens, bool)
        reused[parts.reused] = True
        self._reused = reused[self._positions]
        return self._engine.embed(ids[self._positions], self._positions)

    def through(self, layer: int, rows: Rows) -> Rows:
        """The rows after ``layer``, for which they were projected: those that are computed on."""
        engine, kv, shape = self._engine, self._kv, self._engine.shape
        self._spend(shape.project(len(self._positions)), shape.project(len(self._alive)))
        deviation = None
        if 0 < self._wanted[layer] < len(self._alive):
            deviation = engine.deviation(layer, self._of_reused(rows), kv)
        engine.keep(layer, rows, kv)
        if layer <= self._ranked_at and layer in self._policy.mass_layers:
            self._mass[layer] = self._cross_attention(layer, self._of_reused(rows))
        if self._wanted[layer] < len(self._alive):
            rows = self._drop(layer, rows, deviation)
        self._by_layer.append(len(self._alive))
        reused = self._plan.reused[self._alive]
        self._spend(shape.attend(layer, self._positions), shape.attend(layer, reused))
        return engine.attend(layer, rows, kv)

    def _drop(self, layer: int, rows: Rows, deviation: Array | None) -> Rows:
        """Only the missing ones, and the best of the reused. Behind the layer where the policy ranked, its
        order holds, except that deviation is measured anew."""
        if deviation is None:
            stay = self._alive[:0]
        elif layer == self._ranked_at:
            self._chosen = stay = self._ranked(deviation, layer)
        elif isinstance(self._policy, Deviation):
            stay = self._best(np.square(deviation).sum(axis=(1, 2)), layer)
        else:
            stay = self._best(self._scores[self._alive], layer)
        kept = ~self._reused
        kept[np.flatnonzero(self._reused)[np.searchsorted(self._alive, stay)]] = True
        self._alive, self._positions, self._reused = stay, self._positions[kept], self._reused[kept]
        return self._engine.take(rows, np.flatnonzero(kept))

    def _ranked(self, deviation: Array, layer: int) -> Array:
        """What the policy ranks highest. All reused tokens are still there."""
        self._scores = np.asarray(self._policy.scores(self._seen(deviation)))
        return self._best(self._scores, layer)

    def _best(self, scores: Array, layer: int) -> Array:
        if scores.shape != self._alive.shape:
            raise SpecError(
                f"policy {self._policy.name!r} must give one score for each of {len(self._alive)} tokens, "
                f"got shape {scores.shape}"
            )
        place = self._plan.place[self._alive]
        return self._alive[choose(scores, place, self._wanted[layer], self._settings.lead)]

    def _seen(self, deviation: Array) -> Seen:
        parts = self._plan
        segments = int(parts.segment[-1]) + 1
        return Seen(parts.reused, parts.place, parts.segment, segments, deviation, self._mass)

    def _cross_attention(self, layer: int, rows: Rows) -> Array:
        parts = self._plan
        score = self._engine.shape.score(layer, parts.reused)
        self._spend(score, score)
        starts = parts.reused - parts.place
        return self._engine.mass(layer, rows, self._kv, np.minimum(1, starts), starts)

    def _of_reused(self, rows: Rows) -> Rows:
        return self._engine.take(rows, np.flatnonzero(self._reused))

    def _spend(self, flops: int, reused: int) -> None:
        self._flops += flops
        self._flops_reused += reused

    def report(self) -> Report:
        parts = self._plan
        if len(parts.reused) == 0:
            note = "nothing was blended: no token is reused from another context"
        elif self._settings.ratio == 0:
            note = f"nothing was blended: ratio 0 takes all {len(parts.reused)} reused tokens as they are"
        else:
            note = ""
        return Report(
            exact=parts.exact,
            reused=len(parts.reused),
            recomputed=len(self._chosen),
            computed=len(parts.missing),
            by_layer=tuple(self._by_layer),
            chosen=parts.reused[self._chosen],
            flops=self._flops,
            flops_full=self._engine.shape.prefill(np.arange(parts.tokens)),
            flops_reused=self._flops_reused,
            policy=self._policy.name if self._ranked_at >= 0 else "",
            note=note,
        )


def _schedule(settings: Blend, layers: int, reused: int) -> tuple[list[int], int]:
    """How many reused tokens go through each layer, and the layer that ranks them (-1: nothing to rank).

    Nobody reads what the last layer makes of a reused token: there its K/V are all that is wanted.
    """
    if reused == 0 or settings.ratio == 0:
        return [0] * layers, -1
    start = settings.check_layer if settings.chosen_policy.probes else 0
    counts = settings.counts(reused, layers - 1 - start)
    ranked_at = start if any(count < reused for count in counts) else -1
    return [*[reused] * start, *counts, 0], ranked_at
