"""The fabric contract: what every transport offers, and the registry that finds it by URI scheme.

A *channel* carries *frames* both ways: a type, a request id, a small body, and payload buffers. Bodies
are opaque bytes here. Three rules make one contract serve sockets, RDMA and shared memory:

- **The receiver places payload.** When a frame's body has arrived, :meth:`Handler.on_frame` returns a
  :class:`Sink` (destination views); the payload lands there without another copy, then
  :meth:`Handler.on_payload` is called. No sink: the payload is drained and dropped.
- **The sender lends payload.** An :class:`Outgoing` lends its views until ``release`` is called, exactly
  once, on every path: sent, cancelled or lost.
- **Output is pulled.** Bulk data come from :class:`Source` objects, asked for a frame only when the
  channel can take one, in turn with each other; frames queued by :meth:`Channel.send` go first. So
  memory per channel is bounded by construction.

All calls happen on the event loop's thread, callbacks are plain functions, and none may block.
"""

from __future__ import annotations

import abc
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fabrics.errors import AddressError, FabricUnavailable


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps checked before any allocation, and the bounds of queues. Bytes and seconds.

    ``max_queued``: where a channel was accepted, each waiting frame counts as 1 KiB more than its bytes. Who
    connected counts bytes alone, or both sides of a burst of small requests could wait for each other.
    """

    max_body: int = 4 << 20
    max_payload: int = 256 << 20
    max_queued: int = 8 << 20  # pushed frames that wait; beyond it reading pauses, far beyond send() fails
    stall_timeout: float = 30.0  # no progress on owed bytes, either way
    min_rate_bytes: int = 64 << 10  # progress is this much per stall_timeout, or all that is owed
    first_body: int | None = None  # max_body of a peer that connected, until welcome(); None: max_body


@dataclass(slots=True)
class Frame:
    """A received frame without its payload. ``body`` is only valid during the callback: copy to keep."""

    type: int
    flags: int
    request_id: int
    body: memoryview
    payload_nbytes: int


class Sink:
    """Destination of one payload: writable byte views, filled in order; their sizes add up to the payload.

    ``landed(n)``, if given, is called as bytes arrive with the running total, so that a checksum can be
    computed while they are still in the CPU's cache. ``closed(complete)`` is called exactly once when the
    channel will never write to the views again: only then may their memory have another owner. For a
    complete payload it comes just before :meth:`Handler.on_payload`. A sink is good for one payload: the
    channel then lets go of both callables, so that a sink may refer to itself by them and still goes when its
    last user does.
    """

    __slots__ = ("closed", "landed", "nbytes", "spent", "views")

    def __init__(
        self,
        views: Sequence[memoryview],
        *,
        landed: Callable[[int], None] | None = None,
        closed: Callable[[bool], None] | None = None,
    ) -> None:
        self.views = views
        self.nbytes = sum([view.nbytes for view in views])
        self.landed = landed
        self.closed = closed
        self.spent = False  # set by the channel: another payload is refused


@dataclass(slots=True)
class Outgoing:
    """A frame to be sent. ``payload`` views are lent until ``release(sent)`` is called (once, always)."""

    type: int
    request_id: int
    body: bytes
    payload: Sequence[memoryview] = ()
    flags: int = 0
    release: Callable[[bool], None] | None = None


class Source(Protocol):
    """A producer of bulk frames, pulled by the channel when it can send."""

    def next_frame(self) -> Outgoing | None:
        """The next frame, or None: nothing now. After None the channel forgets the source until it is
        added again with :meth:`Channel.add_source`. An exception aborts the channel."""


class Handler(Protocol):
    """Receives a channel's events. An exception that escapes a callback aborts the channel."""

    def on_frame(self, channel: Channel, frame: Frame) -> Sink | None:
        """A frame's header and body arrived. Return where its payload goes (None: drop it)."""

    def on_payload(self, channel: Channel, frame: Frame, sink: Sink) -> None:
        """The payload of ``frame`` is in place. ``frame.body`` is no longer valid."""

    def on_cancel(self, channel: Channel, request_id: int) -> None:
        """The peer gave up a request: stop producing for it."""

    def on_lost(self, channel: Channel, error: Exception | None) -> None:
        """The channel is gone (``error`` None: closed in order). Called once; nothing follows."""


@dataclass(slots=True)
class ChannelStats:
    frames_in: int = 0
    frames_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    bytes_dropped: int = 0  # payload drained without a sink


