"""A task where the quality of reuse can be scored: train its model, or measure what blending does to it.

python tools/twohop.py train --out DIR [--minutes N]
python tools/twohop.py eval --model DIR [--json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train the model on one core")
    train.add_argument("--out", type=Path, required=True, help="directory for the model")
    train.add_argument("--minutes", type=float, default=60, help="CPU time at most (default 60)")
    train.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    import twohop_train

    print(
        json.dumps(
            twohop_train.train(args.out, args.minutes, args.seed, lambda text: print(text, flush=True))
        )
    )


if __name__ == "__main__":
    main()
