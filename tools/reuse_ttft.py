"""Time to first token: full prefill against documents in another order, fetched over TCP and repaired.

The text of the package, in passages, is prefilled behind one system prompt and stored in a server process;
then the same passages are asked in reverse order behind another system prompt. Full prefill is the model's
own forward. Rounds alternate; medians.

    python tools/reuse_ttft.py [--rounds 5] [--codec int8] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Transformers copies K/V once for each query head of a group unless told that the kernel shares them.
os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")

from hypercache import KVBuffers, connect_sync
from hypercache.blend import Blend
from hypercache.cli.local_server import local_server
from hypercache.engines.cached import prefill
from hypercache.engines.compare import kl
from hypercache.engines.load import load
from hypercache.engines.subject import document

PASSAGE = 250  # tokens


def prompts(encode: Any) -> tuple[list[int], list[int]]:
    """Stored and asked: the same passages, in another order behind another system prompt."""
    ids = encode(document())
    passages = [ids[at : at + PASSAGE] for at in range(0, len(ids) - PASSAGE + 1, PASSAGE)]
    first = encode("You are a librarian.\n\n") + [token for one in passages for token in one]
    second = encode("Answer from these pages, in any order they come, and only from them.\n\n")
    second += [token for one in reversed(passages) for token in one]
    return first + encode("\nWho is it about?"), second + encode("\nWhat happened to the steamer Aurelia?")


def measure(model: str, codec: str, rounds: int) -> dict[str, Any]:
    """Seconds of each way (medians), and what the blends reported."""
    loaded = load(model, "float32", lambda line: print(line, file=sys.stderr))
    assert loaded.encode is not None
    engine = loaded.engine
    stored, asked = prompts(loaded.encode)
    ways = {
        "full": None,
        "rotated": Blend(0.0),
        "5 %": Blend(0.05),
        "15 %": Blend(0.15),
        "15 %, boundary": Blend(0.15, policy="boundary"),
        "30 %": Blend(0.30),
    }
    spent: dict[str, list[float]] = {name: [] for name in ways}
    rows: dict[str, Any] = {}
    with (
        local_server("1GiB") as server,
        connect_sync(server["uris"][0], model=engine.spec, codec=codec, deadline=60) as client,
    ):
        client.store(stored, prefill(engine, stored).kv)
        kv = KVBuffers.allocate(engine.spec, len(asked))
        truth = prefill(engine, asked).logits
        for _ in range(rounds + 1):  # the first is not counted: fresh pages, caches
            for name, blend in ways.items():
                began = time.perf_counter()
                done = prefill(engine, asked, client if blend else None, kv, blend=blend)
                spent[name].append(time.perf_counter() - began)
                rows[name] = {"kl": float(kl(truth, done.logits))}
                if done.report is not None:
                    if not done.report.reused:
                        raise SystemExit(f"nothing was reused: {done.fetch}")
                    rows[name] |= {
                        "reused": done.report.reused,
                        "flops_saved": done.report.flops_saved,
                        "policy": done.report.policy,
                        "wire_mb": done.fetch.wire_bytes / 1e6,
                    }
    for name, row in rows.items():
        row["seconds"] = statistics.median(spent[name][1:])
        row["of_full"] = row["seconds"] / statistics.median(spent["full"][1:])
    return {"model": loaded.name, "tokens": len(asked), "codec": codec, "rounds": rounds, "ways": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="as in hypercache doctor --help")
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args.model, args.codec, args.rounds)
    if args.json:
        print(json.dumps(found, indent=1))
        return
    print(
        f"{found['model']}, {found['tokens']} tokens, {found['codec']} over TCP, medians of {found['rounds']}"
    )
    for name, row in found["ways"].items():
        saved = f"{row['flops_saved']:.0%} of FLOPs saved, {row['reused']} reused" if "reused" in row else ""
        print(f"  {name:<16}{row['seconds']:7.2f} s  1/{1 / row['of_full']:.1f}  KL {row['kl']:.4f}  {saved}")


if __name__ == "__main__":
    main()
