"""What reuse out of context does to a prompt's end, on the reference engine: part A of the benchmark.

[Sys, A, B, Q] is computed and its K/V kept; then [Sys, B, A, Q] is asked. Sys is an exact prefix, B and A
are taken from where they were. What counts are the final hidden states of Q, against a full prefill: when A
and B come as they are (naive), with keys rotated to their new positions (rotated), and with a share of their
tokens recomputed as well (blend).

Weights are random. The reference engine's embeddings are as large as what all layers add to them, so that
nearly everything survives any reuse. The main figures are therefore those of embeddings of Llama's initial
size, where what a token attended to decides; the engine's own stand beside them, and so does a shorter Sys:
the less of a segment's context is the same in both prompts, the more of its K/V is stale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from hypercache import rope
from hypercache.blend import POLICIES, Blend, Reused
from hypercache.blend import run as run_blend
from hypercache.engines.reference import ReferenceConfig, ReferenceModel, rope_angles, rotate
from hypercache.kv import KVBuffers
from hypercache.model import KVDtype, KVLayout, Part, RopeSpec
from hypercache.stitch import put

Array = npt.NDArray[Any]
SEEDS = 20
RATIO = 0.15
NARROW = 1.0  # the last layers' K/V hang on all layers before, the first ones' on little
POLICY = "boundary"  # needs no layer computed for all: layer 0 alone is a quarter of this model
MOVE = (1024, 8192)  # source and target of the rotation that is measured on its own


@dataclass(frozen=True, slots=True)
class Case:
    """Tokens of each part of the prompt, and the standard deviation of the embeddings."""

    name: str
    system: int = 256
    a: int = 128
    b: int = 128
    question: int = 32
    embedding_std: float = 0.02

    @property
    def prefix(self) -> int:
        return self.system + self.a + self.b


MODEL = ReferenceConfig(layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32, mlp=768, vocab=512)
MAIN = Case("main")
OTHERS = (
    replace(MAIN, name="shorter system prompt", system=64),
    replace(MAIN, name="the engine's own embeddings", embedding_std=1.0),
)


class _Model(ReferenceModel):
    """The reference engine with embeddings of another size."""

    def __init__(self, config: ReferenceConfig, seed: int, embedding_std: float) -> None:
        super().__init__(config, seed)
        self.embedding = self.embedding * np.asarray(embedding_std, self.embedding.dtype)
        self.spec = self._spec()


class _Trial:
    """One seed: a model, a stored prompt, and the same parts in another order."""

    def __init__(self, case: Case, config: ReferenceConfig, seed: int) -> None:
        self.case, self.model = case, _Model(config, seed, case.embedding_std)
        random = np.random.Generator(np.random.PCG64(seed))
        sizes = (case.system, case.a, case.b, case.question)
        system, a, b, question = (random.integers(0, config.vocab, size) for size in sizes)
        self.stored = KVBuffers.allocate(self.model.spec, sum(sizes))
        self.model.forward(np.concatenate([system, a, b, question]), self.stored, 0)
        self.ids = np.concatenate([system, b, a, question])
        self.full = KVBuffers.allocate(self.model.spec, sum(sizes))
        self.truth = self.model.forward(self.ids, self.full, 0)[case.prefix :]
        middle = case.system + case.b
        self.moves = (  # source and target of each segment
            (case.system + case.a, Reused(case.system, middle)),
            (case.system, Reused(middle, case.prefix)),
        )

    def stitched(self, rotated: bool) -> KVBuffers:
        """Sys as it is, B and A at their places in the new prompt."""
        kv = KVBuffers.allocate(self.model.spec, len(self.ids))
        put(self.stored, 0, kv, 0, self.case.system)
        for at, span in self.moves:
            put(self.stored, at, kv, span.start, span.stop - span.start, turned=rotated)
        return kv

    def row(self, rotated: bool, settings: Blend) -> dict[str, float]:
        """Figures of one way to reuse."""
        spans = [span for _, span in self.moves]
        kv = self.stitched(rotated)
        blended = run_blend(self.model, self.ids, kv, self.case.system, spans, settings)
        spent, shape = blended.report.flops_reused, self.model.shape
        prefix = np.arange(self.case.prefix)
        return compare(blended.hidden, self.truth) | {
            "flops_saved": 1 - spent / shape.prefill(prefix),
            "flops_saved_reused": 1 - spent / shape.prefill(prefix[self.case.system :]),
        }

    def rotation_error(self) -> float:
        """Layer 0's moved keys against those of the full prefill, at most: nothing else is in them."""
        part = slice(self.case.system, self.case.prefix)
        moved, computed = (kv.layer(0)[0][:, part] for kv in (self.stitched(True), self.full))
        return float(np.abs(moved - computed).max())


