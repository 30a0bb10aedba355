"""What finding costs: one question for a prompt of 131,072 tokens of which none is an exact prefix.

The server is another process, so that the CPU time of this one is the client's: hashing, fingerprints of
every offset, the wire, and the check of each block that was found.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from hypercache.cli.bench_live import DEADLINE_S, NotMeasured, kv_spec
from hypercache.client import SyncClient, connect_sync
from hypercache.kv import KVBuffers
from hypercache.protocol import MAX_PROBES

BLOCK_SIZES = (8, 16, 64)
DOCUMENT = 4096  # tokens


def measure(uri: str, tokens: int = MAX_PROBES, rounds: int = 5) -> dict[str, Any]:
    """By block size: ``cpu_ms`` and ``wall_ms`` of ``match(modular=True)``, medians, and the ``share`` found.

    Of a prompt that is ``unknown``, and of a ``known`` one: documents that are stored in another order and
    behind other tokens. The K/V are of one layer and 8 bytes a token: they are not what is measured.
    """
    spec = kv_spec(1, 1, 2)
    random = np.random.default_rng(11)
    stored = random.integers(0, 128_000, tokens)
    documents = [stored[at : at + DOCUMENT] for at in range(0, tokens, DOCUMENT)]
    known = np.concatenate([random.integers(0, 128_000, 5), *reversed(documents)])[:tokens]
    unknown = random.integers(0, 128_000, tokens)
    rows: dict[str, Any] = {"tokens": tokens}
    for block_size in BLOCK_SIZES:
        with connect_sync(uri, model=spec, codec="raw", block_size=block_size, deadline=DEADLINE_S) as client:
            kv = KVBuffers.allocate(spec, tokens)
            result = client.store(stored, kv)
            if result.stored != result.blocks:
                raise NotMeasured(f"stored {dict(result.outcome)} of {result.blocks} blocks: {result.reason}")
            rows[str(block_size)] = {
                "unknown": _row(client, unknown, rounds),
                "known": _row(client, known, rounds),
            }
            client.clear()
    return rows


def _row(client: SyncClient, prompt: Any, rounds: int) -> dict[str, float]:
    cpu, wall = [], []
    match = client.match(prompt, modular=True)
    for _ in range(rounds):
        began, spent = time.perf_counter(), time.process_time()
        match = client.match(prompt, modular=True)
        cpu.append(time.process_time() - spent)
        wall.append(time.perf_counter() - began)
    return {
        "cpu_ms": 1e3 * median(cpu),
        "wall_ms": 1e3 * median(wall),
        "share": match.modular_tokens / len(prompt),
    }


def show(found: Mapping[str, Any], console: Console) -> None:
    """For people."""
    console.print(f"[bold]Finding[/bold] (one question for {found['tokens']:,} tokens, none an exact prefix)")
    for block_size in BLOCK_SIZES:
        row = found[str(block_size)]
        console.print(
            f"  blocks of {block_size:<3} client CPU {row['unknown']['cpu_ms']:.1f} ms if none is known, "
            f"{row['known']['cpu_ms']:.1f} ms if {row['known']['share']:.0%} are, at other places "
            f"(wall {row['unknown']['wall_ms']:.0f}, {row['known']['wall_ms']:.0f} ms)"
        )
