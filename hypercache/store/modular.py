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
SEARCH_STEPS: Final = 96 << 10  # of one search: about 20 ms. A block compared with a window is one step ...
_OFFSET_STEPS: Final = 3  # ... a place where a run might begin, ...
_START_STEPS: Final = 6  # ... a block that a run is tried from, ...
_RUN_STEPS: Final = 32  # ... a run that is found, with its use and its place in the answer, ...
_FOUND_STEPS: Final = 1  # ... and each block of it.
_TWINS: Final = 64  # blocks of one fingerprint looked at to learn that no run can be longer

_UINT64: Final = (1 << 64) - 1

Fingerprints = npt.NDArray[np.uint64]
Keys = npt.NDArray[np.uint64]


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
    """Says of most keys at once that no block has them: a Bloom filter with counts (Fan et al., 2000) and one
    hash, a key's high bits. It is as large as the index may ever need (8 to 16 bytes a block), so that it is
    never rebuilt. All trees share it: their keys have nothing in common, so none learns from it what another
    holds.
    """

    __slots__ = ("_array", "_counts", "_more", "nbytes", "shift")

    def __init__(self, blocks: int) -> None:
        bits = (8 * max(blocks, 1) - 1).bit_length()
        self.nbytes = 1 << bits
        self.shift = 64 - bits
        try:
            self._array = np.zeros(self.nbytes, np.uint8)  # pages that are never touched take no memory
        except MemoryError as error:
            raise MemoryUnavailable(
                f"no {self.nbytes} bytes of memory for the index; lower the memory setting or the load"
            ) from error
        self._counts = self._array.data
        self._more: dict[int, int] = {}  # what is above 255

    def add(self, key: int) -> None:
        slot = key >> self.shift
        if self._counts[slot] < 255:
            self._counts[slot] += 1
        else:
            self._more[slot] = self._more.get(slot, 0) + 1

    def discard(self, key: int) -> None:
        slot = key >> self.shift
        more = self._more.pop(slot, 0)
        if more > 1:
            self._more[slot] = more - 1
        elif not more:
            self._counts[slot] -= 1

    def passes(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which of them some block may have."""
        slots = (keys >> np.uint64(self.shift)).view(np.int64)
        passed: npt.NDArray[np.bool_] = self._array[slots] != 0
        return passed


def key(tree: Tree, fingerprint: int) -> int:
    """What a fingerprint is filed under. Writers choose their fingerprints, so this is a hash with secrets of
    the tree (multiply-shift, Dietzfelbinger et al., 1997), one to one: nobody can aim at a slot."""
    return (fingerprint ^ tree.mask) * tree.factor & _UINT64


def keys(tree: Tree, fingerprints: Fingerprints) -> Keys:
    """:func:`key` of each."""
    return (fingerprints ^ np.uint64(tree.mask)) * np.uint64(tree.factor)


def enter(block: Block, sieve: Sieve) -> None:
    """A block has become visible: the newest of its fingerprint. Nothing happens if it has no mark."""
    if not block.fingerprint:
        return
    heads, filed = block.tree.windows, key(block.tree, block.fingerprint)
    newest = heads.get(filed)
    heads[filed] = block
    if newest is None:
        block.newer = block.older = block
        sieve.add(filed)
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
    heads, filed = block.tree.windows, key(block.tree, block.fingerprint)
    if older is block:
        del heads[filed]
        sieve.discard(filed)
    else:
        newer.older, older.newer = older, newer
        if heads[filed] is block:
            heads[filed] = older
    block.newer = block.older = None


def find(
    tree: Tree, sieve: Sieve, first: int, fingerprints: Fingerprints, start: int, least: int
) -> tuple[list[Run], bool]:
    """The runs of at least ``least`` blocks at token ``start`` or behind, from left to right: wherever one
    begins, the longest. ``fingerprints[i]`` is that of the window at token ``first + i``.

    Of equally long ones that wins which was computed at the start of its prompt, then the newest. Returns
    False beside them if the search was cut short after ``SEARCH_STEPS``; so there are a few thousand at most.
    """
    size = tree.space.info.block_size
    filed = keys(tree, fingerprints)
    fits = _fits(sieve.passes(filed) & (fingerprints != 0), size, least)
    begin = max(start - first, 0)
    offsets = (np.flatnonzero(fits[begin:]) + begin).tolist()
    search = _Search(tree, fingerprints.data, filed.data)
    runs: list[Run] = []
    index = 0
    while index < len(offsets):
        offset = offsets[index]
        newest = search.newest(offset)
        if newest is None:  # a false alarm costs no step: what others hold does not show
            index += 1
            continue
        if search.steps <= 0:
            return runs, False
        blocks = search.longest(newest, offset)
        if len(blocks) < least:
            index += 1
            continue
        search.steps -= _RUN_STEPS + _FOUND_STEPS * len(blocks)
        runs.append(Run(first + offset, blocks[0].depth * size, blocks))
        index = bisect_left(offsets, offset + len(blocks) * size, index)
    return runs, True


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
    __slots__ = ("_fingerprints", "_keys", "_size", "_windows", "steps")

    def __init__(self, tree: Tree, fingerprints: memoryview, filed: memoryview) -> None:
        self._fingerprints = fingerprints
        self._keys = filed
        self._size = tree.space.info.block_size
        self._windows = tree.windows
        self.steps = SEARCH_STEPS  # left

    def newest(self, offset: int) -> Block | None:
        """The newest block that holds the window at ``offset``."""
        return self._windows.get(self._keys[offset])

    def longest(self, newest: Block, offset: int) -> list[Block]:
        """The best run that begins at ``offset``, of those found before the steps are used up; maybe none.
        ``newest``: the newest block there."""
        self.steps -= _OFFSET_STEPS
        best: list[Block] = []
        for block in _both_ends(newest):
            run = self._run(block, offset)
            if self.steps <= 0:
                break
            if len(run) > len(best):
                best = run
                if self._ends(offset + len(run) * self._size):
                    break  # text that is stored in many contexts costs about what it costs in one
        return best

    def _run(self, block: Block, offset: int) -> list[Block]:
        run = [block]
        self.steps -= _START_STEPS
        for at in range(offset + self._size, len(self._fingerprints), self._size):
            child = self._child(run[-1], at)
            if child is None:
                break
            run.append(child)
        return run

    def _child(self, block: Block, at: int) -> Block | None:
        """The child that holds the window at offset ``at``: looked for among the children and among the
        blocks that hold it at the same time, so that it costs what the fewer of them cost."""
        self.steps -= 1
        fingerprint, child = self._fingerprints[at], block.child
        if child is None or (child.fingerprint == fingerprint and child.older is not None):
            return child
        newest = twin = self.newest(at)
        while child is not None and twin is not None and self.steps > 0:
            self.steps -= 1
            if child.fingerprint == fingerprint and child.older is not None:
                return child
            if twin.parent is block:
                return twin
            child = child.next
            twin = twin.older if twin.older is not newest else None
        return None

    def _ends(self, at: int) -> bool:
        """Whether no block that holds the window at offset ``at`` stands behind one that holds the window
        before it: then nothing goes on from there, whatever the context."""
        if at >= len(self._fingerprints):
            return True
        before = self._fingerprints[at - self._size]
        newest = twin = self.newest(at)
        for _ in range(_TWINS):
            if twin is None:
                return True
            self.steps -= 1
            if twin.parent is not None and twin.parent.fingerprint == before:
                return False
            twin = twin.older if twin.older is not newest else None
        return twin is None


def _both_ends(newest: Block) -> list[Block]:
    """Some blocks of a ring: those that begin their prompt, then the others, newest first. The oldest are
    among them for the sake of text that repeats: the first block of a long repetition is its oldest, and
    begins the longest run."""
    if newest.older is newest:
        return [newest]
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
    return sorted(new + old[::-1], key=lambda block: block.depth > 0)
