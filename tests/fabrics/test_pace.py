"""When a peer is too slow, told without a clock."""

from __future__ import annotations

import pytest

from fabrics.pace import TICKS, Pace


def looks(pace: Pace, steps: list[tuple[int, int]]) -> int | None:
    """The number of the look at which the peer is called stalled."""
    for number, (moved, owed) in enumerate(steps):
        if pace.stalled(moved, owed):
            return number
    return None


@pytest.mark.parametrize(
    ("a_look", "stalled"), [(0, True), (1, True), (24, True), (25, False), (100, False)], ids=str
)
def test_progress_is_the_least_per_window(a_look: int, stalled: bool) -> None:
    steps = [(a_look * number, 10**6) for number in range(100)]
    assert looks(Pace(100), steps) == (TICKS if stalled else None)


def test_little_that_is_owed_must_come_in_full() -> None:
    assert looks(Pace(100), [(0, 10), (1, 9), (2, 8), (3, 7), (9, 1)]) == TICKS
    assert looks(Pace(100), [(0, 10), (1, 9), (2, 8), (3, 7), (10, 1), (11, 0)]) is None


def test_nothing_owed_is_never_late_and_begins_anew() -> None:
    pace = Pace(100)
    assert looks(pace, [(0, 0)] * 50) is None
    assert looks(pace, [(0, 50)] * TICKS) is None
    assert looks(pace, [(0, 0)]) is None
    assert looks(pace, [(0, 50)] * (TICKS + 1)) == TICKS


def test_frames_that_follow_each_other_are_progress() -> None:
    assert looks(Pace(100), [(40 * number, 7) for number in range(50)]) is None
