"""What every fabric promises. One body of tests, run against each."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import pickle
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator

import pytest
from fabric_kit import DATA, PUSH, SMALL, Frames, Ledger, Party, Received, joined, pattern, uri_for

from fabrics import Channel, Frame, Limits, Outgoing, Sink, fabric_for
from fabrics.errors import AddressError, ChannelClosed, ConnectFailed, ForkedProcess, FrameTooLarge

SCHEMES = ("tcp", "loop")


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def echo(channel: Channel, came: Received) -> None:
    payload = () if came.payload is None else (memoryview(came.payload),)
    channel.send(Outgoing(came.type, came.request_id, came.body, payload, flags=came.flags))


async def test_frames_arrive_as_they_were_sent(scheme: str) -> None:
    async with joined(scheme) as pair:
        pair.far.on_each = echo
        pair.client.send(Outgoing(0, 0, b""))
        pair.client.send(Outgoing(0xEF, 2**64 - 1, b"body", (), flags=0xFFFF))
        pair.client.send(pair.ledger.lend(DATA, 7, b"x" * 70_000, [b"ab", b"", b"c"]))
        came = await pair.near.count(3)
        assert came == [
            Received(0, 0, 0, b"", None),
            Received(0xEF, 0xFFFF, 2**64 - 1, b"body", None),
            Received(DATA, 0, 7, b"x" * 70_000, b"abc"),
        ]


@pytest.mark.parametrize("pieces", [(), (1, 0, 3, 4095), (16, 100_001, 7, 262_143, 5)], ids=len)
async def test_payload_of_any_size_lands_in_views_of_any_size(scheme: str, pieces: tuple[int, ...]) -> None:
    sizes = [0, 1, 15, 16, 17, 4096, 65_535, 262_143, 262_144, 262_145, 1_000_003, (9 << 20) + 1]
    async with joined(scheme, pieces=pieces) as pair:
        for number, size in enumerate(sizes):
            data = pattern(size, number)
            pair.client.send(pair.ledger.lend(DATA, number, b"", [data[: size // 3], data[size // 3 :]]))
        came = await pair.far.count(len(sizes))
        for number, size in enumerate(sizes):
            assert (came[number].payload or b"") == pattern(size, number), f"{size} bytes"
        for totals, size in zip(pair.far.landings, sizes[1:], strict=True):
            assert totals == sorted(set(totals)), "landed() must tell a growing total"
            assert totals[-1] == size


async def test_a_large_payload(scheme: str) -> None:
    size = (64 << 20) + 3
    data = pattern(size, 1)
    async with joined(scheme) as pair:
        pair.client.send(pair.ledger.lend(DATA, 1, b"", [data]))
        assert (await pair.far.count(1))[0].payload == data


async def test_h04_more_than_2_gib_in_frames_of_one_buffer(scheme: str) -> None:
    """H04: a whole is split into frames, and no count of bytes is 32 bits wide."""
    chunk, total = 128 << 20, (2 << 30) + (256 << 20)
    data = memoryview(bytearray(chunk))
    there = memoryview(bytearray(chunk))
    arrived = 0

    def place(channel: Channel, frame: Frame) -> Sink:
        return Sink([there])

    def frames() -> Iterator[Outgoing]:
        for number in range(total // chunk):
            yield Outgoing(DATA, number, b"", [data])

    async with joined(scheme) as pair:
        pair.far.answers = place
        pair.far.on_payload = lambda channel, frame, sink: pair.far.events.set()  # type: ignore[method-assign]
        pair.client.add_source(Frames(frames()))
        await pair.far.until(lambda: pair.server.stats.frames_in == total // chunk, timeout=90)
        arrived = pair.server.stats.bytes_in
        await pair.far.until(lambda: pair.server.stats.bytes_in >= total, timeout=90)
        arrived = pair.server.stats.bytes_in
    assert arrived == total + 32 * (total // chunk)


async def test_sources_take_turns_and_small_frames_overtake(scheme: str) -> None:
    """A small frame never waits for all the bulk before it, and no source waits for another."""
    size, each = 256 << 10, 60
    block = pattern(size, 3)
    async with joined(scheme) as pair:
        sources = [
            Frames([pair.ledger.lend(DATA, number, b"", [block]) for _ in range(each)]) for number in range(4)
        ]
        for source in sources:
            pair.client.add_source(source)
            pair.client.add_source(source)  # twice changes nothing
        await pair.far.count(10)
        pair.client.send(Outgoing(SMALL, 99, b"me first"))
        came = await pair.far.count(4 * each + 1)
        order = [item.request_id for item in came]
        position = order.index(99)
        assert position < 4 * each * 3 / 4, f"the small frame came as number {position} of {len(order)}"
        bulk = [number for number in order if number != 99]
        for number in range(4):
            assert bulk.count(number) == each
        for start in range(0, len(bulk), 4):
            assert len(set(bulk[start : start + 4])) == 4, "each source gives one frame a turn"


async def test_a_source_is_forgotten_when_it_has_nothing_and_asked_when_added_again(scheme: str) -> None:
    async with joined(scheme) as pair:
        source = Frames([Outgoing(PUSH, 1, b""), None, Outgoing(PUSH, 2, b"")])
        pair.client.add_source(source)
        await pair.far.count(1)
        await asyncio.sleep(0.02)
        assert source.asked == 2
        pair.client.add_source(source)
        assert [item.request_id for item in await pair.far.count(2)] == [1, 2]


async def test_a_removed_source_is_asked_no_more(scheme: str) -> None:
    async with joined(scheme) as pair:
        source = Frames([Outgoing(PUSH, number, b"") for number in range(3)])
        pair.client.add_source(source)
        pair.client.remove_source(source)
        pair.client.send(Outgoing(SMALL, 9, b""))
        await pair.far.count(1)
        assert source.asked == 0
        pair.client.remove_source(source)  # twice changes nothing


async def test_a_failing_source_ends_the_channel(scheme: str) -> None:
    class Broken:
        def next_frame(self) -> Outgoing:
            raise OSError("the disk is gone")

    seen: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: seen.append(context))
    async with joined(scheme) as pair:
        pair.client.send(pair.ledger.lend(DATA, 1, b"", [pattern(100, 1)]))
        pair.client.add_source(Broken())
        assert "the disk is gone" in str(await pair.near.lost())
        assert isinstance(await pair.far.lost(), ChannelClosed)
    assert len(seen) == 1, "a programming error is reported to the loop, once"


async def test_payload_without_a_sink_is_dropped_and_counted(scheme: str) -> None:
    async with joined(scheme) as pair:
        pair.far.refuse.add(1)
        pair.client.send(pair.ledger.lend(DATA, 1, b"", [pattern(3_000_000, 1)]))
        pair.client.send(pair.ledger.lend(DATA, 2, b"", [pattern(1000, 2)]))
        came = await pair.far.count(2)
        assert came[0].payload is None
        assert came[1].payload == pattern(1000, 2)
        assert pair.server.stats.bytes_dropped == 3_000_000


async def test_h01_a_cancelled_requests_bytes_reach_nobody(scheme: str) -> None:
    """H01, E05: cancel at any moment; the memory is free at once, and the next request gets its own bytes."""
    size, rounds, rng = 700_001, 150, random.Random(1)
    async with joined(scheme) as pair:
        answered: dict[int, bytearray] = {}

        def serve(channel: Channel, came: Received) -> None:
            answered[came.request_id] = pattern(size, came.request_id)
            channel.add_source(
                Frames(
                    pair.ledger.lend(DATA, came.request_id, b"", [answered[came.request_id]]) for _ in (0, 1)
                )
            )

        pair.far.on_each = serve
        for number in range(0, rounds * 2, 2):
            pair.client.send(Outgoing(SMALL, number, b"get"))
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0)
            pair.client.cancel(number)
            pair.client.cancel(number)  # twice changes nothing
            parts = pair.near.placed.pop(number, None)
            canary = None
            if parts is not None:  # the memory has a new owner now
                canary = bytes(parts[0])
            pair.near.refuse.add(number)
            pair.near.received.clear()
            pair.client.send(Outgoing(SMALL, number + 1, b"get"))
            await pair.near.until(
                lambda number=number: (
                    sum(item.request_id == number + 1 for item in pair.near.received) == 2  # type: ignore[misc]
                )
            )
            for item in pair.near.received:
                if item.request_id == number + 1:
                    assert item.payload == pattern(size, number + 1)
            if parts is not None:
                assert parts[0] == canary, "bytes were written after cancel() had given the memory back"
        told = Counter(pair.far.cancelled)
        assert list(told) == list(range(0, rounds * 2, 2))
        for number, times in told.items():  # taken back before it was sent: the first cancel was silent
            assert times == 1 + (number in answered)


async def test_dropping_a_sink_frees_it_in_the_middle_of_a_payload(scheme: str) -> None:
    size = 8 << 20
    async with joined(scheme) as pair:
        dropped: list[int] = []
        parts = [bytearray(size)]

        def place(channel: Channel, frame: Frame) -> Sink | None:
            if frame.request_id != 1:
                return pair.ledger.sink([bytearray(frame.payload_nbytes)])

            def landed(count: int) -> None:
                if count >= size // 4 and not dropped:
                    dropped.append(count)
                    channel.drop_sink(2)  # another's: changes nothing
                    channel.drop_sink(1)
                    assert next(iter(pair.ledger.closed.values())) == [False]
                    parts[0] = bytearray(b"\xaa" * size)

            return pair.ledger.sink(parts, landed=landed)

        pair.far.answers = place
        done: list[int] = []
        pair.far.on_payload = (  # type: ignore[method-assign]
            lambda channel, frame, sink: (done.append(frame.request_id), pair.far.events.set())
        )
        for number in (1, 2):
            pair.client.send(pair.ledger.lend(DATA, number, b"", [pattern(size, number)]))
        await pair.far.until(lambda: done)
        assert done == [2]
        assert pair.server.stats.bytes_dropped == size - dropped[0]
        assert pair.far.cancelled == []


@pytest.mark.parametrize("dropped", [False, True])
async def test_a_view_given_back_is_not_referenced(scheme: str, dropped: bool) -> None:
    """When closed() or release() is called, a memory map can be closed, which an exported view forbids."""
    with mmap.mmap(-1, 1 << 20) as source, mmap.mmap(-1, 1 << 20) as target:
        done: list[str] = []
        async with joined(scheme) as pair:

            def place(channel: Channel, frame: Frame) -> Sink:
                sink = Sink([memoryview(target)])

                def closed(complete: bool) -> None:
                    sink.views[0].release()
                    target.close()  # BufferError, should anybody hold a view
                    done.append("target")

                def landed(total: int) -> None:
                    if dropped:
                        channel.drop_sink(1)

                sink.closed, sink.landed = closed, landed
                return sink

            def released(sent: bool) -> None:
                frame.payload[0].release()
                source.close()
                done.append("source")

            pair.far.answers = place
            pair.far.on_payload = lambda channel, frame, sink: pair.far.events.set()  # type: ignore[method-assign]
            frame = Outgoing(DATA, 1, b"", [memoryview(source)], release=released)
            pair.client.send(frame)
            while len(done) < 2:  # noqa: ASYNC110 - callbacks of the memory's owner, not of a party
                await asyncio.sleep(0.001)
            assert pair.client.state == "open"


async def test_h07_output_waits_in_its_source_when_the_peer_does_not_read(scheme: str) -> None:
    """H07: what is queued for a reader that stops is bounded; here both ends are choked by small frames."""
    limits = Limits(max_queued=10 << 20, stall_timeout=0.4)
    async with joined(scheme, limits) as pair:
        pulled = 0
        block = bytearray(1 << 20)

        class Endless:
            def next_frame(self) -> Outgoing:
                nonlocal pulled
                pulled += 1
                return pair.ledger.lend(DATA, 1, b"", [block])

        # the client's queue is full, and stays so as long as the server does not read, and the reverse
        for channel in (pair.client, pair.server):
            for _ in range(40):
                channel.send(pair.ledger.lend(PUSH, 1, b"", [bytearray(1 << 20)]))
            channel.add_source(Endless())
        error = await pair.near.lost() or await pair.far.lost()
        assert isinstance(error, ChannelClosed)
        assert pulled == 0, "sources were asked though pushed frames had not gone"


async def test_h07_requests_wait_while_answers_do(scheme: str) -> None:
    """H07: a burst of requests does not become a heap of answers: reading pauses, then goes on."""
    size, requests, limits = 100_000, 300, Limits(max_queued=250_000)
    async with joined(scheme, limits) as pair:
        most = 0

        def serve(channel: Channel, came: Received) -> None:
            nonlocal most
            most = max(most, sum(not calls for calls in pair.ledger.released.values()))
            channel.send(pair.ledger.lend(DATA, came.request_id, b"", [pattern(size, came.request_id)]))

        pair.far.on_each = serve
        for number in range(requests):
            pair.client.send(Outgoing(SMALL, number, b"get"))
        for came in await pair.near.count(requests):
            assert came.payload == pattern(size, came.request_id)
        assert most < 20, f"{most} answers were queued at once"


async def test_closing_sends_what_was_queued(scheme: str) -> None:
    async with joined(scheme) as pair:
        block = bytearray(1 << 20)
        endless = Frames(pair.ledger.lend(DATA, 9, b"", [block]) for _ in range(100))
        pair.client.add_source(endless)
        for number in range(5):
            pair.client.send(pair.ledger.lend(DATA, number, b"", [pattern(3 << 20, number)]))
        closing = asyncio.create_task(pair.client.close())
        await asyncio.sleep(0)
        assert pair.client.state == "closing"
        with pytest.raises(ChannelClosed, match="closing"):
            pair.client.send(pair.ledger.lend(SMALL, 1))
        with pytest.raises(ChannelClosed):
            pair.client.add_source(endless)
        pair.client.cancel(3)  # harmless
        await closing
        assert pair.client.state == "closed"
        assert await pair.near.lost() is None
        assert await pair.far.lost() is None
        assert [item.request_id for item in pair.far.received if item.request_id != 9] == [0, 1, 2, 3, 4]
        for item in pair.far.received:
            if item.request_id != 9:
                assert item.payload == pattern(3 << 20, item.request_id)
        await pair.client.close()  # twice is harmless
        pair.client.abort()
        assert endless.asked < 100


async def test_both_ends_may_close_at_once(scheme: str) -> None:
    async with joined(scheme) as pair:
        for number in range(3):
            pair.client.send(pair.ledger.lend(DATA, number, b"", [pattern(100_000, number)]))
            pair.server.send(pair.ledger.lend(DATA, number, b"", [pattern(100_000, number)]))
        await asyncio.gather(pair.client.close(), pair.server.close(), pair.client.close())
        assert (pair.client.state, pair.server.state) == ("closed", "closed")


async def test_abort_gives_everything_back_at_once(scheme: str) -> None:
    async with joined(scheme) as pair:
        for number in range(8):
            pair.client.send(pair.ledger.lend(DATA, number, b"", [pattern(4 << 20, number)]))
        await pair.far.until(lambda: pair.far.landings)
        pair.server.abort()
        assert all(pair.ledger.closed.values()), "sinks are free when abort() returns"
        assert isinstance(await pair.far.lost(), ChannelClosed)
        assert isinstance(await pair.near.lost(), ChannelClosed)
        pair.ledger.assert_settled()
        with pytest.raises(ChannelClosed, match="closed; connect again"):
            pair.server.send(pair.ledger.lend(SMALL, 1))


async def test_the_reason_of_an_abort_reaches_the_peer(scheme: str) -> None:
    async with joined(scheme) as pair:
        pair.server.abort(FrameTooLarge("the body is a novel"))
        assert "too-large" in str(await pair.near.lost())
        assert "a novel" in str(pair.near.losses[0])


@pytest.mark.parametrize(
    "where",
    ["on_frame", "landed", "closed", "on_payload", "on_cancel", "short sink", "read-only sink", "kept body"],
)
async def test_an_exception_in_a_callback_ends_the_channel(scheme: str, where: str) -> None:
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))

    def fail(*args: object) -> None:
        raise RuntimeError(f"{where} failed")

    kept: list[object] = []
    async with joined(scheme) as pair:
        book = pair.ledger

        def place(channel: Channel, frame: Frame) -> Sink:
            if where == "on_frame":
                fail()
            if where == "kept body":
                kept.append(pickle.PickleBuffer(frame.body))
            sink = book.sink([bytearray(frame.payload_nbytes - (where == "short sink"))])
            if where == "read-only sink":
                sink.views = [memoryview(bytes(frame.payload_nbytes))]
            if where == "landed":
                sink.landed = fail
            if where == "closed":
                note = sink.closed
                assert note is not None
                sink.closed = lambda complete: (note(complete), fail())[0]
            return sink

        pair.far.answers = place
        if where == "on_payload":
            pair.far.on_payload = fail  # type: ignore[method-assign]
        if where == "on_cancel":
            pair.far.on_cancel = fail  # type: ignore[method-assign]
            pair.client.cancel(5)
        pair.client.send(book.lend(DATA, 1, b"body", [pattern(600_000, 1)]))
        error = await pair.far.lost()
        assert isinstance(error, RuntimeError | ValueError | TypeError)
        assert isinstance(await pair.near.lost(), ChannelClosed)
    assert len(reported) == 1


async def test_callbacks_may_end_their_own_channel(scheme: str) -> None:
    """L01: abort before, in and after a payload, from within: no exception, everything returned."""
    for moment in ("on_frame", "landed", "on_payload", "release"):
        async with joined(scheme) as pair:

            def place(channel: Channel, frame: Frame, moment: str = moment) -> Sink:
                if moment == "on_frame":
                    channel.abort()

                def landed(count: int) -> None:
                    if moment == "landed":
                        channel.abort()

                return pair.ledger.sink([bytearray(frame.payload_nbytes)], landed=landed)

            pair.far.answers = place
            if moment == "on_payload":
                pair.far.on_payload = lambda channel, frame, sink: channel.abort()  # type: ignore[method-assign]
            frame = pair.ledger.lend(DATA, 1, b"", [pattern(900_000, 1)])
            if moment == "release":
                note, client = frame.release, pair.client
                frame.release = lambda sent, note=note, client=client: (note(sent), client.abort())[0]  # type: ignore[misc]
            pair.client.send(frame)
            pair.client.send(pair.ledger.lend(DATA, 2, b"", [pattern(900_000, 2)]))
            assert isinstance(await pair.near.lost(), ChannelClosed)
            assert isinstance(await pair.far.lost(), ChannelClosed)


async def test_h06_limits_are_exact_and_refusal_leaves_the_channel_usable(scheme: str) -> None:
    limits = Limits(max_body=1000, max_payload=50_000)
    async with joined(scheme, limits) as pair:
        for nbytes in (limits.max_payload - 1, limits.max_payload):
            pair.client.send(pair.ledger.lend(DATA, nbytes, b"b" * limits.max_body, [pattern(nbytes, 1)]))
        with pytest.raises(FrameTooLarge, match=r"50001 bytes.*max_payload is 50000"):
            pair.client.send(pair.ledger.lend(DATA, 1, b"", [pattern(25_000, 1), pattern(25_001, 1)]))
        with pytest.raises(FrameTooLarge, match=r"1001 bytes.*max_body is 1000"):
            pair.client.send(pair.ledger.lend(DATA, 1, b"b" * 1001))
        for wrong in (
            {"type": 0xF0},
            {"type": -1},
            {"flags": 65536},
            {"request_id": -1},
            {"request_id": 2**64},
        ):
            frame = pair.ledger.lend(DATA, 1)
            for name, value in wrong.items():
                setattr(frame, name, value)
            with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
                pair.client.send(frame)
        with pytest.raises(TypeError, match="not contiguous"):
            frame = pair.ledger.lend(DATA, 1)
            frame.payload = [memoryview(b"abcd")[::2]]
            pair.client.send(frame)
        pair.client.send(pair.ledger.lend(SMALL, 3))
        assert [item.request_id for item in await pair.far.count(3)] == [49_999, 50_000, 3]


async def test_h06_a_receiver_with_lower_limits_says_so(scheme: str) -> None:
    ledger = Ledger()
    near, far = Party(ledger), Party(ledger)
    listener = await fabric_for(f"{scheme}://", Limits(max_payload=1000)).listen(
        uri_for(scheme), lambda _: far
    )
    client = await fabric_for(f"{scheme}://").connect(listener.uris[0], near, timeout=5)
    client.send(ledger.lend(DATA, 1, b"", [pattern(1001, 1)]))
    assert isinstance(await far.lost(), FrameTooLarge)
    assert "max_payload is 1000" in str(await near.lost())
    await listener.close()
    ledger.assert_settled()


async def test_h18_a_fork_is_told_that_it_must_not_use_the_channel(scheme: str) -> None:
    async with joined(scheme) as pair:
        read, write = os.pipe()
        gc.collect()
        child = os.fork()
        if not child:
            said = []
            for call in (
                lambda: pair.client.send(Outgoing(SMALL, 1, b"from the child")),
                lambda: pair.client.add_source(Frames([])),
                lambda: pair.client.cancel(1),
                pair.client.abort,
                lambda: pair.client.close().send(None),
            ):
                try:
                    call()
                    said.append("nothing was raised")
                except ForkedProcess as error:
                    said.append("ok" if "not fork-safe" in str(error) else str(error))
                except BaseException as error:
                    said.append(repr(error))
            os.write(write, ",".join(said).encode())
            os._exit(0)
        os.close(write)
        await asyncio.to_thread(os.waitpid, child, 0)
        assert os.read(read, 1000) == b"ok,ok,ok,ok,ok"
        os.close(read)
        pair.client.send(Outgoing(SMALL, 2, b"from the parent"))
        assert [item.request_id for item in await pair.far.count(1)] == [2]


async def test_a_body_cannot_be_read_after_its_callback(scheme: str) -> None:
    frames: list[Frame] = []
    async with joined(scheme) as pair:
        pair.far.answers = lambda channel, frame: frames.append(frame) or pair.far.events.set()
        pair.client.send(Outgoing(SMALL, 1, b"fleeting"))
        await pair.far.until(lambda: pair.server.stats.bytes_in == 40 and frames)
        with pytest.raises(ValueError, match="released"):
            bytes(frames[0].body)


async def test_stats_count_both_ways_alike(scheme: str) -> None:
    async with joined(scheme) as pair:
        pair.client.send(pair.ledger.lend(DATA, 1, b"12345", [bytes(100)]))
        pair.client.send(pair.ledger.lend(SMALL, 2, b"1"))
        await pair.far.count(2)
        out, into = pair.client.stats, pair.server.stats
        assert (
            (out.frames_out, out.bytes_out) == (into.frames_in, into.bytes_in) == (2, 32 + 5 + 100 + 32 + 1)
        )


async def test_what_a_channel_says_of_itself(scheme: str) -> None:
    async with joined(scheme) as pair:
        assert f"Channel open {pair.client.local} - {pair.client.peer}>" in repr(pair.client)
        assert pair.client.peer == pair.listener.uris[0] == pair.server.local
        assert pair.client.local == pair.server.peer
        await pair.client.close()
        assert "Channel closed " in repr(pair.client)


async def test_nobody_listens(scheme: str) -> None:
    fabric = fabric_for(f"{scheme}://")
    listener = await fabric.listen(uri_for(scheme), lambda channel: Party(Ledger()))
    with pytest.raises(AddressError, match="EADDRINUSE"):
        await fabric.listen(listener.uris[0], lambda channel: Party(Ledger()))
    await listener.close()
    await listener.close()  # twice is harmless
    with pytest.raises(ConnectFailed):
        await fabric.connect(listener.uris[0], Party(Ledger()), timeout=2)
    again = await fabric.listen(listener.uris[0], lambda channel: Party(Ledger()))
    await again.close()


async def test_a_closed_listener_leaves_its_channels_alone(scheme: str) -> None:
    async with joined(scheme) as pair:
        await pair.listener.close()
        pair.far.on_each = echo
        pair.client.send(Outgoing(SMALL, 1, b"still there?"))
        assert (await pair.near.count(1))[0].body == b"still there?"


async def test_an_accepted_channel_may_speak_first_or_be_refused(scheme: str) -> None:
    ledger = Ledger()
    far = Party(ledger)

    def accept(channel: Channel) -> Party:
        if len(seen):
            channel.abort()
        else:
            channel.send(Outgoing(SMALL, 1, b"welcome"))
        seen.append(channel)
        return far

    seen: list[Channel] = []
    fabric = fabric_for(f"{scheme}://")
    listener = await fabric.listen(uri_for(scheme), accept)
    first, second = Party(ledger), Party(ledger)
    channel = await fabric.connect(listener.uris[0], first, timeout=5)
    assert (await first.count(1))[0].body == b"welcome"
    await fabric.connect(listener.uris[0], second, timeout=5)
    assert isinstance(await second.lost(), ChannelClosed)
    assert isinstance(await far.lost(), ChannelClosed)
    await channel.close()
    await listener.close()


async def test_many_channels_with_self_identifying_payload(scheme: str) -> None:
    """L09: parallel requests in both directions; every payload is its own."""
    rng = random.Random(9)
    ledger = Ledger()

    def accept(channel: Channel) -> Party:
        party = Party(ledger, (777,))
        party.on_each = lambda channel, came: channel.add_source(
            Frames(
                [
                    ledger.lend(
                        DATA, came.request_id, b"", [pattern(came.request_id % 90_000, came.request_id)]
                    )
                ]
            )
        )
        return party

    fabric = fabric_for(f"{scheme}://")
    listener = await fabric.listen(uri_for(scheme), accept)

    async def one(seed: int) -> None:
        party = Party(ledger, (333, 4000))
        channel = await fabric.connect(listener.uris[0], party, timeout=5)
        wanted = [seed * 1_000_000 + rng.randrange(1, 900_000) for _ in range(20)]
        for request_id in wanted:
            channel.send(Outgoing(SMALL, request_id, b""))
            await asyncio.sleep(0)
        for came in await party.count(len(wanted)):
            assert (came.payload or b"") == pattern(came.request_id % 90_000, came.request_id)
        assert sorted(item.request_id for item in party.received) == sorted(wanted)
        await channel.close()

    await asyncio.gather(*map(one, range(16)))
    await listener.close()
    await asyncio.sleep(0.05)
    ledger.assert_settled()


async def test_memory_of_a_channel_does_not_grow_with_what_passes(scheme: str) -> None:
    async with joined(scheme) as pair:
        block = bytearray(256 << 10)
        target = [memoryview(bytearray(256 << 10))]
        pair.far.answers = lambda channel, frame: Sink(target)
        pair.far.on_payload = lambda channel, frame, sink: pair.far.events.set()  # type: ignore[method-assign]

        async def pass_frames(number: int) -> None:
            before = pair.server.stats.bytes_in
            view = [memoryview(block)]
            pair.client.add_source(Frames(Outgoing(DATA, 1, b"", view) for _ in range(number)))
            await pair.far.until(lambda: pair.server.stats.bytes_in == before + number * (32 + (256 << 10)))

        await pass_frames(20)
        tracemalloc.start()
        try:
            start = tracemalloc.get_traced_memory()[0]
            await pass_frames(400)
            assert tracemalloc.get_traced_memory()[0] - start < 100_000
        finally:
            tracemalloc.stop()
