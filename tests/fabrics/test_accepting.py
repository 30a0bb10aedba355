"""Listeners that are paused and resumed: who connects meanwhile waits, and costs nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from fabric_kit import Ledger, Party

from fabrics import Channel, Handler, Listener, fabric_for
from fabrics.loopback import LoopbackListener


class House:
    """Accepts, and pauses its listener when it is full."""

    def __init__(self, seats: int) -> None:
        self.seats = seats
        self.channels: list[Channel] = []
        self.listener: Listener | None = None

    def accept(self, channel: Channel) -> Handler:
        self.channels.append(channel)
        if len(self.channels) >= self.seats:
            assert self.listener is not None
            self.listener.pause()
        return Party(Ledger())

    async def count(self, wanted: int) -> None:
        async with asyncio.timeout(10):
            while len(self.channels) < wanted:  # noqa: ASYNC110 (whoever is accepted has nothing to tell us)
                await asyncio.sleep(0.01)


async def test_who_comes_while_it_is_paused_waits() -> None:
    house = House(2)
    listener = house.listener = await fabric_for("tcp://").listen("tcp://127.0.0.1:0", house.accept)
    uri = listener.uris[0]
    guests = [await fabric_for(uri).connect(uri, Party(Ledger()), timeout=5) for _ in range(5)]
    await house.count(2)
    await asyncio.sleep(0.1)
    assert len(house.channels) == 2
    listener.pause()  # twice is once
    house.seats = 4
    listener.resume()  # and paused again by the fourth
    await house.count(4)
    await asyncio.sleep(0.1)
    assert len(house.channels) == 4
    house.seats = 99
    listener.resume()
    listener.resume()
    await house.count(5)
    listener.pause()
    await listener.close()
    listener.resume()
    for channel in (*guests, *house.channels):
        channel.abort(None)


async def test_nobody_can_wait_within_one_process() -> None:
    house = House(1)
    listener = house.listener = await fabric_for("loop://").listen("loop://pausing", house.accept)
    assert isinstance(listener, LoopbackListener)
    for number in range(3):
        await fabric_for("loop://").connect("loop://pausing", Party(Ledger()), timeout=5)
        await house.count(number + 1)
    listener.resume()
    await listener.close()


@pytest.mark.parametrize("paused", [True, False])
def test_a_paused_listener_stays_so_when_there_are_descriptors_again(paused: bool) -> None:
    """Out of descriptors it listens again after a while by itself, unless its owner wants it quiet."""
    program = f"""
import asyncio, os, resource, socket
import fabrics.tcp
from fabrics import fabric_for

fabrics.tcp._ACCEPT_PAUSE = 0.02

class Quiet:
    def on_frame(self, channel, frame): return None
    def on_payload(self, channel, frame, sink): pass
    def on_cancel(self, channel, request_id): pass
    def on_lost(self, channel, error): pass

async def main():
    reports, accepted = [], []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))
    listener = await fabric_for("tcp://").listen(
        "tcp://127.0.0.1:0", lambda channel: accepted.append(channel) or Quiet()
    )
    waiting = [socket.socket() for _ in range(4)]
    top = os.dup(0)
    os.close(top)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (top + 1, hard))
    for sock in waiting:
        sock.connect(("127.0.0.1", int(listener.uris[0].rpartition(":")[2])))
    while not reports:
        await asyncio.sleep(0.01)
    if {paused}:
        listener.pause()
    resource.setrlimit(resource.RLIMIT_NOFILE, (top + 50, hard))
    await asyncio.sleep(0.5)  # some twenty tries
    before = len(accepted)
    listener.resume()
    while len(accepted) < 4:
        await asyncio.sleep(0.01)
    print(before)
    await listener.close()

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=30, check=False, text=True
    )
    assert (done.stdout, done.stderr) == ("1\n" if paused else "4\n", "")