class Channel(abc.ABC):
    """A duplex stream of frames to one peer. Not thread-safe: loop thread only."""

    local: str
    peer: str
    stats: ChannelStats

    @property
    @abc.abstractmethod
    def state(self) -> str:
        """ "open", "closing" or "closed"."""

    @abc.abstractmethod
    def send(self, frame: Outgoing) -> None:
        """Queue a frame ahead of all sources. Raises ChannelClosed, and ChannelFull where four times
        ``Limits.max_queued`` wait already (each frame counted with 1 KiB more than its bytes): the channel
        stays open, the frame is not sent. ``release`` is called in any case."""

    @abc.abstractmethod
    def add_source(self, source: Source) -> None:
        """Put ``source`` into the ring that is asked for frames in turn. Adding it twice changes nothing."""

    @abc.abstractmethod
    def remove_source(self, source: Source) -> None:
        """Ask ``source`` no more. A frame it already gave is still sent in full."""

    @abc.abstractmethod
    def drop_sink(self, request_id: int) -> None:
        """From now on write to no sink of ``request_id``: what is still arriving is drained and dropped.
        ``Sink.closed(False)`` is called when the memory is free (at once, where the fabric can)."""

    @abc.abstractmethod
    def cancel(self, request_id: int) -> None:
        """:meth:`drop_sink`, and take back what was queued by :meth:`send` for ``request_id`` and still waits
        (``release(False)``). The peer is told to stop producing for it, unless it cannot have heard of it."""

    @abc.abstractmethod
    def welcome(self) -> None:
        """The peer is one of ours: bodies of its next frame and all later ones may have
        ``Limits.max_body`` bytes, no longer only ``Limits.first_body``. Twice changes nothing; the side that
        connected need not call it."""

    @abc.abstractmethod
    def hang_up(self) -> None:
        """Begin to :meth:`close`, without waiting: also from within a callback. From here on nothing more of
        the peer reaches the handler but ``on_lost``, not even what has arrived already; a payload that is
        arriving is dropped."""

    @abc.abstractmethod
    async def close(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Send what is queued by :meth:`send`, say goodbye, close; wait for the end of it. What is not done
        within ``timeout`` seconds (None, and at most: ``Limits.stall_timeout``) is aborted."""

    @abc.abstractmethod
    def abort(self, error: Exception | None = None) -> None:
        """Close now. If ``error`` is a FrameError the peer is told why, as far as that needs no waiting."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.state} {self.local} - {self.peer}>"


class Listener(abc.ABC):
    """Accepts channels until closed."""

    uris: Sequence[str]  # what peers can connect to; the port is the one really bound

    @abc.abstractmethod
    def pause(self) -> None:
        """Accept nobody for now; also from within the accept callback. Who connects waits. A fabric on which
        waiting takes as much of this process as being served does nothing."""

    @abc.abstractmethod
    def resume(self) -> None:
        """Accept again. Harmless where nothing is paused, and after :meth:`close`."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Stop accepting. Channels already accepted live on."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {' '.join(self.uris)}>"


AcceptCallback = Callable[[Channel], Handler]


class Fabric(abc.ABC):
    """A transport. Instances are cheap and hold no global state."""

    scheme: str

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()

    @abc.abstractmethod
    def check(self, uri: str) -> None:
        """Raises AddressError if ``uri`` can never be connected to by this fabric, whoever listens."""

    @abc.abstractmethod
    async def connect(self, uri: str, handler: Handler, *, timeout: float) -> Channel:  # noqa: ASYNC109
        """Open a channel within ``timeout`` seconds.
        Raises AddressError, ConnectFailed, FabricUnavailable."""

    @abc.abstractmethod
    async def listen(self, uri: str, accept: AcceptCallback) -> Listener:
        """Bind and accept; ``accept`` is called with each new channel and returns its handler.
        Raises AddressError with address and errno."""


@dataclass(slots=True)
class _Registry:
    known: dict[str, type[Fabric]] = field(default_factory=dict)


_registry = _Registry()


def register(scheme: str, fabric: type[Fabric]) -> None:
    """Make ``fabric`` known without an entry point (tests, embedded use)."""
    _registry.known[scheme] = fabric


def schemes() -> list[str]:
    """URI schemes that can be opened here."""
    points = importlib.metadata.entry_points(group="hypercache.fabrics")
    return sorted({*_registry.known, *(point.name for point in points)})


def fabric_for(uri: str, limits: Limits | None = None) -> Fabric:
    """The fabric for a URI such as ``tcp://host:7440``. Loaded on first use, so that RDMA libraries are not
    touched by those who speak TCP.
    Raises AddressError for an unknown scheme, FabricUnavailable with the reason."""
    scheme, separator, _ = uri.partition("://")
    if not separator:
        raise AddressError(f"{uri!r} is not a fabric URI; write SCHEME://ADDRESS with one of {schemes()}")
    if scheme not in _registry.known:
        points: Any = importlib.metadata.entry_points(group="hypercache.fabrics", name=scheme)
        if not points:
            raise AddressError(f"{uri!r}: unknown scheme {scheme!r}; known here: {schemes()}")
        try:
            _registry.known[scheme] = next(iter(points)).load()
        except ImportError as error:
            raise FabricUnavailable(f"{scheme}:// cannot be used here: {error}") from error
    return _registry.known[scheme](limits)
