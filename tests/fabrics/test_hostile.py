"""Peers that mean harm, and users that give up: who is served on, what is kept, what is let go."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref

import pytest
from fabric_kit import DATA, SMALL, Frames, Ledger, Party, Received, joined, uri_for

from fabrics import Channel, Frame, Outgoing, Sink, fabric_for
from fabrics.framing import encode_head


@pytest.fixture(params=["tcp", "loop"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class OwnSink(Sink):
    """Refers to itself by its callbacks, as a sink that verifies what lands naturally does."""

    def __init__(self, views: list[memoryview]) -> None:
        super().__init__(views, landed=self._landed, closed=self._closed)

    def _landed(self, total: int) -> None: ...

    def _closed(self, complete: bool) -> None: ...


@pytest.mark.parametrize("ending", ["complete", "empty", "dropped", "cancelled", "hung up", "lost"])
async def test_a_sink_goes_with_its_payload_without_a_garbage_collector(scheme: str, ending: str) -> None:
    seen: list[weakref.ref[Sink]] = []
    size = 0 if ending == "empty" else 4 << 20

    async with joined(scheme) as pair:

        def place(channel: Channel, frame: Frame) -> Sink | None:
            if frame.request_id == 2:
                pair.far.events.set()
                return None
            sink = OwnSink([memoryview(bytearray(frame.payload_nbytes))])
            seen.append(weakref.ref(sink))
            return sink

        landed_some = lambda: seen and pair.server.stats.bytes_in > 100_000  # noqa: E731
        pair.far.answers = place
        pair.far.on_payload = lambda channel, frame, sink: pair.far.events.set()  # type: ignore[method-assign]
        gc.collect()
        gc.disable()
        try:
            pair.client.send(Outgoing(DATA, 1, b"", [memoryview(bytes(size))]))
            if ending in ("complete", "empty"):
                pair.client.send(Outgoing(SMALL, 2, b""))
                await pair.far.until(lambda: pair.server.stats.frames_in == 2)
            else:
                while not landed_some():  # noqa: ASYNC110 - each turn of the loop moves a bounded part
                    await asyncio.sleep(0)
                assert pair.server.stats.bytes_in < size, "the payload must still be on its way"
                {
                    "dropped": lambda: pair.server.drop_sink(1),
                    "cancelled": lambda: pair.server.cancel(1),
                    "hung up": lambda: pair.server.hang_up(),
                    "lost": lambda: pair.client.abort(),
                }[ending]()
                if ending == "lost":
                    await pair.far.lost()
            await asyncio.sleep(0)
            assert [ref() for ref in seen] == [None]
        finally:
            gc.enable()


@pytest.mark.parametrize("moment", ["on_frame", "on_payload", "landed", "closed"])
async def test_after_hanging_up_nothing_that_was_staged_is_handed_over(scheme: str, moment: str) -> None:
    async with joined(scheme) as pair:
        heard: list[str] = []

        def act(channel: Channel, now: str) -> None:
            heard.append(now)
            if now == moment:
                channel.hang_up()
                assert channel.state == "closing"
                channel.hang_up()  # twice changes nothing

        def place(channel: Channel, frame: Frame) -> Sink:
            act(channel, "on_frame")
            calls = pair.ledger.closed[len(pair.ledger.closed) + 1000] = []

            def closed(complete: bool) -> None:
                calls.append(complete)
                if complete:
                    act(channel, "closed")

            return Sink(
                [memoryview(bytearray(frame.payload_nbytes))],
                landed=lambda total: act(channel, "landed"),
                closed=closed,
            )

        pair.far.answers = place
        pair.far.on_payload = lambda channel, frame, sink: act(channel, "on_payload")  # type: ignore[method-assign]
        for number in range(20):
            pair.client.send(pair.ledger.lend(DATA, number, b"", [b"x"]))
        pair.client.cancel(5)
        assert await pair.far.lost() is None
        assert await pair.near.lost() is None
        steps = ["on_frame", "landed", "closed", "on_payload"]
        assert heard == steps[: steps.index(moment) + 1]
        assert pair.far.cancelled == []


async def test_what_was_said_before_hanging_up_arrives(scheme: str) -> None:
    async with joined(scheme) as pair:

        def refuse(channel: Channel, came: Received) -> None:
            channel.send(Outgoing(SMALL, came.request_id, b"no"))
            channel.hang_up()

        pair.far.on_each = refuse
        for number in range(3):
            pair.client.send(Outgoing(SMALL, number, b"get"))
        assert await pair.near.lost() is None
        assert [(item.request_id, item.body) for item in pair.near.received] == [(0, b"no")]


FLOOD = 30_000


@pytest.mark.parametrize("way", ["tcp", "loop", "raw"])
async def test_a_flood_of_tiny_frames_is_handled_in_turns_with_others(way: str) -> None:
    """The flooder's frames fit a few segments; in bytes they are nothing, in work they are seconds."""
    ledger = Ledger()
    flooded, near = Party(ledger), Party(ledger)
    handled = 0

    def work(channel: Channel, frame: Frame) -> None:
        nonlocal handled
        handled += 1
        if handled == FLOOD:
            flooded.events.set()
        sum(range(1000))  # what a real handler does at least

    flooded.answers = work
    echoing = Party(ledger)
    echoing.on_each = lambda channel, came: channel.send(Outgoing(SMALL, came.request_id, b""))
    handlers = [echoing, flooded]
    fabric = fabric_for("loop://" if way == "loop" else "tcp://")
    listener = await fabric.listen(
        uri_for("loop" if way == "loop" else "tcp"), lambda channel: handlers.pop(0)
    )
    client = await fabric.connect(listener.uris[0], near, timeout=5)
    client.send(Outgoing(SMALL, 0, b""))
    await near.count(1)

    frame = encode_head(SMALL, 0, 1, b"", 0)
    raw = socket.socket()
    flooding: asyncio.Future[None] | None = None
    flooder: Channel | None = None
    if way == "raw":
        raw.connect(("127.0.0.1", int(listener.uris[0].rpartition(":")[2])))
        flooding = asyncio.ensure_future(asyncio.to_thread(raw.sendall, frame * FLOOD))
    else:
        flooder = await fabric.connect(listener.uris[0], Party(ledger), timeout=5)
        flooder.add_source(Frames(Outgoing(SMALL, 1, b"") for _ in range(FLOOD)))

    rounds = most = 0
    while handled < FLOOD:
        before = handled
        rounds += 1
        client.send(Outgoing(SMALL, rounds, b""))
        await near.count(rounds + 1)
        most = max(most, handled - before)
    assert rounds >= 12, f"{rounds} answers while {FLOOD} frames of another were handled"
    assert most < FLOOD / 3, f"{most} frames of another were handled before one of ours"
    if flooding is not None:
        await flooding
    raw.close()
    await client.close()
    if flooder is not None:
        await flooder.close()
    await listener.close()
    await flooded.lost()
