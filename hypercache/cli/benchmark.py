"""Measure on this machine: the reference engine, codecs, hashing, and a live server over TCP.

Ratios compare with a memcpy in the same run; read them rather than the absolute figures of a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from hypercache.cli.local_server import local_server
from hypercache.server import logs

T = TypeVar("T")
SERVER_MEMORY = "768MiB"
CODEC_SECONDS = 20.0
DIMS = (64, 128)  # the second is what the flat keys of "codecs" speak of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    # What goes wrong ends the measurement with an error of its own; that the client lost its server, when
    # both are interrupted, is nobody's news.
    logs.configure("error")
    # More BLAS threads than idle cores wait for each other, and the figures would be about that. NumPy reads
    # this when it is loaded, so what needs NumPy is imported below.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    results = measure(Console(stderr=True))
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = 110
        show(results, console)
    return 0


def measure(progress: Console) -> dict[str, Any]:
    """All parts: ``engine``, ``codecs``, ``keys`` and ``live``. Raises HyperCacheError."""
    from hypercache.cli import bench_codecs, bench_live

    def step(text: str, work: Callable[[], T]) -> T:
        with progress.status(text):
            return work()

    with local_server(SERVER_MEMORY) as server:
        uri = server["uris"][0]
        engine = step("reference engine", lambda: bench_live.engine(uri))
        codecs = step("codecs against memcpy", lambda: bench_codecs.measure(CODEC_SECONDS, DIMS))
        keys = step("hashing a million tokens", bench_live.hashing)
        live = step("live server", lambda: bench_live.live(uri))
    flat = {name: _flat(by_dim) for name, by_dim in codecs.items()}
    return {"engine": engine, "codecs": flat, "keys": keys, "live": live}


def _flat(by_dim: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """One codec's figures at the larger head dim, and under ``dim_64`` at the smaller."""
    small, large = (dict(by_dim[str(dim)]) for dim in DIMS)
    for row in (small, large):
        row["rel_error"] = row.pop("relative_error")
        row["rel_error_outliers"] = row.pop("relative_error_outliers")
    return {"dim": DIMS[1], **large, f"dim_{DIMS[0]}": small}


def show(results: dict[str, Any], console: Console) -> None:
    engine, keys, live = results["engine"], results["keys"], results["live"]
    console.print("[bold]A. Reference engine[/bold] (NumPy)")
    console.print(f"  prefill                {engine['prefill_tokens_per_s']:,.0f} tokens/s")
    console.print(
        f"  TTFT cold, cached      {engine['ttft_cold_s'] * 1e3:.1f} ms, {engine['ttft_hit_s'] * 1e3:.1f} ms "
        f"({engine['hit_tokens']} of {engine['prompt_tokens']} tokens hit, codec raw)"
    )
    console.print(
        f"  logits, cached - full  {engine['logits_max_error']:.2g} at most "
        f"(largest logit {engine['logits_max']:.3g})"
    )
    console.print("\n[bold]B. Codecs[/bold] (one thread, bf16 in and out, Gaussian K/V)")
    table = _table("codec", "dim", "ratio", "cosine", "error to f32", "with outliers", "encode", "decode")
    for name, large in results["codecs"].items():
        for dim, row in ((DIMS[0], large[f"dim_{DIMS[0]}"]), (DIMS[1], large)):
            exact = row["same_values"] == row["same_values_outliers"] == 1
            errors = ("exact",) * 3 if exact else _errors(row)
            speeds = f"{row['encode_to_memcpy']:.2f}x", f"{row['decode_to_memcpy']:.2f}x"
            table.add_row(name, str(dim), f"{row['ratio']:.3f}", *errors, *speeds)
    console.print(table)
    console.print("  cosine, error (relative, L2): against float32 K/V, before they were rounded to bf16")
    console.print("  exact: the bf16 values come back bit for bit")
    console.print("  encode, decode: bf16 bytes a second beside memcpy's")
    console.print("\n[bold]Hashing[/bold] (causal digests, one thread)")
    for size in (16, 64):
        console.print(f"  blocks of {size}  {keys[f'tokens_per_s_{size}'] / 1e6:.2f} million tokens/s")
    console.print(
        f"\n[bold]Live server over TCP[/bold] ({live['blocks']} blocks, "
        f"{live['kv_bytes'] / 2**20:.0f} MiB of bf16 K/V; memcpy {live['memcpy_gbps']:.2f} GB/s)"
    )
    table = _table("codec", "fetch GB/s", "of memcpy", "wire MiB", "wire GB/s", "store GB/s", "same bytes")
    for codec, row in live.items():
        if not isinstance(row, dict):
            continue  # figures of the whole run
        speeds = f"{row['gbps']:.2f}", f"{row['to_memcpy']:.2f}x"
        wire = f"{row['wire_bytes'] / 2**20:.1f}", f"{row['wire_gbps']:.2f}", f"{row['store_gbps']:.2f}"
        table.add_row(codec, *speeds, *wire, "yes" if row["identical"] else "no, lossy")
    console.print(table)
    console.print("  fetch, store: bf16 bytes a second, encoding, checksums and decoding included")


def _errors(row: Mapping[str, float]) -> tuple[str, str, str]:
    return f"{row['cosine']:.6f}", f"{row['rel_error']:.4f}", f"{row['rel_error_outliers']:.4f}"


def _table(first: str, *headings: str) -> Table:
    table = Table(first, box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
