"""Segments that a caller gives: found between separators, checked before they are used."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypercache.errors import SpecError, TokenError
from hypercache.segments import check, split

SMALL = st.integers(0, 2)


def naive(tokens: list[int], separator: list[int]) -> list[tuple[int, int]]:
    found, start, place = [], 0, 0
    while place + len(separator) <= len(tokens):
        if tokens[place : place + len(separator)] == separator:
            found.append((start, place))
            start = place = place + len(separator)
        else:
            place += 1
    return [(a, b) for a, b in [*found, (start, len(tokens))] if a < b]


@given(st.lists(SMALL, max_size=40), st.lists(SMALL, min_size=1, max_size=5))
def test_split_is_what_a_search_at_each_place_finds(tokens: list[int], separator: list[int]) -> None:
    """Three token ids only, so that separators repeat, overlap themselves and stand at both ends."""
    assert split(tokens, separator) == naive(tokens, separator)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], []),
        ([9, 9], []),
        ([9, 9, 9, 9], []),
        ([9, 9, 9], [(2, 3)]),  # leftmost first: the third 9 is a document
        ([1, 2, 9, 9, 3], [(0, 2), (4, 5)]),
        ([1, 9, 2], [(0, 3)]),
    ],
)
def test_borders(tokens: list[int], expected: list[tuple[int, int]]) -> None:
    for kind in (list, tuple, np.uint16, np.int64, lambda ids: array.array("i", ids)):
        given_tokens: Any = np.asarray(tokens, kind) if kind in (np.uint16, np.int64) else kind(tokens)
        assert split(given_tokens, [9, 9]) == expected


def test_a_document_moves_as_one() -> None:
    """K08: separators are compared as ids, and a beginning-of-text token in front of a stored document is not
    part of it when the separator names it."""
    document, bos, rule = list(range(100, 140)), 1, [28705, 422, 422]
    alone = [bos, *rule, *document]
    asked = [bos, 7, 8, *rule, *range(50, 60), *rule, *document, *rule, 3]
    (a,) = [span for span in split(alone, rule) if span[1] - span[0] == 40]
    (b,) = [span for span in split(asked, rule) if span[1] - span[0] == 40]
    assert alone[slice(*a)] == asked[slice(*b)] == document


def test_repetition_costs_no_more() -> None:
    """A separator that nearly matches everywhere: naive search would compare 2.5e9 tokens."""
    tokens = np.zeros(100_000, np.uint32)
    tokens[-1] = 1
    assert split(tokens, [0] * 50_000 + [1]) == [(0, 49_999)]
    assert split(tokens, [0] * 50_000 + [2]) == [(0, 100_000)]


def test_what_cannot_separate_is_refused() -> None:
    with pytest.raises(SpecError, match="separator has no tokens"):
        split([1, 2], [])
    with pytest.raises(TokenError, match="tokenize the text first"):
        split([1, 2], "###")
    with pytest.raises(TokenError):
        split([1.5], [1])


def test_check_gives_plain_pairs() -> None:
    segments = [[0, 3], (np.int64(3), np.uint8(5)), (9, 10)]
    checked = check(segments, 10)  # type: ignore[arg-type]
    assert checked == ((0, 3), (3, 5), (9, 10))
    assert {type(edge) for span in checked for edge in span} == {int}
    assert check([], 0) == ()


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([(0, 11)], r"segment 0 is 0\.\.11: .*0\.\.10"),
        ([(-1, 3)], r"segment 0 is -1\.\.3"),
        ([(0, 2), (2, 2)], r"segment 1 is 2\.\.2: it must have at least one token"),
        ([(5, 3)], r"segment 0 is 5\.\.3"),
        ([(3, 5), (0, 2)], "segment 1 begins at token 0, before .* ends at 5; sort"),
        ([(0, 5), (4, 6)], "segment 1 begins at token 4"),
        ([(0, 5), 7], r"segment 1 must be a pair .* got int"),
        ([(0, 5, 7)], "segment 0 must be a pair"),
        ([(0, 2.0)], "segment 0 must be a pair"),
        ([(False, True)], "segment 0 must be a pair"),
        (5, "must be a list of .start, stop., got int"),
        ("0..5", "must be a list of .start, stop., got str"),
        ({(0, 5)}, "must be a list of .start, stop., got set"),
    ],
)
def test_check_names_the_first_offender(segments: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check(segments, 10)
