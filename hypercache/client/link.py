"""The line to one server: handshake, request table, and reconnecting by itself.

States: ``connecting`` (first try), ``ready``, ``stalled`` (the server hangs: a call got not one byte within
its time), ``down`` (waiting for the next try), ``closed``. Calls never wait for a reconnect or a hanging
server: while the link is not ready they are misses at once, with :attr:`Link.reason`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from typing import TypeVar

from fabrics import Channel, FabricError, Frame, Limits, Outgoing, Sink, fabric_for
from fabrics.errors import AddressError, FabricUnavailable
from hypercache import protocol
from hypercache.client.operations import Call, Operation
from hypercache.errors import ConfigError, HyperCacheError, ProtocolError, Refused, Unavailable
from hypercache.protocol import ErrorCode

M = TypeVar("M", bound=protocol.Message)

AGENT = "hypercache-client/0.1.0"
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
CONNECT_S = 5.0
SETTLED_S = 5.0  # a line that held so long was a good one: the next try comes soon
MAX_IN_FLIGHT = 4096  # requests; what waits for a server that hangs is bounded
CLOSE_S = 1.0  # for a goodbye; a server that hangs is not waited for
#: Refusals that no retry mends: the two sides do not fit.
PERMANENT = {
    ErrorCode.VERSION,
    ErrorCode.HASH_VERSION,
    ErrorCode.CHECKSUM,
    ErrorCode.CODEC,
    ErrorCode.SPEC,
    ErrorCode.TOO_LARGE,
}


class Link:
    """A :class:`fabrics.Handler` for the current channel. One event loop, one server, one namespace."""

    def __init__(
        self, uri: str, hello: protocol.Hello, opening: protocol.Open, limits: Limits | None = None
    ) -> None:
        self.uri = uri
        self.state = "connecting"
        self.reason = f"unreachable: no connection to {uri} yet"
        self.channel: Channel | None = None
        self.handle = -1
        self.opened: protocol.Opened | None = None
        self.server: protocol.HelloOk | None = None
        self.error: HyperCacheError | FabricError | None = None  # why the last try failed
        self.pause = FIRST_PAUSE_S  # the longest before the next try
        self._hello = hello
        self._opening = opening
        try:
            self._fabric = fabric_for(uri, limits)
            self._fabric.check(uri)
        except (AddressError, FabricUnavailable) as error:
            raise ConfigError(str(error)) from error
        self._operations: dict[int, Operation] = {}
        self._ids = itertools.count(1)
        self._log = logging.getLogger("hypercache.client")  # the engine's own logging, silent by default
        self._lost = asyncio.Event()
        self._tried = asyncio.Event()  # the first try is over
        self._task: asyncio.Task[None] | None = None

    # --- life

    async def start(self, patience: float) -> None:
        """Begin to connect; returns when the first try is over or ``patience`` seconds have passed."""
        self._task = asyncio.create_task(self._run(), name=f"hypercache link {self.uri}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._tried.wait()

    async def close(self) -> None:
        """End all operations at once, then the line: in order if the server takes part, else by force."""
        self.state, self.reason = "closed", "the client is closed"
        task, self._task = self._task, None
        channel, self.channel = self.channel, None
        try:
            if channel is not None:
                for request_id in self._operations:
                    channel.drop_sink(request_id)  # no byte lands in a buffer whose operation has ended
            self._end_all(self.reason)
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
            if channel is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_S):
                        await channel.close()
        finally:
            if channel is not None:
                channel.abort()  # nothing if it is closed by now

    async def _run(self) -> None:
        while True:
            try:
                await self._connect()
                self._tried.set()
                since = time.monotonic()
                await self._lost.wait()
                if time.monotonic() - since >= SETTLED_S:
                    self.pause = FIRST_PAUSE_S
            except (FabricError, HyperCacheError) as error:
                self.error = error
                self._down(f"unreachable: {error}")
                self._log.info("cannot connect, trying again within %.2f s: %s", self.pause, error)
                self._tried.set()
            # Full jitter: a thousand clients of a server that comes back do not return in one wave.
            await asyncio.sleep(random.uniform(FIRST_PAUSE_S / 2, self.pause))
            self.pause = min(self.pause * 2, LONGEST_PAUSE_S)

    async def _connect(self) -> None:
        self._lost.clear()
        channel = await self._fabric.connect(self.uri, self, timeout=CONNECT_S)
        self.channel = channel
        try:
            async with asyncio.timeout(CONNECT_S):
                # Both at once: the answers come in order, and a refused HELLO refuses the rest.
                greeting = self._ask(channel, self._hello)
                opening = self._ask(channel, self._opening)
                server = self._expect(await greeting, protocol.HelloOk)
                self._check(server)
                opened = self._expect(await opening, protocol.Opened)
                if self.channel is not channel:
                    raise Unavailable(f"{self.uri} closed the connection it had just accepted")
        except TimeoutError as error:
            refusal = Unavailable(
                f"{self.uri} accepted the connection but did not answer within {CONNECT_S} s"
            )
            self._drop(channel, refusal)
            raise refusal from error
        except HyperCacheError as error:
            self._drop(channel, error)
            raise
        except asyncio.CancelledError:
            self._drop(channel, None)
            raise
        self.server, self.opened, self.handle, self.error = server, opened, opened.handle, None
        self.state, self.reason = "ready", ""
        self._log.info("%s connected: %s, %d blocks in our namespace", self.uri, server.agent, opened.blocks)

    def _drop(self, channel: Channel, error: Exception | None) -> None:
        self.channel = None
        channel.abort(error)

    def _expect(self, answer: protocol.Message | str, kind: type[M]) -> M:
        if isinstance(answer, str):
            raise Unavailable(f"{self.uri}: {answer}")
        if isinstance(answer, protocol.Error):
            raise Refused(answer.code, answer.message)
        if not isinstance(answer, kind):
            raise ProtocolError(f"{self.uri} answered {type(answer).__name__} instead of {kind.__name__}")
        return answer

    def _check(self, server: protocol.HelloOk) -> None:
        """What the server chose must be among what was offered."""
        hello = self._hello
        if not hello.lowest <= server.version <= hello.highest or server.checksum not in hello.checksums:
            raise ProtocolError(
                f"{self.uri} ({server.agent[:80]!r}) chose protocol version {server.version} with checksum "
                f"{server.checksum[:80]!r}; offered were versions {hello.lowest}..{hello.highest} with "
                f"{', '.join(hello.checksums)}: it is not a server of these versions"
            )

    def _down(self, reason: str) -> None:
        if self.state != "closed":
            self.state, self.reason = "down", reason

    # --- requests

    def begin(self, message: protocol.Message, operation: Operation) -> Channel | None:
        """Send ``message`` and route its answers to ``operation``; returns the channel it went to.

        None: the operation has ended with a reason, for there is no line or too much runs on it.
        """
        channel = self.channel
        if self.state != "ready" or channel is None:
            operation.end(self.reason)
        elif len(self._operations) >= MAX_IN_FLIGHT:
            operation.end(f"busy: {MAX_IN_FLIGHT} calls of this client are waiting for {self.uri}")
        else:
            self._begin(channel, message, operation)
        return None if operation.ended else channel

    def _begin(self, channel: Channel, message: protocol.Message, operation: Operation) -> None:
        operation.request_id = next(self._ids)
        operation.heard = channel.stats.bytes_in
        self._operations[operation.request_id] = operation
        op, body = protocol.encode(message)
        try:
            channel.send(Outgoing(op, operation.request_id, body))
        except FabricError as error:
            self._operations.pop(operation.request_id, None)
            operation.end(f"unreachable: {error}")

    def _ask(self, channel: Channel, message: protocol.Message) -> asyncio.Future[protocol.Message | str]:
        operation = Call(asyncio.get_running_loop().create_future())
        self._begin(channel, message, operation)
        return operation.future

    async def call(self, message: protocol.Message, budget: float) -> protocol.Message | str:
        """One question, one answer within ``budget`` seconds; a string says why there is none."""
        operation = Call(asyncio.get_running_loop().create_future())
        self.begin(message, operation)
        try:
            async with asyncio.timeout(budget):
                return await operation.future
        except TimeoutError:
            self.timed_out(operation)
            return f"deadline: no answer within {budget:.3g} s"
        finally:
            self.forget(operation)

    def timed_out(self, operation: Operation) -> None:
        """A request ran out of time. If the server has not sent a byte since it began, the next ones need not
        wait as long: they miss at once until it does, which a probe brings about."""
        channel = self.channel
        if self.state != "ready" or channel is None or channel.stats.bytes_in != operation.heard:
            return
        self.state, self.reason = "stalled", f"unreachable: {self.uri} does not answer"
        self._log.warning("%s does not answer, requests miss until it does", self.uri)
        probe = Call(asyncio.get_running_loop().create_future())
        self._begin(channel, protocol.Contains(self.handle, bytes(protocol.DIGEST_BYTES)), probe)

    def forget(self, operation: Operation) -> None:
        """The request is over for us. If it still runs, the server is told and its bytes are dropped."""
        if self._operations.pop(operation.request_id, None) is not None and self.channel is not None:
            with contextlib.suppress(FabricError):
                self.channel.cancel(operation.request_id)

    # --- channel events

    def on_frame(self, channel: Channel, frame: Frame) -> Sink | None:
        try:
            return self._on_frame(channel, frame)
        except ProtocolError as error:
            self._log.warning("%s broke the protocol: %s", self.uri, error)
            channel.abort(error)
            return None

    def _on_frame(self, channel: Channel, frame: Frame) -> Sink | None:
        if self.state == "stalled":
            self.state, self.reason = "ready", ""
            self._log.info("%s answers again", self.uri)
        operation = self._operations.get(frame.request_id)
        if operation is None:
            return None  # the answer to a request that was given up
        most = protocol.ANSWERS.get(frame.type)
        if most is None:
            if frame.type in protocol.BODIES:
                raise ProtocolError(f"{protocol.Op(frame.type).name} is not an answer")
            return None  # of a later version
        if len(frame.body) > most:
            raise ProtocolError(f"{protocol.Op(frame.type).name} has {len(frame.body)} bytes, at most {most}")
        message = protocol.decode(frame.type, frame.body)
        assert message is not None
        if isinstance(message, protocol.Error) and not isinstance(operation, Call):
            del self._operations[frame.request_id]
            operation.end(f"{message.code}: {message.message}")
            return None
        sink = operation.on_message(channel, frame, message)
        if operation.ended:
            self._operations.pop(frame.request_id, None)
        return sink

    def on_payload(self, channel: Channel, frame: Frame, sink: Sink) -> None:
        """All was done as it landed."""

    def on_cancel(self, channel: Channel, request_id: int) -> None:
        """Servers have no requests of their own."""

    def on_lost(self, channel: Channel, error: Exception | None) -> None:
        if channel is not self.channel and self.channel is not None:
            return
        self.channel = None
        reason = f"unreachable: connection to {self.uri} lost" + (f": {error}" if error else "")
        if self.state in ("ready", "stalled"):
            self._log.warning("%s lost, requests miss until it is back: %s", self.uri, error or "closed")
        self._down(reason)
        self._end_all(reason)
        self._lost.set()

    def _end_all(self, reason: str) -> None:
        operations, self._operations = self._operations, {}
        for operation in operations.values():
            operation.end(reason)

    @property
    def permanent_error(self) -> HyperCacheError | None:
        """Why this server can never be used as configured, if that is so."""
        if isinstance(self.error, Refused) and self.error.code in PERMANENT:
            return self.error
        return self.error if isinstance(self.error, ProtocolError) else None


def why(answer: protocol.Message | str) -> str:
    """Why a call has no answer that fits: the link's own words, or what the server said."""
    if isinstance(answer, protocol.Error):
        return f"{answer.code}: {answer.message}"
    return answer if isinstance(answer, str) else "unexpected answer"
