"""Walking over scattered memory: one notion for gathering output, scattering input and copying."""

from __future__ import annotations

from collections.abc import Iterable

_MAX_VIEWS = 256  # well below IOV_MAX (1024 on Linux), so that a few lists fit one system call


def flat(views: Iterable[memoryview]) -> list[memoryview]:
    """``views`` as runs of bytes, the empty ones left out. Raises TypeError if one is not contiguous."""
    return [
        view if view.format == "B" and view.ndim == 1 and view.c_contiguous else _cast(view)
        for view in views
        if view.nbytes
    ]


def _cast(view: memoryview) -> memoryview:
    if not view.c_contiguous:
        raise TypeError(f"a view of shape {view.shape}, strides {view.strides} is not contiguous")
    return view.cast("B")


class Cursor:
    """A position in a list of views of bytes. ``left`` bytes are still ahead of it."""

    __slots__ = ("_index", "_offset", "_views", "left")

    def __init__(self, views: list[memoryview], left: int) -> None:
        self._views = views  # taken over
        self._index = 0
        self._offset = 0
        self.left = left

    def peek(self, limit: int) -> tuple[list[memoryview], int]:
        """Views of the next bytes and their number: at most ``limit`` (> 0), at least one if any is left."""
        offset = self._offset
        if len(self._views) == 1:  # nearly always
            view = self._views[0][offset : offset + limit]
            return [view], len(view)
        found: list[memoryview] = []
        room = limit
        for index in range(self._index, min(len(self._views), self._index + _MAX_VIEWS)):
            view = self._views[index]
            if offset or len(view) > room:
                view = view[offset : offset + room]
                offset = 0
            found.append(view)
            room -= len(view)
            if not room:
                break
        return found, limit - room

    def advance(self, count: int) -> None:
        """Move ``count`` (<= ``left``) bytes ahead. When all have passed, no view is referenced any more."""
        self.left -= count
        if not self.left:
            self.clear()
            return
        count += self._offset
        while count >= len(self._views[self._index]):
            count -= len(self._views[self._index])
            self._index += 1
        self._offset = count

    def clear(self) -> None:
        """Refer to no view any more."""
        self._views.clear()
