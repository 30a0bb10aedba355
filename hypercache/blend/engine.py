"""Run an engine over a prompt that is exact in part, in part of another context, and in part missing.

K/V of layer 0 depend on a token and its position alone: after rotation they are exact. What a token attends
to in its new context comes in from layer 1 on. So the layers before the check layer are computed for all
reused tokens, a policy ranks them there, and only the best are computed on (CacheBlend, Yao et al. 2024,
arXiv:2405.16444). K/V computed on the way are always kept: those up to the check layer are exact for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hypercache.blend.flops import Shape
from hypercache.blend.plan import Blend, Blended, Plan, Report, Reused, plan
from hypercache.blend.policies import Deviation, Seen, choose, scored
from hypercache.checks import typed
from hypercache.errors import SpecError, TokenError
from hypercache.keys import canonical_tokens
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
    @property
    def vocab(self) -> int:
        """Token ids are below it."""

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

    Raises SpecError for spans and settings that do not fit, for another model's K/V, and for a policy whose
    scores rank nothing; TokenError for what is not token ids of this model.
    """
    check(engine, kv, settings)
    tokens = _token_ids(ids, engine.vocab)
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
    if kv.exact >= parts.exact:
        kv.mark_exact(len(tokens) if work.exact else int(parts.reused[0]))
    hidden = engine.hidden(rows)
    return Blended(engine.logits(hidden[-1]), hidden, parts.missing, work.report())


def check(engine: Any, kv: KVBuffers, settings: Blend) -> None:
    """Raises SpecError unless ``engine`` works layer by layer and ``kv`` and ``settings`` fit it."""
    typed("blend settings", settings, Blend, "for example Blend(ratio=0.15)")
    if not all(hasattr(engine, name) for name in ("spec", "shape", "vocab", "embed", "attend")):
        raise SpecError(
            f"{type(engine).__name__} does not compute layer by layer; "
            "use hypercache.engines.layered.LayeredTransformer(model) or the reference engine"
        )
    if kv.spec != engine.spec:
        raise SpecError(
            f"these K/V belong to another model ({kv.spec.name!r}; theirs, this engine's: "
            f"{kv.spec.differences(engine.spec)}); allocate them with engine.spec"
        )
    _check_layers(settings, engine.shape.layers)


def rehearse(settings: Blend, shape: Shape) -> None:
    """Raises SpecError unless the policy in ``settings`` can be asked in a model of ``shape``, and scores a
    token there: whether the model has the layers and heads that it looks at."""
    _check_layers(settings, shape.layers)
    policy, place = settings.chosen_policy, np.zeros(1, np.intp)
    deviation = np.zeros((1, shape.kv_heads if policy.probes else 0, 2), np.float32)
    mass = {layer: np.zeros((1, shape.heads), np.float32) for layer in policy.mass_layers}
    scored(policy, Seen(place, place, place, 1, deviation, mass))


def _check_layers(settings: Blend, layers: int) -> None:
    if layers < 2:
        raise SpecError(
            "a model of one layer has nothing to repair: K/V of layer 0 depend on a token and its position "
            "alone, so they are exact once moved; run it without a blend"
        )
    last = max(1, layers - 2)  # from all of the layer before it, K/V of the last layer are exact for all
    if settings.check_layer > last:
        raise SpecError(
            f"check_layer {settings.check_layer} leaves nothing to choose in a model of {layers} layers: all "
            f"reused tokens would be recomputed; it must be in 1..{last}"
        )


def _token_ids(ids: Any, vocab: int) -> Array:
    tokens = canonical_tokens(ids)
    if len(tokens) and int(tokens.max()) >= vocab:
        index = int(np.argmax(tokens >= vocab))
        raise TokenError(f"token {index} is {tokens[index]}; this model's token ids are in 0..{vocab - 1}")
    return tokens


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
        if self._ranked_at == 0:  # a policy that needs no look
            self._rank(np.empty((len(self._alive), 0, 2), np.float32))
        if self._wanted[0] < len(self._alive):
            self._chosen = self._alive = self._best(0)
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
        if self._looks(layer):
            deviation = engine.deviation(layer, self._of_reused(rows), kv)
        engine.keep(layer, rows, kv)
        if layer <= self._ranked_at and layer in self._policy.mass_layers:
            self._mass[layer] = self._cross_attention(layer, self._of_reused(rows))
        if deviation is not None:
            self._rank(deviation)
        if self._wanted[layer] < len(self._alive):
            rows = self._drop(layer, rows)
        self._by_layer.append(len(self._alive))
        reused = self._plan.reused[self._alive]
        self._spend(shape.attend(layer, self._positions), shape.attend(layer, reused))
        return engine.attend(layer, rows, kv)

    def _looks(self, layer: int) -> bool:
        """Whether the policy is to rank in ``layer`` by what is seen there. At the check layer, even if the
        first tokens are dropped later; behind it its order holds, except that a deviation is measured anew
        where some are dropped."""
        if layer == self._ranked_at:
            return self._policy.probes
        behind = isinstance(self._policy, Deviation) and layer > self._ranked_at
        return behind and 0 < self._wanted[layer] < len(self._alive)

    def _drop(self, layer: int, rows: Rows) -> Rows:
        """Only the missing ones, and the best of the reused."""
        stay = self._best(layer)
        if layer == self._ranked_at:
            self._chosen = stay
        kept = ~self._reused
        kept[np.flatnonzero(self._reused)[np.searchsorted(self._alive, stay)]] = True
        self._alive, self._positions, self._reused = stay, self._positions[kept], self._reused[kept]
        return self._engine.take(rows, np.flatnonzero(kept))

    def _rank(self, deviation: Array) -> None:
        """Ask the policy for the scores of those that are still computed."""
        parts, alive = self._plan, self._alive
        seen = Seen(
            _read_only(parts.reused[alive]),
            _read_only(parts.place[alive]),
            _read_only(parts.segment[alive]),
            int(parts.segment[-1]) + 1,
            _read_only(deviation),
            MappingProxyType({layer: _read_only(shares) for layer, shares in self._mass.items()}),
        )
        self._scores[alive] = scored(self._policy, seen)

    def _best(self, layer: int) -> Array:
        """Those of the reused tokens that are computed on through ``layer``."""
        scores, place = self._scores[self._alive], self._plan.place[self._alive]
        return self._alive[choose(scores, place, self._wanted[layer], self._settings.lead)]

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
            note = f"nothing was recomputed: ratio 0 takes all {len(parts.reused)} reused tokens as they are"
        elif self._engine.shape.layers == 2 and self._policy.probes and self._settings.ratio < 1:
            note = "nothing was chosen: once layer 0 is computed, all K/V of a model of two layers are exact"
        else:
            note = ""
        return Report(
            exact=parts.exact,
            reused=len(parts.reused),
            ratio=self._settings.ratio,
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


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view


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
