"""What a channel has to send, in which order. No I/O, no clock."""

from __future__ import annotations

from collections import OrderedDict, deque

from fabrics.base import Outgoing, Source


def nbytes(frame: Outgoing) -> int:
    """Bytes a waiting frame holds: body and payload."""
    return len(frame.body) + sum(view.nbytes for view in frame.payload)


class Outbox:
    """Frames that were pushed go first, in order; then sources are asked for a frame each, in turn."""

    __slots__ = ("_frames", "_ring", "queued")

    def __init__(self) -> None:
        self._frames: deque[tuple[Outgoing, int]] = deque()
        self._ring: OrderedDict[int, Source] = OrderedDict()
        self.queued = 0  # bytes of pushed frames that wait

    def __bool__(self) -> bool:
        return bool(self._frames or self._ring)

    def push(self, frame: Outgoing) -> None:
        size = nbytes(frame)
        self.queued += size
        self._frames.append((frame, size))

    def add(self, source: Source) -> None:
        self._ring.setdefault(id(source), source)

    def remove(self, source: Source) -> None:
        self._ring.pop(id(source), None)

    def stop_sources(self) -> None:
        self._ring.clear()

    def next(self) -> Outgoing | None:
        """The frame to send now, or None. An exception of a source passes through."""
        if self._frames:
            frame, size = self._frames.popleft()
            self.queued -= size
            return frame
        while self._ring:
            key, source = next(iter(self._ring.items()))
            self._ring.move_to_end(key)
            pulled = source.next_frame()
            if pulled is not None:
                return pulled
            self._ring.pop(key, None)
        return None

    def clear(self) -> list[Outgoing]:
        """Forget everything; returns the frames whose payload the caller must release."""
        frames = [frame for frame, _ in self._frames]
        self._frames.clear()
        self._ring.clear()
        self.queued = 0
        return frames
