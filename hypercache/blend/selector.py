"""A policy calibrated for one model: what :mod:`hypercache.blend.fit` learns, and the file it is kept in.

The file is one line of JSON, the same bytes for the same input and seed: no date, no host, no path. It holds
the fingerprint of the model whose K/V it was calibrated on, and is refused for any other: for the same
weights in another dtype or on another tensor-parallel degree, too, since their K/V are others.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from hypercache.blend.policies import Seen, feature, mass_layers
from hypercache.errors import SpecError, TooLarge
from hypercache.model import ModelSpec

Array = npt.NDArray[Any]

VERSION = 1
MAX_NBYTES = 1 << 20  # some 12,000 features: a model with 128 heads has 300
LIMIT = 4.0  # standard deviations; further out nothing was learned, and squares would run away
_REMEDY = "run hypercache calibrate --model PATH again"


class Trained(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a selector was calibrated on. prompts: how many. rows: reused tokens of them that were learned
    from. source: hex digest of their text and of all settings. layers: first and last whose repair was
    valued."""

    prompts: int
    rows: int
    source: str
    layers: tuple[int, int]


class Selector(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A :class:`hypercache.blend.Policy`: ``z @ weights + z**2 @ squares + bias`` of standardised features z,
    the logit that a token is among those whose recomputation repairs the output most.

    model: hex fingerprint of the :class:`ModelSpec`. features: names that
    :func:`hypercache.blend.policies.feature` knows. mean, scale, weights, squares: one number each. ratio:
    the share of tokens that it learned to find. check_layer: where the features were seen.
    Raises SpecError for numbers that are not finite, lengths that differ, unknown features.
    """

    format: str = "hypercache.selector"
    version: int = VERSION
    model: str
    features: tuple[str, ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    weights: tuple[float, ...]
    squares: tuple[float, ...]
    bias: float
    ratio: float
    check_layer: int
    trained: Trained

    def __post_init__(self) -> None:
        mass_layers(self.features)  # refuses unknown names
        if len(set(self.features)) != len(self.features) or not self.features:
            raise SpecError("features must be given, each once")
        for name in ("mean", "scale", "weights", "squares"):
            numbers = getattr(self, name)
            if len(numbers) != len(self.features) or not all(map(math.isfinite, numbers)):
                raise SpecError(f"{name} must hold {len(self.features)} finite numbers, one a feature")
        if not all(number > 0 for number in self.scale):
            raise SpecError("scale must hold numbers > 0")
        if not math.isfinite(self.bias):
            raise SpecError(f"bias must be finite, got {self.bias}")
        if not 0 < self.ratio <= 1:
            raise SpecError(f"ratio must be in 0..1 and above 0, got {self.ratio}")
        if self.check_layer < 1:
            raise SpecError(f"check_layer must be 1 or more, got {self.check_layer}")

    @property
    def name(self) -> str:
        return "selector"

    @property
    def probes(self) -> bool:
        return True

    @property
    def mass_layers(self) -> tuple[int, ...]:
        return mass_layers(self.features)

    def scores(self, seen: Seen) -> Array:
        """Float64 ``(n,)``."""
        columns = expand(table(seen, self.features), np.array(self.mean), np.array(self.scale))
        out: Array = columns @ np.array([*self.weights, *self.squares]) + self.bias
        return out

    def encode(self) -> bytes:
        """The file's content."""
        return msgspec.json.encode(self) + b"\n"


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


def decode(data: bytes, where: str, spec: ModelSpec | None = None) -> Selector:
    """A selector out of its file's content; ``where`` names the file in messages.

    spec: the model it is meant for. Raises TooLarge above MAX_NBYTES, and SpecError for what is no selector,
    for another version, and for another model's.
    """
    if len(data) > MAX_NBYTES:
        raise TooLarge(f"{where}: a selector has {MAX_NBYTES} bytes at the most, this file more; {_REMEDY}")
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format != "hypercache.selector":
            raise SpecError(f"{where} is no selector; {_REMEDY}")
        if head.version != VERSION:
            raise SpecError(f"{where} has version {head.version}, this is for version {VERSION}; {_REMEDY}")
        found = msgspec.json.decode(data, type=Selector)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(f"{where} is no selector: {error}; {_REMEDY}") from None
    if spec is not None and found.model != spec.fingerprint().hex():
        raise SpecError(
            f"{where} was calibrated for the model {found.model[:16]}..., not for {spec.name!r} "
            f"({spec.fingerprint().hex()[:16]}...): other weights, or the same in another dtype, adapter or "
            f"tensor-parallel degree; {_REMEDY}"
        )
    return found


def names(spec: ModelSpec, heads: int) -> tuple[str, ...]:
    """The features that a calibration starts from, for a model with ``heads`` query heads."""
    kv_heads = spec.layout(1).heads
    mass = [f"mass.{layer}.{head}" for layer in (0, 1) for head in range(heads)]
    deviation = [f"{part}.{head}" for part in "kv" for head in range(kv_heads)]
    return (*mass, *deviation, "place", "lead", "segment")


def expand(x: Array, mean: Array, scale: Array) -> Array:
    """What is weighed, ``(n, 2 * features)``: standardised features within ``LIMIT``, and their squares."""
    z = np.clip((x - mean) / scale, -LIMIT, LIMIT)
    return np.hstack([z, z * z])


def table(seen: Seen, features: tuple[str, ...]) -> Array:
    """Raw features ``(n, features)``, float64."""
    return np.stack([feature(seen, name) for name in features], axis=1)