def compare(hidden: Array, truth: Array) -> dict[str, float]:
    """``cosine``: mean over the rows of ``(n, hidden)``; ``rel_l2``: of all elements together."""
    a, b = hidden.astype(np.float64), truth.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return {
        "cosine": float(((a * b).sum(axis=1) / lengths).mean()),
        "rel_l2": float(np.linalg.norm(a - b) / np.linalg.norm(b)),
    }


def measure(
    seeds: int = SEEDS, config: ReferenceConfig = MODEL, cases: Sequence[Case] = (MAIN, *OTHERS)
) -> dict[str, Any]:
    """Rows ``naive``, ``rotated`` and ``blend`` of the first case, ``rope``, and what else there is to say.

    A row: medians over the seeds of ``cosine``, ``rel_l2`` (final hidden states of Q against full prefill),
    ``flops_saved`` (share of the prefix, which is all but Q) and ``flops_saved_reused`` (share of A and B
    alone, since Sys is an ordinary hit); under ``spread`` least, median, greatest and standard deviation.

    ``rope``: ``max_abs_error`` of unit normal float32 keys moved from 1,024 to 8,192, against float64;
        ``layer0_max_abs_error``: of the stitched keys of layer 0, over all seeds.
    ``blend_conditions``: seeds, model, prompt, ratio, policy, and :attr:`Blend.narrow`.
    ``blend_policies``: rows of every policy at that ratio, what each looks at counted.
    ``blend_others``: the three rows in the other cases.
    """
    main, *others = cases
    trials = [_Trial(main, config, seed) for seed in range(seeds)]
    policies = {name: _rows(trials, True, _settings(name)) for name in POLICIES}
    return _ways(trials, policies[POLICY]) | {
        "rope": move_error() | {"layer0_max_abs_error": max(trial.rotation_error() for trial in trials)},
        "blend_conditions": {
            "seeds": list(range(seeds)),
            "model": asdict(config) | {"kv_dtype": config.kv_dtype.value},
            "prompt": asdict(main),
            "ratio": RATIO,
            "narrow": NARROW,
            "policy": POLICY,
        },
        "blend_policies": policies,
        "blend_others": [_other(case, config, seeds) for case in others],
    }


def _settings(policy: str) -> Blend:
    return Blend(RATIO, policy, narrow=NARROW)


def _other(case: Case, config: ReferenceConfig, seeds: int) -> dict[str, Any]:
    trials = [_Trial(case, config, seed) for seed in range(seeds)]
    return {"prompt": asdict(case)} | _ways(trials, _rows(trials, True, _settings(POLICY)))


def _ways(trials: Sequence[_Trial], blend: dict[str, Any]) -> dict[str, Any]:
    as_is = Blend(0.0)
    return {"naive": _rows(trials, False, as_is), "rotated": _rows(trials, True, as_is), "blend": blend}


def _rows(trials: Sequence[_Trial], rotated: bool, settings: Blend) -> dict[str, Any]:
    rows = [trial.row(rotated, settings) for trial in trials]
    spread = {name: _spread([row[name] for row in rows]) for name in rows[0]}
    return {name: found["median"] for name, found in spread.items()} | {"spread": spread}


