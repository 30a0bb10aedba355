"""Prefill through a real server process: hits, misses, and fetches that fail midway (E09)."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hypercache
from hypercache.blend import Blend, Report
from hypercache.blend.selector import Selector, Trained
from hypercache.cli.local_server import local_server
from hypercache.client import SyncClient, connect_sync
from hypercache.engines import cached, selectors
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


# --- K/V of another context: S, A, B stored, S, five tokens, B, A asked

S, A, B = prompt(32, 31), prompt(96, 32), prompt(160, 33)
STORED = np.concatenate([S, A, B, prompt(7, 34)])
ASKED = np.concatenate([S, prompt(5, 35), B, A, prompt(11, 36)])
PLACES = [(37, 197), (197, 293)]


@pytest.fixture
def stocked(client: SyncClient) -> SyncClient:
    assert client.store(STORED, prefill(ENGINE, STORED).kv).stored == 18
    return client


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def test_documents_in_another_order_are_reused_and_repaired(stocked: SyncClient) -> None:
    cold = prefill(ENGINE, ASKED)
    errors = []
    for ratio in (0.0, 0.15, 1.0):
        got = prefill(ENGINE, ASKED, stocked, blend=Blend(ratio))
        assert got.fetch.hit_tokens == 32
        assert [(span.start, span.stop) for span in got.fetch.modular] == PLACES
        assert [(span.source, span.isolated) for span in got.fetch.modular] == [(128, False), (32, False)]
        assert got.fetch.wire_bytes == (32 + 256) * ENGINE.spec.token_nbytes()
        report = got.report
        assert report is not None
        assert (report.exact, report.reused, report.computed) == (32, 256, 16)
        through = report.by_layer[1:7]  # layer 0 was computed to look, of the last one K/V are enough
        assert ratio * 256 <= np.mean(through) < ratio * 256 + 1 and max(through) == report.recomputed
        assert got.kv.exact == (37 if ratio < 1 else 304)  # the tokens put in between are exact as well
        errors.append(relative(got.logits, cold.logits))
    same(got, cold)
    assert errors[0] > errors[1] > errors[2]


def test_without_a_blend_nothing_of_another_context_is_used(stocked: SyncClient) -> None:
    got = prefill(ENGINE, ASKED, stocked)
    assert got.fetch.hit_tokens == 32 and got.fetch.modular == () and got.report is None
    same(got, prefill(ENGINE, ASKED))


def selector(*features: str, **changes: Any) -> Selector:
    n = len(features)
    fields: dict[str, Any] = {
        "model": ENGINE.spec.fingerprint().hex(),
        "features": features,
        "mean": (0.0,) * n,
        "scale": (1.0,) * n,
        "weights": (1.0,) * n,
        "squares": (0.5,) * n,
        "bias": 0.0,
        "ratio": 0.15,
        "check_layer": 1,
        "trained": Trained(prompts=1, rows=256, source="00" * 16, layers=(1, 7)),
    }
    return Selector(**{**fields, **changes})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the selector for ENGINE is looked for, with an empty directory around it."""
    monkeypatch.setenv("HYPERCACHE_HOME", str(tmp_path))
    path = selectors.path_of(ENGINE.spec)
    assert path is not None and path.is_relative_to(tmp_path)
    path.parent.mkdir()
    yield path
    cached._calibrated.cache_clear()


def report_of(client: SyncClient, blend: Blend) -> Report:
    cached._calibrated.cache_clear()  # as in another process
    report = prefill(ENGINE, ASKED, client, blend=blend).report
    assert report is not None and report.reused == 256
    return report


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "no calibrated selector" in record.message]


