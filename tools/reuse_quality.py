"""What reuse at another position costs in quality, on a real model and real text, through a real server.

Prompts of 4 to 6 passages and a question are prefilled and stored; the same passages in another order, with
another question, are then matched, fetched over TCP (rotated to their new places) and repaired. Against full
prefill: KL and top-1 of the next token, and whether a greedy continuation of 16 tokens is the same.

    python tools/reuse_quality.py [--prompts 30] [--codecs raw,...] [--policies kv,...] [--json FILE]
    python tools/reuse_quality.py --plot FILE.json     # table (Markdown) on stdout, plot beside the file
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import passages

from hypercache import KVBuffers, blend, connect_sync, rope
from hypercache.blend import Blend, Reused
from hypercache.cli.local_server import local_server
from hypercache.engines import selectors
from hypercache.engines.compare import kl
from hypercache.engines.load import Loaded, load
from hypercache.stitch import copied

CONTINUATION = 16
RATIOS = (0.05, 0.15, 0.30)
POLICIES = ("kv", "k", "v", "attention", "boundary", "random", "learned")


def measure(
    loaded: Loaded,
    codecs: list[str],
    methods: list[tuple[str, float]],
    count: int,
    seed: int,
    save: Callable[[dict[str, Any]], None],
) -> None:
    """Rows by codec and method, each a list of one record a prompt: given to ``save`` after every prompt."""
    assert loaded.encode is not None
    engine = loaded.engine
    rows: dict[str, dict[str, list[dict[str, float]]]] = {codec: {} for codec in codecs}
    if "learned" in dict(methods) and learned(loaded) is None:
        raise SystemExit("no selector: run hypercache calibrate, or leave 'learned' out of --policies")
    began = time.monotonic()
    with local_server("3GiB") as server:
        clients = {
            codec: connect_sync(server["uris"][0], model=engine.spec, codec=codec, deadline=60)
            for codec in codecs
        }
        cases = passages.cases(loaded.encode, count, seed)
        for number, case in enumerate(cases, 1):
            first = KVBuffers.allocate(engine.spec, len(case.stored))
            blend.run(engine, case.stored, first, 0, (), Blend(0.0))
            truth, answer = full(engine, case.asked)
            for codec, client in clients.items():
                client.clear()
                client.store(case.stored, first)
                for name, record in one(loaded, client, case, truth, answer, methods):
                    rows[codec].setdefault(name, []).append(record)
            spent = time.monotonic() - began
            print(f"{number}/{count} prompts, {spent:.0f} s", file=sys.stderr, flush=True)
            save(rows)
        for client in clients.values():
            client.close()


def full(engine: Any, ids: list[int]) -> tuple[Any, list[int]]:
    """Logits (CONTINUATION, vocab) of a full prefill and its greedy continuation, and that continuation."""
    kv = KVBuffers.allocate(engine.spec, len(ids) + CONTINUATION)
    logits = [blend.run(engine, ids, kv, 0, (), Blend(0.0)).logits]
    answer: list[int] = []
    while True:
        answer.append(int(np.argmax(logits[-1])))
        if len(answer) == CONTINUATION:
            return np.stack(logits), answer
        more = [*ids, *answer]
        logits.append(blend.run(engine, more, kv, len(more) - 1, (), Blend(0.0)).logits)


def one(
    loaded: Loaded,
    client: Any,
    case: passages.Case,
    truth: Any,
    answer: list[int],
    methods: list[tuple[str, float]],
) -> Iterator[tuple[str, dict[str, float]]]:
    """Every method on one prompt, from one fetch."""
    engine = loaded.engine
    match = client.match(case.asked, modular=True, segments=case.segments)
    fetched = KVBuffers.allocate(engine.spec, len(case.asked) + CONTINUATION)
    result = client.fetch(match, fetched)
    if not result.modular or result.reason:
        raise SystemExit(f"nothing to measure: {result}")
    spans = [Reused(span.start, span.stop) for span in result.modular]
    naive = copied(fetched)
    for span in result.modular:
        for group in engine.spec.groups:
            back = rope.turn(group.rope, -span.delta)
            for layer in group.layers:
                parts = naive.window(span.start, span.stop).layer(layer)
                rope.rerotate(engine.spec.layout(layer), parts, back)
    ways = [("naive", naive, Blend(0.0)), ("rotated", fetched, Blend(0.0))]
    for policy, ratio in methods:
        chosen = learned(loaded) if policy == "learned" else policy
        ways.append((f"{policy} {ratio:.0%}", fetched, Blend(ratio, policy=chosen)))
    for name, kv, settings in ways:
        kv = copied(kv)
        run = blend.run(engine, case.asked, kv, result.hit_tokens, spans, settings)
        # The reference's continuation is fed, not this one's own: as long as all likeliest tokens agree, they
        # are the same, and where they do not, the distributions stay comparable.
        more = [*case.asked, *answer[:-1]]
        rest = blend.run(engine, more, kv, len(case.asked), (), Blend(0.0))
        logits = np.concatenate([run.logits[None], engine.logits(rest.hidden)])
        same = logits.argmax(-1) == np.array(answer)
        distances = kl(truth, logits)
        yield (
            name,
            {
                "kl_next": float(distances[0]),
                "kl_16": float(distances.mean()),
                "top1": float(same[0]),
                "top1_16": float(same.mean()),
                "exact_16": float(same.all()),
                "flops_saved": run.report.flops_saved,
                "reused": run.report.reused / len(case.asked),
            },
        )


def learned(loaded: Loaded) -> Any:
    """The selector calibrated for this model, if there is one."""
    return selectors.find(loaded.engine.spec)


def summary(rows: dict[str, dict[str, list[dict[str, float]]]]) -> dict[str, Any]:
    """Means over the prompts, and standard errors of the mean (``..._se``)."""
    out: dict[str, Any] = {}
    for codec, methods in rows.items():
        out[codec] = {}
        for name, records in methods.items():
            row = {"n": len(records)}
            for key in records[0]:
                values = [record[key] for record in records]
                row[key] = statistics.fmean(values)
                row[f"{key}_se"] = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0
            out[codec][name] = row
    return out


def table(results: dict[str, Any]) -> str:
    """Markdown, one table a codec."""
    lines = []
    for codec, methods in results["codecs"].items():
        lines += [
            f"`{codec}`:",
            "",
            "| method | KL, next token | KL, 16 tokens | top-1 | 16 tokens the same | FLOPs saved |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {name} | {row['kl_next']:.3f} ± {row['kl_next_se']:.3f} | {row['kl_16']:.3f} ± "
            f"{row['kl_16_se']:.3f} | {row['top1_16']:.1%} | {row['exact_16']:.0%} | "
            f"{row['flops_saved']:.0%} |"
            for name, row in methods.items()
        ]
        lines.append("")
    return "\n".join(lines)


def plot(results: dict[str, Any], file: Path) -> None:
    """KL against the share recomputed, a line a policy, a panel a codec."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    codecs = list(results["codecs"])
    figure, axes = pyplot.subplots(1, len(codecs), figsize=(3.4 * len(codecs), 3.6), sharey=True)
    for axis, codec in zip(np.atleast_1d(axes), codecs, strict=True):
        rows = results["codecs"][codec]
        start = rows["rotated"]
        for policy in POLICIES:
            ratios = [ratio for ratio in RATIOS if f"{policy} {ratio:.0%}" in rows]
            if not ratios:
                continue
            points = [start, *(rows[f"{policy} {ratio:.0%}"] for ratio in ratios)]
            values, errors = ([point[key] for point in points] for key in ("kl_16", "kl_16_se"))
            shares = [0, *(100 * ratio for ratio in ratios)]
            color = f"C{POLICIES.index(policy)}"
            axis.errorbar(shares, values, errors, color=color, marker="o", ms=3, capsize=2, label=policy)
        axis.axhline(rows["naive"]["kl_16"], color="grey", ls=":", label="naive (not rotated)")
        axis.set_title(codec)
        axis.set_xlim(-1, 100 * RATIOS[-1] + 1)
        axis.set_xlabel("share of reused tokens recomputed, %")
        axis.set_yscale("log")
    np.atleast_1d(axes)[0].set_ylabel("KL to full prefill, nats (16 tokens)")
    named = np.atleast_1d(axes)[0].get_legend_handles_labels()
    np.atleast_1d(axes)[-1].legend(*named, fontsize=6, loc="lower right")
    figure.suptitle(f"{results['model']}: reordered passages, {rows['rotated']['n']} prompts")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="as in hypercache doctor --help")
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--codecs", default="raw,fp8,int8,int4,int4-plain")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--ratios", default=",".join(map(str, RATIOS)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results here; rows of such a file are added to")
    parser.add_argument("--plot", type=Path, help="only show results written before")
    args = parser.parse_args()
    if args.plot is not None:
        results = json.loads(args.plot.read_text())
    else:
        loaded = load(args.model, "float32", lambda line: print(line, file=sys.stderr))
        ratios = [float(ratio) for ratio in args.ratios.split(",")]
        methods = [(policy, ratio) for policy in args.policies.split(",") for ratio in ratios]
        before = json.loads(args.json.read_text())["codecs"] if args.json and args.json.exists() else {}
        results: dict[str, Any] = {}

        def save(rows: dict[str, Any]) -> None:
            found = summary(rows)
            for codec, known in before.items():
                found[codec] = {**known, **found.get(codec, {})}
            results.update(model=loaded.name, seed=args.seed, python=platform.python_version(), codecs=found)
            if args.json is not None:
                args.json.write_text(json.dumps(results, indent=1))

        measure(loaded, args.codecs.split(","), methods, args.prompts, args.seed, save)
    print(table(results))
    where = args.plot or args.json
    if where is not None:
        plot(results, where.with_suffix(".png"))


if __name__ == "__main__":
    main()
