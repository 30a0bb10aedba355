"""A task where the quality of reuse can be scored: train its model, or measure what blending does to it.

python tools/twohop.py train --out DIR [--minutes N] [--seed N]
python tools/twohop.py eval --model DIR [--prompts N] [--seed N] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.progress import Progress
from transformers.utils import logging

from hypercache.errors import HyperCacheError


def train(args: argparse.Namespace) -> None:
    import twohop_train

    reached = twohop_train.train(args.out, args.minutes, args.seed, lambda text: print(text, flush=True))
    print(json.dumps(reached))


def evaluate(args: argparse.Namespace) -> None:
    import twohop_eval

    from hypercache.engines import selectors
    from hypercache.engines.load import load

    engine = load(str(args.model)).engine
    ways = twohop_eval.rows(selectors.find(engine.spec))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"{args.prompts} prompts, {len(ways)} ways", total=args.prompts)
        found = twohop_eval.evaluate(engine, args.prompts, args.seed, ways, lambda: progress.advance(task))
    if args.json:
        print(json.dumps({"prompts": args.prompts, "seed": args.seed, "rows": found}, indent=2))
    else:
        console = Console()
        twohop_eval.show(found, console if console.is_terminal else Console(width=110))


def prompts(args: argparse.Namespace) -> None:
    import twohop_task

    random = Random(args.seed)
    for _ in range(args.prompts):
        print(json.dumps(twohop_task.unlabelled(twohop_task.prompt(random))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("train", help="train the model on one core")
    command.set_defaults(run=train)
    command.add_argument("--out", type=Path, required=True, help="directory for the model")
    command.add_argument("--minutes", type=float, default=60, help="CPU time at most (default 60)")
    command.add_argument("--seed", type=int, default=0)
    command = commands.add_parser(
        "eval", help="accuracy under full prefill, reuse, and every way to repair it"
    )
    command.set_defaults(run=evaluate)
    command.add_argument("--model", type=Path, required=True, help="directory of a trained model")
    command.add_argument("--prompts", type=int, default=300, help="of 6 questions each (default 300)")
    command.add_argument("--seed", type=int, default=1, help="of the prompts; not the one trained with")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command = commands.add_parser("prompts", help="print prompts to calibrate on, without answers")
    command.set_defaults(run=prompts)
    command.add_argument("--prompts", type=int, default=50, help="default 50")
    command.add_argument("--seed", type=int, default=2, help="of the prompts; not the one evaluated with")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    try:
        args.run(args)
    except HyperCacheError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
