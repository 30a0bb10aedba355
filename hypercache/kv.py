"""The K/V of one sequence in host memory: what engines and client hand to each other.

An engine either lends its own memory (:meth:`KVBuffers.wrap`, no copy) or has the client fill a fresh
allocation (:meth:`KVBuffers.allocate`). Everything that could make two sides read the same bytes
differently (layers, parts, heads, tokens, dims, dtype, strides) is checked once, here, before a byte moves.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hypercache.checks import count, typed
from hypercache.errors import SpecError
from hypercache.model import KVDtype, ModelSpec

Array = npt.NDArray[Any]
_ALIGN = 64  # bytes; each array of an allocation starts on a cache line


class KVBuffers:
    """K/V of positions ``0..tokens-1`` of one sequence, all layers of one rank. Holds views, never copies.

    ``layer(i)`` gives one array per part of ``spec.layout(i)``: shape ``(heads, tokens, dim)``, dtype
    ``layout.dtype.storage`` (bf16 as uint16, fp8 as uint8), innermost axis contiguous, other strides free.

    ``exact`` of the tokens may be stored: K/V that were computed in another context, and all that was
    computed behind them, only approximate the prompt's own, and would poison every later hit. One memory has
    one KVBuffers, and windows of it: a second one over the same arrays cannot know what came through the
    first, and begins as exact (say :meth:`mark_approximate`).
    """

    __slots__ = ("_exact", "_first", "_layers", "spec", "tokens")

    def __init__(self, spec: ModelSpec, tokens: int, layers: Sequence[Sequence[Array]]) -> None:
        """Zero-copy over engine memory: one sequence of arrays per layer, one array per part.

        Raises SpecError that names the layer, the part and both values for any disagreement with ``spec``.
        """
        typed("KVBuffers: spec", spec, ModelSpec)
        self.spec = spec
        self.tokens = count("KVBuffers: tokens", tokens, 0)
        self._layers = _checked(spec, self.tokens, layers)
        self._first = 0
        self._exact = Exactness(self.tokens)

    @classmethod
    def _trusted(cls, spec: ModelSpec, tokens: int, layers: Sequence[tuple[Array, ...]]) -> KVBuffers:
        made = cls.__new__(cls)
        made.spec, made.tokens, made._layers = spec, tokens, layers
        made._first, made._exact = 0, Exactness(tokens)
        return made

    def layer(self, i: int) -> tuple[Array, ...]:
        """The arrays of layer ``i``, one per part."""
        if not 0 <= i < len(self._layers):
            raise SpecError(
                f"K/V of model {self.spec.name!r} have layers 0..{len(self._layers) - 1}, asked for {i}"
            )
        return self._layers[i]

    def window(self, start: int, stop: int) -> KVBuffers:
        """Positions ``start..stop-1`` as views of the same memory (their index restarts at 0).

        What is exact is known to both: it changes in one when it does in the other.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise SpecError(f"tokens {start}..{stop} are outside the 0..{self.tokens} that these K/V hold")
        layers = [tuple(array[:, start:stop] for array in parts) for parts in self._layers]
        part = self._trusted(self.spec, stop - start, layers)
        part._first, part._exact = self._first + start, self._exact
        return part

    @property
    def exact(self) -> int:
        """Leading tokens whose K/V may be stored: all of them, unless approximate ones were put there.

        A fetch of modular spans lowers it to the first token of these that came; whatever else happens to
        such a fetch, nothing takes that back but :meth:`mark_exact` of an engine that computed over them, or
        a fetch of all layers from token 0 on, which makes those tokens exact that it brought.
        """
        return min(max(self._exact.end - self._first, 0), self.tokens)

    def mark_exact(self, tokens: int) -> None:
        """The K/V of the first ``tokens`` tokens are exact: they were computed over nothing approximate.

        Changes nothing where more are exact already, and where tokens before those of this window are not:
        what follows them cannot be exact. What is fetched into them later counts again.
        """
        end = self._first + count("KVBuffers.mark_exact: tokens", tokens, 0)
        if tokens > self.tokens:
            raise SpecError(f"mark_exact({tokens}): these K/V hold {self.tokens} tokens")
        self._exact.mark(self._first, end)

    def mark_approximate(self, first: int) -> None:
        """The K/V from token ``first`` on are approximate: they are not stored."""
        self._exact.lower(self._first + count("mark_approximate: first", first, 0))

    def arriving(self, exact: int, approximate: int | None) -> Arrival:
        """For who fetches: K/V are on their way into all layers of the first ``exact`` tokens, or into so
        many as to tell nothing (0); approximate ones to no token before ``approximate`` (None: none)."""
        return Arrival(
            self._exact,
            0 if self._first else exact,  # a prompt that begins here does not go on from what is before it
            None if approximate is None else self._first + approximate,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.tokens * self.spec.token_nbytes()

    @classmethod
    def allocate(cls, spec: ModelSpec, tokens: int) -> KVBuffers:
        """Uninitialised C-contiguous arrays, cut from one allocation in layer order."""
        typed("KVBuffers.allocate: spec", spec, ModelSpec)
        tokens = count("KVBuffers.allocate: tokens", tokens, 0)
        shapes = [
            [((layout.heads, tokens, part.dim), layout.dtype.storage) for part in layout.parts]
            for layout in map(spec.layout, range(spec.num_layers))
        ]
        total = sum(_aligned(shape, dtype) for parts in shapes for shape, dtype in parts)
        memory = np.empty(total + _ALIGN, np.uint8)
        at = -memory.ctypes.data % _ALIGN
        layers = []
        for parts in shapes:
            arrays = []
            for shape, dtype in parts:
                arrays.append(np.ndarray(shape, dtype, memory.data, at))
                at += _aligned(shape, dtype)
            layers.append(tuple(arrays))
        return cls._trusted(spec, tokens, layers)

    @classmethod
    def wrap(cls, spec: ModelSpec, layers: Sequence[Sequence[Array]]) -> KVBuffers:
        """The constructor for who need not say how many tokens: as many as the first array has.

        All of them count as exact: wrap a memory once, or call :meth:`mark_approximate`.
        """
        first: Any = layers
        for _ in range(2):
            first = first[0] if isinstance(first, (list, tuple)) and first else None
        tokens = first.shape[1] if isinstance(first, np.ndarray) and first.ndim == 3 else 0
        return cls(spec, tokens, layers)

    def __repr__(self) -> str:
        size = f"{self.tokens} tokens, {len(self._layers)} layers, {self.nbytes} bytes"
        return f"<KVBuffers {self.spec.name!r} {size}>"


_MARKS = threading.Lock()  # engines mark in their threads, fetches in that of the client's loop


class Exactness:
    """Where the exact K/V of one memory end, in tokens (or rows); one for all windows on it.

    Whatever approximates lowers it before it is written. It is raised by who computed (:meth:`mark`), and by
    exact K/V that came, as far as nothing approximate was written there since they set out.
    """

    __slots__ = ("_arrivals", "_end")

    def __init__(self, end: int) -> None:
        self._end = end
        self._arrivals: list[Arrival] = []

    @property
    def end(self) -> int:
        """While approximate K/V are on their way, no farther than to where they go."""
        with _MARKS:
            ways = [arrival.approximate for arrival in self._arrivals if arrival.approximate is not None]
            return min([*ways, self._end])

    def lower(self, end: int) -> None:
        with _MARKS:
            self._end = min(self._end, end)
            for arrival in self._arrivals:
                arrival.exact = min(arrival.exact, end)

    def mark(self, first: int, end: int) -> None:
        with _MARKS:
            if self._end >= first:
                self._end = max(self._end, end)

    def begins(self, arrival: Arrival) -> None:
        with _MARKS:
            self._arrivals.append(arrival)

    def has(self, arrival: Arrival, exact: int) -> None:
        with _MARKS:
            others = [other.approximate for other in self._arrivals if other is not arrival]
            ways = [way for way in others if way is not None]
            self._end = max(self._end, min([exact, arrival.exact, *ways]))

    def ends(self, arrival: Arrival) -> None:
        with _MARKS:
            self._arrivals.remove(arrival)


class Arrival:
    """What one fetch may do to a memory, see :meth:`KVBuffers.arriving`.

    Until it is :meth:`over`, nothing counts as exact from ``approximate`` on.
    """

    __slots__ = ("_exactness", "approximate", "exact")

    def __init__(self, exactness: Exactness, exact: int, approximate: int | None) -> None:
        self._exactness = exactness
        self.exact = exact
        self.approximate = approximate
        exactness.begins(self)

    def placed(self, exact: int) -> None:
        """The first ``exact`` tokens are in place in all layers."""
        self._exactness.has(self, exact)

    def over(self) -> None:
        """Nothing more comes."""
        self._exactness.ends(self)


def _checked(spec: ModelSpec, tokens: int, layers: Sequence[Sequence[Array]]) -> Sequence[tuple[Array, ...]]:
    typed("KVBuffers: layers", layers, (list, tuple), "give one sequence of arrays per layer")
    if len(layers) != spec.num_layers:
        raise SpecError(
            f"model {spec.name!r} has {spec.num_layers} layers, the engine handed over {len(layers)}; "
            "build the ModelSpec from the config of the model that runs"
        )
    checked = []
    for i, arrays in enumerate(layers):
        layout = spec.layout(i)
        names = [part.name for part in layout.parts]
        typed(f"layer {i}", arrays, (list, tuple), f"give one array for each of {names}")
        if len(arrays) != len(names):
            raise SpecError(f"layer {i}: layout {layout.kind!r} has parts {names}, got {len(arrays)} arrays")
        for part, array in zip(layout.parts, arrays, strict=True):
            _check(f"layer {i}, part {part.name!r}", array, (layout.heads, tokens, part.dim), layout.dtype)
        checked.append(tuple(arrays))
    return checked


def _aligned(shape: tuple[int, int, int], dtype: np.dtype[Any]) -> int:
    nbytes = shape[0] * shape[1] * shape[2] * dtype.itemsize
    return -(-nbytes // _ALIGN) * _ALIGN


def _check(where: str, array: Array, want: tuple[int, int, int], dtype: KVDtype) -> None:
    if not isinstance(array, np.ndarray):
        raise SpecError(
            f"{where}: needs a NumPy array, got {type(array).__name__}; pass a host view of the tensor"
        )
    if array.ndim != 3:
        raise SpecError(
            f"{where}: needs shape (heads, tokens, dim), got {array.shape}; pass one sequence, no batch axis"
        )
    for axis, expected, got in zip(("heads", "tokens", "dim"), want, array.shape, strict=True):
        if expected != got:
            raise SpecError(
                f"{where}: {axis} must be {expected}, got {got} (shape {array.shape}, expected {want})"
            )
    if array.dtype != dtype.storage:
        raise SpecError(f"{where}: {dtype.value} K/V are carried as {dtype.storage}, got {array.dtype}")
    if array.size and array.shape[2] > 1 and array.strides[2] != array.itemsize:
        raise SpecError(
            f"{where}: elements of one token must be contiguous ({array.itemsize} bytes apart), "
            f"they are {array.strides[2]} apart; pass another view or a copy"
        )
