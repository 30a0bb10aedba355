"""Prefill and generate through the cache: match, fetch, compute the rest, store what is new.

The engine computes layer by layer while later layers are still on their way. A fetch that fails, at any
layer, costs its time and nothing else: the tokens it did not bring are computed for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hypercache import checks
from hypercache.client import Client, FetchResult, StoreResult, SyncClient
from hypercache.engines import LayerReady
from hypercache.errors import HyperCacheError, SpecError
from hypercache.keys import canonical_tokens
from hypercache.kv import KVBuffers
from hypercache.model import ModelSpec

Array = npt.NDArray[Any]
_CONNECT = "hypercache.connect_sync(uri, model=engine.spec)"


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

    ``fetch.hit_tokens`` of them came from the cache.
    """

    tokens: int
    logits: Array
    kv: KVBuffers
    fetch: FetchResult


@dataclass(frozen=True, slots=True)
class Generation:
    """tokens: the greedy continuation. fetch and store: what the cache gave and took."""

    tokens: list[int]
    fetch: FetchResult
    store: StoreResult


def prefill(
    engine: Engine, tokens: Any, client: SyncClient | None = None, kv: KVBuffers | None = None
) -> Prefilled:
    """Run a prompt, through ``client``'s cache where one is given.

    kv: where its K/V go, with room for the prompt and whatever is to be decoded after it; None allocates for
        the prompt alone. An engine that serves reuses its buffers: fresh pages cost more than the transfer.

    Raises TokenError for what is not token ids, SpecError for an empty prompt, another model's client, and
    what is no engine or no blocking client.
    """
    _check_engine(engine)
    if client is not None:
        _check_client(client)
    ids = canonical_tokens(tokens)
    if len(ids) == 0:
        raise SpecError(
            "the prompt is empty; embeddings without token ids have no identity and are not cached"
        )
    if kv is None:
        kv = KVBuffers.allocate(engine.spec, len(ids))
    if client is None:
        return Prefilled(len(ids), engine.run(ids, kv, 0), kv, FetchResult(0, 0, 0, "no cache"))
    if client.model != engine.spec:
        raise SpecError(
            f"the client is connected for model {client.model.name!r}, not for the engine's own spec "
            f"(client's, engine's: {client.model.differences(engine.spec)}); connect with model=engine.spec"
        )
    match = client.match(ids)
    if match.hit_tokens == 0:
        return Prefilled(len(ids), engine.run(ids, kv, 0), kv, FetchResult(0, 0, 0, match.reason))
    transfer = client.start_fetch(match, kv)

    def arrived(layer: int) -> None:
        if not transfer.layer(layer) or transfer.tokens < match.hit_tokens:
            raise LayerLost(f"layer {layer} did not arrive")

    logits: Array | None = None
    try:
        logits = engine.run(ids[match.hit_tokens :], kv, match.hit_tokens, arrived)
    except LayerLost:
        pass
    except BaseException:
        transfer.cancel()
        raise
    fetch = transfer.result()
    if logits is None or fetch.hit_tokens != match.hit_tokens:
        # Whatever ran over tokens that did not come is void, in every layer.
        logits = engine.run(ids[fetch.hit_tokens :], kv, fetch.hit_tokens)
    return Prefilled(len(ids), logits, kv, fetch)


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
    return out


def generate(engine: Engine, tokens: Any, count: int, client: SyncClient) -> Generation:
    """:func:`prefill` through the cache, then :func:`greedy`; new blocks are stored meanwhile.

    Raises as :func:`prefill`, and SpecError for a ``count`` below 0.
    """
    _check_engine(engine)
    _check_client(client)
    count = checks.count("count of tokens to generate", count, 0)
    ids = canonical_tokens(tokens)
    prefilled = prefill(engine, ids, client, KVBuffers.allocate(engine.spec, len(ids) + count))
    held = prefilled.fetch.hit_tokens
    saving = client.start_store(ids, prefilled.kv.window(0, len(ids)), start=held)
    out = greedy(engine, prefilled, count)
    return Generation(out, prefilled.fetch, saving.result())
