"""Is a loaded Transformers model what its specification says? Checks before its K/V are believed.

The parameters that a checkpoint gives are in the identity. What they do not tell is looked at here: buffers
that no checkpoint holds, above all the rotary frequencies, which a cast of the whole model rounds; where and
in which dtype things lie; and what a token's K/V look like when the model computes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hypercache import rope
from hypercache.errors import SpecError
from hypercache.identity import Value, commit
from hypercache.kv import KVBuffers
from hypercache.model import ModelSpec, RopeSpec

Array = npt.NDArray[Any]

# Relative. Transformers forms frequencies in float32, off by some 1e-6; rounded to fp16 they are off by 2e-4.
_FREQUENCY = 2e-5
_TABLE_ROWS, _TABLE = 64, 5e-5  # sin and cos of small angles, which float32 gives to 1e-5
_HARMLESS = ("mrope_section", "mrope_interleaved")
_CAST = (
    "a cast of the whole model rounds them, and keys are others then than the checkpoint's; load it with "
    "from_pretrained(..., dtype=...) and do not cast it with .to(dtype), .half() or .bfloat16()"
)


def check_place(model: Any) -> None:
    """Everything in host memory. Raises SpecError that names the first parameter or buffer elsewhere."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "meta":
            raise SpecError(
                f"{type(model).__name__}: {name} is on meta, which holds no data; load the whole checkpoint "
                "into host memory, without device_map or offloading"
            )
        if tensor.device.type != "cpu":
            raise SpecError(
                f"{type(model).__name__}: {name} is on {tensor.device}; this engine hands over host memory: "
                "use model.to('cpu')"
            )


def check_buffers(model: Any, spec: ModelSpec) -> bytes:
    """Compares the buffers that no checkpoint holds with what ``spec`` says.

    Returns what to add to the identity: a digest of those that cannot be derived from it, b"" for none.

    Raises SpecError for rotary frequencies that were rounded by a cast, or are not those of the config.
    """
    name, stored = type(model).__name__, set(model.state_dict(keep_vars=True))
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    inside = {id(module) for module in decoder.modules()}
    kinds = list(getattr(model.config.get_text_config(), "layer_types", None) or [])
    left: dict[str, Value] = {}
    for path, module, key, tensor in _buffers(model):
        if path in stored or not tensor.is_floating_point():
            continue
        if _rotary(key) and tensor.dtype is not torch.float32:
            raise SpecError(f"{name}: the rotary frequencies {path} are {tensor.dtype}, not float32: {_CAST}")
        if id(module) not in inside or "original" in key:
            continue
        if (scale := getattr(module, f"scalar_{key}", None)) is not None:
            _check_scale(name, path, tensor, float(scale), model.dtype)
        elif not _rotary(key) or not _check_rotary(name, path, key, tensor, spec, kinds):
            left[path] = tensor.detach().to(torch.float32).numpy().tobytes()
    return commit("transformers.buffers", left) if left else b""


def check_run(model: Any, spec: ModelSpec) -> None:
    """Runs one token: the K/V of each layer must have the heads, dims and dtype that ``spec`` says.

    Raises SpecError that names the layer and the part, or the cause if the model does not run at all.
    """
    name = type(model).__name__
    try:
        with torch.inference_mode():
            cache = model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=True).past_key_values
        tensors = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
    except Exception as error:  # whatever the model's code raises
        raise SpecError(f"{name} does not run, not even one token: {reason(error)}{_mixed(model)}") from error
    layers = [
        [(part.view(torch.uint16) if part.dtype is torch.bfloat16 else part).numpy() for part in parts]
        for parts in tensors
    ]
    try:
        KVBuffers.wrap(spec, layers)
    except SpecError as error:
        raise SpecError(
            f"{name} keeps other K/V than its config says: {error}{_mixed(model)}. Keys of the config that "
            "its class ignores must go"
        ) from None


def reason(error: BaseException) -> str:
    """An exception of other people's code in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _buffers(model: Any) -> Iterator[tuple[str, Any, str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for key, tensor in module.named_buffers(recurse=False):
            yield f"{prefix}.{key}" if prefix else key, module, key, tensor


def _rotary(key: str) -> bool:
    return key.endswith("inv_freq") or key == "embed_positions"


def _check_scale(name: str, path: str, tensor: torch.Tensor, scale: float, dtype: torch.dtype) -> None:
    """Gemma's factor of embeddings: its scalar, rounded once to the dtype that the model computes in."""
    if not torch.equal(tensor.to(dtype), torch.tensor(scale).to(dtype)):
        raise SpecError(
            f"{name}: {path} is {float(tensor)}, not {scale} as {dtype} gives it: a cast of the whole model "
            "rounded it before; load it with from_pretrained(..., dtype=...) and do not cast it"
        )


def _check_rotary(
    name: str, path: str, key: str, tensor: torch.Tensor, spec: ModelSpec, kinds: list[str]
) -> bool:
    """False if what the buffer must hold is not known."""
    kind = key.removesuffix("inv_freq").rstrip("_") if key != "embed_positions" else ""
    known = False
    for group in spec.groups:
        if group.rope.kind == "none" or (kind and (not kinds or kinds[group.layers[0]] != kind)):
            continue
        if (want := _frequencies(group.rope)) is None:
            return False
        known = True
        got = tensor.detach().to(torch.float64).numpy()
        if key == "embed_positions":
            got, want = got[:_TABLE_ROWS], _table(want, len(got))
        if got.shape != want.shape:
            raise SpecError(
                f"{name}: layer {group.layers[0]} rotates {2 * got.shape[-1]} elements of a head by {path}, "
                f"its config says {2 * want.shape[-1]}: the class ignores a key such as "
                "'partial_rotary_factor' or 'rotary_dim'; remove it from the config"
            )
        close = np.abs(got - want) <= (_TABLE if key == "embed_positions" else _FREQUENCY * np.abs(want))
        if not close.all():
            at = tuple(int(index) for index in np.argwhere(~close)[0])
            raise SpecError(
                f"{name}: the rotary frequencies {path} of layer {group.layers[0]} are not those of its "
                f"config ({got[at]:.9g} where {group.rope.kind!r} RoPE with theta {group.rope.theta:g} gives "
                f"{want[at]:.9g}). Either the model was cast: {_CAST}. Or its class ignores a rotary key of "
                "the config: remove it there"
            )
    return known


def _frequencies(spec: RopeSpec) -> Array | None:
    """Of one spec; None for kinds that are not known. Text has the same position three times in mrope."""
    if spec.kind == "mrope" and all(key in _HARMLESS for key, _ in spec.scaling):
        spec = RopeSpec("default", spec.theta, spec.rotary_dim)
    try:
        return rope.frequencies(spec)
    except SpecError:
        return None


def _table(frequencies: Array, rows: int) -> Array:
    """GPT-J's table: sin, then cos, of each position."""
    angles = np.arange(min(rows, _TABLE_ROWS))[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def _mixed(model: Any) -> str:
    dtypes: Mapping[torch.dtype, int] = Counter(part.dtype for part in model.parameters())
    if len(dtypes) < 2:
        return ""
    counts = ", ".join(f"{count} in {dtype}" for dtype, count in dtypes.items())
    odd = min(dtypes, key=lambda dtype: dtypes[dtype])
    first = next(name for name, part in model.named_parameters() if part.dtype is odd)
    return f" (its parameters: {counts}; {first} is {odd}; load it with from_pretrained(..., dtype=...))"
