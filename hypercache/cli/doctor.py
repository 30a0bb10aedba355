"""Self-test of a model: does moving its K/V give what computing them there gives?

Runs the model on a text: an exact prefix, a block at another position, documents in another order. Prints the
measured errors, and whether modular reuse is possible for this model, or why not. Exit code 1 if something
that should agree does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from hypercache.engines.load import Loaded
    from hypercache.engines.parity import Parity

DOCUMENTS = 5
DOCUMENT_TOKENS = 120
QUESTION = (
    "\n\nA reader of the pages above asks: what is told in them, who takes part in it, where does it happen, "
    "and what became of it in the end? Answer in a few words, with what the pages say and nothing else.\n"
)
_ROWS = {
    "naive": "keys left as they were",
    "rotated": "keys rotated, nothing recomputed",
    "blend": "rotated, 15 % of the tokens recomputed",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from hypercache.engines.load import DTYPES, MODEL_HELP

    parser.add_argument("--model", required=True, metavar="PATH", help=MODEL_HELP)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="default: the checkpoint's own")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from hypercache.engines import parity
    from hypercache.engines.load import load

    with Console(stderr=True).status("loading") as status:
        loaded = load(args.model, args.dtype, status.update)
        documents, question = texts(loaded)
        status.update("measuring")
        found = parity.measure(loaded.engine, documents, question, loaded.unlayered)
    if args.json:
        passed = {"model": loaded.name, "passed": found.passed, "modular": not found.refusal}
        print(json.dumps({**passed, **dataclasses.asdict(found)}, indent=2))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = 110
        show(loaded.name, found, console)
    return 0 if found.passed else 1


def texts(loaded: Loaded) -> tuple[list[list[int]], list[int]]:
    """Documents and a question for the model: of the text in the package, random ids without a tokenizer."""
    if loaded.encode is None:
        rng = random.Random(0)
        rows = [[rng.randrange(loaded.vocab) for _ in range(DOCUMENT_TOKENS)] for _ in range(DOCUMENTS)]
        return rows, rows[0][:16]
    from hypercache.engines.subject import document

    ids = loaded.encode(document())[: DOCUMENTS * DOCUMENT_TOKENS]
    rows = [ids[at : at + DOCUMENT_TOKENS] for at in range(0, len(ids), DOCUMENT_TOKENS)]
    return rows, loaded.encode(QUESTION)


def show(name: str, found: Parity, console: Console) -> None:
    """For people."""
    console.print(f"{name}", style="bold", highlight=False)
    rows = [("exact prefix", found.prefix, found.prefix_tolerance, "largest logit")]
    if found.shift is not None:
        rows.append(("shifted block", found.shift, found.tolerance, "largest key"))
    for what, error, limit, unit in rows:
        verdict = "ok" if error <= limit else "FAILED"
        console.print(f"  {what:<16}{verdict:<8}error {error:.1e} of the {unit} (allowed {limit:.0e})")
    for key, row in found.order.items():
        console.print(
            f"  {'reordered' if key == 'naive' else '':<16}{_ROWS[key]:<40}KL {row.kl:.4f} nats, "
            f"{row.top1:.0%} of next tokens the same, {row.flops_saved:.0%} of the prefill's FLOPs saved",
            highlight=False,
            soft_wrap=True,
        )
    why = f"refused: {found.refusal}" if found.refusal else "possible"
    console.print(f"  modular reuse   {why}", highlight=False, soft_wrap=True)
