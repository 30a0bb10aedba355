"""That a model, taken apart by its submodules, computes what its own forward does. Looked at, then measured.

Looked at: what the parts that are not called are (their classes, forwards and hooks), and which window each
layer has. Measured: each layer fed the model's own input of it, so that errors do not add up and a few units
of rounding are the bound; and keys rotated to another position against keys computed there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from hypercache import rope
from hypercache.engines import parity
from hypercache.errors import SpecError
from hypercache.kv import KVBuffers
from hypercache.model import ModelSpec

if TYPE_CHECKING:
    from hypercache.engines.layered import LayeredTransformer

Array = npt.NDArray[Any]

_TOKENS = 24
# Relative L2 of two ways to sum the same products, a few units of rounding.
_ROUNDING = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
_INSTEAD = "so reuse out of context is refused. Exact reuse works: use TransformersEngine"
_RECORDS = "transformers.utils.output_capturing"  # its hooks keep what passes, and change nothing


def check_modules(model: Any) -> None:
    """Parts whose forward is not called here must be Transformers' own, with nothing attached to them.

    Raises SpecError that names the part. Cheap: for each prompt, since hooks come and go.
    """
    name = type(model).__name__
    own = getattr(transformers, name)
    if type(model) is not own:
        raise SpecError(
            f"{type(model).__module__}.{name} is not {own.__module__}.{name}; it may compute something else, "
            + _INSTEAD
        )
    for path, part in _uncalled(model):
        if type(part).__module__ != own.__module__:
            raise SpecError(
                f"{name}: {path} is a {type(part).__module__}.{type(part).__name__}, not of "
                f"{own.__module__}; it may compute something else, {_INSTEAD}"
            )
        if "forward" in vars(part):
            raise SpecError(f"{name}: the forward of {path} was replaced, {_INSTEAD}")
        for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values()):
            if getattr(hook, "__module__", None) != _RECORDS:
                raise SpecError(
                    f"{name}: {path or 'the model'} has a forward hook "
                    f"({getattr(hook, '__qualname__', type(hook).__name__)}), which would be left out, "
                    f"{_INSTEAD}, or remove the hook"
                )


def check_windows(model: Any, spec: ModelSpec) -> None:
    """Each layer must attend as far back as ``spec`` says. Raises SpecError that names the layer and both."""
    for layer, block in enumerate(model.model.layers):
        computed, said = _window(model.config, block, layer), spec.group_of(layer).window
        if computed != said:
            raise SpecError(
                f"{type(model).__name__}: layer {layer} attends {_back(computed)}, its config says "
                f"{_back(said)}: the class ignores a key such as 'layer_types' or 'use_sliding_window'; "
                f"{_INSTEAD}"
            )


def check_layers(engine: LayeredTransformer) -> None:
    """Every layer on a few tokens, against the model's own forward. Raises SpecError that names the layer."""
    ids = np.arange(1, _TOKENS + 1) * 7919 % engine.vocab
    own, ours = (KVBuffers.allocate(engine.spec, _TOKENS) for _ in range(2))
    seen = _Seen(engine.model)
    try:
        want = engine.run(ids, own, 0)
    finally:
        seen.end()
    rows = engine.embed(ids, np.arange(_TOKENS))
    _compare(engine, "embeddings", rows.x, seen.entering[0])
    for layer in range(engine.shape.layers):
        rows = engine.project(layer, rows._replace(x=seen.entering[layer]))
        engine.keep(layer, rows, ours)
        for what, got, computed in zip("KV", ours.layer(layer), own.layer(layer), strict=True):
            _compare(engine, f"{what} of layer {layer}", _tensor(got), _tensor(computed))
        _compare(
            engine, f"attention of layer {layer}", engine.attention(layer, rows, ours), seen.mixed[layer]
        )
        rows = engine.attend(layer, rows, ours)
        _compare(engine, f"output of layer {layer}", rows.x, seen.leaving[layer])
    logits = engine.logits(engine.hidden(rows)[-1])
    _compare(engine, "logits", torch.from_numpy(logits), torch.from_numpy(want))


def check_shift(engine: LayeredTransformer) -> None:
    """Keys must move as ``engine.spec`` says, where it says that they can; else SpecError."""
    if rope.refusal(engine.spec):
        return
    if why := parity.shift_refusal(engine, list(range(1, _TOKENS + 1)))[1]:
        raise SpecError(f"{type(engine.model).__name__}: {why}, {_INSTEAD}")


class _Seen:
    """What enters and leaves each layer, and what its attention gives, in one run of the model."""

    def __init__(self, model: Any) -> None:
        self.entering: list[torch.Tensor] = []
        self.mixed: list[torch.Tensor] = []
        self.leaving: list[torch.Tensor] = []
        self._hooks = []
        for block in model.model.layers:
            self._hooks += [
                block.register_forward_pre_hook(self._enter, with_kwargs=True),
                block.self_attn.register_forward_hook(self._mix),
                block.register_forward_hook(self._leave),
            ]

    def _enter(self, block: Any, args: Any, kwargs: Any) -> None:
        self.entering.append((args[0] if args else kwargs["hidden_states"])[0])

    def _mix(self, block: Any, args: Any, out: Any) -> None:
        self.mixed.append((out[0] if isinstance(out, tuple) else out)[0])

    def _leave(self, block: Any, args: Any, out: Any) -> None:
        self.leaving.append((out[0] if isinstance(out, tuple) else out)[0])

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _uncalled(model: Any) -> Iterator[tuple[str, Any]]:
    yield "", model
    yield "model", model.model
    for layer, block in enumerate(model.model.layers):
        yield f"model.layers.{layer}", block
        yield f"model.layers.{layer}.self_attn", block.self_attn


def _window(config: Any, block: Any, layer: int) -> int | None:
    """What the modelling code masks by: per layer if attention knows a window, else one or none."""
    if hasattr(block.self_attn, "sliding_window"):  # Qwen 2 and 3, Gemma 3
        sliding = config.layer_types[layer] == "sliding_attention"
        found: int | None = config.sliding_window if sliding else None
        if found != block.self_attn.sliding_window:
            raise SpecError(
                f"layer {layer} attends {_back(block.self_attn.sliding_window)}, its mask reaches "
                f"{_back(found)}; {_INSTEAD}"
            )
        return found
    return config.sliding_window if config.model_type == "mistral" else None


def _back(window: int | None) -> str:
    return "to all tokens" if window is None else f"to the last {window} tokens"


def _tensor(array: Array) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def _compare(engine: LayeredTransformer, what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    got, want = got.double(), want.double()
    error = float((got - want).norm() / (want.norm() or 1.0))
    if not error <= _ROUNDING[engine.model.dtype]:
        raise SpecError(
            f"{type(engine.model).__name__}: run layer by layer, its {what} differ from its own forward by "
            f"{error:.1e}, more than rounding; it computes something else than its class says, {_INSTEAD}"
        )
