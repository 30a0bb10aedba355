"""Moves blocks between a node's store (L2) and its directory (L3), in the background.

The store says what is to be moved, the disk moves it, and nothing here waits for either: one thread writes,
several read, and what happens to the store happens in the event loop. Jobs of the writing thread run in the
order in which they were given, so that a removal can never be overtaken by what it removes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from hypercache.errors import HyperCacheError
from hypercache.server.reads import Reads
from hypercache.server.worker import NICE, Workers
from hypercache.store import BlockStore
from hypercache.store.below import Below
from hypercache.store.disk import Disk, DiskFault, Write

if TYPE_CHECKING:
    import structlog

    from hypercache.store import Block

MOVE_BLOCKS: Final = 64
IDLE_S: Final = 0.05
SYNC_S: Final = 1.0
CALM_NBYTES: Final = 1 << 18  # of records that are written at a time: others wait for a core no longer
RETRY_S, RETRY_MOST_S = 0.5, 10.0
GRACE_S: Final = 0.5  # for jobs that run when the time for closing is over
MOST_REMOVALS: Final = 1024  # that wait for a disk which does not take them, or does not answer

Removed = Callable[[str], None]  # "" or why it may come back


class Tiers:
    """What a server with an L3 has beside its store. Only for use in the event loop."""

    def __init__(
        self,
        store: BlockStore,
        disk: Disk,
        *,
        raw_nbytes: int,
        clock: Callable[[], float],
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        assert store.below is not None
        self._store = store
        self._below: Below = store.below
        self._disk = disk
        self._clock = clock
        self._log = log
        self._writer = Workers("L3 writer", 1, NICE)
        self.reads = Reads(self._below, disk, raw_nbytes=raw_nbytes, log=log)
        self._owed: list[tuple[bytes, list[bytes] | None]] = []  # removals that the disk did not take
        self._task: asyncio.Task[None] | None = None
        self._sync_at = math.inf
        self._closing = False
        self.paused = ""  # why nothing is written
        self.faults_total = 0
        self.pauses_total = 0
        self.reclaimed_total = 0  # segments

    # -- start and end

    async def restore(self) -> None:
        """Take over what the directory holds. Nobody may use the store meanwhile."""
        began = self._clock()
        lost = await self._writer.call(self._restore)
        self._below.takes = self._disk.keeps
        stats = self._store.stats()
        self._log.info(
            "L3 restored", blocks=stats.blocks, orphans=lost, seconds=round(self._clock() - began, 3)
        )

    def _restore(self) -> int:
        for number, contents in self._disk.restore():
            for _ in self._below.adopt(number, contents, self._clock()):
                pass
            self.reads.warm(info for info in contents.namespaces if self._below.record_nbytes(info))
        return self._below.adopted()

    def start(self) -> None:
        self._task = asyncio.create_task(self._demote(), name="L3 demotion")
        self.reads.start()

    async def close(self, limit_s: float, *, purge: bool) -> None:
        """Write what is still to be written, as far as ``limit_s`` go, and let go of the directory. A disk
        that does not answer costs ``GRACE_S`` more."""
        end = self._clock() + limit_s
        self._closing = True
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0 if purge else limit_s):
                    await self._task
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.reads.stop()
        self._writer.submit(partial(self._disk.close, purge=purge), self._closed)
        left = max(end - self._clock(), GRACE_S)
        workers = *self.reads.workers, self._writer
        quiet = await asyncio.gather(*[each.close(left) for each in workers])
        if not all(quiet):
            self._log.error("L3 does not answer; left as it is", directory=str(self._disk.directory))

    def _closed(self, _: None, error: Exception | None) -> None:
        if error is not None:
            self._log.error("L3 was not closed cleanly", reason=str(error))

    # -- removals

    def remove(self, namespace: bytes, digests: Sequence[bytes] | None, done: Removed) -> None:
        """Blocks, or all of a namespace, are gone from the store: see to it that they do not come back with a
        restart. ``done`` is called when that is on the disk, or when it cannot be put there for now."""
        what = None if digests is None else list(dict.fromkeys(digests))
        if self._writer.waiting >= MOST_REMOVALS:
            hung = DiskFault("io", f"L3, {self._disk.directory}: no answer")
            self._told(namespace, what, done, None, hung)
            return
        job = partial(self._disk.remove, namespace, what)
        self._writer.submit(job, partial(self._told, namespace, what, done))

    def _told(
        self,
        namespace: bytes,
        digests: list[bytes] | None,
        done: Removed,
        _: None,
        error: Exception | None,
    ) -> None:
        if error is None:
            done("")
            return
        self._pause(error)
        if len(self._owed) < MOST_REMOVALS:
            self._owed.append((namespace, digests))
        done(f"gone, but the disk does not take note of it, and a restart may bring it back: {error}")

    # -- L2 -> L3

    async def _demote(self) -> None:
        """Writes as long as there is anything to write: half of the time, unless memory runs out."""
        retry = RETRY_S
        while not (self._closing and not self._below.dirty):
            try:
                spent = await self._step()
            except (HyperCacheError, OSError) as error:
                self._pause(error)
                if self._closing:
                    return
                await asyncio.sleep(retry)
                retry = min(2 * retry, RETRY_MOST_S)
                continue
            except Exception as error:
                self._log.exception("L3 demotion failed", exc_info=error)
                await asyncio.sleep(RETRY_MOST_S)
                continue
            retry = RETRY_S
            if self.paused:
                self._log.info("L3 takes blocks again", after=self.paused)
                self.paused = ""
            if spent is None:
                if self._closing:
                    return
                await asyncio.sleep(IDLE_S)
            elif not self._closing and not self._below.hurry:
                await asyncio.sleep(min(spent, 0.25))

    async def _step(self) -> float | None:
        """One batch. Returns the seconds it took; None: there is nothing to write."""
        while self._owed:
            namespace, digests = self._owed[0]
            await self._writer.call(partial(self._disk.remove, namespace, digests))
            self._owed.pop(0)
        if not self._below.dirty:
            if self._clock() >= self._sync_at:
                self._sync_at = math.inf
                await self._writer.call(self._disk.sync)
            return None
        segment = await self._writer.call(partial(self._disk.overfull, self._disk.batch_nbytes))
        if segment is not None:
            await self._reclaim(segment)
            return 0.0
        most = self._disk.batch_nbytes
        if not (self._closing or self._below.hurry):
            most = min(most, CALM_NBYTES)
        blocks = self._below.demote(most)  # and given to the writer before anything else happens
        if not blocks:
            return None
        began = self._clock()
        try:
            places = await self._writer.call(partial(self._disk.write, [self._write(one) for one in blocks]))
        except Exception as error:
            places = error.places if isinstance(error, DiskFault) else []  # what is there nevertheless
            self._below.demoted(blocks[: len(places)], places)
            self._below.undone(blocks[len(places) :])
            raise
        self._below.demoted(blocks, places)
        if self._disk.fsync == "interval":  # what no further write forces to the disk
            self._sync_at = self._clock() + SYNC_S
        return self._clock() - began

    def _write(self, block: Block) -> Write:
        layers = range(block.tree.space.layers)
        return Write(
            info=block.tree.space.info,
            digest=block.digest,
            parent=block.context,
            depth=block.depth,
            mark=block.marked,
            crcs=block.crcs,
            chunks=[self._store.chunk(block, layer) for layer in layers],
        )

    async def _reclaim(self, segment: int) -> None:
        """The oldest segment gives its room back. What of it is used most is written again."""
        contents = await self._writer.call(partial(self._disk.entries, segment))
        keep: list[Block] = []
        rest: list[Block] = []
        for result in self._below.survey(segment, contents, self._disk.segment_nbytes // 2):
            keep, rest = result
            await asyncio.sleep(0)
        for first in range(0, len(keep), MOVE_BLOCKS):
            batch = [one for one in keep[first : first + MOVE_BLOCKS] if self._below.lies_in(one, segment)]
            places = [one.record for one in batch]
            moved = await self._writer.call(partial(self._disk.move, places))
            self._below.moved(batch, places, moved)
        # Where L3 is smaller than the memory, writing again would make room by the same again, for ever.
        again = self._below.warm_nbytes <= self._disk.lasting_nbytes
        for first in range(0, len(rest), MOVE_BLOCKS):
            batch = [one for one in rest[first : first + MOVE_BLOCKS] if self._below.lies_in(one, segment)]
            self._below.forget(batch, again)
            await asyncio.sleep(0)
        await self._writer.call(partial(self._disk.drop, segment))
        self.reclaimed_total += 1

    def _pause(self, error: Exception) -> None:
        self.faults_total += 1
        if not self.paused:
            self.pauses_total += 1
            self._log.error("L3 is paused; serving goes on from memory", reason=str(error))
        self.paused = str(error)

    # -- numbers

    def numbers(self) -> dict[str, Any]:
        """JSON-able; ``*_total`` only rise."""
        below = self._below
        return {
            "state": "paused" if self.paused else "on",
            "reason": self.paused,
            "blocks_waiting": below.dirty,
            "bytes_waiting": below.dirty_nbytes,
            "blocks_writing": below.writing,
            "bytes_writing_limit": self._disk.batch_nbytes,
            "blocks_loading": below.loading,
            "removals_owed": len(self._owed),
            "removals_owed_limit": MOST_REMOVALS,
            "demoted_total": below.demoted_total,
            "promoted_total": below.promoted_total,
            "admitted_total": below.admitted_total,
            "damaged_total": below.damaged_total,
            **self.reads.numbers(),
            "reclaimed_total": self.reclaimed_total,
            "faults_total": self.faults_total,
            "pauses_total": self.pauses_total,
            "disk": dataclasses.asdict(self._disk.stats()),
        }
