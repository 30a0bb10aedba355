"""Measure on this machine: the reference engine, codecs, hashing, and a live server over TCP; and how much of
the prompts in your logs a cache would have found.

Ratios compare with a memcpy in the same run; read them rather than the absolute figures of a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hypercache.cli.local_server import local_server
from hypercache.errors import ConfigError
from hypercache.server import logs

SERVER_MEMORY = "768MiB"
CODEC_SECONDS = 20.0
DIMS = (64, 128)  # the second is what the flat keys of "codecs" speak of
BLEND = "blend"  # A: its rows stand beside the other parts in --json, not under its name
PARTS = (BLEND, "engine", "codecs", "keys", "match", "live", "policies")  # what is measured without --part
LIVE = ("engine", "match", "live")  # those that need a server
REUSE = "reuse"  # needs logs
TIERS = "tiers"  # writes a gigabyte to a disk


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--part", choices=(*PARTS, TIERS, REUSE), help="measure this alone (default: all but tiers and reuse)"
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="reuse: prompt logs, SET_*.jsonl")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="reuse: a tokenizer.json (default: SmolLM2's)"
    )
    parser.add_argument(
        "--disk",
        type=Path,
        metavar="DIR",
        help="tiers: on the disk to measure (default: where temporary files go)",
    )
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="DIR",
        help="policies: public traces, *.jsonl with hash_ids (default: one that is made up)",
    )
    parser.add_argument("--blocks", type=int, metavar="N", help="tiers: in the index (default: 200,000)")


def run(args: argparse.Namespace) -> int:
    # What goes wrong ends the measurement with an error of its own; that the client lost its server, when
    # both are interrupted, is nobody's news.
    logs.configure("error")
    # More BLAS threads than idle cores wait for each other, and the figures would be about that. NumPy reads
    # this when it is loaded, so what needs NumPy is imported below.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    parts = PARTS if args.part is None else (args.part,)
    results = measure(
        Console(stderr=True), parts, args.logs, args.tokenizer, args.disk, args.blocks, args.traces
    )
    if args.json:
        print(json.dumps(_top(results), indent=2))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = 110
        show(results, console)
    return 0


def _top(results: Mapping[str, Any]) -> dict[str, Any]:
    """The object that --json prints: parts under their names, but what A and reuse found at the top."""
    found: dict[str, Any] = {}
    for part, result in results.items():
        found |= result if part in (BLEND, REUSE) else {part: result}
    return found


def measure(
    progress: Console,
    parts: Sequence[str] = PARTS,
    directory: Path | None = None,
    tokenizer: Path | None = None,
    disk: Path | None = None,
    blocks: int | None = None,
    traces: Path | None = None,
) -> dict[str, Any]:
    """Each of ``parts`` under its name. ``reuse`` reads the logs in ``directory``, with ``tokenizer``;
    ``tiers`` writes into ``disk`` and puts ``blocks`` into an index; ``policies`` replays the logs in
    ``traces``.

    Raises HyperCacheError.
    """
    if (REUSE in parts) != (directory is not None) or (tokenizer and directory is None):
        raise ConfigError(
            "--part reuse and --logs DIR (with prompt logs, SET_*.jsonl) go together: give both"
        )
    from hypercache.cli import bench_blend, bench_codecs, bench_live, bench_match, bench_policies, bench_reuse

    def codecs() -> dict[str, Any]:
        return {name: _flat(by_dim) for name, by_dim in bench_codecs.measure(CODEC_SECONDS, DIMS).items()}

    def reuse() -> dict[str, Any]:
        assert directory is not None
        return bench_reuse.measure(directory, tokenizer, progress.print)

    def tiers() -> dict[str, Any]:
        from hypercache.cli import bench_tiers

        return bench_tiers.measure(disk, blocks=blocks or bench_tiers.BLOCKS)

    with contextlib.ExitStack() as stack:
        uri = ""
        if set(parts) & set(LIVE):
            uri = stack.enter_context(local_server(SERVER_MEMORY))["uris"][0]
        work: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
            BLEND: ("reuse out of context", bench_blend.measure),
            "engine": ("reference engine", lambda: bench_live.engine(uri)),
            "codecs": ("codecs against memcpy", codecs),
            "keys": ("hashing a million tokens", bench_live.hashing),
            "match": ("finding documents", lambda: bench_match.measure(uri)),
            "live": ("live server", lambda: bench_live.live(uri)),
            "policies": ("eviction policies", lambda: bench_policies.measure(traces)),
            TIERS: ("disk tier", tiers),
            REUSE: ("prompts from logs", reuse),
        }
        results = {}
        for part in parts:
            text, measured = work[part]
            with progress.status(text):
                results[part] = measured()
    return results


def _flat(by_dim: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """One codec's figures at the larger head dim, and under ``dim_64`` at the smaller."""
    small, large = (dict(by_dim[str(dim)]) for dim in DIMS)
    for row in (small, large):
        row["rel_error"] = row.pop("relative_error")
        row["rel_error_outliers"] = row.pop("relative_error_outliers")
    return {"dim": DIMS[1], **large, f"dim_{DIMS[0]}": small}


