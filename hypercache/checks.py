"""Types of the fields that callers fill: refused by name where they are given, not where they are used."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypercache.errors import SpecError


def count(what: str, value: object, least: int) -> int:
    """``value`` as a plain int, so that a NumPy 8 and an 8 have one identity; SpecError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise SpecError(f"{what} must be an integer >= {least}, got {value!r}")
    return int(value)


def typed(what: str, value: object, kind: type | tuple[type, ...], remedy: str = "") -> None:
    """SpecError that names the field and its type (never its value) unless ``value`` is a ``kind``."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join("None" if one is type(None) else one.__name__ for one in kinds)
        raise SpecError(f"{what} must be {names}, got {type(value).__name__}{remedy and '; ' + remedy}")


def tuple_of(what: str, value: object, kind: type | tuple[type, ...], remedy: str = "") -> tuple[Any, ...]:
    """``value``, a list or tuple, as a tuple; SpecError unless all it holds are ``kind``."""
    typed(what, value, (tuple, list), remedy)
    items: tuple[Any, ...] = tuple(value)  # type: ignore[arg-type]
    for i, item in enumerate(items):
        typed(f"{what}[{i}]", item, kind, remedy)
    return items
