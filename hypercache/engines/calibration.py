"""What a selector is learned from, seen on the model itself: prompts in full, and from K/V of other contexts.

A prompt's passages are computed once as they stand in it, once in another context and rotated to their
place, as reuse would find them. What the blend sees of their tokens at the check layer are the features;
how much each token's repair is worth to what follows is the target (:mod:`hypercache.engines.influence`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hypercache import blend, rope
from hypercache.blend import Blend, Policy, Reused, Seen
from hypercache.blend.fit import fit, scaling, stakes, top_share
from hypercache.blend.selector import Selector, Trained, expand, names, table
from hypercache.engines.compare import kl
from hypercache.engines.influence import influence
from hypercache.engines.progress import Progress
from hypercache.engines.prompts import Prompt, Question
from hypercache.errors import SpecError
from hypercache.identity import commit
from hypercache.kv import KVBuffers
from hypercache.stitch import copied, put

Array = npt.NDArray[Any]

Report = Callable[[str, int, int | None], object]

CHECK_LAYER = 1
MAX_ROWS = 1 << 16  # tokens that are learned from: 7 MB of features for 9 heads
CONTINUATION = 16  # tokens of the model's own, where a question comes without an answer


@dataclass(frozen=True, slots=True)
class Scene:
    """A prompt with its K/V. full: as a prefill gives them, for the prompt. stale: ``start`` tokens of
    another context, rotated. asked: the questions, each with an answer."""

    ids: list[int]
    prefix: int
    spans: tuple[Reused, ...]
    full: KVBuffers
    stale: KVBuffers
    asked: tuple[Question, ...]

    @property
    def start(self) -> int:
        """Where the questions begin."""
        return len(self.ids)


class _Look:
    """A policy that remembers what it was shown."""

    name, probes, mass_layers = "look", True, (0, CHECK_LAYER)

    def __init__(self) -> None:
        self.seen: Seen | None = None

    def scores(self, seen: Seen) -> Array:
        self.seen = seen
        return np.zeros(len(seen.positions))


def refusal(engine: Any) -> str:
    """Why nothing can be calibrated for this engine; "" if it can."""
    why = rope.refusal(engine.spec)
    if why:
        return why
    if not hasattr(engine, "model"):
        return "there are no gradients to be had of this engine; give a Transformers model"
    if engine.shape.layers < CHECK_LAYER + 2:
        return f"it has {engine.shape.layers} layers: none is left to recompute behind the check layer"
    return ""


def scene(engine: Any, prompt: Prompt, isolated: bool) -> Scene:
    """Compute a prompt's K/V both ways. isolated: each segment was stored behind the prefix alone; else all
    of them in the reverse order."""
    ids = [*prompt.prefix, *(token for segment in prompt.segments for token in segment)]
    head, n = len(prompt.prefix), len(ids)
    full = KVBuffers.allocate(engine.spec, n)
    engine.run(ids, full, 0)
    stale = KVBuffers.allocate(engine.spec, n)
    put(full, 0, stale, 0, head)
    spans, at = [], head
    for segment in prompt.segments:
        spans.append(Reused(at, at + len(segment)))
        at += len(segment)
    groups = [[span] for span in spans] if isolated else [spans[::-1]]
    for group in groups:
        stored = KVBuffers.allocate(engine.spec, head + sum(span.stop - span.start for span in group))
        put(full, 0, stored, 0, head)
        engine.run([token for span in group for token in ids[span.start : span.stop]], stored, head)
        source = head
        for span in group:
            put(stored, source, stale, span.start, span.stop - span.start)
            source += span.stop - span.start
    asked = tuple(_answered(engine, full, n, ids, question) for question in prompt.questions)
    return Scene(ids, head, tuple(spans), full, stale, asked)


def observe(engine: Any, seen_in: Scene) -> tuple[Array, Array]:
    """Features float32 ``(n, features)`` (those of :func:`hypercache.blend.selector.names`) of the n reused
    tokens, and their influence float64 ``(n,)``, summed over the questions."""
    look, start = _Look(), seen_in.start
    ids = [*seen_in.ids, seen_in.asked[0].ids[0]]
    kv = copied(seen_in.stale, len(ids))
    blend.run(engine, ids, kv, seen_in.prefix, seen_in.spans, Blend(1e-9, look, check_layer=CHECK_LAYER))
    assert look.seen is not None
    rows = table(look.seen, names(engine.spec, engine.shape.heads)).astype(np.float32)
    total = np.zeros(start)
    for question in seen_in.asked:
        whole = [*seen_in.ids, *question.ids, *question.answer[:-1]]
        first = start + len(question.ids) - 1
        total += influence(
            engine.model, seen_in.full, seen_in.stale, whole, start, first, first_layer=CHECK_LAYER + 1
        )
    return rows, total[look.seen.positions]


def losses(engine: Any, seen_in: Scene, methods: Iterable[tuple[float, Policy | str]]) -> Iterator[float]:
    """For each of ``methods`` (ratio, policy): mean KL(full || repaired) in nats of the distributions
    of the answers' tokens."""
    want = [_logits(engine, seen_in, seen_in.full, question) for question in seen_in.asked]
    for ratio, policy in methods:
        kv = copied(seen_in.stale, seen_in.start + 1)
        ids = [*seen_in.ids, seen_in.asked[0].ids[0]]
        settings = Blend(ratio, policy, check_layer=CHECK_LAYER)
        blend.run(engine, ids, kv, seen_in.prefix, seen_in.spans, settings)
        got = [_logits(engine, seen_in, kv, question) for question in seen_in.asked]
        yield float(np.mean([kl(one, other).mean() for one, other in zip(want, got, strict=True)]))


