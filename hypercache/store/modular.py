"""The modular index: which blocks hold a window of tokens, at whatever token of whatever prompt.

It stands beside the causal one and points to the same blocks. A block is in it while it is visible and its
writer gave it a mark; it is found by the fingerprint in that mark. Blocks of one fingerprint (one text stored
in several contexts, or one that repeats) form a ring from the newest to the oldest, so that none is ever lost
to the index, while a lookup looks at a few from either end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from hypercache.store.arena import MemoryUnavailable

if TYPE_CHECKING:
    from hypercache.store.index import Block, Tree

MARK_NBYTES: Final = 24  # fingerprint (uint64, little-endian), modular digest (16 bytes)
EITHER_END: Final = 4  # blocks of one fingerprint that are tried: so many of the newest, and of the oldest
SEARCH_STEPS: Final = 1 << 17  # blocks and offsets looked at in one search: some tens of milliseconds ...
_START_STEPS: Final = 4  # ... where to begin a run takes the time of so many

Fingerprints = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Run:
    """A chain of stored blocks, parent -> child, that holds the asked tokens from token ``at`` on.

    source: the token at which its first block stands in the prompt it was stored with.
    """

    at: int
    source: int
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Located:
    """hit: blocks of the causal run. runs: what is stored behind it out of context; ascending, apart from
    each other. complete: False if the search was cut short, so that there may be more."""

    hit: int
    runs: Sequence[Run]
    complete: bool = True


class Sieve:
    """Says of most fingerprints at once that no block has them: a Bloom filter with counts (Fan et al., 2000)
    and one hash, the fingerprint's low bits.

    It is as large as the index may ever need (8 to 16 bytes a block), so that it is never rebuilt; a count
    that reaches 255 stays there, and is nothing worse than a false alarm.
    """

    __slots__ = ("_array", "_counts", "_mask", "nbytes")

    def __init__(self, blocks: int) -> None:
        self.nbytes = 1 << (8 * max(blocks, 1) - 1).bit_length()
        self._mask = self.nbytes - 1
        try:
            self._array = np.zeros(self.nbytes, np.uint8)  # pages that are never touched take no memory
        except MemoryError as error:
            raise MemoryUnavailable(
                f"no {self.nbytes} bytes of memory for the index; lower the memory setting or the load"
            ) from error
        self._counts = self._array.data

    def add(self, fingerprint: int) -> None:
        slot = fingerprint & self._mask
        if self._counts[slot] < 255:
            self._counts[slot] += 1

    def discard(self, fingerprint: int) -> None:
        slot = fingerprint & self._mask
        if self._counts[slot] < 255:
            self._counts[slot] -= 1

    def passes(self, fingerprints: Fingerprints) -> npt.NDArray[np.bool_]:
        """Which of them some block may have; never one that is 0."""
        slots = (fingerprints & np.uint64(self._mask)).astype(np.intp)
        passed: npt.NDArray[np.bool_] = (self._array[slots] != 0) & (fingerprints != 0)
        return passed


def enter(block: Block, sieve: Sieve) -> None:
    """A block has become visible: the newest of its fingerprint. Nothing happens if it has no mark."""
    if not block.fingerprint:
        return
    heads = block.tree.windows
    newest = heads.get(block.fingerprint)
    heads[block.fingerprint] = block
    if newest is None:
        block.newer = block.older = block
        sieve.add(block.fingerprint)
        return
    oldest = newest.newer  # the ring's ends touch
    assert oldest is not None
    block.newer, block.older = oldest, newest
    oldest.older = newest.newer = block


def leave(block: Block, sieve: Sieve) -> None:
    """A block is no longer visible, or it goes."""
    newer, older = block.newer, block.older
    if newer is None or older is None:
        return
    heads = block.tree.windows
    if older is block:
        del heads[block.fingerprint]
        sieve.discard(block.fingerprint)
    else:
        newer.older, older.newer = older, newer
        if heads[block.fingerprint] is block:
            heads[block.fingerprint] = older
    block.newer = block.older = None


def find(
    tree: Tree, sieve: Sieve, first: int, fingerprints: Fingerprints, start: int, least: int
) -> tuple[list[Run], bool]:
    """The runs of at least ``least`` blocks at token ``start`` or behind, from left to right: wherever one
    begins, the longest. ``fingerprints[i]`` is that of the window at token ``first + i``.

    Of equally long ones that wins which was computed at the start of its prompt, then the newest. Returns
    False beside them if the search was cut short.
    """
    size = tree.space.info.block_size
    fits = _fits(sieve.passes(fingerprints), size, least)
    begin = max(start - first, 0)
    offsets = (np.flatnonzero(fits[begin:]) + begin).tolist()
    search = _Search(tree, fingerprints.data)
    runs: list[Run] = []
    index = 0
    while index < len(offsets) and search.steps > 0:
        offset = offsets[index]
        blocks = search.longest(offset)
        if len(blocks) < least:
            index += 1
            continue
        runs.append(Run(first + offset, blocks[0].depth * size, blocks))
        index = bisect_left(offsets, offset + len(blocks) * size, index)
    return runs, search.steps > 0


def _fits(passes: npt.NDArray[np.bool_], size: int, least: int) -> npt.NDArray[np.bool_]:
    """At which offsets ``least`` windows in a row, ``size`` apart, pass: most false alarms end here."""
    covered = 1
    while covered < least and passes.size:
        more = min(covered, least - covered)
        shift = more * size
        passes = passes[: max(0, passes.size - shift)] & passes[shift:]
        covered += more
    return passes


class _Search:
    __slots__ = ("_fingerprints", "_size", "_windows", "steps")

    def __init__(self, tree: Tree, fingerprints: memoryview) -> None:
        self._fingerprints = fingerprints
        self._size = tree.space.info.block_size
        self._windows = tree.windows
        self.steps = SEARCH_STEPS  # left

    def longest(self, offset: int) -> list[Block]:
        """The best run that begins at ``offset``; maybe none."""
        self.steps -= 1
        newest = self._windows.get(self._fingerprints[offset])
        best: list[Block] = []
        for block in [] if newest is None else _both_ends(newest):
            if self.steps <= 0:
                break
            run = self._run(block, offset)
            if len(run) > len(best) or (len(run) == len(best) and best[0].depth and not block.depth):
                best = run
        return best

    def _run(self, block: Block, offset: int) -> list[Block]:
        run = [block]
        self.steps -= _START_STEPS
        for at in range(offset + self._size, len(self._fingerprints), self._size):
            child = self._child(run[-1], self._fingerprints[at])
            if child is None:
                break
            run.append(child)
        return run

    def _child(self, block: Block, fingerprint: int) -> Block | None:
        """The child that holds this window: looked for among the children and among the blocks that hold it
        at the same time, so that it costs what the fewer of them cost."""
        newest = twin = self._windows.get(fingerprint)
        child = block.child
        while child is not None and twin is not None and self.steps > 0:
            self.steps -= 1
            if child.fingerprint == fingerprint and child.older is not None:
                return child
            if twin.parent is block:
                return twin
            child = child.next
            twin = twin.older if twin.older is not newest else None
        return None


def _both_ends(newest: Block) -> list[Block]:
    """Some blocks of a ring, newest first. The oldest are among them for the sake of text that repeats: the
    first block of a long repetition is its oldest, and begins the longest run."""
    new = [newest]
    node = newest.older
    while node is not None and node is not newest and len(new) < EITHER_END:
        new.append(node)
        node = node.older
    old: list[Block] = []
    node = newest.newer
    while node is not None and node is not new[-1] and len(old) < EITHER_END:
        old.append(node)
        node = node.newer
    return new + old[::-1]
