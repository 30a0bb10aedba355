"""Counters obey their identities and never hurt who counts (O01-O03 as far as a node's metrics reach)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import generate_latest

import hypercache
from fabrics.errors import FrameError
from hypercache.protocol import ErrorCode
from hypercache.server.config import ServerConfig
from hypercache.server.metrics import (
    L3_TEXTS,
    L3_TOTALS,
    LABEL_LIMIT,
    PROTOCOL_ERRORS,
    STORE_TEXTS,
    Metrics,
    flat,
)
from hypercache.server.node import Node
from hypercache.store.disk import Disk


def test_asked_is_hit_plus_missed() -> None:
    metrics = Metrics()
    rng = random.Random(7)
    for _ in range(200):
        asked = rng.randrange(0, 50)
        hit = rng.randrange(0, asked + 1)
        match rng.randrange(3):
            case 0:
                metrics.matched(asked=asked, hit=hit)
            case 1:
                metrics.located(asked=asked, hit=hit, probes=1, modular=0)
            case _:
                metrics.fetch_started(asked=asked, hit=hit, modular_asked=2 * asked, modular_hit=asked)
    now = metrics.snapshot()
    for op in ("match", "fetch", "fetch_modular"):
        parts = (
            now[f'hypercache_blocks_hit_total{{op="{op}"}}'],
            now[f'hypercache_blocks_missed_total{{op="{op}"}}'],
        )
        assert min(parts) > 0
        assert now[f'hypercache_blocks_asked_total{{op="{op}"}}'] == sum(parts)


def test_o03_impossible_values_are_counted_as_errors_and_nothing_else() -> None:
    metrics = Metrics()
    metrics.matched(asked=4, hit=2)
    before = metrics.snapshot()
    metrics.matched(asked=4, hit=5)
    metrics.matched(asked=4, hit=-1)
    metrics.fetch_finished("ok", -7680)
    after = metrics.snapshot()
    assert after["hypercache_metrics_errors_total"] == 3
    for name, value in before.items():
        assert after[name] >= value, name
    assert after['hypercache_blocks_hit_total{op="match"}'] == 2
    assert after["hypercache_sent_bytes_total"] == 0


def test_k12_causal_and_modular_are_counted_apart() -> None:
    metrics = Metrics()
    metrics.located(asked=9, hit=4, probes=100, modular=6)
    metrics.located(asked=0, hit=0, probes=100, modular=0)
    metrics.located(asked=9, hit=9, probes=0, modular=0)  # nothing was looked for out of context
    metrics.fetch_started(asked=4, hit=3, modular_asked=6, modular_hit=2)
    metrics.fetch_finished("ok", 500, 200)
    now = metrics.snapshot()
    assert now['hypercache_requests_total{op="locate",outcome="ok"}'] == 3
    assert now['hypercache_blocks_hit_total{op="match"}'] == 13
    assert now['hypercache_blocks_hit_total{op="fetch"}'] == 3
    assert now['hypercache_blocks_missed_total{op="fetch"}'] == 1
    assert now['hypercache_blocks_hit_total{op="fetch_modular"}'] == 2
    assert now['hypercache_blocks_missed_total{op="fetch_modular"}'] == 4
    assert now["hypercache_modular_matches_total"] == 2
    assert now["hypercache_modular_matches_found_total"] == 1
    assert now["hypercache_modular_blocks_found_total"] == 6
    assert now["hypercache_sent_bytes_total"] == 500
    assert now["hypercache_modular_sent_bytes_total"] == 200


def test_store_outcomes_are_told_apart() -> None:
    metrics = Metrics()
    metrics.store_finished(Counter(stored=5, exists=2, corrupt=1), 8192)
    now = metrics.snapshot()
    assert now["hypercache_blocks_stored_total"] == 5
    assert now['hypercache_blocks_skipped_total{reason="exists"}'] == 2
    assert now['hypercache_blocks_skipped_total{reason="corrupt"}'] == 1
    assert now["hypercache_checksum_failures_total"] == 1
    assert now["hypercache_received_bytes_total"] == 8192
    assert now['hypercache_requests_total{op="store",outcome="ok"}'] == 1


def test_label_values_are_bounded() -> None:
    metrics = Metrics()
    for number in range(10 * LABEL_LIMIT):
        metrics.protocol_error(f"kind{number}")
    metrics.protocol_error("x" * 1000)
    rows = {name: n for name, n in metrics.snapshot().items() if "protocol_errors_total" in name}
    assert len(rows) == LABEL_LIMIT + 1
    assert sum(rows.values()) == 10 * LABEL_LIMIT + 1
    assert rows['hypercache_protocol_errors_total{kind="other"}'] == 9 * LABEL_LIMIT + 1 + len(
        PROTOCOL_ERRORS
    )


def test_known_labels_start_at_0_so_that_the_first_step_is_seen() -> None:
    metrics = Metrics()
    before = metrics.snapshot()
    assert set(before.values()) == {0}
    metrics.matched(asked=3, hit=1)
    metrics.located(asked=3, hit=1, probes=9, modular=2)
    metrics.fetch_started(asked=3, hit=1, modular_asked=3, modular_hit=2)
    for outcome in ("ok", "deadline", "cancelled"):
        metrics.fetch_finished(outcome, 1, 1)
    reasons = ("exists", "pending", "orphan", "full", "too_large", "corrupt", "aborted")
    metrics.store_finished(Counter({"stored": 1, **dict.fromkeys(reasons, 1)}), 1)
    for op in ("open", "contains", "hint", "evict", "clear"):
        metrics.request(op, "ok")
    for code in ErrorCode:
        metrics.refused(code)
    for error in (FrameError, *FrameError.__subclasses__()):
        metrics.protocol_error(error.__name__)
    metrics.protocol_error("NoHello")
    metrics.protocol_error("ProtocolError")
    metrics.connection_opened()
    after = metrics.snapshot()
    assert set(after) == set(before)
    assert [name for name, value in after.items() if not value] == ["hypercache_metrics_errors_total"]


def test_the_page_has_the_version_and_no_times_of_creation() -> None:
    metrics = Metrics()
    metrics.matched(asked=3, hit=1)
    page = generate_latest(metrics.registry).decode()
    assert f'hypercache_build_info{{version="{hypercache.__version__}"}} 1.0' in page
    assert "_created" not in page
    for line in page.splitlines():
        assert line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith(("hypercache_", "process_"))


def test_the_snapshot_is_of_counters_alone() -> None:
    """/status has the store's numbers, the connections and the lag elsewhere: each number once."""
    metrics = Metrics()
    metrics.watch_store(lambda: {"blocks": 3, "evicted_total": 4}, totals=["evicted_total"])
    metrics.connection_opened()
    metrics.observe_lag(0.1)
    assert metrics.registry.get_sample_value("hypercache_store_evicted_total") == 4
    for name in metrics.snapshot():
        assert name.partition("{")[0].endswith("_total")
        assert not name.startswith("hypercache_store_")