def _logits(engine: Any, seen_in: Scene, kv: KVBuffers, question: Question) -> Array:
    """``(answer, vocab)``: what each token of the answer was drawn from."""
    ids = [*seen_in.ids, *question.ids, *question.answer[:-1]]
    mine = copied(kv.window(0, seen_in.start), len(ids))
    done = blend.run(engine, ids, mine, seen_in.start, (), Blend(0.0))
    out: Array = engine.logits(done.hidden[len(question.ids) - 1 :])
    return out


def _answered(engine: Any, full: KVBuffers, n: int, ids: list[int], question: Question) -> Question:
    if question.answer:
        return question
    kv = copied(full, n + len(question.ids) + CONTINUATION)
    new, at, answer = list(question.ids), n, []
    for _ in range(CONTINUATION):
        answer.append(int(np.argmax(engine.run(new, kv, at))))
        new, at = [answer[-1]], at + len(new)
    return Question(question.ids, tuple(answer))


@dataclass(frozen=True, slots=True)
class Outcome:
    """A selector, and mean KL to full prefill in nats on ``held_out`` prompts: "rotated" only, and repaired
    by layer-1 "deviation" and by the "selector"."""

    selector: Selector
    held_out: int
    kl: dict[str, float]

    @property
    def better(self) -> bool:
        """Whether the selector is worth having."""
        return self.kl["selector"] <= min(self.kl["deviation"], self.kl["rotated"])


def calibrate(
    engine: Any,
    prompts: Iterable[tuple[bool, Prompt]],
    *,
    source: str,
    ratio: float,
    progress: Path,
    report: Report = lambda what, done, of: None,
) -> Outcome:
    """Learn a selector from the prompts that are not held out, and measure it on those that are.

    engine: a LayeredTransformer. prompts: (held out, prompt), computed as they come; of those to learn from
        only feature rows are kept, ``MAX_ROWS`` at the most, of those held out the tokens. source: digest of
        what they are made from. progress: file that a run goes on from if it was ended, removed at the end.
    report: called with what is done, how many prompts are done, and of how many if that is known.

    Raises SpecError for a model that cannot be calibrated, with the reason, and for prompts of which there
    are too few.
    """
    if why := refusal(engine):
        raise SpecError(f"{engine.spec.name!r} cannot be calibrated: {why}")
    settings = {"model": engine.spec.fingerprint(), "source": source, "ratio": ratio}
    inputs = commit("hypercache.calibration.v1", settings).hex()
    with Progress(progress, inputs) as kept:
        if len(kept):
            report(f"going on, {len(kept)} prompts were done", 0, None)
        rows, values, held_out = _learn(engine, prompts, kept, report)
        selector = _fit(engine, rows, values, ratio, inputs)
        kl = _measure(engine, selector, held_out, kept, report)
        kept.remove()
    return Outcome(selector, len(held_out), kl)


def _learn(
    engine: Any, prompts: Iterable[tuple[bool, Prompt]], kept: Progress, report: Report
) -> tuple[list[Array], list[Array], list[Prompt]]:
    rows: list[Array] = []
    values: list[Array] = []
    held_out: list[Prompt] = []
    for apart, prompt in prompts:
        if apart:
            held_out.append(prompt)
        elif sum(map(len, rows)) < MAX_ROWS:
            key = f"{len(rows)} {prompt.digest()}"
            if (known := kept.get(key)) is None:
                known = kept.put(
                    key, list(observe(engine, scene(engine, prompt, isolated=len(rows) % 2 == 0)))
                )
            rows.append(known[0])
            values.append(known[1])
        report("learning", len(rows), None)
    if not rows or not held_out:
        raise SpecError(
            f"{len(rows)} prompts to learn from and {len(held_out)} held out for the comparison are too few: "
            "one of each is the least, 40 and 10 are sensible; give more --prompts"
        )
    return rows, values, held_out


def _fit(engine: Any, rows: list[Array], values: list[Array], ratio: float, source: str) -> Selector:
    x = np.concatenate(rows).astype(np.float64)
    mean, scale = scaling(x)
    matters = np.concatenate([top_share(value, ratio) for value in values])
    counts = np.concatenate([stakes(value) for value in values])
    both, bias = fit(expand(x, mean, scale), matters, counts)
    weights, squares = np.split(both, 2)
    return Selector(
        model=engine.spec.fingerprint().hex(),
        features=names(engine.spec, engine.shape.heads),
        mean=tuple(mean.tolist()),
        scale=tuple(scale.tolist()),
        weights=tuple(weights.tolist()),
        squares=tuple(squares.tolist()),
        bias=bias,
        ratio=ratio,
        check_layer=CHECK_LAYER,
        trained=Trained(
            prompts=len(rows), rows=len(x), source=source, layers=(CHECK_LAYER + 1, engine.shape.layers - 1)
        ),
    )


def _measure(
    engine: Any, selector: Selector, held_out: list[Prompt], kept: Progress, report: Report
) -> dict[str, float]:
    methods: dict[str, tuple[float, Policy | str]] = {
        "rotated": (0.0, "kv"),
        "deviation": (selector.ratio, "kv"),
        "selector": (selector.ratio, selector),
    }
    found = []
    for i, prompt in enumerate(held_out):
        report("comparing", i, len(held_out))
        key = f"held out {i} {prompt.digest()}"
        if (known := kept.get(key)) is None:
            parts = scene(engine, prompt, isolated=i % 2 == 0)
            known = kept.put(key, [np.array(list(losses(engine, parts, methods.values())))])
        found.append(known[0])
    return dict(zip(methods, np.mean(found, axis=0).tolist(), strict=True))