def _spread(values: Sequence[float]) -> dict[str, float]:
    functions: Mapping[str, Callable[[Sequence[float]], Any]]
    functions = {"min": min, "median": np.median, "max": max, "sd": np.std}
    return {name: float(function(values)) for name, function in functions.items()}


def move_error(dim: int = 64, heads: int = 8, tokens: int = 16) -> dict[str, float]:
    """``max_abs_error`` and ``max_error_to_key`` (by the key's length) of keys moved from MOVE[0] to MOVE[1].

    The keys are unit normal, float32 once rotated to the source; the truth is their rotation to the target in
    float64."""
    setting, layout = (
        RopeSpec("default", 10000.0, dim),
        KVLayout("split", heads, (Part("k", dim), Part("v", dim)), KVDtype.FP32),
    )
    plain = np.random.Generator(np.random.PCG64(0)).standard_normal((heads, tokens, dim))
    source, target = (
        rotate(plain, rope_angles(setting, at + np.arange(tokens), "float64"), False) for at in MOVE
    )
    keys = source.astype(np.float32)
    rope.rerotate(layout, [keys, np.zeros_like(keys)], rope.turn(setting, MOVE[1] - MOVE[0]))
    error = np.abs(keys - target)
    lengths = np.linalg.norm(target, axis=-1, keepdims=True)
    return {"max_abs_error": float(error.max()), "max_error_to_key": float((error / lengths).max())}


def show(results: Mapping[str, Any], console: Console) -> None:
    """Print what :func:`measure` found."""
    said, prompt = results["blend_conditions"], results["blend_conditions"]["prompt"]
    console.print(
        f"[bold]A. Reuse out of context[/bold] (reference engine, {said['model']['layers']} layers, random "
        f"weights, {len(said['seeds'])} seeds)"
    )
    console.print(
        f"  stored \\[Sys {prompt['system']}, A {prompt['a']}, B {prompt['b']}, Q {prompt['question']}], "
        "asked \\[Sys, B, A, Q]; hidden states of Q against full prefill"
    )
    table = Table(f"embeddings {prompt['embedding_std']:g}:", box=None, pad_edge=False)
    for heading in ("cosine", "(least)", "relative L2", "(most)", "FLOPs saved", "of A and B"):
        table.add_column(heading, justify="right", no_wrap=True)
    ways = {"naive": "naive", "rotated": "rotated", "blend": f"{said['ratio']:.0%} {said['policy']}"}
    for key, name in ways.items():
        table.add_row(name, *_cells(results[key]))
    for name, row in results["blend_policies"].items():
        if name != said["policy"]:
            table.add_row(f"{said['ratio']:.0%} {name}", *_cells(row))
    for other in results["blend_others"]:
        table.add_section()
        size = other["prompt"]
        table.add_row(f"Sys {size['system']}, embeddings {size['embedding_std']:g}:")
        for key, name in ways.items():
            table.add_row(f"  {name}", *_cells(other[key]))
    console.print(table)
    console.print("  medians; FLOPs saved: of the prefix, which is all but Q; embeddings: standard deviation")
    console.print(
        f"  recomputed: {RATIO:.0%} on average; the set narrows by {said['narrow']:g} "
        f"(Blend's default: {Blend().narrow:g})"
    )
    console.print(
        f"  keys moved {MOVE[0]} -> {MOVE[1]} are off by {results['rope']['max_abs_error']:.1e} at most"
    )


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    spread = row["spread"]
    return (
        f"{row['cosine']:.4f}",
        f"{spread['cosine']['min']:.4f}",
        f"{row['rel_l2']:.4f}",
        f"{spread['rel_l2']['max']:.4f}",
        f"{row['flops_saved']:.1%}",
        f"{row['flops_saved_reused']:.1%}",
    )
