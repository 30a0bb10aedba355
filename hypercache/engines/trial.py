"""The two engines of the demo, each a process of its own: ``python -m hypercache.engines.trial ROLE ...``.

Role "store": prefill a prompt, store its K/V. Role "reuse": another prompt about the same document, once
cold and then from the cache with each codec, and compare. Lines of JSON on stdout: {"step": ...} as it goes,
at the end {"result": ...} or {"error": ...}.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hypercache.client import connect_sync
from hypercache.engines import subject as subjects
from hypercache.engines.cached import Prefilled, greedy, prefill
from hypercache.engines.compare import cosine, kl
from hypercache.engines.subject import Report, Subject
from hypercache.errors import HyperCacheError
from hypercache.kv import KVBuffers

_DEADLINE_S = 30.0  # a demo on a slow, busy machine still shows hits


def store(subject: Subject, uri: str, codecs: Sequence[str], report: Report) -> dict[str, Any]:
    """Engine A: cold prefill of the first question's prompt, its K/V stored with each codec."""
    ids = subject.encode(subjects.QUESTIONS[0])
    report(f"cold prefill of {len(ids)} tokens")
    began = time.perf_counter()
    prefilled = prefill(subject.engine, ids)
    cold = time.perf_counter() - began
    stored = {}
    for codec in codecs:
        report(f"storing with {codec}")
        with connect_sync(uri, model=subject.engine.spec, codec=codec, deadline=_DEADLINE_S) as client:
            began = time.perf_counter()
            result = client.store(ids, prefilled.kv)
            stored[codec] = {
                "store_s": time.perf_counter() - began,
                "blocks": result.stored,
                "wire_bytes": result.wire_bytes,
                "reason": result.reason,
            }
    return {
        "pid": os.getpid(),
        "kind": subject.kind,
        "note": subject.note,
        "prompt_tokens": len(ids),
        "prefill_s": cold,
        "codecs": stored,
    }


def reuse(
    subject: Subject, uri: str, codecs: Sequence[str], rounds: int, count: int, report: Report
) -> dict[str, Any]:
    """Engine B: TTFT (prompt ids to first token, everything in between included) cold and from the cache.

    The process is warm before anything is timed: all runs use the same K/V memory, wiped in between. From the
    cache: median of ``rounds`` after one that opens the way.
    """
    engine, ids = subject.engine, subject.encode(subjects.QUESTIONS[1])
    kv = KVBuffers.allocate(engine.spec, len(ids) + count)
    _poison(kv)
    prefill(engine, ids[:64], None, kv)
    report(f"cold prefill of {len(ids)} tokens, for comparison")
    began = time.perf_counter()
    cold = prefill(engine, ids, None, kv)
    cold_s = time.perf_counter() - began
    report(f"decoding {count} tokens")
    want = greedy(engine, cold, count)
    rows = {}
    for codec in codecs:
        report(f"fetching with {codec}")
        with connect_sync(uri, model=engine.spec, codec=codec, deadline=_DEADLINE_S) as client:
            times = []
            for _ in range(1 + rounds):
                _poison(kv)
                began = time.perf_counter()
                hit = prefill(engine, ids, client, kv)
                times.append(time.perf_counter() - began)
        rows[codec] = {"ttft_s": statistics.median(times[1:]), **_compare(cold, hit)}
        got = greedy(engine, hit, count)
        rows[codec]["identical_tokens"] = _agreeing(want, got)
        rows[codec]["continuation"] = subject.decode(got)
    return {
        "pid": os.getpid(),
        "model": subject.name,
        "prompt_tokens": len(ids),
        "continuation_tokens": count,
        "continuation": subject.decode(want),
        "ttft_cold_s": cold_s,
        "kv_bytes": len(ids) * engine.spec.token_nbytes(),
        "codecs": rows,
    }


def _poison(kv: KVBuffers) -> None:
    """Fill with bytes that no hit could be mistaken for: NaNs, in every dtype."""
    for i in range(kv.spec.num_layers):
        for part in kv.layer(i):
            part.view(np.uint8).fill(0xFF)


def _compare(cold: Prefilled, hit: Prefilled) -> dict[str, Any]:
    return {
        "hit_tokens": hit.fetch.hit_tokens,
        "wire_bytes": hit.fetch.wire_bytes,
        "reason": hit.fetch.reason,
        "logits_cosine": cosine(cold.logits, hit.logits),
        "kl": float(kl(cold.logits, hit.logits)),
    }


def _agreeing(want: Sequence[int], got: Sequence[int]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b), len(want))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hypercache.engines.trial", allow_abbrev=False)
    parser.add_argument("role", choices=("store", "reuse"))
    parser.add_argument("--uri", required=True)
    parser.add_argument("--model", choices=subjects.MODELS, default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--codecs", required=True, help="comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=32)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that nothing half made is left
    # Transformers copies K/V once for each query head of a group unless told that the kernel shares them.
    os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    codecs = args.codecs.split(",")
    try:
        subject = subjects.load(args.model, args.dtype, lambda line: _say("step", line))
        if args.role == "store":
            result = store(subject, args.uri, codecs, lambda line: _say("step", line))
        else:
            result = reuse(
                subject, args.uri, codecs, args.rounds, args.count, lambda line: _say("step", line)
            )
    except HyperCacheError as error:
        _say("error", str(error))
        return 1
    _say("result", result)
    return 0


def _say(kind: str, value: object) -> None:
    try:
        print(json.dumps({kind: value}), flush=True)
    except BrokenPipeError:  # who started us is gone: nobody is left to be told anything
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


if __name__ == "__main__":
    sys.exit(main())
