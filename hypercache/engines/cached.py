"""Prefill and generate through the cache: match, fetch, compute the rest, store what is new.

The engine computes layer by layer while later layers are still on their way. A fetch that fails, at any
layer, costs its time and nothing else: the tokens it did not bring are computed for all layers.

With ``blend``, blocks that were stored in another context are used as well, wherever they stand in the
prompt, and repaired in part (:mod:`hypercache.blend`): the result approximates a full prefill, and says what
was done. Such K/V are never stored.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from hypercache import checks
from hypercache.blend import Blend, Layered, Report, Reused, Shape, check, run
from hypercache.blend.selector import Selector
from hypercache.client import Client, FetchResult, Match, ModularSpan, StoreResult, SyncClient
from hypercache.client.plan import MIN_RUN
from hypercache.client.sync import SyncTransfer
from hypercache.engines import LayerReady, selectors
from hypercache.errors import HyperCacheError, SpecError
from hypercache.keys import canonical_tokens
from hypercache.kv import KVBuffers
from hypercache.model import ModelSpec

Array = npt.NDArray[Any]
_CONNECT = "hypercache.connect_sync(uri, model=engine.spec)"
_NOTHING = FetchResult(0, 0, 0)
_log = logging.getLogger("hypercache.engines")


class Engine(Protocol):
    """What an engine must do to be cached. It keeps no sequence: K/V live in the buffers it is given."""

    spec: ModelSpec

    def run(
        self, ids: Sequence[int] | Array, kv: KVBuffers, start: int, layer_ready: LayerReady | None = None
    ) -> Array:
        """Compute ``ids`` at positions ``start..`` after the past in ``kv`` and put their K/V there.

        Returns the logits ``(vocab,)`` that follow. ``layer_ready(i)`` precedes its use of layer ``i``.
        """


class LayerLost(HyperCacheError):
    """A layer that is being fetched will not come: compute its tokens instead."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt of ``tokens`` tokens that was run. logits: ``(vocab,)`` after it. ``kv`` has its K/V and room.

    ``fetch.hit_tokens`` of them came from the cache as they are, those in ``fetch.modular`` from another
    context; ``report`` says what a blend made of them, None without one.
    """

    tokens: int
    logits: Array
    kv: KVBuffers
    fetch: FetchResult
    report: Report | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """tokens: the greedy continuation. fetch and store: what the cache gave and took. report: see
    :class:`Prefilled`."""

    tokens: list[int]
    fetch: FetchResult
    store: StoreResult
    report: Report | None = None


def prefill(
    engine: Engine,
    tokens: Any,
    client: SyncClient | None = None,
    kv: KVBuffers | None = None,
    *,
    blend: Blend | None = None,
    segments: Sequence[tuple[int, int]] | None = None,
    min_run: int = MIN_RUN,
) -> Prefilled:
    """Run a prompt, through ``client``'s cache where one is given.

    kv: where its K/V go, with room for the prompt and whatever is to be decoded after it; None allocates for
        the prompt alone. An engine that serves reuses its buffers: fresh pages cost more than the transfer.
    blend: reuse K/V of other contexts too, and repair them so; needs an engine that works layer by layer
        (:class:`hypercache.blend.Layered`). Its policy "auto" is the selector calibrated for the engine's
        model, with the check layer it was calibrated for, if there is one that can be used:
        :mod:`hypercache.engines.selectors`.
    segments, min_run: with ``blend``, the spans of tokens that may move and the least tokens of a run, as in
        :meth:`Client.match`.

    Raises TokenError for what is not token ids, SpecError for an empty prompt, another model's client, and
    what is no engine or no blocking client.
    """
    _check_engine(engine)
    if client is not None:
        _check_client(client)
    if segments is not None and blend is None:
        raise SpecError("segments are of use with blend=Blend(...) alone: an exact prefix needs none")
    ids = canonical_tokens(tokens)
    if len(ids) == 0:
        raise SpecError(
            "the prompt is empty; embeddings without token ids have no identity and are not cached"
        )
    if kv is None:
        kv = KVBuffers.allocate(engine.spec, len(ids))
    if client is not None and client.model != engine.spec:
        raise SpecError(
            f"the client is connected for model {client.model.name!r}, not for the engine's own spec "
            f"(client's, engine's: {client.model.differences(engine.spec)}); connect with model=engine.spec"
        )
    if blend is not None:
        checks.typed("blend", blend, Blend, "for example blend=Blend(ratio=0.15)")
        check(engine, kv, blend)
        blend = _with_selector(blend, cast("Layered", engine))

    def compute(exact: int, modular: Sequence[ModularSpan], ready: LayerReady | None = None) -> Prefilled:
        if blend is None:
            logits = engine.run(ids[exact:], kv, exact, ready)
            kv.mark_exact(len(ids))  # whatever was there before; what is behind stays
            return Prefilled(len(ids), logits, kv, _NOTHING)
        spans = [Reused(span.start, span.stop) for span in modular]
        done = run(cast("Layered", engine), ids, kv, exact, spans, blend, ready)
        return Prefilled(len(ids), done.logits, kv, _NOTHING, done.report)

    if client is None:
        return _because(replace(compute(0, ()), fetch=replace(_NOTHING, reason="no cache")), "no cache")
    if blend is None:
        match = client.match(ids)
    else:
        match = client.match(ids, modular=True, segments=segments, min_run=min_run)
    if match.hit_tokens == 0 and not match.modular:
        found = replace(compute(0, ()), fetch=replace(_NOTHING, reason=match.reason))
    else:
        found = _while_fetched(client.start_fetch(match, kv), match, compute)
    if blend is None or match.modular:
        return found
    return _because(found, client.modular_refusal or match.reason or "all of it is an exact hit")


def _because(found: Prefilled, cause: str) -> Prefilled:
    """With ``cause`` in the note of a blend that found nothing to blend."""
    if found.report is None:
        return found
    return replace(found, report=replace(found.report, note=f"nothing was blended: {cause}"))


def _with_selector(blend: Blend, engine: Layered) -> Blend:
    if blend.policy != "auto" or blend.selector is not None:
        return blend
    found = _calibrated(engine.spec, engine.shape)
    return blend if found is None else replace(blend, selector=found)


@functools.lru_cache(maxsize=16)
def _calibrated(spec: ModelSpec, shape: Shape) -> Selector | None:
    """Read once a process. One that cannot be used is told, and is not in the way."""
    try:
        return selectors.find(spec, shape)
    except HyperCacheError as error:
        _log.warning(
            "no calibrated selector for %r, tokens are ranked by their deviation: %s", spec.name, error
        )
        return None


def _while_fetched(transfer: SyncTransfer, match: Match, compute: Callable[..., Prefilled]) -> Prefilled:
    """Compute while layers arrive, and again what did not."""
    try:
        good = match.hit_tokens, match.modular
        if match.modular and transfer.layer(0):
            good = transfer.tokens, transfer.modular  # what has gone since the match is known by now

        def arrived(layer: int) -> None:
            if not transfer.layer(layer) or (transfer.tokens, transfer.modular) != good:
                raise LayerLost(f"layer {layer} did not arrive")

        found = compute(*good, arrived)
    except LayerLost:
        found = None
    except BaseException:
        transfer.cancel()
        raise
    fetch = transfer.result()
    if found is None or (fetch.hit_tokens, fetch.modular) != good:
        # Whatever ran over tokens that did not come is void, in every layer; and what is left of another
        # context cannot be told any more from what was computed over it.
        found = compute(fetch.hit_tokens, ())
    if match.modular and found.report is not None and not found.report.reused:
        found = _because(found, f"K/V were lost on the way ({fetch.reason}), so all was computed")
    return replace(found, fetch=fetch)


def _check_engine(engine: Engine) -> None:
    if not isinstance(getattr(engine, "spec", None), ModelSpec) or not hasattr(engine, "run"):
        raise SpecError(
            f"an engine must have spec and run, got {type(engine).__name__}; wrap a loaded model: "
            "hypercache.engines.transformers.TransformersEngine(model)"
        )


def _check_client(client: SyncClient) -> None:
    if client is None:
        raise SpecError(
            "generate needs a client, got None; without a cache call "
            "greedy(engine, prefill(engine, tokens, None, kv), count)"
        )
    if isinstance(client, Client):
        raise SpecError(f"the client is asynchronous, and engines block; use {_CONNECT}")
    if not isinstance(getattr(client, "model", None), ModelSpec):
        raise SpecError(f"a client is needed, got {type(client).__name__}; use {_CONNECT}")


def greedy(engine: Engine, prefilled: Prefilled, count: int) -> list[int]:
    """The ``count`` likeliest next tokens, one by one. ``prefilled.kv`` needs room for ``count - 1`` more."""
    logits, out = prefilled.logits, []
    for position in range(prefilled.tokens, prefilled.tokens + count):
        out.append(int(np.argmax(logits)))
        if len(out) < count:
            logits = engine.run(out[-1:], prefilled.kv, position)
            if prefilled.kv.exact >= position:
                prefilled.kv.mark_exact(position + 1)
    return out


def generate(
    engine: Engine,
    tokens: Any,
    count: int,
    client: SyncClient,
    *,
    blend: Blend | None = None,
    segments: Sequence[tuple[int, int]] | None = None,
    min_run: int = MIN_RUN,
) -> Generation:
    """:func:`prefill` through the cache, then :func:`greedy`; new blocks that are exact are stored meanwhile.

    Raises as :func:`prefill`, and SpecError for a ``count`` below 0.
    """
    _check_engine(engine)
    _check_client(client)
    count = checks.count("count of tokens to generate", count, 0)
    ids = canonical_tokens(tokens)
    kv = KVBuffers.allocate(engine.spec, len(ids) + count)
    prefilled = prefill(engine, ids, client, kv, blend=blend, segments=segments, min_run=min_run)
    held = prefilled.fetch.hit_tokens
    saving = client.start_store(ids, prefilled.kv.window(0, len(ids)), start=held)
    out = greedy(engine, prefilled, count)
    return Generation(out, prefilled.fetch, saving.result(), prefilled.report)