def test_two_nodes_in_one_process_do_not_share_counters() -> None:
    first, second = Metrics(), Metrics()
    first.connection_opened()
    assert first.registry.get_sample_value("hypercache_connections") == 1
    assert second.registry.get_sample_value("hypercache_connections") == 0
    first.connection_closed()
    assert first.registry.get_sample_value("hypercache_connections") == 0
    assert first.snapshot()["hypercache_connections_accepted_total"] == 1


def test_a_store_that_cannot_answer_does_not_stop_the_scrape() -> None:
    def broken() -> Mapping[str, float]:
        raise RuntimeError("the store is closed")

    metrics = Metrics()
    metrics.watch_store(broken)
    metrics.refused("busy")
    assert metrics.snapshot()['hypercache_refused_total{code="busy"}'] == 1
    assert metrics.snapshot()["hypercache_metrics_errors_total"] >= 1


async def test_loop_lag_is_seen() -> None:
    metrics = Metrics()
    assert metrics.lag() == {"samples": 0, "p50_s": None, "p99_s": None, "max_s": None}
    sampler = asyncio.create_task(metrics.sample_lag())
    await asyncio.sleep(0.01)
    time.sleep(0.3)  # noqa: ASYNC251 - the fault that the sampler is there to show
    await asyncio.sleep(0.12)
    sampler.cancel()
    lag = metrics.lag()
    assert lag["samples"] is not None and lag["samples"] >= 1
    assert lag["max_s"] is not None and lag["max_s"] >= 0.2
    assert lag["p99_s"] == lag["max_s"]
    assert metrics.registry.get_sample_value("hypercache_loop_lag_seconds_count") == lag["samples"]


