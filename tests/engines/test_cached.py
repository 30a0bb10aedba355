"""Prefill through a real server process: hits, misses, and fetches that fail midway (E09)."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hypercache
from hypercache.cli.local_server import local_server
from hypercache.client import SyncClient, connect_sync
from hypercache.engines.cached import Prefilled, generate, greedy, prefill
from hypercache.engines.reference import ReferenceConfig, ReferenceModel
from hypercache.errors import SpecError, TokenError
from hypercache.keys import TenantKey
from hypercache.kv import KVBuffers
from hypercache.model import KVDtype

sys.path.append(str(Path(__file__).parents[1] / "fabrics"))
from proxy import proxied

# Little to compute, with K/V so heavy (64 KiB a token) that each layer travels in several frames.
ENGINE = ReferenceModel(ReferenceConfig(layers=8, hidden=32, heads=8, kv_heads=8, head_dim=128, mlp=32))


@pytest.fixture(scope="module")
def uri() -> Iterator[str]:
    with local_server("256MiB") as ready:
        yield ready["uris"][0]


@pytest.fixture
def client(uri: str) -> Iterator[SyncClient]:
    with connect_sync(
        uri, model=ENGINE.spec, codec="raw", tenant=TenantKey.public(), deadline=30.0
    ) as client:
        yield client
        client.clear()


def prompt(length: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 512, length)


def same(a: Prefilled, b: Prefilled) -> None:
    np.testing.assert_allclose(a.logits, b.logits, atol=2e-4)
    for i in range(8):
        for ours, theirs in zip(a.kv.layer(i), b.kv.layer(i), strict=True):
            np.testing.assert_allclose(ours[:, : a.tokens], theirs[:, : a.tokens], atol=2e-4)


def test_a_second_engine_decodes_the_same_tokens(uri: str, client: SyncClient) -> None:
    ids = prompt(200)
    first = generate(ENGINE, ids, 12, client)
    assert first.fetch.hit_tokens == 0 and first.store.stored == 12
    asked = np.append(ids[:150], prompt(20, seed=9))  # another question about the same text
    cold = prefill(ENGINE, asked, None, KVBuffers.allocate(ENGINE.spec, 182))
    with connect_sync(
        uri, model=ReferenceModel(ENGINE.config).spec, codec="raw", tenant=TenantKey.public()
    ) as other:
        hit = prefill(ENGINE, asked, other, KVBuffers.allocate(ENGINE.spec, 182))
        assert hit.fetch.hit_tokens == 144 and hit.fetch.wire_bytes == 144 * ENGINE.spec.token_nbytes()
        same(hit, cold)
        assert greedy(ENGINE, hit, 12) == greedy(ENGINE, cold, 12)
        second = generate(ENGINE, asked, 12, other)
    assert second.fetch.hit_tokens == 144 and second.store.stored == 1  # only what is new
    assert second.tokens == greedy(ENGINE, cold, 12)


def test_l05_c01_a_prompt_that_is_cached_in_full_leaves_one_token_and_nothing_to_store(
    client: SyncClient,
) -> None:
    for length in (1, 15, 16, 17, 32, 64):
        ids = prompt(length, seed=length)
        first = generate(ENGINE, ids, 3, client)
        again = generate(ENGINE, ids, 3, client)
        assert again.tokens == first.tokens
        assert again.fetch.hit_tokens == (length - 1) // 16 * 16
        assert again.store.stored == 0


@pytest.mark.parametrize("layer", [0, 3, 7])
@pytest.mark.parametrize("fault", ["end", "corrupt"])
async def test_e09_a_fetch_that_fails_at_layer_k_is_recomputed_for_all_layers(
    uri: str, client: SyncClient, fault: str, layer: int
) -> None:
    ids = prompt(200)
    cold = prefill(ENGINE, ids)
    client.store(ids, cold.kv)
    layer_nbytes = 192 * ENGINE.spec.token_nbytes() // 8
    async with proxied(uri) as proxy:
        tenant = TenantKey.public()
        through = await asyncio.to_thread(
            connect_sync, proxy.uri, model=ENGINE.spec, codec="raw", tenant=tenant
        )
        assert through.match(ids[:1]).hit_tokens == 0  # answered without asking; the link is up and silent
        at = proxy.back.passed + layer * layer_nbytes + layer_nbytes // 2
        if fault == "end":
            proxy.back.end_at = at
        else:
            proxy.back.corrupt_at = at
        healed = await asyncio.to_thread(prefill, ENGINE, ids, through)
        await asyncio.to_thread(through.close)
    assert healed.fetch.hit_tokens < 192 and healed.fetch.reason
    assert healed.fetch.wire_bytes >= layer * layer_nbytes
    if fault == "end":
        assert healed.fetch.hit_tokens == 0
    same(healed, cold)


class Forgetful:
    """A real client whose server is emptied between ``match`` and the fetch."""

    def __init__(self, client: SyncClient) -> None:
        self._client = client
        self.model, self.match = client.model, client.match

    def start_fetch(self, match: Any, into: Any) -> Any:
        self._client.clear()
        return self._client.start_fetch(match, into)


def test_e09_blocks_that_vanish_between_match_and_fetch_are_recomputed(client: SyncClient) -> None:
    ids = prompt(100)
    cold = prefill(ENGINE, ids)
    client.store(ids, cold.kv)
    healed = prefill(ENGINE, ids, Forgetful(client))  # type: ignore[arg-type]
    assert healed.fetch.hit_tokens == 0
    np.testing.assert_array_equal(healed.logits, cold.logits)


def test_c06_only_the_matched_blocks_are_loaded_and_the_rest_is_computed(client: SyncClient) -> None:
    ids = prompt(100)
    wrong = prefill(ENGINE, prompt(100, seed=2))  # K/V that would show if more than 48 tokens were taken
    client.store(ids[:48], prefill(ENGINE, ids[:48]).kv)
    hit = prefill(ENGINE, ids, client)
    assert hit.fetch.hit_tokens == 48
    same(hit, prefill(ENGINE, ids))
    assert np.abs(hit.logits - wrong.logits).max() > 0.1


def test_a05_embeddings_without_ids_share_nothing(client: SyncClient) -> None:
    for nothing in (None, [], np.empty(0, np.int64)):
        with pytest.raises(SpecError, match="no identity"):
            generate(ENGINE, nothing, 4, client)
    with pytest.raises(TokenError):
        generate(ENGINE, np.zeros((20, 32), np.float32), 4, client)
    assert client.match(None).hit_tokens == 0
    assert client.clear() == 0


def test_another_models_client_is_refused_with_what_differs(client: SyncClient) -> None:
    for other, told in {
        ReferenceModel(ENGINE.config, seed=8): r"weights: \w{16}\.\.\., \w{16}\.\.\.\)",
        ReferenceModel(dataclasses.replace(ENGINE.config, layers=2)): r"weights: .*; layers: 8, 2\)",
        ReferenceModel(dataclasses.replace(ENGINE.config, kv_dtype=KVDtype.FP16)): r"dtype: fp32, fp16\)",
    }.items():
        with pytest.raises(
            SpecError, match=rf"own spec \(client's, engine's: .*{told}; connect with model=engine\.spec"
        ):
            prefill(other, prompt(20), client)
        with pytest.raises(SpecError, match=rf"{told}; allocate them with engine\.spec"):
            other.run(prompt(8), KVBuffers.allocate(ENGINE.spec, 8), 0)


async def test_what_is_no_engine_and_no_blocking_client_is_refused(uri: str) -> None:
    ids: Any = prompt(20)
    for engine in ("meta-llama/Llama-3.2-1B", None, ENGINE.spec, ReferenceModel):
        with pytest.raises(SpecError, match=r"an engine must have spec and run, got .*TransformersEngine"):
            prefill(engine, ids)  # type: ignore[arg-type]
        with pytest.raises(SpecError, match=r"an engine must have spec and run"):
            generate(engine, ids, 2, None)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"generate needs a client, got None; without a cache call greedy"):
        generate(ENGINE, ids, 2, None)  # type: ignore[arg-type]
    client: Any
    async with await hypercache.connect(uri, model=ENGINE.spec, codec="raw") as client:
        for call in (lambda: prefill(ENGINE, ids, client), lambda: generate(ENGINE, ids, 2, client)):
            with pytest.raises(
                SpecError, match=r"asynchronous, and engines block; use hypercache\.connect_sync"
            ):
                call()
    for client in (uri, ENGINE, 7):
        with pytest.raises(SpecError, match=r"a client is needed, got \w+; use|asynchronous"):
            generate(ENGINE, ids, 2, client)


def test_the_count_of_tokens_is_checked(client: SyncClient) -> None:
    for count in (-1, "2", 1.5, None):
        with pytest.raises(SpecError, match="count of tokens to generate must be an integer >= 0"):
            generate(ENGINE, prompt(20), count, client)  # type: ignore[arg-type]
    assert generate(ENGINE, prompt(20), 0, client).tokens == []


def test_a_dead_or_frozen_server_costs_the_deadline_and_nothing_else() -> None:
    ids = prompt(100)
    cold = prefill(ENGINE, ids, None, KVBuffers.allocate(ENGINE.spec, 104))
    want = greedy(ENGINE, cold, 4)
    with (
        local_server("64MiB") as ready,
        connect_sync(
            ready["uris"][0], model=ENGINE.spec, codec="raw", tenant=TenantKey.public(), deadline=1.0
        ) as client,
    ):
        assert generate(ENGINE, ids, 4, client).store.stored == 6
        os.kill(ready["pid"], signal.SIGSTOP)
        frozen = generate(ENGINE, ids, 4, client)
        os.kill(ready["pid"], signal.SIGCONT)
        assert frozen.tokens == want and frozen.fetch.hit_tokens == 0 and frozen.fetch.reason
        os.kill(ready["pid"], signal.SIGKILL)
        dead = generate(ENGINE, ids, 4, client)
        assert dead.tokens == want and dead.fetch.hit_tokens == 0 and dead.store.stored == 0
