"""Two engine processes share the K/V of a real prompt through a cache server of their own.

Engine A prefills a document with a question and stores its K/V. Engine B, which never saw it, asks another
question about the same document: once without the cache, then with it, and the two are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hypercache import codecs
from hypercache.cli.local_server import local_server
from hypercache.client.client import DEFAULT_CODEC
from hypercache.errors import ConfigError, HyperCacheError

CODECS = ("raw", "fp8", "int8")


class DemoFailed(HyperCacheError):
    """A process of the demo ended without its result. Says which, and what it said."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument(
        "--model",
        choices=("auto", "smollm2", "reference"),
        default="auto",
        help="auto: SmolLM2-135M-Instruct, or the reference engine where it cannot be had (default)",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of SmolLM2 (default: float32)"
    )
    parser.add_argument("--codecs", default=",".join(CODECS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timed fetches per codec (default: 5)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to decode (default: 32)")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when every codec hit and the lossless one gave the same tokens, else 1."""
    chosen = list(dict.fromkeys(name.strip() for name in args.codecs.split(",")))
    if chosen == [""]:
        raise ConfigError(f"--codecs is empty; give one or more of {', '.join(codecs.names())}")
    for name in chosen:
        codecs.get(name)
    for name, value in (("--rounds", args.rounds), ("--tokens", args.tokens)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be >= 1")
    console = Console(stderr=True)
    with console.status("starting hypercache-serve") as status:
        outcome = measure(args.model, args.dtype, chosen, args.rounds, args.tokens, status.update)
    if args.json:
        print(json.dumps(outcome))
    else:
        _print(outcome)
    hits = all(row["hit_tokens"] for row in outcome["codecs"].values())
    return 0 if hits and outcome.get("identical_tokens_raw", True) else 1


def measure(
    model: str, dtype: str, chosen: list[str], rounds: int, tokens: int, report: Callable[[str], None]
) -> dict[str, Any]:
    """Run the three processes; the result as ``--json`` prints it."""
    common = ["--codecs", ",".join(chosen), "--dtype", dtype, "--count", str(tokens), "--rounds", str(rounds)]
    with local_server("1GiB") as ready:
        where = ["--uri", ready["uris"][0], *common]
        a = _engine("A", ["store", "--model", model, *where], report)
        # B must run what A ran, also if the index came back meanwhile.
        b = _engine("B", ["reuse", "--model", a["kind"], *where], report)
    rows = b["codecs"]
    default = rows.get(DEFAULT_CODEC) or next(iter(rows.values()))
    outcome = {
        "model": b["model"],
        "note": a["note"],
        "prompt_tokens": b["prompt_tokens"],
        "hit_tokens": default["hit_tokens"],
        "continuation_tokens": tokens,
        "ttft_cold_s": b["ttft_cold_s"],
        "ttft_hit_s": default["ttft_s"],
        "ttft_ratio": b["ttft_cold_s"] / default["ttft_s"],
        "default_codec": DEFAULT_CODEC,
        "wire_bytes": default["wire_bytes"],
        "kv_bytes": b["kv_bytes"],
        "codecs": rows,
        "continuation": b["continuation"],
        "stored": a["codecs"],
        "server_pid": ready["pid"],
        "engine_pids": [a["pid"], b["pid"]],
    }
    if "raw" in rows:
        outcome["identical_tokens_raw"] = rows["raw"]["identical_tokens"] == tokens
    if "fp8" in rows:
        outcome["logits_cosine_fp8"] = rows["fp8"]["logits_cosine"]
    return outcome


def _engine(name: str, arguments: list[str], report: Callable[[str], None]) -> dict[str, Any]:
    """Run one engine process to its end and give its result."""
    command = [sys.executable, "-m", "hypercache.engines.trial", *arguments]
    # Spinning OpenMP threads would take the cores from the server and from the thread that receives.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0,  # Ctrl-C is ours to answer: the engine and what it started end without a word
    )
    assert process.stdout is not None
    result: dict[str, Any] | None = None
    error = ""
    try:
        with process.stdout as lines:
            for line in lines:
                message = json.loads(line)
                if "step" in message:
                    report(f"engine {name} (pid {process.pid}): {message['step']}")
                error = message.get("error", error)
                result = message.get("result", result)
        code = process.wait()
    finally:
        _end(process)
    if result is None:
        raise DemoFailed(f"engine {name} failed (exit code {code}): {error or 'see its output above'}")
    return result


def _end(process: subprocess.Popen[str]) -> None:
    """The engine and what it started, such as a download; some time to clean up, but not long."""
    for number, seconds in ((signal.SIGTERM, 2.0), (signal.SIGKILL, None)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def _print(outcome: dict[str, Any]) -> None:
    console = Console()
    if outcome["note"]:
        console.print(outcome["note"], style="yellow")
    console.print(
        f"{outcome['model']}: {outcome['prompt_tokens']} tokens, {outcome['kv_bytes'] / 1e6:.1f} MB of K/V"
    )
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    table.add_column("")
    for heading in ("TTFT", "lower", "hit", "MB", "same", "cosine", "KL"):
        table.add_column(heading, justify="right")
    cold = outcome["ttft_cold_s"]
    table.add_row("cold prefill", f"{cold * 1e3:.0f} ms")
    for codec, row in outcome["codecs"].items():
        table.add_row(
            codec + (" *" if codec == outcome["default_codec"] else ""),
            f"{row['ttft_s'] * 1e3:.0f} ms",
            f"{cold / row['ttft_s']:.1f}x",
            str(row["hit_tokens"]),
            f"{row['wire_bytes'] / 1e6:.1f}",
            f"{row['identical_tokens']}/{outcome['continuation_tokens']}",
            f"{row['logits_cosine']:.6f}",
            f"{row['kl']:.1e}",
        )
    console.print(table)
    console.print(
        "TTFT: prompt to first token. hit: tokens from the cache. MB: moved. same: greedy tokens before "
        "the first that differs. cosine, KL: next-token logits against cold prefill. *: default codec.",
        style="dim",
    )
    console.print(f"continuation: {outcome['continuation']!r}", markup=False)