def test_percentile_is_the_nearest_rank() -> None:
    metrics = Metrics()
    for number in range(1, 201):
        metrics.observe_lag(number / 1000)
    assert metrics.lag() == {"samples": 200, "p50_s": 0.1, "p99_s": 0.198, "max_s": 0.2}


def test_the_disk_tier_is_on_the_page_while_there_is_one(tmp_path: Path) -> None:
    """From the start, with what only rises as counters; what is text stays in /status."""
    metrics = Metrics()
    now: dict[str, Any] = {}
    metrics.watch_l3(lambda: now)
    assert "hypercache_l3_" not in generate_latest(metrics.registry).decode()
    with contextlib.closing(Disk(tmp_path / "l3", capacity=1 << 20, segment_nbytes=1 << 18)) as disk:
        list(disk.restore())
        now |= {
            "state": "paused",
            "reason": "No space left on device",
            "blocks_waiting": 3,
            "demoted_total": 0,
            "disk": dataclasses.asdict(disk.stats()),
        }
    page = generate_latest(metrics.registry).decode()
    assert "No space" not in page
    types = dict(re.findall(r"^# TYPE hypercache_l3_(\S+) (\S+)$", page, re.M))
    values = {name: float(value) for name, value in re.findall(r"^hypercache_l3_(\S+) (\S+)$", page, re.M)}
    assert len(values) == len(types) == 3 + len(now["disk"])
    assert types["paused"] == "gauge" and values["paused"] == 1
    assert types["disk_bytes_files"] == "gauge" and values["disk_bytes_files"] > 0
    for name in ("demoted_total", "disk_writes_total", "disk_bytes_read_total"):
        assert types[name] == "counter" and values[name] == 0
    now["state"] = "on"
    assert metrics.registry.get_sample_value("hypercache_l3_paused") == 0
    assert not any("_l3_" in name for name in metrics.snapshot())
    assert metrics.snapshot()["hypercache_metrics_errors_total"] == 0


async def test_each_number_of_a_node_says_what_it_is(tmp_path: Path) -> None:
    settings = {"listen": ("tcp://127.0.0.1:0",), "admin": "", "memory": 16 << 20}
    l3 = {"l3_dir": str(tmp_path / "l3"), "l3_capacity": 8 << 20, "l3_segment": 1 << 20}
    node = Node(ServerConfig(**settings, **l3), log=structlog.get_logger())
    try:
        await node.start()
        status = node.status()
        assert set(status["store"]) == set(STORE_TEXTS)
        assert set(flat(status["l3"])) == set(L3_TEXTS) > L3_TOTALS
        page = generate_latest(node.metrics.registry).decode()
        for prefix, texts in (("store", STORE_TEXTS), ("l3", L3_TEXTS)):
            for name in texts:
                total = "" if name not in L3_TOTALS else "_total"
                assert re.search(rf"^hypercache_{prefix}_{name}{total} \S+$", page, re.M), name
                assert re.search(rf"^# HELP hypercache_{prefix}_{name}{total} .*\.$", page, re.M), name
    finally:
        await node.stop()
    assert "hypercache_l3_" not in generate_latest(node.metrics.registry).decode()
