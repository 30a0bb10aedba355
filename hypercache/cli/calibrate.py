"""Learn for a model which reused tokens to recompute: blends use the result instead of layer-1 deviation.

Prompts of reused passages are computed in full and from K/V of other contexts; a selector learns to tell the
tokens whose repair matters by what a blend sees of them at layer 1. No labels are needed: any text will do.
The result is compared, on prompts that were not learned from, with rotation alone and layer-1 deviation, and
kept under the model's fingerprint if it is no worse than these (exit code 1 if it is). A run that was ended
goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hypercache.errors import ConfigError, SpecError

if TYPE_CHECKING:
    from hypercache.engines.calibration import Outcome
    from hypercache.engines.load import Loaded
    from hypercache.engines.prompts import Prompt

PROMPTS, HELD_OUT = 40, 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from hypercache.engines.load import DTYPES, MODEL_HELP

    parser.add_argument("--model", required=True, metavar="PATH", help=MODEL_HELP)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="default: the checkpoint's own")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='a text; or JSONL, a line {"text": ...} or {"segments": [...], "question": ...}: '
        "texts or lists of token ids (default: the text in the package)",
    )
    parser.add_argument(
        "--count",
        type=int,
        default=PROMPTS,
        help="prompts to learn from; a quarter as many more are held out to compare (default: %(default)s)",
    )
    parser.add_argument("--ratio", type=float, default=0.15, help="share to find (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to put the selector")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if not 0 < args.ratio < 1:
        raise ConfigError(f"--ratio must be above 0 and below 1, got {args.ratio}")
    if args.count < 1:
        raise ConfigError(f"--count must be 1 or more, got {args.count}")
    from hypercache.engines import calibration, selectors
    from hypercache.engines.load import load

    made_from = source(args.prompts, args.count)  # before the model: what cannot be read is told at once
    console = Console(stderr=True)
    with console.status("loading") as status:
        loaded = load(args.model, args.dtype, status.update)
    if loaded.unlayered:
        raise SpecError(f"{loaded.name} cannot be calibrated: {loaded.unlayered}")
    out = args.out or selectors.path_of(loaded.engine.spec)
    if out is None:
        raise ConfigError("there is no home directory to keep the selector in; give --out FILE")
    columns = SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
    kept = out.with_name(f"{out.name}.progress")
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("calibrating", total=None)

        def report(what: str, done: int, of: int | None) -> None:
            bar.update(task, description=what, completed=done, total=of)
            if not console.is_terminal:
                console.print(what, done or "", f"of {of}" if of else "", highlight=False)

        try:
            outcome = calibration.calibrate(
                loaded.engine,
                prompts(loaded, args.prompts, args.count),
                source=made_from,
                ratio=args.ratio,
                progress=kept,
                report=report,
            )
        except KeyboardInterrupt:
            if kept.exists():
                console.print(
                    f"ended; what was done is kept in {kept}, the same command goes on", soft_wrap=True
                )
            raise
        except OSError as error:
            raise SpecError(f"{error.filename or args.prompts} cannot be read: {error.strerror}") from None
    if outcome.better:
        selectors.save(outcome.selector, out)
    show(loaded.name, outcome, out, as_json=args.json)
    return 0 if outcome.better else 1


def prompts(loaded: Loaded, path: Path | None, count: int) -> Iterator[tuple[bool, Prompt]]:
    """(whether it is held out, prompt), as the file gives them."""
    from hypercache.engines import prompts as sources
    from hypercache.engines.subject import document

    held_out = max(1, count * HELD_OUT // PROMPTS)
    if path is not None and path.suffix in (".jsonl", ".json"):
        found = sources.from_lines(path, loaded.encode, loaded.vocab, seed=0)
        for i, prompt in zip(range(count + held_out), found, strict=False):
            yield i % (count // held_out + 1) == count // held_out, prompt
        return
    if loaded.encode is None:
        raise SpecError(
            f"{loaded.name} has no tokenizer: give --prompts FILE.jsonl with token ids, "
            '{"segments": [[...], [...]], "question": [...]}'
        )
    text = document() if path is None else sources.read_text(path)
    for i, prompt in enumerate(sources.from_text(text, loaded.encode, count, held_out, seed=0)):
        yield i >= count, prompt


def source(path: Path | None, count: int) -> str:
    """Digest of what the prompts are made from."""
    import hashlib

    from hypercache.engines.subject import document

    state = hashlib.blake2b(f"{count}\n".encode(), digest_size=16)
    if path is None:
        state.update(document().encode())
        return state.hexdigest()
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                state.update(piece)
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}; give a text or JSONL file") from None
    return state.hexdigest()


def show(name: str, outcome: Outcome, out: Path, *, as_json: bool) -> None:
    """For people, or for programs."""
    trained, kl = outcome.selector.trained, outcome.kl
    if as_json:
        found: dict[str, Any] = {
            "model": name,
            "fingerprint": outcome.selector.model,
            "ratio": outcome.selector.ratio,
            "prompts": trained.prompts,
            "rows": trained.rows,
            "held_out": outcome.held_out,
            "kl": kl,
            "better": outcome.better,
            "out": str(out) if outcome.better else None,
        }
        print(json.dumps(found, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{name}: learned from {trained.rows} tokens of {trained.prompts} prompts")
    if outcome.better:
        console.print(f"selector: {out}")
    else:
        console.print(
            "not kept: on the prompts held out it is worse than what blends do without it; more --prompts, "
            "or such as the model will see, may help. Blends go on by layer-1 deviation."
        )
    share = f"{outcome.selector.ratio:.0%}"
    console.print(
        f"KL to full prefill, {outcome.held_out} other prompts: rotated only {kl['rotated']:.4g}, "
        f"{share} by layer-1 deviation {kl['deviation']:.4g}, {share} by the selector {kl['selector']:.4g}"
    )
