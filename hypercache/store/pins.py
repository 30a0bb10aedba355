"""Pins: runs of blocks that a client wants kept for a while, whoever else needs the room."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hypercache.store.index import Block, hold
from hypercache.store.room import Room

MOST_PINS = 4096
OWNER_SHARE = 2  # one owner has at most half of what pins may keep


class Pin:
    """Keeps ``block`` and all before it where they are. ``expires`` is in the clock of ``now``."""

    __slots__ = ("block", "expires", "nbytes")

    def __init__(self, block: Block, expires: float) -> None:
        self.block = block
        self.expires = expires
        self.nbytes = (block.depth + 1) * block.tree.space.nbytes


class Pins:
    """All pins of a store, by owner and by their last block. They end by themselves: when their time is up,
    and when their blocks are evicted by name or cleared.

    limit_s: no pin lasts longer. limit_nbytes: of all that is pinned; a prefix that two pins share counts
    twice.
    """

    def __init__(self, room: Room, limit_s: float, limit_nbytes: int) -> None:
        self._room = room
        self.limit_s = limit_s
        self.limit_nbytes = limit_nbytes
        self.nbytes = 0
        self._pins: dict[tuple[Hashable, Block], Pin] = {}
        self._owned: dict[Hashable, int] = {}  # bytes

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def blocks(self) -> list[Block]:
        """The last one of each."""
        return [pin.block for pin in self._pins.values()]

    def pin(self, run: Sequence[Block], owner: Hashable, seconds: float, now: float) -> tuple[int, float]:
        """Pin the run, or as much of its beginning as there is room for. Returns how many blocks are pinned,
        and for how long. A run that the owner has pinned already gets the new time."""
        seconds = min(seconds, self.limit_s)
        count = len(run)
        while count:
            block = run[count - 1]
            known = self._pins.get((owner, block))
            if known is not None:
                known.expires = now + seconds
                return count, seconds
            pin = Pin(block, now + seconds)
            mine = self._owned.get(owner, 0)
            spare = min(self.limit_nbytes - self.nbytes, self.limit_nbytes // OWNER_SHARE - mine)
            if pin.nbytes <= spare and len(self._pins) < MOST_PINS:
                block.tree.busy += 1
                hold(block)
                self._pins[owner, block] = pin
                self._owned[owner] = mine + pin.nbytes
                self.nbytes += pin.nbytes
                return count, seconds
            if len(self._pins) >= MOST_PINS:
                break
            count = min(count - 1, max(0, spare) // block.tree.space.nbytes - run[0].depth)
            count = max(count, 0)
        return 0, 0.0

    def unpin(self, run: Sequence[Block], owner: Hashable) -> int:
        """End the owner's pin of the longest run that ``run`` begins with. Returns its blocks."""
        for count in range(len(run), 0, -1):
            if (owner, run[count - 1]) in self._pins:
                self._end((owner, run[count - 1]))
                return count
        return 0

    def sweep(self, now: float) -> None:
        for key, pin in list(self._pins.items()):
            if pin.expires <= now or pin.block.hidden:
                self._end(key)

    def _end(self, key: tuple[Hashable, Block]) -> None:
        pin = self._pins.pop(key)
        self.nbytes -= pin.nbytes
        owner = key[0]
        self._owned[owner] -= pin.nbytes
        if not self._owned[owner]:
            del self._owned[owner]
        pin.block.tree.busy -= 1
        self._room.ending.append(pin.block)
