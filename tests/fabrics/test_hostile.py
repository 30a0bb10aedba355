"""Peers that mean harm, and users that give up: who is served on, what is kept, what is let go."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref

import pytest
from fabric_kit import DATA, SMALL, Frames, Ledger, Party, Received, joined, uri_for

from fabrics import Channel, Frame, Limits, Outgoing, Sink, fabric_for
from fabrics.errors import ChannelFull, FrameTooLarge
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


async def test_a_sink_is_not_used_twice(scheme: str) -> None:
    """Its callbacks are gone: a second payload would land without being verified."""
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    async with joined(scheme) as pair:
        sink = Sink([memoryview(bytearray(10))])
        pair.far.answers = lambda channel, frame: sink
        for number in (1, 2):
            pair.client.send(Outgoing(DATA, number, b"", [memoryview(bytes(10))]))
        assert "make one for each" in str(await pair.far.lost())
    assert len(reported) == 1


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


async def test_a_peer_that_connected_may_send_large_bodies_once_it_is_welcome(scheme: str) -> None:
    limits = Limits(first_body=100)

    def greet(channel: Channel, came: Received) -> None:
        if came.body == b"hello":
            channel.welcome()

    async with joined(scheme, limits) as pair:
        pair.far.on_each = greet
        pair.client.send(Outgoing(SMALL, 1, b"hello"))
        pair.client.send(Outgoing(SMALL, 2, bytes(50_000)))  # it may lie staged behind the first
        assert len((await pair.far.count(2))[1].body) == 50_000
        pair.server.send(Outgoing(SMALL, 3, bytes(50_000)))  # who was called may answer as it likes
        await pair.near.count(1)
    async with joined(scheme, limits) as pair:
        pair.client.send(Outgoing(SMALL, 1, bytes(101)))
        assert isinstance(await pair.far.lost(), FrameTooLarge)
        assert "first_body is 100; say hello first" in str(await pair.near.lost())


async def test_waiting_frames_count_by_their_number_too(scheme: str) -> None:
    """Answers of a few bytes each: a queue must not become a heap of them."""
    async with joined(scheme, Limits(max_queued=100 << 10)) as pair:
        handled = most = 0

        def answer(channel: Channel, came: Received) -> None:
            nonlocal handled, most
            handled += 1
            channel.send(pair.ledger.lend(SMALL, came.request_id))
            most = max(most, sum(not calls for calls in pair.ledger.released.values()))

        pair.far.on_each = answer
        pair.client.add_source(Frames(Outgoing(SMALL, number, b"") for number in range(2000)))
        assert [item.request_id for item in await pair.near.count(2000)] == list(range(2000))
        assert most <= 101 + 256, f"{most} answers waited at once"


async def test_requests_cancelled_before_they_were_sent_are_not_sent(scheme: str) -> None:
    async with joined(scheme) as pair:
        pair.client.send(pair.ledger.lend(SMALL, 1))
        for number in (2, 3, 3, 4):
            pair.client.send(pair.ledger.lend(SMALL, number))
        for number in (2, 3):
            pair.client.cancel(number)
        assert list(pair.ledger.released.values()) == [[], [False], [False], [False], []]
        assert [item.request_id for item in await pair.far.count(2)] == [1, 4]
        assert pair.far.cancelled == []
        pair.client.send(pair.ledger.lend(SMALL, 4))  # more of what the peer has heard of
        pair.client.cancel(4)
        pair.client.cancel(9)  # perhaps of a request of the peer: it is told
        await pair.far.until(lambda: len(pair.far.cancelled) == 2)
        assert pair.far.cancelled == [4, 9]
        assert len(pair.far.received) == 2


async def test_cancelling_takes_back_our_answer_and_still_tells_who_asked(scheme: str) -> None:
    async with joined(scheme) as pair:

        def stop(channel: Channel, came: Received) -> None:
            channel.send(pair.ledger.lend(SMALL, came.request_id))
            channel.cancel(came.request_id)

        pair.far.on_each = stop
        pair.client.send(Outgoing(SMALL, 7, b""))
        await pair.near.until(lambda: pair.near.cancelled)
        assert (pair.near.cancelled, pair.near.received) == ([7], [])


async def test_sending_without_end_to_a_peer_that_takes_nothing_is_refused(scheme: str) -> None:
    """Requests that are tiny but many, all cancelled or not: what waits is bounded, the channel lives on."""
    async with joined(scheme, Limits(max_queued=64 << 10)) as pair:
        with pytest.raises(ChannelFull, match=r"4 times max_queued \(65536\)"):
            for number in range(1000):  # within one turn of the loop: nothing can be taken
                pair.client.send(pair.ledger.lend(SMALL, number))
        assert 200 < len(pair.ledger.released) < 260
        assert pair.client.state == "open"
        for number in range(len(pair.ledger.released) - 1):
            pair.client.cancel(number)
        pair.client.send(Outgoing(SMALL, 5000, b""))
        assert [item.request_id for item in await pair.far.count(1)] == [5000]
