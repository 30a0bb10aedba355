"""Moving keys to another position: a rotation by the difference of positions (RoFormer, arXiv:2104.09864).

A cached key is R(p) k: each pair of its rotary elements turned by the angle p * f of the pair's frequency.
R(q) k = R(q - p) R(p) k, so a key moves without the token's hidden state, and values do not move at all.
What a scaling kind multiplies keys by (YaRN's attention factor) is inside the cached key and commutes with
the rotation: it is not applied again.

Frequencies and angles are float64, rounded once when cos and sin become float32. Engines that form theirs in
float32 (Hugging Face, vLLM) are off by about 2**-23 * p * f radians at position p, at most 2e-2 at
131072: a moved key carries the error of the position that it was computed at, and adds none.

Always move the stored original: rounding adds up over moves of a moved key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hypercache.checks import count, typed
from hypercache.errors import SpecError
from hypercache.model import KVLayout, ModelSpec, RopeSpec

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

# The parameters of each kind that is understood. Any other might change the rotation.
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "proportional": ("partial_rotary_factor",),
}
# Kinds that do not need them ignore the lengths; the last one scales queries.
_HARMLESS = ("max_position_embeddings", "original_max_position_embeddings", "llama_4_scaling_beta")
_OPTIONAL = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "proportional": ("factor",),
}
_BY_LENGTH = "whose frequencies depend on the prompt's length"
_REFUSED = {
    "dynamic": _BY_LENGTH,
    "longrope": _BY_LENGTH,
    "mrope": "whose positions are triples of time, height and width",
}


def refusal(spec: ModelSpec) -> str:
    """Why this model's cached keys cannot be moved, for people; "" if they can.

    Layers without rotation ("none") hold keys that are the same at every position, so they move as they are;
    but if no layer rotates, positions are in the embeddings or the attention (learned, ALiBi), and nothing
    can be moved. Exact hits work in any case.
    """
    if all(group.rope.kind == "none" for group in spec.groups):
        return "no layer has a rotary embedding: positions are learned or ALiBi, and K/V depend on them"
    for group in spec.groups:
        if group.rope.kind == "none":
            continue
        where = f"layer {group.layers[0]}"
        if group.layout.dtype.is_fp8:
            return f"{where} keeps K/V in {group.layout.dtype.value}: its scale may not hold a rotated key"
        if why := _problem(group.rope):
            return f"{where} has {why}"
    return ""


def frequencies(rope: RopeSpec) -> F64:
    """Radians per position of each pair, float64 ``(rotary_dim / 2,)``, the pairs in the order of RopeSpec.

    Kinds: default; linear (arXiv:2306.15595); llama3 (Llama 3.1's, by wavelength); yarn (arXiv:2309.00071,
    NTK-by-parts); proportional (Gemma 4's: the first share of a head's pairs, 0 for the rest). Raises
    SpecError for any other, and for parameters that are missing, unknown or out of range.
    """
    if why := _problem(rope):
        raise SpecError(f"RopeSpec has {why}; its keys cannot be moved")
    given: Mapping[str, Any] = dict(rope.scaling)
    half = rope.rotary_dim // 2
    factor = float(given.get("factor", 1.0))
    plain: F64 = float(rope.theta) ** (-np.arange(half, dtype=np.float64) / half)
    kept: F64 = np.zeros(half)  # how much of a frequency stays as it is; the rest is divided by factor
    match rope.kind:
        case "default":
            return plain
        case "proportional":
            share = int(given["partial_rotary_factor"] * rope.rotary_dim // 2)
            plain[share:] = 0.0
        case "llama3":
            low, high = given["low_freq_factor"], given["high_freq_factor"]
            turns = given["original_max_position_embeddings"] * plain / (2 * math.pi)
            kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        case "yarn":
            first, last = _yarn_range(rope, given)
            kept = 1 - np.clip((np.arange(half) - first) / (last - first), 0.0, 1.0)
    moved: F64 = plain * (kept + (1 - kept) / factor)
    return moved


def _yarn_range(rope: RopeSpec, given: Mapping[str, Any]) -> tuple[float, float]:
    """The pairs at which the change from kept to interpolated frequencies begins and ends."""
    length = given["original_max_position_embeddings"]
    ends = [
        rope.rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (given.get("beta_fast") or 32, given.get("beta_slow") or 1)
    ]
    if given.get("truncate", True):
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    first, last = max(ends[0], 0), min(ends[1], rope.rotary_dim - 1)
    return first, last if last != first else last + 0.001


def _problem(rope: RopeSpec) -> str:
    """Why the frequencies of ``rope`` are not known, "" if they are."""
    kind, given = rope.kind, dict(rope.scaling)
    if kind in _REFUSED:
        return f"{kind!r} RoPE, {_REFUSED[kind]}"
    if kind not in _REQUIRED:
        return f"{kind!r} RoPE, which is not known here (known: {', '.join(_REQUIRED)})"
    known = (*_REQUIRED[kind], *_OPTIONAL.get(kind, ()), *_HARMLESS)
    if unknown := [key for key in given if key not in known]:
        return f"{kind!r} RoPE with {unknown[0]!r}, a parameter that is not known here"
    for key in known[: -len(_HARMLESS)]:
        if key in given or key in _REQUIRED[kind]:
            value: Any = given.get(key)
            if not _fine(key, value):
                return f"{kind!r} RoPE with {key!r} {value!r}"
    if kind == "llama3" and given["high_freq_factor"] <= given["low_freq_factor"]:
        return "'llama3' RoPE with 'high_freq_factor' not above 'low_freq_factor'"
    if kind == "yarn" and rope.theta <= 1:
        return f"'yarn' RoPE with theta {rope.theta}, which must exceed 1"
    return ""


def _fine(key: str, value: Any) -> bool:
    if key == "truncate":
        return isinstance(value, (bool, np.bool_))
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    return math.isfinite(value) and bool(value > 0 or key in ("mscale", "mscale_all_dim"))


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A rotation of keys by one difference of positions: what :func:`turn` makes, and decoding applies.

    cos, sin: float32 ``(rotary_dim / 2,)``, C-contiguous, of each pair's angle.
    rotary_dim, interleaved: as in :class:`hypercache.model.RopeSpec`.
    """

    cos: F32
    sin: F32
    rotary_dim: int
    interleaved: bool

    def __post_init__(self) -> None:
        for name in ("cos", "sin"):  # kernels read them by address
            array = getattr(self, name)
            typed(f"Turn.{name}", array, np.ndarray)
            if (
                array.dtype != np.float32
                or array.shape != (self.rotary_dim // 2,)
                or not array.flags.c_contiguous
            ):
                raise SpecError(
                    f"Turn.{name} must be contiguous float32 ({self.rotary_dim // 2},), "
                    f"got {array.dtype} {array.shape}"
                )


def turn(rope: RopeSpec, delta: int) -> Turn | None:
    """The rotation that moves a key by ``delta`` positions (target - source, any sign).

    None where there is nothing to do: delta 0, or kind "none". Costs 25 to 50 microseconds: make one for each
    span and layer group, not for each layer. Raises SpecError as :func:`frequencies` does.
    """
    delta = count("delta", delta, -(2**53))
    if delta == 0 or rope.kind == "none":
        return None
    angles = delta * frequencies(rope)
    return Turn(
        np.cos(angles).astype(np.float32),
        np.sin(angles).astype(np.float32),
        rope.rotary_dim,
        rope.interleaved,
    )


def rotated_part(layout: KVLayout) -> int:
    """Index, in ``layout.parts``, of the part that RoPE rotates: ``k``, or ``rope`` of MLA."""
    return 1 if layout.kind == "mla" else 0


def rerotate(layout: KVLayout, parts: Sequence[npt.NDArray[Any]], turn: Turn | None) -> None:
    """Move K/V of one layer that are decoded already, in place; values and MLA's latent stay.

    parts: one array per ``layout.parts``, ``(heads, tokens, dim)``, as :meth:`Codec.decode` fills them.
    bf16 and fp16 are rotated in float32 and rounded once. K/V still encoded: ``Codec.decode(..., turn=)``
    does it in the same pass. Raises SpecError for shapes that do not fit and for fp8.
    """
    from hypercache.codecs import base, kernels  # codecs know this module

    tokens = base.check_parts(layout, parts)
    which = rotated_part(layout)
    told, keys = base.place_turn(layout, turn)[which], parts[which]
    if told == base.NO_TURN:
        return
    base.check_writable(f"part {layout.parts[which].name!r}", keys)
    shape = (layout.heads, 1, tokens, keys.shape[2] * keys.itemsize)
    place = (keys.ctypes.data, keys.strides[0], 0, keys.strides[1])
    kernels.turner(2 * told[2])(base.KINDS[layout.dtype], shape, place, place, told)
