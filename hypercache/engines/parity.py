"""Does moving K/V work on this model? Measured on the model itself, before anyone relies on it.

Three questions, each against the model's own computation: an exact prefix (K/V of a prefix and the rest
computed on top), a shifted block (keys rotated to another position against keys computed there), and
documents in another order (the quality of what selective recompute repairs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hypercache import blend, rope
from hypercache.blend import Blend, Blended, Layered, Reused
from hypercache.engines.compare import kl
from hypercache.engines.reference import from_storage
from hypercache.errors import SpecError
from hypercache.kv import KVBuffers
from hypercache.model import KVDtype, ModelSpec
from hypercache.stitch import put

Array = npt.NDArray[Any]

SHIFT = 1000  # positions
# Of the largest key. Engines form their angles in float32, off by 2**-24 * position * frequency radians;
# narrow K/V are rounded at both positions. A wrong convention or frequency is off by about 1.
TOLERANCE = {KVDtype.FP32: 1e-3, KVDtype.FP16: 4e-3, KVDtype.BF16: 3e-2}
# Of the largest logit: a prefill in two pieces rounds in another order.
PREFIX_TOLERANCE = {KVDtype.FP32: 1e-4, KVDtype.FP16: 2e-2, KVDtype.BF16: 1e-1}


@dataclass(frozen=True, slots=True)
class Order:
    """Reordered documents against full prefill, over the tokens of the question behind them.

    kl: mean KL(full || this) of the next-token distributions, in nats. top1: share of the tokens after which
    the likeliest token is the same. flops_saved: share of a full prefill's FLOPs.
    """

    kl: float
    top1: float
    flops_saved: float


@dataclass(frozen=True, slots=True)
class Parity:
    """What was measured.

    prefix: largest difference of a logit, exact prefix against full prefill, over their largest magnitude.
    shift: largest difference of a key element over the largest key, of all layer groups; ``tolerance`` is
        what rounding explains. None for a model whose keys cannot be moved.
    order: "naive" (keys as they were), "rotated", and "blend" (rotated and repaired). Empty if ``refusal``.
    refusal: why modular reuse is refused for this model; "" if it is not.
    """

    prefix: float
    prefix_tolerance: float
    shift: float | None
    tolerance: float
    order: dict[str, Order]
    refusal: str

    @property
    def passed(self) -> bool:
        """Whether all that was measured is within rounding. Refusal by RoPE kind is no failure."""
        return self.prefix <= self.prefix_tolerance and (self.shift is None or self.shift <= self.tolerance)


def measure(
    engine: Any, documents: Sequence[Sequence[int]], question: Sequence[int], unlayered: str = ""
) -> Parity:
    """Run all three on token ids; the first alone of an engine that is run as a whole (``unlayered``: why).

    ``documents`` are stored in the order given and asked in the reverse one, behind the first, which stays in
    front: three or more.

    Raises SpecError for too few documents or none of a question.
    """
    if len(documents) < 3 or not all(map(len, documents)) or not len(question):
        raise SpecError("parity needs three documents or more and a question, none of them empty")
    head, *others = [list(document) for document in documents]
    stored = [*head, *(token for document in others for token in document)]
    dtype = engine.spec.layout(0).dtype
    tolerance = TOLERANCE[dtype]
    prefix = _prefix_error(engine, [*stored, *question], len(stored) // 2)
    refusal = unlayered or rope.refusal(engine.spec)
    shift: float | None = None
    if not refusal:
        shift, refusal = shift_refusal(engine, stored[:64])
        if not refusal and engine.shape.layers < 2:
            refusal = (
                "a model of one layer has nothing to repair: its K/V depend on a token and its position alone"
            )
    order = {} if refusal else _reordered(engine, head, others, list(question))
    return Parity(prefix, PREFIX_TOLERANCE[dtype], shift, tolerance, order, refusal)


def shift_refusal(engine: Layered, ids: Sequence[int]) -> tuple[float, str]:
    """:func:`shift_error` over ``SHIFT`` positions, and why keys cannot be moved then; "" if they can."""
    tolerance = TOLERANCE[engine.spec.layout(0).dtype]
    shift = shift_error(engine, ids, SHIFT)
    if shift <= tolerance:
        return shift, ""
    return shift, (
        f"keys rotated by {SHIFT} positions differ from keys computed there by {shift:.1e} of the "
        f"largest, more than the {tolerance:.0e} that rounding explains: the RoPE setting read from "
        "its config is not what the model computes"
    )


def shift_error(engine: Layered, ids: Sequence[int], delta: int) -> float:
    """Keys of ``ids`` computed from position 0 and rotated by ``delta``, against keys computed at ``delta``.

    The largest difference of an element over the largest key, over one layer of each group.

    Every layer is given the embeddings: RoPE is the same whatever comes in. Memory: delta + n tokens of one
    layer, however many the model has.
    """
    tokens = np.asarray(ids)
    n, spec = len(tokens), engine.spec
    kv = _one_layer(spec, delta + n)
    here, there = (engine.embed(tokens, np.arange(start, start + n)) for start in (0, delta))
    worst = 0.0
    for group in spec.groups:
        layer = group.layers[0]
        for rows in (here, there):
            engine.keep(layer, engine.project(layer, rows), kv)
        layout = spec.layout(layer)
        parts = [part[:, :n].copy() for part in kv.layer(layer)]
        rope.rerotate(layout, parts, rope.turn(group.rope, delta))
        which = rope.rotated_part(layout)
        moved = from_storage(parts[which], layout.dtype, "float64")
        computed = from_storage(kv.layer(layer)[which][:, delta : delta + n], layout.dtype, "float64")
        worst = max(worst, float(np.abs(moved - computed).max() / np.abs(computed).max()))
    return worst


def _one_layer(spec: ModelSpec, tokens: int) -> KVBuffers:
    """K/V whose layers of one layout all lie in the same memory: for who looks at one layer at a time."""
    rooms = {
        layout: [np.empty((layout.heads, tokens, part.dim), layout.dtype.storage) for part in layout.parts]
        for layout in {group.layout for group in spec.groups}
    }
    return KVBuffers(spec, tokens, [rooms[spec.layout(layer)] for layer in range(spec.num_layers)])


def _prefix_error(engine: Any, ids: list[int], prefix: int) -> float:
    full = KVBuffers.allocate(engine.spec, len(ids))
    want = engine.run(ids, full, 0)
    cached = KVBuffers.allocate(engine.spec, len(ids))
    engine.run(ids[:prefix], cached, 0)
    got = engine.run(ids[prefix:], cached, prefix)
    return float(np.abs(got - want).max() / np.abs(want).max())


def _reordered(
    engine: Any, head: list[int], others: list[list[int]], question: list[int]
) -> dict[str, Order]:
    stored = KVBuffers.allocate(engine.spec, len(head) + sum(map(len, others)))
    engine.run([*head, *(token for document in others for token in document)], stored, 0)
    starts = np.cumsum([len(head), *map(len, others)]).tolist()
    asked, pieces, spans = list(head), [(0, 0, len(head))], []
    for index in reversed(range(len(others))):
        count = len(others[index])
        pieces.append((starts[index], len(asked), count))
        spans.append(Reused(len(asked), len(asked) + count))
        asked += others[index]
    asked += question
    full = KVBuffers.allocate(engine.spec, len(asked))
    want = _logits(engine, blend.run(engine, asked, full, 0, (), Blend(0.0)), len(question))
    out = {}
    for name, rotate, settings in (
        ("naive", False, Blend(0.0)),
        ("rotated", True, Blend(0.0)),
        ("blend", True, Blend()),
    ):
        kv = KVBuffers.allocate(engine.spec, len(asked))
        for at, to, count in pieces:
            put(stored, at, kv, to, count, turned=rotate)
        done = blend.run(engine, asked, kv, len(head), spans, settings)
        got = _logits(engine, done, len(question))
        same = float(np.mean(got.argmax(-1) == want.argmax(-1)))
        out[name] = Order(float(kl(want, got).mean()), same, done.report.flops_saved)
    return out


def _logits(engine: Layered, run: Blended, last: int) -> Array:
    return engine.logits(run.hidden[-last:])
