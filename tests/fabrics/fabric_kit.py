"""Two parties on a channel that keep account of everything lent and given."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fabrics import Channel, Frame, Limits, Listener, Outgoing, Sink, fabric_for

DATA, SMALL, PUSH = 1, 2, 3

_names = itertools.count()


def pattern(nbytes: int, seed: int) -> bytearray:
    """Bytes that tell whose they are and where they belong."""
    word = (seed * 2654435761 % 2**32).to_bytes(4, "little")
    data = bytearray(word * (nbytes // 4 + 1))[:nbytes]
    for at in range(0, nbytes, 997):
        data[at] = (at // 997 + seed) % 256
    return data


class Ledger:
    """Counts how often each lent payload and each sink came back."""

    def __init__(self) -> None:
        self.released: dict[int, list[bool]] = {}
        self.closed: dict[int, list[bool]] = {}
        self._keys = itertools.count()

    def lend(
        self, kind: int, request_id: int, body: bytes = b"", payload: Sequence[bytes | bytearray] = ()
    ) -> Outgoing:
        calls = self.released[next(self._keys)] = []
        views = [memoryview(part) for part in payload]
        return Outgoing(kind, request_id, body, views, release=calls.append)

    def sink(self, parts: Sequence[bytearray], *, landed: Callable[[int], None] | None = None) -> Sink:
        calls = self.closed[next(self._keys)] = []
        return Sink([memoryview(part) for part in parts], landed=landed, closed=calls.append)

    def outstanding(self) -> int:
        return sum(not calls for calls in (*self.released.values(), *self.closed.values()))

    def assert_settled(self) -> None:
        for what, book in (("release", self.released), ("closed", self.closed)):
            wrong = {key: calls for key, calls in book.items() if len(calls) != 1}
            assert not wrong, f"{what} was not called exactly once: {wrong}"


def split(nbytes: int, pieces: Sequence[int]) -> list[bytearray]:
    """Destinations of the given sizes, the last one taking what is left."""
    sizes = []
    for piece in pieces:
        sizes.append(min(piece, nbytes - sum(sizes)))
    return [bytearray(size) for size in (*sizes, nbytes - sum(sizes))]


@dataclass
class Received:
    type: int
    flags: int
    request_id: int
    body: bytes
    payload: bytes | None


class Party:
    """A handler that places payload, remembers what came, and can be told to act."""

    def __init__(self, ledger: Ledger, pieces: Sequence[int] = ()) -> None:
        self.ledger = ledger
        self.pieces = pieces
        self.channel: Channel | None = None
        self.received: list[Received] = []
        self.cancelled: list[int] = []
        self.events = asyncio.Event()
        self._body = b""
        self.losses: list[Exception | None] = []
        self.landings: list[list[int]] = []
        self.placed: dict[int, list[bytearray]] = {}
        self.refuse: set[int] = set()  # request ids without a sink
        self.on_each: Callable[[Channel, Received], None] | None = None
        self.answers: Callable[[Channel, Frame], Sink | None] | None = None

    def on_frame(self, channel: Channel, frame: Frame) -> Sink | None:
        if self.answers is not None:
            return self.answers(channel, frame)
        self._body = bytes(frame.body)
        if not frame.payload_nbytes or frame.request_id in self.refuse:
            self._note(channel, frame, None)
            return None
        parts = split(frame.payload_nbytes, self.pieces)
        self.placed[frame.request_id] = parts
        totals: list[int] = []
        self.landings.append(totals)

        def landed(total: int) -> None:
            totals.append(total)
            self.events.set()

        return self.ledger.sink(parts, landed=landed)

    def on_payload(self, channel: Channel, frame: Frame, sink: Sink) -> None:
        self._note(channel, frame, b"".join(sink.views))

    def _note(self, channel: Channel, frame: Frame, payload: bytes | None) -> None:
        came = Received(frame.type, frame.flags, frame.request_id, self._body, payload)
        self.received.append(came)
        self.events.set()
        if self.on_each is not None:
            self.on_each(channel, came)

    def on_cancel(self, channel: Channel, request_id: int) -> None:
        self.cancelled.append(request_id)
        self.events.set()

    def on_lost(self, channel: Channel, error: Exception | None) -> None:
        self.losses.append(error)
        self.events.set()

    async def until(self, true: Callable[[], object], timeout: float = 20) -> None:  # noqa: ASYNC109
        async with asyncio.timeout(timeout):
            while not true():
                self.events.clear()
                await self.events.wait()

    async def count(self, number: int) -> list[Received]:
        await self.until(lambda: len(self.received) >= number)
        return self.received

    async def lost(self) -> Exception | None:
        await self.until(lambda: self.losses)
        assert len(self.losses) == 1
        return self.losses[0]


class Frames:
    """A source of given frames, made when they are asked for."""

    def __init__(self, frames: Iterable[Outgoing | None]) -> None:
        self._frames = iter(frames)
        self.asked = 0

    def next_frame(self) -> Outgoing | None:
        self.asked += 1
        return next(self._frames, None)


@dataclass
class Pair:
    """A client's and a server's channel, joined."""

    listener: Listener
    client: Channel
    near: Party
    far: Party
    ledger: Ledger
    accepted: list[Channel] = field(default_factory=list)

    @property
    def server(self) -> Channel:
        return self.accepted[0]


def uri_for(scheme: str) -> str:
    return f"loop://test-{next(_names)}" if scheme == "loop" else f"{scheme}://127.0.0.1:0"


@contextlib.asynccontextmanager
async def joined(
    scheme: str,
    limits: Limits | None = None,
    *,
    pieces: Sequence[int] = (),
    via: Callable[[str], AsyncIterator[str]] | None = None,
) -> AsyncIterator[Pair]:
    """A listener and one channel to it. At the end everything is closed and every account must be settled."""
    ledger = Ledger()
    near, far = Party(ledger, pieces), Party(ledger, pieces)
    accepted: list[Channel] = []

    def accept(channel: Channel) -> Party:
        accepted.append(channel)
        far.events.set()
        return far

    fabric = fabric_for(f"{scheme}://", limits)
    listener = await fabric.listen(uri_for(scheme), accept)
    client = await fabric.connect(listener.uris[0], near, timeout=5)
    await far.until(lambda: accepted)
    try:
        yield Pair(listener, client, near, far, ledger, accepted)
    finally:
        for channel in (client, *accepted):
            channel.abort()
        await listener.close()
        await near.lost()
        await far.lost()
    ledger.assert_settled()
    assert Counter(len(party.losses) for party in (near, far)) == {1: 2}
