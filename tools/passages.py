"""Real text for measurements, found on every machine that runs Python: the standard library's docstrings.

Nothing is shipped or fetched. What a prompt holds depends on the Python version, which results name.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SYSTEM = "You are a careful assistant. Answer from the reference below, and say so if it does not tell.\n\n"


class Passage(NamedTuple):
    """A docstring of 330 to 480 characters, and what it describes."""

    title: str
    text: str


@dataclass(frozen=True)
class Case:
    """Token ids of two prompts over the same passages in two orders, and where the passages stand in the
    second: (start, stop) of each."""

    stored: list[int]
    asked: list[int]
    segments: list[tuple[int, int]]


def passages() -> list[Passage]:
    """All docstrings of the standard library of that length, in the order of files and lines."""
    root = Path(sysconfig.get_path("stdlib"))
    return [one for path in sorted(root.glob("[a-z]*.py")) for one in _of(path)]


def _of(path: Path) -> Iterator[Passage]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            text = ast.get_docstring(node)
            if text is not None and 330 <= len(text) <= 480 and text.isascii():
                yield Passage(f"{path.stem}.{node.name}", text)


def cases(encode: Callable[[str], list[int]], count: int, seed: int = 0) -> list[Case]:
    """``count`` cases of 4, 5 or 6 passages each; no passage is used twice in one, none keeps its place."""
    rng = random.Random(seed)
    pool = passages()
    made = []
    for index in range(count):
        chosen = rng.sample(pool, 4 + index % 3)
        order = list(range(len(chosen)))
        while any(a == b for a, b in zip(order, range(len(chosen)), strict=True)):
            rng.shuffle(order)
        head = encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
        docs = [encode(f"# {one.title}\n{one.text}\n\n") for one in chosen]
        first, second = rng.sample(chosen, 2)
        asked, segments = list(head), []
        for which in order:
            segments.append((len(asked), len(asked) + len(docs[which])))
            asked += docs[which]
        made.append(
            Case(
                head + [token for doc in docs for token in doc] + encode(_question(first)),
                asked + encode(_question(second)),
                segments,
            )
        )
    return made


def _question(about: Passage) -> str:
    return f"What does {about.title} do, in two sentences?<|im_end|>\n<|im_start|>assistant\n"
