"""Prompts to calibrate on: passages that move, and what is asked about them, of any text or out of a file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hypercache.errors import SpecError, TooLarge
from hypercache.identity import commit

Encode = Callable[[str], list[int]]

MAX_TEXT = 4 << 20  # bytes of a text file that are read; passages come from all of it
MAX_LINE = 4 << 20  # of a JSONL file
MAX_TOKENS = 8192  # of one prompt: the attention of layers 0 and 1 is looked at for all of them
PASSAGE = (40, 96)  # tokens
PASSAGES = 4  # a prompt
CUE, ANSWER = 8, 24  # tokens of a passage's end that are repeated, and those that follow in the text
PREFIX = "Documents:\n\n"


@dataclass(frozen=True, slots=True)
class Question:
    """ids: what stands behind the passages. answer: what follows it; the distributions of its tokens are
    compared. Empty: the model's own greedy continuation."""

    ids: tuple[int, ...]
    answer: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """prefix: exact tokens in front. segments: what is reused from another context."""

    prefix: tuple[int, ...]
    segments: tuple[tuple[int, ...], ...]
    questions: tuple[Question, ...]

    def digest(self) -> str:
        asked = [(question.ids, question.answer) for question in self.questions]
        return commit("hypercache.calibration.prompt.v1", {"of": (self.prefix, self.segments, asked)}).hex()


def from_text(text: str, encode: Encode, count: int, held_out: int, seed: int) -> Iterator[Prompt]:
    """``count`` prompts to learn from, then ``held_out`` of other passages of the same text.

    Each is PASSAGES passages in a random order; it is asked to go on with two of them where they break off,
    and what the text really says there is the answer. Raises SpecError for a text too short for that.
    """
    rng = random.Random(seed)
    ids = encode(text)
    pieces: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # a passage, and what follows it
    at = 0
    while at + PASSAGE[0] + ANSWER <= len(ids):
        stop = min(at + rng.randint(*PASSAGE), len(ids) - ANSWER)
        pieces.append((tuple(ids[at:stop]), tuple(ids[stop : stop + ANSWER])))
        at = stop
    apart = len(pieces) // 4 if held_out else 0
    learn, rest = pieces[: len(pieces) - apart], pieces[len(pieces) - apart :]
    if min(len(learn), len(rest) if held_out else PASSAGES) < PASSAGES:
        need = PASSAGES * PASSAGE[1] * (4 if held_out else 1)
        raise SpecError(f"the text has {len(ids)} tokens; {need} or more are needed")
    prefix = tuple(encode(PREFIX))
    for number in range(count + held_out):
        yield _of_passages(prefix, rng.sample(learn if number < count else rest, PASSAGES), rng)


def _of_passages(
    prefix: tuple[int, ...], chosen: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], rng: random.Random
) -> Prompt:
    asked = [Question(passage[-CUE:], follows) for passage, follows in rng.sample(chosen, 2)]
    return Prompt(prefix, tuple(passage for passage, _ in chosen), tuple(asked))


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a JSONL file, beside {"text": ...}: texts, or lists of token ids."""

    segments: list[Any]
    question: Any = None
    questions: list[Any] = []
    answer: Any = None
    prefix: Any = ""


def from_lines(path: Path, encode: Encode | None, vocab: int, seed: int) -> Iterator[Prompt]:
    """The prompts of a JSONL file, one a line, as they come.

    A line is ``{"text": ...}``, a text of its own as for :func:`from_text`, or
    ``{"segments": [...], "question": ...}`` with optional ``"prefix"``, ``"answer"``, and ``"questions"`` for
    several at once. Each part is a text or a list of token ids; a model without tokenizer needs ids. Raises
    SpecError that names the line, TooLarge for a line above ``MAX_LINE`` or a prompt above ``MAX_TOKENS``.
    """
    number = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE + 1):
            number += 1
            where = f"{path}, line {number}"
            if len(line) > MAX_LINE:
                raise TooLarge(f"{where}: a line has {MAX_LINE} bytes at the most")
            if line.strip():
                yield _parse(where, line, encode, vocab, seed + number)


def _parse(where: str, line: bytes, encode: Encode | None, vocab: int, seed: int) -> Prompt:
    def ids(name: str, value: Any) -> tuple[int, ...]:
        if isinstance(value, str) and (encode is not None or not value):
            return tuple(encode(value)) if encode is not None else ()
        if isinstance(value, str):
            raise SpecError(f"{where}: {name} is a text, but the model has no tokenizer; give token ids")
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise SpecError(f"{where}: {name} must be a text or a list of token ids")
        if any(not 0 <= item < vocab for item in value):
            raise SpecError(f"{where}: {name} has token ids outside 0..{vocab - 1}, the model's vocabulary")
        return tuple(value)

    try:
        found = json.loads(line)
        json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        if isinstance(found, dict) and set(found) == {"text"} and isinstance(found["text"], str):
            if encode is None:
                raise SpecError(f"{where}: text, but the model has no tokenizer; give segments of token ids")
            return next(from_text(found["text"], encode, 1, 0, seed))
        parts = msgspec.convert(found, _Line)
    except SpecError as error:
        raise SpecError(str(error) if where in str(error) else f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(
            f'{where}: {error}; give {{"text": ...}} or {{"segments": [...], "question": ...}}'
        ) from None
    answer = () if parts.answer is None else ids("answer", parts.answer)
    asked = parts.questions or ([] if parts.question is None else [parts.question])
    prompt = Prompt(
        prefix=ids("prefix", parts.prefix),
        segments=tuple(ids(f"segments[{i}]", segment) for i, segment in enumerate(parts.segments)),
        questions=tuple(Question(ids("question", one), answer) for one in asked),
    )
    if len(prompt.segments) < 2 or not all(prompt.segments) or not prompt.questions:
        raise SpecError(f"{where}: needs two segments or more and a question, none of them empty")
    if not all(question.ids for question in prompt.questions):
        raise SpecError(f"{where}: a question is empty")
    size = len(prompt.prefix) + sum(map(len, prompt.segments))
    size += max(len(question.ids) + len(question.answer) for question in prompt.questions)
    if size > MAX_TOKENS:
        raise TooLarge(f"{where}: {size} tokens; a prompt has {MAX_TOKENS} at the most here")
    return prompt


def read_text(path: Path) -> str:
    """The first ``MAX_TEXT`` bytes of a text file. Raises SpecError for one that is not UTF-8."""
    with path.open("rb") as file:
        data = file.read(MAX_TEXT)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if len(data) - error.start < 4 and len(data) == MAX_TEXT:  # cut inside a character
            return data[: error.start].decode()
        raise SpecError(f"{path} is not UTF-8 text (byte {error.start}); give a text or JSONL file") from None
