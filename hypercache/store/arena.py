"""The RAM that blocks lie in: one anonymous memory map, cut on demand.

The map is divided into *regions* of equal size. A *slab* is a run of neighbouring regions, cut into equal
*slots* of one size class. A slab whose slots are all free goes back to the pool of regions at once, so
load that has gone leaves nothing behind, whatever its mix of sizes was. An object larger than a region
is a slab with a longer run, nothing special. The arena decides nothing about who has to go.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections import deque
from typing import Generic, TypeVar

from hypercache.errors import ConfigError, HyperCacheError

Owner = TypeVar("Owner")

ALIGN = 64
MIN_REGION = 1 << 20
MAX_REGION = 128 << 20
MIN_CAPACITY = 4 << 20
MAX_CAPACITY = 1 << 46
_WASTE = 1 / 16  # of a slab, at its end; a longer run is tried above that
_RUN_TRIES = 8


class MemoryUnavailable(HyperCacheError, MemoryError):
    """The operating system gives no memory map of the asked size. Run without this tier, or smaller."""


def slot_nbytes(nbytes: int) -> int:
    """Size of the class that holds ``nbytes``: a multiple of 64, at most 1/16 (or 63 bytes) larger."""
    nbytes = max(nbytes, ALIGN)
    step = max(ALIGN, 1 << (nbytes - 1).bit_length() >> 5)
    return -(-nbytes // step) * step


def region_nbytes(capacity: int) -> int:
    """About 1/64 of the capacity, a power of two, 1..128 MiB."""
    return min(max(1 << (max(capacity, 64) // 64).bit_length() - 1, MIN_REGION), MAX_REGION)


class SizeClass(Generic[Owner]):
    """One slot size and the slabs of it that have room."""

    __slots__ = ("count", "nbytes", "partial", "run")

    def __init__(self, nbytes: int, run: int, count: int) -> None:
        self.nbytes = nbytes
        self.run = run  # regions per slab
        self.count = count  # slots per slab
        self.partial: dict[Slab[Owner], None] = {}


class Slab(Generic[Owner]):
    """A run of regions of one class. ``owners[slot]`` is whose bytes lie there.

    ``held`` counts slots that may not go; ``rank`` is the newest use of any slot (see policy.py).
    """

    __slots__ = ("first", "free", "held", "klass", "offset", "owners", "queued", "rank", "used")

    def __init__(self, klass: SizeClass[Owner], first: int, offset: int) -> None:
        self.klass = klass
        self.first = first
        self.offset = offset
        self.owners: list[Owner | None] = []  # grows to klass.count as slots are first used
        self.free: list[int] = []
        self.used = 0
        self.held = 0
        self.rank = -math.inf
        self.queued = 0

    @property
    def evictable(self) -> bool:
        return self.held == 0 and self.used > 0


class Arena(Generic[Owner]):
    """Allocator over one memory map of ``nbytes`` (rounded down to whole regions).

    Raises ConfigError for a size out of range, MemoryUnavailable when the map cannot be had.
    """

    def __init__(self, nbytes: int, region: int) -> None:
        if not 0 < region <= nbytes <= MAX_CAPACITY:
            raise ConfigError(f"arena of {nbytes} bytes in regions of {region}: need 0 < region <= size")
        self.region = region
        self.regions: list[Slab[Owner] | None] = [None] * (nbytes // region)
        self.regions_free = len(self.regions)
        self.nbytes = len(self.regions) * region
        self.used = 0  # bytes in slots that have an owner
        self._classes: dict[int, SizeClass[Owner]] = {}
        try:
            self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryUnavailable(
                f"cannot map {self.nbytes} bytes of memory ({error}); lower the memory setting or the load"
            ) from error
        # Huge pages: the first write to small ones runs at a fraction of memcpy. And no K/V in core dumps.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTDUMP"):
            if hasattr(mmap, advice):
                with contextlib.suppress(OSError):
                    self._map.madvise(getattr(mmap, advice))
        self._memory = memoryview(self._map)
        self._readonly = self._memory.toreadonly()

    def size_class(self, nbytes: int) -> SizeClass[Owner] | None:
        """The class for objects of ``nbytes``; None if they exceed the arena."""
        if nbytes > self.nbytes:
            return None
        slot = min(slot_nbytes(nbytes), self.nbytes)
        klass = self._classes.get(slot)
        if klass is None:
            run = self._run(slot)
            klass = self._classes[slot] = SizeClass(slot, run, run * self.region // slot)
        return klass

    def _run(self, slot: int) -> int:
        """Fewest regions that, cut into slots, waste little; long runs only for large slots."""
        need = -(-slot // self.region)
        most = max(need, min(need + _RUN_TRIES, len(self.regions) // 8))
        waste = {run: run * self.region % slot / (run * self.region) for run in range(need, most + 1)}
        for run, share in waste.items():
            if share <= _WASTE:
                return run
        return min(waste, key=lambda run: waste[run])

    def allocate(self, klass: SizeClass[Owner]) -> tuple[Slab[Owner], int] | None:
        """A free slot, from a slab with room or from a new one; None if there is neither."""
        slab = next(iter(klass.partial), None)
        if slab is None:
            slab = self._new_slab(klass)
            if slab is None:
                return None
        if slab.free:
            slot = slab.free.pop()
        else:
            slot = len(slab.owners)
            slab.owners.append(None)
        slab.used += 1
        if slab.used == klass.count:
            del klass.partial[slab]
        self.used += klass.nbytes
        return slab, slot

    def spare(self, nbytes: int) -> int:
        """How many objects of ``nbytes`` there is room for as it is: no region is counted for two sizes."""
        klass = self.size_class(nbytes)
        if klass is None:
            return 0
        slabs = self.regions_free // klass.run
        return sum(klass.count - slab.used for slab in klass.partial) + slabs * klass.count

    def release(self, slab: Slab[Owner], slot: int) -> None:
        """Take a slot back. The caller answers for it that nobody reads or writes it any more."""
        klass = slab.klass
        slab.owners[slot] = None
        slab.free.append(slot)
        slab.used -= 1
        self.used -= klass.nbytes
        if slab.used:
            klass.partial[slab] = None
            return
        klass.partial.pop(slab, None)
        self.regions[slab.first : slab.first + klass.run] = [None] * klass.run
        self.regions_free += klass.run

    def _new_slab(self, klass: SizeClass[Owner]) -> Slab[Owner] | None:
        if self.regions_free < klass.run:
            return None
        first = self._free_run(klass.run)
        if first is None:
            return None
        slab = Slab(klass, first, first * self.region)
        self.regions[first : first + klass.run] = [slab] * klass.run
        self.regions_free -= klass.run
        klass.partial[slab] = None
        return slab

    def _free_run(self, run: int) -> int | None:
        """Lowest run of free regions: packing to one end keeps long runs at the other."""
        length = 0
        for index, slab in enumerate(self.regions):
            length = 0 if slab is not None else length + 1
            if length == run:
                return index - run + 1
        return None

    def largest_free_run(self) -> int:
        """Bytes of the longest run of free regions."""
        best = length = 0
        for slab in self.regions:
            length = 0 if slab is not None else length + 1
            best = max(best, length)
        return best * self.region

    def coldest_window(self, run: int) -> tuple[float, list[Slab[Owner]]] | None:
        """The run of regions whose hottest slab is coldest, nothing in it held: its heat and its slabs.

        One pass with a queue of falling maxima. None if every window has something held in it.
        """
        heat = [-math.inf if slab is None else math.inf if slab.held else slab.rank for slab in self.regions]
        best: tuple[float, int] | None = None
        maxima: deque[int] = deque()
        for index, value in enumerate(heat):
            while maxima and heat[maxima[-1]] <= value:
                maxima.pop()
            maxima.append(index)
            if maxima[0] <= index - run:
                maxima.popleft()
            hottest = heat[maxima[0]]
            if index >= run - 1 and hottest < math.inf and (best is None or hottest < best[0]):
                best = hottest, index - run + 1
        if best is None:
            return None
        slabs = dict.fromkeys(slab for slab in self.regions[best[1] : best[1] + run] if slab is not None)
        return best[0], list(slabs)

    def view(self, slab: Slab[Owner], slot: int, first: int, end: int) -> memoryview:
        """Writable bytes ``first..end`` of a slot."""
        base = slab.offset + slot * slab.klass.nbytes
        return self._memory[base + first : base + end]

    def readonly(self, slab: Slab[Owner], slot: int, first: int, end: int) -> memoryview:
        """Read-only bytes ``first..end`` of a slot."""
        base = slab.offset + slot * slab.klass.nbytes
        return self._readonly[base + first : base + end]

    def slabs(self) -> list[Slab[Owner]]:
        return list(dict.fromkeys(slab for slab in self.regions if slab is not None))

    def close(self) -> None:
        """Give the map back. Views still lent out keep it alive until they are gone."""
        self._readonly.release()
        self._memory.release()
        with contextlib.suppress(BufferError):
            self._map.close()
