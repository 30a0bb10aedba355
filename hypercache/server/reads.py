"""Blocks that lie in L3 alone and are asked for: into the arena, or into buffers, as they lie there."""

from __future__ import annotations

import asyncio
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from hypercache.server.streams import Raw
from hypercache.server.worker import NICE, Workers
from hypercache.store import Lease, NamespaceInfo, transcode
from hypercache.store.below import Below, Recall
from hypercache.store.disk import Damaged, Disk, DiskFault

if TYPE_CHECKING:
    import structlog

    from hypercache.store import Block

READ_NBYTES: Final = 2 << 20  # that one thread fetches before it tells
READERS: Final = 4
MOST_READS: Final = 1024  # jobs that wait for a disk which does not answer
PROMOTE_S: Final = 1.0  # after a fetch, so that it takes no time from it
MOST_PROMOTIONS: Final = 16  # pieces that wait for a place in memory
MOST_WARM: Final = 4096
TEND_S: Final = 0.1

Bytes = npt.NDArray[np.uint8]
Lying = tuple[Sequence[memoryview], Sequence[int]]  # a block's chunks and checksums, as on disk
Read = Callable[["Block", int, Sequence[memoryview], bool], "array[int] | None"]


class Reads:
    """What reads from a node's directory. Only for use in the event loop. raw_nbytes: memory for blocks that
    are sent as they lie on disk."""

    def __init__(
        self, below: Below, disk: Disk, *, raw_nbytes: int, log: structlog.typing.FilteringBoundLogger
    ) -> None:
        self._below = below
        self._disk = disk
        self._log = log
        self._readers = Workers("L3 reader", READERS)
        self._promoter = Workers("L3 promoter", 1, NICE)
        self.workers = self._readers, self._promoter
        self._waiting: dict[Recall, list[_Wait]] = {}
        self._warm: set[bytes] = set()  # namespaces whose kernels are compiled, or just being
        self._raw_nbytes = 0  # of buffers in use
        self._raw_limit = raw_nbytes
        self._raw_back: deque[bytearray] = deque()  # no longer in use; any thread may find that out
        self._raw_free: list[bytearray] = []  # their pages are there already: touching new ones takes time
        self._failed_total = 0
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._tend(), name="L3 reads given up")

    async def stop(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def opened(self, info: NamespaceInfo) -> None:
        """A client may ask for blocks of this namespace: compile what that takes."""
        if info.transcoded and info.digest not in self._warm and len(self._warm) < MOST_WARM:
            self._warm.add(info.digest)
            self._promoter.submit(partial(transcode.warm, info), self._warmed)

    def warm(self, infos: Iterable[NamespaceInfo]) -> None:
        """The same of namespaces that were found at start, here and now."""
        for info in infos:
            if info.transcoded and info.digest not in self._warm and len(self._warm) < MOST_WARM:
                self._warm.add(info.digest)
                transcode.warm(info)

    def _warmed(self, _: None, error: Exception | None) -> None:
        if error is not None:
            self._log.warning("blocks of a namespace cannot change their codec", reason=str(error))

    def fetch(self, lease: Lease, as_it_lies: bool, ready: Callable[[Raw], None]) -> None:
        """Get what of ``lease`` lies on disk alone. ``ready`` is called once all of that has come, or has
        turned out to be lost.

        as_it_lies: as far as there is room for buffers, blocks take no place in memory: ``ready`` gets them
        as they are on disk, and may keep them. Those that are used often get their place afterwards.
        """
        raw: dict[Block, Lying] = {}
        if self._readers.waiting >= MOST_READS:
            ready(raw)  # there is what there is in memory
            return
        cold = [block for block in lease.blocks if not block.ready]
        direct = self._room_for(cold) if as_it_lies else []
        fresh, joined = self._below.recall(cold[len(direct) :], READ_NBYTES)
        pieces = self._pieces(direct)
        wait = _Wait(len(fresh) + len(joined) + len(pieces), lease, partial(self._come, raw, ready))
        for recall in joined:
            self._waiting[recall].append(wait)
        for recall in fresh:
            self._waiting[recall] = [wait]
            self._readers.submit(partial(self._recall, recall), partial(self._recalled, recall))
        for piece in pieces:
            self._readers.submit(piece.read, partial(self._landed, piece, raw, wait))
        if not wait.count:
            ready(raw)

    def _come(self, raw: dict[Block, Lying], ready: Callable[[Raw], None]) -> None:
        ready(raw)
        if raw:
            asyncio.get_running_loop().call_later(PROMOTE_S, self._promote, list(raw))

    # -- into the arena

    def _recall(self, recall: Recall) -> list[array[int] | None]:
        found: list[array[int] | None] = []
        if not recall.claim():
            return found  # nobody waits for it any more
        for block, place, chunks in zip(recall.blocks, recall.places, recall.chunks, strict=True):
            found.append(self._read(block, place, chunks, False))
        return found

    def _read(
        self, block: Block, place: int, chunks: Sequence[memoryview], as_it_lies: bool
    ) -> array[int] | None:
        try:
            info = block.tree.space.info
            return self._disk.read(info, block.digest, place, chunks, as_it_lies=as_it_lies)
        except (Damaged, DiskFault) as error:
            self._log.warning("L3 has a block no more", reason=str(error))
            return None

    def _recalled(
        self, recall: Recall, found: list[array[int] | None] | None, error: Exception | None
    ) -> None:
        if recall not in self._waiting:
            return
        if error is not None:
            self._log.exception("reading L3 failed", exc_info=error)
        results = found or [None] * len(recall.blocks)
        self._failed_total += results.count(None)
        self._below.recalled(recall, results)
        self._over(recall)

    def _over(self, recall: Recall) -> None:
        for wait in self._waiting.pop(recall):
            wait.come()

    async def _tend(self) -> None:
        """Reads that nobody waits for any more give their memory back, if no thread has begun them: a disk
        that hangs has as much of it as its threads read at once."""
        while True:
            await asyncio.sleep(TEND_S)
            for recall, waits in list(self._waiting.items()):
                if waits and all(wait.lease.ended for wait in waits) and recall.claim():
                    self._below.unread(recall)
                    self._over(recall)

    def _promote(self, used: Sequence[Block]) -> None:
        """Blocks that were read past the memory get a place in it, if they are used often enough."""
        if self._closed:
            return
        wanted = self._below.wanted(used) if self._promoter.waiting < MOST_PROMOTIONS else []
        fresh, _ = self._below.recall(wanted, READ_NBYTES)
        for recall in fresh:
            self._waiting[recall] = []
            self._promoter.submit(partial(self._recall, recall), partial(self._recalled, recall))

    # -- as they lie

    def _room_for(self, cold: Sequence[Block]) -> Sequence[Block]:
        """The first of these blocks, as many as there is memory for."""
        while self._raw_back:
            buffer = self._raw_back.popleft()
            self._raw_nbytes -= len(buffer)
            self._raw_free.append(buffer)
        if not cold:
            return cold
        block = sum(cold[0].tree.space.info.below_nbytes)
        each = max(1, READ_NBYTES // block)
        return cold[: max(0, self._raw_limit - self._raw_nbytes) // (each * block) * each]

    def _pieces(self, blocks: Sequence[Block]) -> list[_Piece]:
        sizes = blocks[0].tree.space.info.below_nbytes if blocks else (1,)
        each = max(1, READ_NBYTES // sum(sizes))
        parts = [blocks[at : at + each] for at in range(0, len(blocks), each)]
        return [_Piece(part, sizes, self._buffer(each * sum(sizes)), self._read) for part in parts]

    def _buffer(self, nbytes: int) -> Bytes:
        """Of so many bytes, ours again when nobody refers to it any more."""
        while self._raw_free and len(self._raw_free[-1]) != nbytes:
            self._raw_free.pop()  # of a namespace with other blocks
        buffer = self._raw_free.pop() if self._raw_free else bytearray(nbytes)
        self._raw_nbytes += nbytes
        memory = np.frombuffer(buffer, np.uint8)
        weakref.finalize(memory, self._raw_back.append, buffer)
        return memory

    def _landed(
        self,
        piece: _Piece,
        raw: dict[Block, Lying],
        wait: _Wait,
        found: list[Lying | None] | None,
        error: Exception | None,
    ) -> None:
        if error is not None:
            self._log.exception("reading L3 failed", exc_info=error)
        results = found or [None] * len(piece.blocks)
        for block, was, lying in zip(piece.blocks, piece.places, results, strict=True):
            if lying is not None:
                raw[block] = lying
            else:
                self._failed_total += 1
                self._below.lost(block, was)
        wait.come()

    # -- numbers

    def numbers(self) -> dict[str, Any]:
        """As of Tiers."""
        return {
            "bytes_sending": self._raw_nbytes - sum(map(len, list(self._raw_back))),
            "bytes_sending_limit": self._raw_limit,
            "reads_waiting": sum(workers.waiting for workers in self.workers),
            "reads_waiting_limit": MOST_READS + MOST_PROMOTIONS,
            "loads_failed_total": self._failed_total,
        }


class _Piece:
    """Blocks that one thread reads into a buffer."""

    def __init__(
        self,
        blocks: Sequence[Block],
        sizes: Sequence[int],
        memory: Bytes,
        read: Read,
    ) -> None:
        self.blocks = blocks
        self.places = [block.record for block in blocks]
        self._memory: Bytes | None = memory
        self._sizes = sizes
        self._read = read

    def read(self) -> list[Lying | None]:
        found: list[Lying | None] = []
        assert self._memory is not None
        view, self._memory = self._memory.data, None
        at = 0
        for block, place in zip(self.blocks, self.places, strict=True):
            chunks: list[memoryview] = []
            for size in self._sizes:
                chunks.append(view[at : at + size])
                at += size
            crcs = None if place < 0 else self._read(block, place, chunks, True)
            found.append(None if crcs is None else (chunks, crcs))
        return found


class _Wait:
    """A lease that waits for so many pieces."""

    __slots__ = ("_ready", "count", "lease")

    def __init__(self, count: int, lease: Lease, ready: Callable[[], None]) -> None:
        self.count = count
        self.lease = lease
        self._ready = ready

    def come(self) -> None:
        """One of them has."""
        self.count -= 1
        if not self.count:
            self._ready()
