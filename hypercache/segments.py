"""Segments: the runs of a prompt's tokens that may move as one (documents, files, tool schemas).

A caller that knows where its documents begin and end gives them as spans ``(start, stop)`` of tokens. What is
looked for out of context then stays inside them, so that no run is stitched together across a border.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hypercache.errors import SpecError
from hypercache.keys import canonical_tokens

Segment = tuple[int, int]


def split(tokens: Any, separator: Any) -> list[Segment]:
    """The documents between the separators, as spans ``(start, stop)`` of ``tokens``, in order.

    Separators are found from left to right without overlap, and belong to no segment; what would be empty is
    left out. ``separator`` is compared as token ids, so give it as it is tokenized inside a prompt: many
    tokenizers give the same text other ids at its beginning. Linear in both lengths (Knuth, Morris and Pratt
    1977), whatever repeats. Raises TokenError for bad tokens, SpecError for an empty separator.
    """
    ids, wanted = canonical_tokens(tokens), canonical_tokens(separator).tolist()
    if not wanted:
        raise SpecError("the separator has no tokens; give the token ids that stand between the documents")
    found: list[Segment] = []
    start = 0
    for place in _places(ids.tolist(), wanted):
        found.append((start, place))
        start = place + len(wanted)
    found.append((start, len(ids)))
    return [(first, end) for first, end in found if first < end]


def _places(ids: list[int], wanted: list[int]) -> list[int]:
    """Where ``wanted`` begins in ``ids``, leftmost first, without overlap."""
    back = [0] * len(wanted)  # length of the longest proper border of wanted[: i + 1]
    matched = 0
    for index in range(1, len(wanted)):
        while matched and wanted[index] != wanted[matched]:
            matched = back[matched - 1]
        matched += wanted[index] == wanted[matched]
        back[index] = matched
    places = []
    matched = 0
    for index, token in enumerate(ids):
        while matched and token != wanted[matched]:
            matched = back[matched - 1]
        matched += token == wanted[matched]
        if matched == len(wanted):
            places.append(index + 1 - matched)
            matched = 0
    return places


def check(segments: Sequence[Segment], tokens: int) -> tuple[Segment, ...]:
    """``segments`` as plain ints, for a prompt of ``tokens`` tokens.

    Raises SpecError, naming the first offender, unless each is a pair ``0 <= start < stop <= tokens`` and
    begins where the one in front of it ends or later.
    """
    if not isinstance(segments, (list, tuple)):
        raise SpecError(
            f"segments must be a list of (start, stop), got {type(segments).__name__}; "
            "hypercache.segments.split finds them between separators"
        )
    good: list[Segment] = []
    end = 0
    for index, span in enumerate(segments):
        whole = isinstance(span, (tuple, list)) and len(span) == 2 and all(map(_is_whole, span))
        if not whole:
            raise SpecError(
                f"segment {index} must be a pair of integers (start, stop), got {type(span).__name__}; "
                "segments say where tokens lie, not which they are"
            )
        start, stop = map(int, span)
        if not 0 <= start < stop <= tokens:
            raise SpecError(
                f"segment {index} is {start}..{stop}: it must have at least one token, all of them in the "
                f"prompt's 0..{tokens}"
            )
        if start < end:
            raise SpecError(
                f"segment {index} begins at token {start}, before the one in front of it ends at {end}; "
                "sort them, and let none overlap"
            )
        good.append((start, stop))
        end = stop
    return tuple(good)


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
