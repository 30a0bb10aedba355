"""Where a client may be used: in the process and on the event loop that made it."""

from __future__ import annotations

import asyncio
import os

from hypercache.errors import HyperCacheError


class Place:
    """The process and the running event loop at the time of making."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()

    @property
    def forked(self) -> bool:
        """Whether this process is not the one that made it."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raises HyperCacheError in any other process."""
        if self.forked:
            raise HyperCacheError(
                "this client was made in another process and is not fork-safe; "
                "call hypercache.connect in the child"
            )

    def check(self) -> None:
        """Raises HyperCacheError in any other process, on any other loop and without one."""
        self.check_process()
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is not self._loop:
            raise HyperCacheError(
                "this client belongs to another event loop and would wait there for ever; call "
                "hypercache.connect in each loop, or use one hypercache.connect_sync from all threads"
            )