def show(results: Mapping[str, Any], console: Console) -> None:
    """Print what :func:`measure` found."""
    from hypercache.cli import bench_blend, bench_match, bench_policies, bench_reuse

    shows: dict[str, Callable[[Mapping[str, Any], Console], None]] = {
        BLEND: bench_blend.show,
        "engine": _show_engine,
        "codecs": _show_codecs,
        "keys": _show_keys,
        "match": bench_match.show,
        "live": _show_live,
        "policies": bench_policies.show,
        TIERS: _show_tiers,
        REUSE: bench_reuse.show,
    }
    for index, (part, result) in enumerate(results.items()):
        if index:
            console.print()
        shows[part](result, console)


def _show_engine(engine: Mapping[str, Any], console: Console) -> None:
    console.print("[bold]Reference engine[/bold] (NumPy)")
    console.print(f"  prefill                {engine['prefill_tokens_per_s']:,.0f} tokens/s")
    console.print(
        f"  TTFT cold, cached      {engine['ttft_cold_s'] * 1e3:.1f} ms, {engine['ttft_hit_s'] * 1e3:.1f} ms "
        f"({engine['hit_tokens']} of {engine['prompt_tokens']} tokens hit, codec raw)"
    )
    console.print(
        f"  logits, cached - full  {engine['logits_max_error']:.2g} at most "
        f"(largest logit {engine['logits_max']:.3g})"
    )


def _show_codecs(codecs: Mapping[str, Any], console: Console) -> None:
    console.print("[bold]B. Codecs[/bold] (one thread, bf16 in and out, Gaussian K/V)")
    table = _table(
        "codec", "dim", "ratio", "cosine", "error to f32", "with outliers", "encode", "decode", "moved"
    )
    for name, large in codecs.items():
        for dim, row in ((DIMS[0], large[f"dim_{DIMS[0]}"]), (DIMS[1], large)):
            exact = row["same_values"] == row["same_values_outliers"] == 1
            errors = ("exact",) * 3 if exact else _errors(row)
            speeds = (
                f"{row['encode_to_memcpy']:.2f}x",
                f"{row['decode_to_memcpy']:.2f}x",
                f"{row['turned_to_memcpy']:.2f}x",
            )
            table.add_row(name, str(dim), f"{row['ratio']:.3f}", *errors, *speeds)
    console.print(table)
    console.print("  cosine, error (relative, L2): against float32 K/V, before they were rounded to bf16")
    console.print("  exact: the bf16 values come back bit for bit")
    console.print("  encode, decode, decode with keys moved: bf16 bytes a second beside memcpy's")
    if turned := codecs.get("int4"):
        console.print(
            f"  int4, keys with outlier channels, dim {DIMS[1]}: cosine {turned['cosine_outliers']:.4f} "
            f"with the rotation, {codecs['int4-plain']['cosine_outliers']:.4f} without (int4-plain)"
        )
        console.print(
            f"  int4 encodes {turned['encode_gbps']:.1f} and decodes {turned['decode_gbps']:.1f} GB/s of K/V "
            f"(memcpy {turned['memcpy_gbps']:.1f})"
        )


def _show_keys(keys: Mapping[str, Any], console: Console) -> None:
    console.print("[bold]Hashing[/bold] (causal digests, one thread)")
    for size in (16, 64):
        console.print(f"  blocks of {size}  {keys[f'tokens_per_s_{size}'] / 1e6:.2f} million tokens/s")


def _show_live(live: Mapping[str, Any], console: Console) -> None:
    console.print(
        f"[bold]Live server over TCP[/bold] ({live['blocks']} blocks, "
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


def _show_tiers(tiers: Mapping[str, Any], console: Console) -> None:
    from hypercache.cli import bench_tiers

    bench_tiers.show(tiers, console)


def _errors(row: Mapping[str, float]) -> tuple[str, str, str]:
    return f"{row['cosine']:.6f}", f"{row['rel_error']:.4f}", f"{row['rel_error_outliers']:.4f}"


def _table(first: str, *headings: str) -> Table:
    table = Table(first, box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