def test_auto_is_the_selector_calibrated_for_the_model(
    stocked: SyncClient, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert report_of(stocked, Blend(0.15)).policy == "kv"
    selectors.save(selector("mass.0.3", "v.1"), place)
    assert report_of(stocked, Blend(0.15)).policy == "selector"
    assert report_of(stocked, Blend(0.15, "v")).policy == "v"
    assert warnings_in(caplog) == []


def test_a_selector_is_asked_at_the_check_layer_it_was_calibrated_for(
    stocked: SyncClient, place: Path
) -> None:
    selectors.save(selector("mass.0.3", "mass.3.0", check_layer=3), place)
    report = report_of(stocked, Blend(0.1, narrow=0.0))
    assert report.policy == "selector" and report.by_layer == (256, 256, 256, 26, 26, 26, 26, 0)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _home_is_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_bytes(b"")


UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no selector": (lambda path: path.write_text("{}"), "is no selector"),
    "directory": (lambda path: path.mkdir(), "cannot be read: not a regular file"),
    "pipe": (_pipe, "cannot be read: not a regular file"),
    "endless": (lambda path: path.symlink_to("/dev/zero"), "cannot be read: not a regular file"),
    "loop": (lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
    "home is a file": (_home_is_a_file, "cannot be read: Not a directory"),
} | {
    name: (lambda path, made=made: selectors.save(made, path), told)
    for name, made, told in (
        ("no such layer", selector("place", check_layer=99), "check_layer 99 leaves nothing to choose"),
        ("nothing left to choose", selector("place", check_layer=7), "it must be in 1..6"),
        ("looks too deep", selector("mass.2.0"), "must be in 0..1, the check layer"),
        ("no such head", selector("place", "mass.1.8"), "'mass.1.8': this model has no such head"),
        ("no such K/V head", selector("k.99"), "'k.99': this model has no such head"),
        ("no number", selector("place", weights=(1e308,), bias=1e308), "scores would not be finite"),
    )
}


@pytest.mark.parametrize(("write", "told"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_a_selector_that_cannot_be_used_is_told_once_and_not_in_the_way(
    write: Callable[[Path], object],
    told: str,
    stocked: SyncClient,
    place: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write(place)
    assert report_of(stocked, Blend(0.15)).policy == "kv"
    again = prefill(ENGINE, ASKED, stocked, blend=Blend(0.15))
    assert again.report is not None and again.report.policy == "kv"
    (warning,) = warnings_in(caplog)
    assert told in warning and str(place) in warning


def test_a_home_that_cannot_be_searched_is_not_in_the_way(
    stocked: SyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HYPERCACHE_HOME", str(tmp_path / ("x" * 300)))
    assert report_of(stocked, Blend(0.15)).policy == "kv"
    assert "cannot be read: File name too long" in warnings_in(caplog)[0]
    if os.geteuid() != 0:  # root may search everything
        (tmp_path / "closed").mkdir(mode=0)
        monkeypatch.setenv("HYPERCACHE_HOME", str(tmp_path / "closed"))
        assert report_of(stocked, Blend(0.15)).policy == "kv"
        assert "cannot be read: Permission denied" in warnings_in(caplog)[1]
    cached._calibrated.cache_clear()


def test_numbers_far_out_in_a_selector_are_no_warning(stocked: SyncClient, place: Path) -> None:
    selectors.save(selector("v.0", "place", mean=(1e308, 0.0), scale=(1e-308, 1.0)), place)
    assert report_of(stocked, Blend(0.15)).policy == "selector"


def test_a_model_of_one_layer_is_told_that_a_blend_has_nothing_to_repair() -> None:
    one = ReferenceModel(dataclasses.replace(ENGINE.config, layers=1))
    with pytest.raises(SpecError, match="a model of one layer has nothing to repair"):
        prefill(one, prompt(20), blend=Blend())
    assert prefill(one, prompt(20)).kv.exact == 20


def test_ids_outside_the_vocabulary_are_refused_with_their_place(stocked: SyncClient) -> None:
    asked = ASKED.copy()
    asked[300] = 512
    with pytest.raises(TokenError, match=r"token 300 is 512; this model's token ids are in 0\.\.511"):
        prefill(ENGINE, asked, stocked, blend=Blend())


def test_segments_say_what_may_move(stocked: SyncClient) -> None:
    got = prefill(ENGINE, ASKED, stocked, blend=Blend(1.0), segments=[(200, 293)])
    assert [(span.start, span.stop) for span in got.fetch.modular] == [(213, 293)]  # blocks of A within
    same(got, prefill(ENGINE, ASKED))
    with pytest.raises(SpecError, match=r"segments are of use with blend=Blend\(\.\.\.\) alone"):
        prefill(ENGINE, ASKED, stocked, segments=[(200, 293)])


def test_what_only_approximates_is_never_stored(stocked: SyncClient) -> None:
    """Approximate K/V under an exact digest would poison every later hit."""
    first = generate(ENGINE, ASKED, 3, stocked, blend=Blend(0.15))
    assert first.report is not None and first.report.reused == 256
    assert first.store.stored == 0 and "approximate" in first.store.reason
    again = prefill(ENGINE, ASKED, stocked)
    assert again.fetch.hit_tokens == 32
    same(again, prefill(ENGINE, ASKED))
    whole = generate(ENGINE, ASKED, 3, stocked, blend=Blend(1.0))  # all anew: exact, and stored
    assert whole.store.stored == 17 and whole.store.reason == ""
    exact = prefill(ENGINE, ASKED, stocked, blend=Blend(0.15))
    assert exact.fetch.hit_tokens == 288 and exact.fetch.modular == ()
    assert exact.report is not None and "nothing was blended: all of it is an exact hit" in exact.report.note
    same(exact, prefill(ENGINE, ASKED))


def test_buffers_that_were_blended_into_are_exact_again_where_computed_anew(stocked: SyncClient) -> None:
    """And nowhere else: a shorter prompt leaves approximate ones behind it."""
    kv = KVBuffers.allocate(ENGINE.spec, len(ASKED))
    other = prompt(60, 40)
    for blend, caching in ((None, False), (Blend(0.15), False), (None, True), (Blend(0.15), True)):
        prefill(ENGINE, ASKED, stocked, kv, blend=Blend(0.15))
        assert kv.exact == 37
        found = prefill(ENGINE, other, stocked if caching else None, kv, blend=blend)
        assert kv.exact == len(other)
        greedy(ENGINE, found, 4)
        assert kv.exact == len(other) + 3
    prefill(ENGINE, ASKED, stocked, kv, blend=Blend(0.15))
    kv.mark_approximate(5)  # of a prompt before
    prefill(ENGINE, ASKED, stocked, kv, blend=Blend(0.15))
    assert kv.exact == 37  # 32 came, five were computed
    got = prefill(ENGINE, ASKED, stocked, kv, blend=Blend(0.15))
    greedy(ENGINE, dataclasses.replace(got, tokens=300), 3)
    assert kv.exact == 37


def test_a_blend_without_a_cache_or_a_find_says_that_it_did_nothing(client: SyncClient) -> None:
    for cache in (None, client):
        got = prefill(ENGINE, ASKED, cache, blend=Blend())
        assert got.report is not None and got.report.computed == len(ASKED)
        assert got.report.note == f"nothing was blended: {got.fetch.reason}" and got.fetch.reason
        np.testing.assert_array_equal(got.logits, prefill(ENGINE, ASKED).logits)


@pytest.mark.parametrize("layer", [0, 1, 4, 7])
@pytest.mark.parametrize("fault", ["end", "corrupt"])
async def test_e09_a_fetch_out_of_context_that_fails_at_layer_k_costs_time_alone(
    uri: str, stocked: SyncClient, fault: str, layer: int
) -> None:
    cold = prefill(ENGINE, ASKED)
    layer_nbytes = 288 * ENGINE.spec.token_nbytes() // 8
    async with proxied(uri) as proxy:
        through = await asyncio.to_thread(
            connect_sync, proxy.uri, model=ENGINE.spec, codec="raw", tenant=TenantKey.public()
        )
        answer = await asyncio.to_thread(through.match, ASKED, modular=True)
        assert [(span.start, span.stop) for span in answer.modular] == PLACES
        at = proxy.back.passed + layer * layer_nbytes + layer_nbytes * 3 // 4
        if fault == "end":
            proxy.back.end_at = at
        else:
            proxy.back.corrupt_at = at
        healed = await asyncio.to_thread(prefill, ENGINE, ASKED, through, blend=Blend(0.15))
        await asyncio.to_thread(through.close)
    assert healed.fetch.reason and healed.report is not None
    if healed.report.reused:  # known before anything was built on it: what did come is used
        assert fault == "corrupt" and healed.report.reused < 256 and healed.report.note == ""
        assert relative(healed.logits, cold.logits) < 0.2  # bytes that were not verified would give about 1
    else:
        assert "lost on the way" in healed.report.note
        same(healed, cold)
        assert healed.kv.exact == len(ASKED)


def test_blocks_out_of_context_that_vanish_after_the_match_are_recomputed(stocked: SyncClient) -> None:
    healed = prefill(ENGINE, ASKED, Forgetful(stocked), blend=Blend())  # type: ignore[arg-type]
    assert healed.fetch.hit_tokens == 0 and healed.fetch.modular == ()
    assert healed.report is not None and "lost on the way" in healed.report.note
    np.testing.assert_array_equal(healed.logits, prefill(ENGINE, ASKED).logits)
    assert healed.kv.exact == len(ASKED)


def test_an_engine_that_cannot_blend_is_told_before_anything_is_fetched(stocked: SyncClient) -> None:
    class Plain:
        spec, run = ENGINE.spec, ENGINE.run

    with pytest.raises(SpecError, match=r"Plain does not compute layer by layer; use .*LayeredTransformer"):
        prefill(Plain(), ASKED, stocked, blend=Blend())
    with pytest.raises(SpecError, match=r"blend must be Blend, got float; .*Blend\(ratio=0.15\)"):
        prefill(ENGINE, ASKED, stocked, blend=0.15)  # type: ignore[arg-type]


def test_what_was_switched_off_is_named_beside_an_exact_hit(stocked: SyncClient, uri: str) -> None:
    """The prefix hits, so the fetch has no reason to give; the blend has."""
    with connect_sync(uri, model=ENGINE.spec, codec="raw", modular=False) as client:
        got = prefill(ENGINE, ASKED, client, blend=Blend())
    assert got.fetch.hit_tokens == 32 and got.report is not None
    assert got.report.note == f"nothing was blended: {client.modular_refusal}"


def test_short_documents_are_reused_where_a_short_run_is_allowed(client: SyncClient) -> None:
    document = prompt(40, 71)
    client.store(document, prefill(ENGINE, document).kv)
    asked = np.concatenate([prompt(5, 72), document, prompt(5, 73)])
    assert prefill(ENGINE, asked, client, blend=Blend()).fetch.modular == ()
    found = generate(ENGINE, asked, 1, client, blend=Blend(), min_run=32)
    assert found.report is not None and found.report.reused == 32
