"""What reuse does to the answers: documents computed each behind START alone, then put one behind another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import twohop_task as task
from rich.console import Console
from rich.table import Table
from twohop_task import Prompt
from twohop_train import summary

from hypercache.blend import POLICIES, Blend, Blended, Layered, Policy, Reused, run
from hypercache.kv import KVBuffers
from hypercache.stitch import copied, put

RATIOS = (0.05, 0.15, 0.3)


@dataclass
class Row:
    """Answers of one way to make the K/V of the documents."""

    way: str
    settings: Blend | None = None  # None: full prefill
    rotated: bool = True
    right: dict[str, list[bool]] = field(default_factory=lambda: {kind: [] for kind in task.KINDS})
    recomputed: list[int] = field(default_factory=list)
    saved: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """Accuracy, of ``all`` and by kind, and means: tokens ``recomputed``, share of FLOPs ``saved``."""
        means = {"recomputed": float(np.mean(self.recomputed)), "flops_saved": float(np.mean(self.saved))}
        ratio, narrow = (self.settings.ratio, self.settings.narrow) if self.settings else (None, None)
        return {"way": self.way, "ratio": ratio, "narrow": narrow, **summary(self.right), **means}


def rows(selector: Policy | None) -> list[Row]:
    """All ways: full prefill, as they come, rotated, every policy at every ratio; one also without narrowing
    and with as much as there is."""
    policies = [*POLICIES.values(), *([selector] if selector else [])]
    blends = [Row(policy.name, Blend(ratio, policy)) for policy in policies for ratio in RATIOS]
    narrowing = [
        Row(policy.name, Blend(0.15, policy, narrow=narrow)) for narrow in (0.0, 1.0) for policy in policies
    ]
    unrepaired = [Row("full"), Row("naive", Blend(0.0), rotated=False), Row("rotated", Blend(0.0))]
    return [*unrepaired, *blends, *narrowing]


def evaluate(
    engine: Layered,
    count: int,
    seed: int,
    ways: Sequence[Row],
    tick: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Figures of each of ``ways`` over ``count`` prompts, ``tick`` after each. The questions of one are
    answered in one run, each with the right answers of those before it in view."""
    random = Random(seed)
    for _ in range(count):
        prompt = task.prompt(random)
        stitched = {rotated: stitch(engine, prompt, rotated) for rotated in (False, True)}
        for row in ways:
            _answer(engine, prompt, row, stitched[row.rotated])
        tick()
    return [row.figures() for row in ways]


def _answer(engine: Layered, prompt: Prompt, row: Row, stitched: KVBuffers) -> None:
    found = blended(engine, prompt, row, stitched)
    for (position, kind), said in zip(prompt.questions, answers(engine, found, prompt), strict=True):
        row.right[kind].append(said == prompt.labels[position])
    row.recomputed.append(found.report.recomputed)
    row.saved.append(found.report.flops_saved)


def blended(engine: Layered, prompt: Prompt, row: Row, stitched: KVBuffers) -> Blended:
    """One prompt run as ``row`` says, from a copy of ``stitched``."""
    if row.settings is None:
        return run(engine, prompt.ids, KVBuffers.allocate(engine.spec, len(prompt.ids)), 0, [], Blend(0.0))
    kv = copied(stitched)
    spans = [Reused(*document) for document in prompt.documents]
    return run(engine, prompt.ids, kv, 1, spans, row.settings)


def answers(engine: Layered, blended: Blended, prompt: Prompt) -> list[int]:
    """The likeliest token behind the key of each question."""
    asked = np.searchsorted(blended.positions, [position for position, _ in prompt.questions])
    said: list[int] = engine.logits(blended.hidden[asked]).argmax(axis=-1).tolist()
    return said


def stitch(engine: Layered, prompt: Prompt, rotated: bool) -> KVBuffers:
    """K/V of a prompt with room for the questions: START exact, each document computed behind START alone and
    put to its place, with its keys turned to it where ``rotated``."""
    whole = KVBuffers.allocate(engine.spec, len(prompt.ids))
    for start, stop in prompt.documents:
        ids = [task.START, *prompt.ids[start:stop]]
        alone = KVBuffers.allocate(engine.spec, len(ids))
        run(engine, ids, alone, 0, [], Blend(0.0))
        put(alone, 0, whole, 0, 1)
        put(alone, 1, whole, start, stop - start, turned=rotated)
    return whole


def show(found: Sequence[dict[str, Any]], console: Console) -> None:
    """A table of :func:`evaluate`'s figures."""
    table = Table("", box=None, pad_edge=False)
    for heading in ("all", *task.KINDS, "tokens recomputed", "FLOPs saved"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found:
        table.add_row(_name(row), *_cells(row))
    console.print(table)
    console.print("  accuracy; FLOPs saved: of the whole prompt's, probing counted")


def _name(row: dict[str, Any]) -> str:
    return f"{row['way']} {row['ratio']:.0%}, narrow {row['narrow']:g}" if row["ratio"] else row["way"]


def _cells(row: dict[str, Any]) -> Iterator[str]:
    for kind in ("all", *task.KINDS):
        yield f"{row[kind]:.1%}" if kind in row else "n/a"
    yield f"{row['recomputed']:.1f}"
    yield f"{row['flops_saved']:.1%}"
