"""The two-hop task: facts in three documents, some of which point at facts of earlier documents.

A fact is ``key x ;``. x is a value, or the key of a fact in an earlier document, whose value it then has. The
last fact of each later document defines a key of an earlier one anew, and the latest definition counts. A
question is ``? key``, the answer a value. So the K/V of a fact that points elsewhere depend on the documents
before it: what a cache must repair when documents come in another order, and a worst case on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

START, DOCUMENT, END, ASK, PAD = range(5)
KEYS, VALUES = 48, 32
FIRST_KEY, FIRST_VALUE = 8, 8 + KEYS
VOCAB = 96
REFERENCES = 0.5  # share of the facts of later documents that point at earlier ones
KINDS = ("direct", "twohop", "override")


@dataclass(frozen=True, slots=True)
class Shape:
    """Documents of a prompt, facts of each, and questions."""

    documents: int = 3
    facts: int = 5
    questions: int = 6

    @property
    def document_tokens(self) -> int:
        return 1 + 3 * self.facts

    @property
    def context_tokens(self) -> int:
        """START and the documents."""
        return 1 + self.documents * self.document_tokens


@dataclass(frozen=True, slots=True)
class Prompt:
    """``ids``: START, the documents, then ``ASK key value`` for each question.

    labels: position -> the token that a model should put out there: each question's answer at its key, and
        the value behind each reference at the reference, which a model learns from but is not asked for.
    questions: position of the key, and the fact's kind, one of :data:`KINDS`.
    documents: where each starts and stops.
    """

    ids: list[int]
    labels: dict[int, int]
    questions: list[tuple[int, str]]
    documents: list[tuple[int, int]]


@dataclass(slots=True)
class _Fact:
    key: int
    value: int  # what it comes to
    points_at: int | None = None  # the key that stands in the value's place
    kind: str = "direct"


def prompt(random: Random, shape: Shape = Shape()) -> Prompt:
    """One prompt, drawn from ``random``."""
    facts = _facts(random, shape)
    ids, labels = [START], {}
    documents = []
    for at in range(0, len(facts), shape.facts):
        begin = len(ids)
        ids.append(DOCUMENT)
        for fact in facts[at : at + shape.facts]:
            x = FIRST_VALUE + fact.value if fact.points_at is None else FIRST_KEY + fact.points_at
            ids += (FIRST_KEY + fact.key, x, END)
            if fact.points_at is not None:
                labels[len(ids) - 2] = FIRST_VALUE + fact.value
        documents.append((begin, len(ids)))
    questions = []
    for fact in _asked(random, facts, shape.questions):
        ids += (ASK, FIRST_KEY + fact.key, FIRST_VALUE + fact.value)
        questions.append((len(ids) - 2, fact.kind))
        labels[len(ids) - 2] = FIRST_VALUE + fact.value
    return Prompt(ids, labels, questions, documents)


def unlabelled(prompt: Prompt) -> dict[str, Any]:
    """A prompt as ``hypercache calibrate`` reads it: what is in front, what moves, what is asked."""
    return {
        "prefix": prompt.ids[:1],
        "segments": [prompt.ids[start:stop] for start, stop in prompt.documents],
        "questions": [prompt.ids[position - 1 : position + 1] for position, _ in prompt.questions],
        # An answer of one token: what is compared is the distribution it would be drawn from, whatever it is.
        "answer": [START],
    }


def _facts(random: Random, shape: Shape) -> list[_Fact]:
    keys = iter(random.sample(range(KEYS), shape.documents * shape.facts))
    facts: list[_Fact] = []
    for document in range(shape.documents):
        earlier = tuple(facts)
        latest = {fact.key: fact for fact in earlier}
        targets = [fact for fact in earlier if fact.points_at is None]
        for slot in range(shape.facts):
            key, value = next(keys), random.randrange(VALUES)
            if document and slot == shape.facts - 1:
                facts.append(_Fact(random.choice(earlier).key, value, kind="override"))
            elif document and random.random() < REFERENCES:
                target = random.choice(targets).key
                facts.append(_Fact(key, latest[target].value, target, "twohop"))
            else:
                facts.append(_Fact(key, value))
    return facts


def _asked(random: Random, facts: list[_Fact], count: int) -> list[_Fact]:
    """``count`` of the facts that count, in random order; two hops and overrides are asked for more often."""
    extra = {"direct": 0.0, "twohop": 0.35, "override": 0.5}
    latest = list({fact.key: fact for fact in facts}.values())
    ranked = sorted(latest, key=lambda fact: random.random() + extra[fact.kind], reverse=True)
    return random.sample(ranked[:count], count)


def copying(random: Random, length: int) -> Prompt:
    """Where a model's training starts: a random run of keys and values, twice, to be repeated."""
    run = random.sample(range(FIRST_KEY, FIRST_VALUE + VALUES), length)
    ids = [START, *run, *run]
    return Prompt(ids, {i: ids[i + 1] for i in range(1 + length, 2 * length)}, [], [])
