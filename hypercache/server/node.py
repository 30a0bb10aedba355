"""One node: the store, the listeners, the sessions on them, and the admin port."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import structlog

from fabrics import Channel, Limits, Listener, fabric_for
from fabrics.errors import AddressError
from hypercache import protocol
from hypercache.server import descriptors
from hypercache.server.admin import AdminServer
from hypercache.server.config import ServerConfig
from hypercache.server.context import Context
from hypercache.server.metrics import Metrics
from hypercache.server.session import AGENT, Session
from hypercache.store import BlockStore, MemoryUnavailable, policy
from hypercache.store.arena import MIN_CAPACITY

HANDSHAKE_S = 5.0  # a connection that has not said HELLO by then is closed
SWEEP_S = 0.1
HOT_SHOWN = 20
#: Kept back from the memory cap for sockets' staging, queues, the interpreter and its libraries.
BUFFERS_SHARE, BUFFERS_MOST = 1 / 16, 128 << 20


def _buffers(memory: int) -> int:
    return min(int(memory * BUFFERS_SHARE), BUFFERS_MOST)


class Node:
    """A ``hypercache-serve`` process, without the process: start, drain, stop."""

    def __init__(self, config: ServerConfig, *, log: structlog.typing.FilteringBoundLogger) -> None:
        self.config = config
        self.metrics = Metrics()
        self._log = log
        self._started = time.time()
        buffers = _buffers(config.memory) * (2 if config.l3_dir else 1)  # the same again for the disk's reads
        self._store = self._open_store(config.memory - buffers)
        self._context = Context(
            store=self._store,
            metrics=self.metrics,
            log=log,
            clock=time.monotonic,
            max_payload=config.max_frame_payload,
            lease_limit_s=config.lease_limit_s,
        )
        self._limits = Limits(
            max_payload=config.max_frame_payload,
            stall_timeout=config.stall_timeout_s,
            first_body=protocol.REQUESTS[protocol.Op.HELLO],
        )
        self._most = descriptors.reserve(config.max_connections, self._files())
        self._sessions: set[Session] = set()
        self._listeners: list[Listener] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = self._served = False
        self._admin: AdminServer | None = None
        self.metrics.watch_store(self._store_numbers)
        self.metrics.watch_l3(self._l3_numbers)
        if config.admin:
            self._admin = AdminServer(
                config.admin, status=self.status, ready=lambda: self._ready, registry=self.metrics.registry
            )

    def _open_store(self, capacity: int) -> BlockStore:
        """A store of ``capacity`` bytes, or of as much as the system gives: a small cache beats none."""
        config = self.config
        while True:
            try:
                return BlockStore(
                    capacity,
                    lease_limit_s=config.lease_limit_s,
                    store_stall_s=config.store_stall_s,
                    policy=policy.get(
                        config.policy,
                        **({"half_life_s": config.lrfu_half_life_s} if config.policy == "lrfu" else {}),
                    ),
                    pin_limit_s=config.pin_limit_s,
                    pin_share=config.pin_share,
                    disk=config.l3_capacity if config.l3_dir else 0,
                )
            except MemoryUnavailable as error:
                if capacity // 2 < MIN_CAPACITY:
                    raise
                capacity //= 2
                self._log.error("less memory than asked for", reason=str(error), now_trying=capacity)

    @property
    def uris(self) -> tuple[str, ...]:
        """What engines connect to, with the ports really bound."""
        return tuple(uri for listener in self._listeners for uri in listener.uris)

    @property
    def admin_address(self) -> str:
        return self._admin.address if self._admin else ""

    async def start(self) -> None:
        """Take over the disk tier and bind everything, or nothing. Raises ConfigError, AddressError and
        FabricUnavailable."""
        try:
            await self._open_tiers()
            for uri in self.config.listen:
                try:
                    self._listeners.append(await fabric_for(uri, self._limits).listen(uri, self._accept))
                except AddressError as error:
                    raise AddressError(f"{error} (listen, --listen)") from error
            if self._admin is not None:
                await self._admin.start()
        except BaseException:
            await self.stop()
            raise
        self._tasks = [
            asyncio.create_task(self._sweep(), name="sweep"),
            asyncio.create_task(self.metrics.sample_lag(), name="loop lag"),
        ]
        if self._context.tiers is not None:
            self._context.tiers.start()
        self._ready = self._served = True
        self._log.info("ready", uris=list(self.uris), admin=self.admin_address, memory=self.config.memory)

    async def _open_tiers(self) -> None:
        """The disk tier, where there is to be one: its lock, and what it has kept."""
        config = self.config
        if not config.l3_dir:
            return
        from hypercache.server.tiers import Tiers  # with them come codecs and a compiler
        from hypercache.store.disk import Disk, Fsync

        disk = Disk(
            Path(config.l3_dir),
            capacity=config.l3_capacity,
            segment_nbytes=config.l3_segment,
            fsync=cast("Fsync", config.l3_fsync),
            open_files=descriptors.segments(),
        )
        self._context.tiers = Tiers(
            self._store,
            disk,
            raw_nbytes=_buffers(config.memory),
            clock=time.monotonic,
            log=self._log,
        )
        await self._context.tiers.restore()

    async def drain(self) -> None:
        """Readiness off, accept no more, let running streams end within ``drain_s``, then stop."""
        self._ready = False
        self._context.draining = True
        for listener in self._listeners:
            await listener.close()
        until = time.monotonic() + self.config.drain_s
        busy = sum(session.busy for session in self._sessions)
        self._log.info("draining", connections=len(self._sessions), busy=busy, limit_s=self.config.drain_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_s):
                while any(session.busy for session in self._sessions):  # noqa: ASYNC110 (once in a life)
                    await asyncio.sleep(0.01)
        closing = [session.channel.close(timeout=1.0) for session in self._sessions]
        await asyncio.gather(*closing, return_exceptions=True)
        await self.stop(max(0.0, until - time.monotonic()))

    async def stop(self, limit_s: float | None = None) -> None:
        """Close everything now, but for what is still to be written to disk: that has ``limit_s``, or
        ``drain_s``. Harmless when nothing runs."""
        self._ready = False
        for listener in self._listeners:
            await listener.close()
        for session in list(self._sessions):
            session.channel.abort(None)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._admin is not None:
            await self._admin.close()
        tiers, self._context.tiers = self._context.tiers, None
        if tiers is not None:
            seconds = self.config.drain_s if limit_s is None else limit_s
            await tiers.close(seconds, purge=self.config.l3_on_exit == "purge")
        self._store.close()
        if self._served:
            self._log.info("stopped")

    def status(self) -> dict[str, Any]:
        """What /status shows: JSON-able, the same numbers as /metrics."""
        return {
            "agent": AGENT,
            "pid": os.getpid(),
            "uptime_s": round(time.time() - self._started, 3),
            "state": "ready" if self._ready else "draining" if self._context.draining else "starting",
            "uris": list(self.uris),
            "connections": len(self._sessions),
            "max_connections": self._most,
            "memory_bytes": self.config.memory,
            "store": self._store_numbers(),
            "hot": self._context.hot.top(HOT_SHOWN, time.monotonic()),
            **({} if self._context.tiers is None else {"l3": self._l3_numbers()}),
            "loop_lag": self.metrics.lag(),
            "counters": self.metrics.snapshot(),
        }

    def _store_numbers(self) -> dict[str, Any]:
        return dataclasses.asdict(self._store.stats())

    def _l3_numbers(self) -> dict[str, Any]:
        return {} if self._context.tiers is None else self._context.tiers.numbers()

    def _files(self) -> int:
        """Files and sockets that are yet to be opened beside connections."""
        ports = 2 * (len(self.config.listen) + 1)  # a host may have an address in each family
        return ports + (descriptors.DISK_FILES + descriptors.segments() if self.config.l3_dir else 0)

    def _accept(self, channel: Channel) -> Session:
        session = Session(self._context, channel, self._lost, full=len(self._sessions) >= self._most)
        self._sessions.add(session)
        self.metrics.connection_opened()
        if len(self._sessions) >= self._most + descriptors.REFUSED:
            for listener in self._listeners:
                listener.pause()
        return session

    def _lost(self, session: Session) -> None:
        self._sessions.discard(session)
        self.metrics.connection_closed()
        if len(self._sessions) < self._most + descriptors.REFUSED and not self._context.draining:
            for listener in self._listeners:
                listener.resume()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            self._guarded("sweep", partial(self._store.sweep, now))
            for session in list(self._sessions):
                self._guarded("expire", partial(session.expire, now, HANDSHAKE_S))

    def _guarded(self, what: str, work: Callable[[], None]) -> None:
        """Housekeeping goes on whatever one session or pass does."""
        try:
            work()
        except Exception as error:
            self._log.exception("housekeeping failed", what=what, exc_info=error)
