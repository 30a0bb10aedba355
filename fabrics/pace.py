"""Whether one side keeps what it owes the other coming. No clock: it is looked at in even steps."""

from __future__ import annotations

TICKS = 4  # looks per stall limit


class Pace:
    """One way of a channel, in windows of TICKS looks.

    Within a window, ``least`` bytes must move, or all that was owed when it began, if that is less. So a slow
    link lives, and a peer that sends or takes a byte now and then, to hold on to our memory, does not.
    """

    __slots__ = ("_goal", "_least", "_looks")

    def __init__(self, least: int) -> None:
        self._least = max(1, least)
        self._goal = 0  # the count of moved bytes that ends the window; 0: nothing was owed
        self._looks = 0  # since the window began

    def stalled(self, moved: int, owed: int) -> bool:
        """``moved``: all bytes so far; ``owed``: bytes that should move, 0 if none."""
        if not owed:
            self._goal = 0
        elif not self._goal or moved >= self._goal:
            self._goal = moved + min(owed, self._least)
            self._looks = 0
        else:
            self._looks += 1
        return bool(self._goal) and self._looks >= TICKS
