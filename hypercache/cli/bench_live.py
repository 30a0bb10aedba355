"""What the benchmark measures beside the codecs: hashing, the reference engine, a live server over TCP."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from hypercache.client import SyncClient, connect_sync
from hypercache.engines.cached import prefill
from hypercache.engines.reference import ReferenceConfig, ReferenceModel
from hypercache.errors import HyperCacheError
from hypercache.keys import Namespace, TenantKey, causal_digests
from hypercache.kv import KVBuffers
from hypercache.model import KVDtype, KVLayout, LayerGroup, ModelSpec, Part, RopeSpec

LIVE_CODECS = ("raw", "int8", "fp8")
DEADLINE_S = 60.0
ENGINE = ReferenceConfig(
    layers=8, hidden=512, heads=8, kv_heads=2, head_dim=64, mlp=1408, vocab=8192, kv_dtype=KVDtype.BF16
)


class NotMeasured(HyperCacheError):
    """A measurement did not do what it was to measure: its figure would mean nothing."""


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def kv_spec(layers: int = 32, heads: int = 8, dim: int = 128) -> ModelSpec:
    """The K/V shape of an 8-billion-parameter Llama: 128 KiB a token in bf16."""
    layout = KVLayout("split", heads, (Part("k", dim), Part("v", dim)), KVDtype.BF16)
    rope = RopeSpec("default", 500_000.0, dim)
    return ModelSpec(
        b"benchmark weights", (LayerGroup(tuple(range(layers)), layout, rope),), name="benchmark"
    )


def hashing(tokens: int = 1_000_000, rounds: int = 3) -> dict[str, float]:
    """Tokens a second that get their causal digests, one thread, for both block sizes."""
    ids = np.random.default_rng(1).integers(0, 128_000, tokens, dtype=np.uint32)
    tenant = TenantKey.public()
    rates: dict[str, float] = {}
    for block_size in (16, 64):
        ns = Namespace.build(kv_spec(), block_size=block_size, codec="raw", tenant=tenant)
        spent = [seconds(partial(causal_digests, ns, tenant, ids)) for _ in range(rounds)]
        rates[f"tokens_per_s_{block_size}"] = tokens / median(spent)
    return rates


def engine(
    uri: str, config: ReferenceConfig = ENGINE, prompt_tokens: int = 1024, rounds: int = 5
) -> dict[str, Any]:
    """The reference engine: prefill cold, and with its prefix from the live server (codec raw, lossless)."""
    model = ReferenceModel(config, seed=7)
    ids = np.random.default_rng(2).integers(0, config.vocab, prompt_tokens)
    colds = [prefill(model, ids)]
    cold_s = [seconds(lambda: colds.append(prefill(model, ids))) for _ in range(3)]
    cold = colds[-1]
    with connect_sync(uri, model=model.spec, codec="raw", deadline=DEADLINE_S) as client:
        client.store(ids, cold.kv)
        hits = [prefill(model, ids, client)]
        hit_s = [seconds(lambda: hits.append(prefill(model, ids, client))) for _ in range(rounds)]
    hit = hits[-1]
    if hit.fetch.hit_tokens == 0:
        raise NotMeasured(f"the reference engine's prompt was not served from the cache: {hit.fetch.reason}")
    return {
        "prompt_tokens": prompt_tokens,
        "hit_tokens": hit.fetch.hit_tokens,
        "prefill_tokens_per_s": prompt_tokens / median(cold_s),
        "ttft_cold_s": median(cold_s),
        "ttft_hit_s": median(hit_s),
        "logits_max_error": float(np.abs(cold.logits - hit.logits).max()),
        "logits_max": float(np.abs(cold.logits).max()),
    }


def live(uri: str, blocks: int = 64, rounds: int = 5) -> dict[str, Any]:
    """Store ``blocks`` blocks of 16 tokens and fetch them back through a server in another process.

    gbps: K/V bytes in the engine's own dtype (bf16) in place, decoded and verified, per second.
    wire_gbps: bytes on the wire per second. memcpy_gbps: a copy of the same K/V, in turn with the fetches.
    """
    spec = kv_spec()
    tokens = blocks * 16 + 1  # one more: a hit leaves the last token to compute
    source, target, copied = (KVBuffers.allocate(spec, blocks * 16) for _ in range(3))
    fill(source)
    prompt = np.random.default_rng(3).integers(0, 128_000, tokens)
    clients = {
        codec: connect_sync(uri, model=spec, codec=codec, deadline=DEADLINE_S) for codec in LIVE_CODECS
    }
    rows: dict[str, Any] = {"kv_bytes": source.nbytes, "blocks": blocks}
    try:
        stores = {codec: _store(client, prompt, source) for codec, client in clients.items()}
        fetches: dict[str, list[float]] = {codec: [] for codec in clients}
        wire: dict[str, int] = {}
        copies = []
        _copy(copied, source)  # the first touch of memory is no copy
        for _ in range(rounds):
            copies.append(seconds(lambda: _copy(copied, source)))
            for codec, client in clients.items():
                began = time.perf_counter()
                result = client.fetch(prompt, target)
                fetches[codec].append(time.perf_counter() - began)
                if result.hit_tokens != blocks * 16:
                    raise NotMeasured(
                        f"{codec}: {result.hit_tokens} of {blocks * 16} tokens: {result.reason}"
                    )
                wire[codec] = result.wire_bytes
        rows["memcpy_gbps"] = source.nbytes / median(copies) / 1e9
        for codec, client in clients.items():
            spent = median(fetches[codec])
            client.fetch(prompt, target)
            rows[codec] = {
                "gbps": source.nbytes / spent / 1e9,
                "to_memcpy": median(copies) / spent,
                "wire_gbps": wire[codec] / spent / 1e9,
                "wire_bytes": wire[codec],
                "store_gbps": source.nbytes / stores[codec] / 1e9,
                "identical": _identical(source, target),
            }
    finally:
        for client in clients.values():
            client.close()
    return rows


def fill(kv: KVBuffers) -> None:
    """Gaussian bf16 K/V: the same in all layers, which no codec can make use of."""
    first = kv.layer(0)
    for index, part in enumerate(first):
        normal = np.random.default_rng(index).standard_normal(part.shape, np.float32)
        part[...] = (normal.view(np.uint32) >> 16).astype(np.uint16)
    for layer in range(1, kv.spec.num_layers):
        for part, source in zip(kv.layer(layer), first, strict=True):
            part[...] = source


def _store(client: SyncClient, prompt: npt.NDArray[Any], source: KVBuffers) -> float:
    began = time.perf_counter()
    result = client.store(prompt, source)
    spent = time.perf_counter() - began
    if result.stored != result.blocks:
        raise NotMeasured(
            f"{client!r} stored {dict(result.outcome)} of {result.blocks} blocks: {result.reason}"
        )
    return spent


def _copy(target: KVBuffers, source: KVBuffers) -> None:
    for layer in range(source.spec.num_layers):
        for into, part in zip(target.layer(layer), source.layer(layer), strict=True):
            np.copyto(into, part)


def _identical(a: KVBuffers, b: KVBuffers) -> bool:
    layers = range(a.spec.num_layers)
    return all(np.array_equal(x, y) for i in layers for x, y in zip(a.layer(i), b.layer(i), strict=True))
