"""Which blocks of a trace each eviction policy would have kept: hit ratios beside Belady's optimum.

The policies are the server's own, the cache around them has room for a share of the trace's blocks and keeps
whole prefixes. Nothing is timed: the figures are the same on each machine.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hypercache.audit import traces
from hypercache.audit.replay import belady, replay
from hypercache.audit.traces import Request, Trace
from hypercache.store.policy import HALF_LIFE_S, NAMES, get

SHARES = {"1%": 0.01, "5%": 0.05, "20%": 0.2}  # of a trace's distinct blocks
BELADY = "belady"
SYNTHETIC = "synthetic"


def measure(directory: Path | None) -> dict[str, Any]:
    """For each trace in ``directory``, or for one that is made up if there is none: hit ratios by cache size
    and policy, of all block references, and what the trace is like.

    Raises ConfigError for a directory that cannot be read or holds no trace.
    """
    found, others = ([synthetic()], []) if directory is None else traces.find(directory)
    return {trace.name: _measured(trace) for trace in found} | ({"left_out": others} if others else {})


def _measured(trace: Trace) -> dict[str, Any]:
    distinct = trace.distinct
    row: dict[str, Any] = {
        "requests": len(trace.requests),
        "references": trace.references,
        "distinct": distinct,
        "block_size": trace.block_size,
        "seconds": trace.requests[-1].time,
        "bad_rows": trace.bad_rows,
        "first_bad": [f"line {bad.line}: {bad.why}" for bad in trace.bad[:1]],
        "synthetic": trace.name == SYNTHETIC,
        "unlimited": belady(trace.requests, distinct or 1).ratio,
    }
    for size, share in SHARES.items():
        room = max(1, round(distinct * share))
        row[size] = {
            "blocks": room,
            **{name: replay(trace.requests, room, get(name)).ratio for name in NAMES},
            BELADY: belady(trace.requests, room).ratio,
        }
    return row


def synthetic(requests: int = 4000, seed: int = 4) -> Trace:
    """A made-up trace, one request a second: a system prompt, then one of 400 documents by Zipf's law, then a
    question of its own. After each 300 of them 100 others read documents that nobody reads again."""
    rng = random.Random(seed)
    fresh = iter(range(1 << 62))

    def blocks(count: int) -> tuple[int, ...]:
        return tuple(next(fresh) for _ in range(count))

    system = blocks(4)
    documents = [blocks(rng.randint(4, 40)) for _ in range(400)]
    weights = [1 / (rank + 1) ** 0.9 for rank in range(len(documents))]
    served: list[Request] = []
    for second in range(requests):
        scanning = second % 400 >= 300
        document: Sequence[int] = blocks(24) if scanning else rng.choices(documents, weights)[0]
        served.append(Request(float(second), (*system, *document, *blocks(rng.randint(1, 3)))))
    return Trace(SYNTHETIC, traces.MOONCAKE_BLOCK, served)


def show(found: Mapping[str, Any], console: Console) -> None:
    """For people."""
    console.print("[bold]Eviction policies[/bold] (hits of all block references; prefixes are kept whole)")
    table = Table("trace", box=None, pad_edge=False)
    for heading in ("cache", "blocks", *NAMES, "Belady"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = {name: row for name, row in found.items() if name != "left_out"}
    for name, row in rows.items():
        for index, size in enumerate(SHARES):
            hits = row[size]
            ratios = (f"{hits[policy]:.2%}" for policy in (*NAMES, BELADY))
            table.add_row("" if index else name, size, f"{hits['blocks']:,}", *ratios)
    console.print(table)
    console.print(
        f"  cache: share of the trace's distinct blocks; lrfu with a half-life of {HALF_LIFE_S:.0f} s"
    )
    console.print("  Belady: the optimum, which knows the future")
    for name, row in rows.items():
        made = " (made up; --traces DIR replays real ones)" if row["synthetic"] else ""
        console.print(
            f"  {name}: {row['requests']:,} requests, {row['seconds'] / 60:.0f} min, {row['references']:,} "
            f"references to {row['distinct']:,} blocks, at most {row['unlimited']:.2%} hit{made}"
        )
        if row["bad_rows"]:
            console.print(f"  {name}: {row['bad_rows']:,} rows left out, {row['first_bad'][0]}")
    for why in found.get("left_out", ()):
        console.print(f"  left out: {why.partition(', so no hit ratio')[0]}")
