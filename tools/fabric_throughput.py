"""How fast the fabrics move verified payload, against a raw blocking socket in the same run.

Every payload is summed with CRC-32 as it lands and compared, inside the timed region; the raw transfer
(``sendall`` to ``recv_into``, two processes, no framing, no sum) moves the same bytes one way, back to back.
Both are measured in turn, in short rounds, so that a busy machine hits both alike; a row gives medians.

    python tools/fabric_throughput.py [--quick] [--json] [--fabric tcp --fabric loop]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from isal.isal_zlib import crc32
from rich.console import Console
from rich.table import Table

from fabrics import Channel, Frame, Handler, Outgoing, Sink, fabric_for

GET, PUT, DATA, ACK, LAG = range(1, 6)
REQUEST = struct.Struct("<QQ")  # payload size, index
SUM = struct.Struct("<I")
RAW = struct.Struct("<BQQQ")  # frame type, payload size, count, number of places to land in

ARENA_NBYTES = 64 << 20  # what payloads are cut from: more than a core's caches hold
SIZES = {64 << 10: 32, 2 << 20: 4}  # payload size: requests under way per client
LAG_PERIOD = 0.002


class Arena:
    """Payloads in one piece of memory, with the sum of each."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(os.urandom(1 << 20) * (ARENA_NBYTES >> 20)))
        for page in range(0, ARENA_NBYTES, 4096):  # no two pages alike
            struct.pack_into("<Q", self.memory, page, page)
        self._sums = {size: [crc32(view) for view in self.cut(size)] for size in SIZES}

    def cut(self, size: int) -> list[memoryview]:
        return [self.memory[at : at + size] for at in range(0, ARENA_NBYTES, size)]

    def payload(self, size: int, index: int) -> tuple[memoryview, bytes]:
        index %= ARENA_NBYTES // size
        return self.memory[index * size : (index + 1) * size], SUM.pack(self._sums[size][index])


def slots(memory: memoryview, size: int) -> list[memoryview]:
    """Where payload lands: one place for each request under way."""
    return [memory[at * size : (at + 1) * size] for at in range(SIZES[size])]


class Slot:
    """Where the payload of one request under way lands, and its sum so far."""

    __slots__ = ("_at", "_sum", "_view", "expected")

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.expected = self._at = self._sum = 0

    def open(self, expected: int) -> Sink:
        self.expected, self._at, self._sum = expected, 0, 0
        return Sink([self._view], landed=self._landed)

    def _landed(self, count: int) -> None:
        self._sum = crc32(self._view[self._at : count], self._sum)
        self._at = count

    def check(self) -> None:
        if self._sum != self.expected or self._at != len(self._view):
            raise ValueError("what landed is not what was sent")


class Receiver(Handler):
    """The half that takes payload."""

    def __init__(self) -> None:
        memory = memoryview(bytearray(os.urandom(1 << 20) * 8))
        self._slots = {size: [Slot(view) for view in slots(memory, size)] for size in SIZES}

    def place(self, frame: Frame) -> Sink:
        size = frame.payload_nbytes
        return self._slots[size][frame.request_id % SIZES[size]].open(SUM.unpack(frame.body)[0])

    def verify(self, frame: Frame) -> None:
        size = frame.payload_nbytes
        self._slots[size][frame.request_id % SIZES[size]].check()


class Lag:
    """How late the loop runs what is due."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._arm()

    def _arm(self) -> None:
        self._due = self._loop.time() + LAG_PERIOD
        self._loop.call_at(self._due, self._fire)

    def _fire(self) -> None:
        self._late.append(self._loop.time() - self._due)
        self._arm()

    def p99_ms(self) -> float:
        late, self._late = sorted(self._late), []
        return late[int(len(late) * 0.99)] * 1e3 if late else 0.0


class ServerSide(Receiver):
    """Answers gets from a source, checks and acknowledges puts."""

    def __init__(self, arena: Arena, lag: Lag) -> None:
        super().__init__()
        self._arena = arena
        self._lag = lag
        self._wanted: deque[tuple[int, int, int]] = deque()

    def next_frame(self) -> Outgoing | None:
        if not self._wanted:
            return None
        request_id, size, index = self._wanted.popleft()
        view, total = self._arena.payload(size, index)
        return Outgoing(DATA, request_id, total, [view])

    def on_frame(self, channel: Channel, frame: Frame) -> Sink | None:
        if frame.type == PUT:
            return self.place(frame)
        if frame.type == GET:
            self._wanted.append((frame.request_id, *REQUEST.unpack(frame.body)))
            channel.add_source(self)
        elif frame.type == LAG:
            channel.send(Outgoing(LAG, 0, struct.pack("<d", self._lag.p99_ms())))
        return None

    def on_payload(self, channel: Channel, frame: Frame, sink: Sink) -> None:
        self.verify(frame)
        channel.send(Outgoing(ACK, frame.request_id, b""))

    def on_cancel(self, channel: Channel, request_id: int) -> None:
        pass

    def on_lost(self, channel: Channel, error: Exception | None) -> None:
        pass


class ClientSide(Receiver):
    """Keeps a window of requests under way until all are answered."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena
        self._done: asyncio.Future[float]
        self._next = 0
        self._left = 0

    async def transfer(self, channel: Channel, kind: int, size: int, count: int) -> None:
        self._done = asyncio.get_running_loop().create_future()
        self._kind, self._size, self._next, self._left, self._count = kind, size, 0, count, count
        for _ in range(min(SIZES[size], count)):
            self._request(channel)
        await self._done

    async def server_lag(self, channel: Channel) -> float:
        self._done = asyncio.get_running_loop().create_future()
        channel.send(Outgoing(LAG, 0, b""))
        return await self._done

    def _request(self, channel: Channel) -> None:
        if self._next == self._count:
            return
        index, self._next = self._next, self._next + 1
        if self._kind == GET:
            channel.send(Outgoing(GET, index, REQUEST.pack(self._size, index)))
        else:
            view, total = self._arena.payload(self._size, index)
            channel.send(Outgoing(PUT, index, total, [view]))

    def _answered(self, channel: Channel) -> None:
        self._left -= 1
        if self._left:
            self._request(channel)
        else:
            self._done.set_result(0.0)

    def on_frame(self, channel: Channel, frame: Frame) -> Sink | None:
        if frame.type == DATA:
            return self.place(frame)
        if frame.type == ACK:
            self._answered(channel)
        elif frame.type == LAG:
            self._done.set_result(struct.unpack("<d", frame.body)[0])
        return None

    def on_payload(self, channel: Channel, frame: Frame, sink: Sink) -> None:
        self.verify(frame)
        self._answered(channel)

    def on_cancel(self, channel: Channel, request_id: int) -> None:
        pass

    def on_lost(self, channel: Channel, error: Exception | None) -> None:
        if error is not None and not self._done.done():
            self._done.set_exception(error)


# -- the raw socket


class Landing:
    """Memory for raw payload, in as many places as ours lands in: what is cached there is cached here."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def views(self, size: int, places: int) -> list[memoryview]:
        if len(self._memory) < size * places:
            self._memory = memoryview(bytearray(os.urandom(1 << 20) * -(-size * places // (1 << 20))))
        return [self._memory[at * size : (at + 1) * size] for at in range(places)]


def receive_raw(sock: socket.socket, views: Sequence[memoryview], count: int) -> None:
    for number in range(count):
        view, at = views[number % len(views)], 0
        while at < len(view):
            got = sock.recv_into(view[at:])
            if not got:
                raise ConnectionError("the raw peer left")
            at += got


def send_raw(sock: socket.socket, arena: Arena, size: int, count: int) -> None:
    views = arena.cut(size)
    for number in range(count):
        sock.sendall(views[number % len(views)])


def serve_raw(sock: socket.socket, arena: Arena) -> None:
    memory = Landing()
    while request := sock.recv(RAW.size, socket.MSG_WAITALL):
        kind, size, count, places = RAW.unpack(request)
        if kind == GET:
            send_raw(sock, arena, size, count)
        else:
            receive_raw(sock, memory.views(size, places), count)
            sock.sendall(b"+")
    sock.close()


class RawClient:
    """The client's half, one thread per connection."""

    def __init__(self, port: int, arena: Arena, clients: int) -> None:
        self._arena = arena
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(clients)]
        for sock in self._sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._memory = [Landing() for _ in self._sockets]
        self._threads = ThreadPoolExecutor(clients)

    def transfer(self, kind: int, size: int, count: int, places: int) -> None:
        def one(sock: socket.socket, memory: Landing) -> None:
            sock.sendall(RAW.pack(kind, size, count, places))
            if kind == GET:
                receive_raw(sock, memory.views(size, places), count)
            else:
                send_raw(sock, self._arena, size, count)
                sock.recv(1)

        list(self._threads.map(one, self._sockets, self._memory))

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._threads.shutdown()


# -- the server process


async def serve() -> None:
    arena, lag = Arena(), Lag()
    listener = await fabric_for("tcp://").listen("tcp://127.0.0.1:0", lambda channel: ServerSide(arena, lag))
    print(listener.uris[0], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the parent is gone


def serve_raw_forever() -> None:
    arena = Arena()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
        while True:
            sock, _ = listening.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=serve_raw, args=(sock, arena), daemon=True).start()


class Child:
    """This file in another process, until closed."""

    def __init__(self, role: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--role", role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.said = self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.communicate()


# -- measuring


@dataclass
class Row:
    fabric: str
    op: str
    payload_nbytes: int
    clients: int
    gb_per_s: float
    raw_gb_per_s: float
    ratio_to_raw: float
    lag_p99_ms: float


async def measure(uri: str, raw_port: int, arena: Arena, clients: int, args: argparse.Namespace) -> list[Row]:
    """All rows of one fabric and number of clients."""
    scheme = uri.partition(":")[0]
    lag = Lag()
    fabric = fabric_for(uri)
    listener = None
    if scheme == "loop":
        listener = await fabric.listen(uri, lambda channel: ServerSide(arena, lag))
    sides = [ClientSide(arena) for _ in range(clients)]
    channels = [await fabric.connect(uri, side, timeout=5) for side in sides]
    raw = RawClient(raw_port, arena, clients)
    rows = []
    for size in SIZES:
        count = (args.mib << 20) // size // clients
        nbytes = count * size * clients
        for op, kind in (("get", GET), ("put", PUT)):
            progress(f"{scheme}: {op} {size >> 10} KiB, {clients} client{'s' * (clients > 1)} ...")
            rates: list[tuple[float, float]] = []
            lags: list[float] = []
            for turn in range(args.rounds + 1):
                await asyncio.sleep(2 * LAG_PERIOD)  # the raw transfer held this loop up: not its fault
                await sides[0].server_lag(channels[0])
                lag.p99_ms()
                began = time.perf_counter()
                async with asyncio.TaskGroup() as group:
                    for side, channel in zip(sides, channels, strict=True):
                        group.create_task(side.transfer(channel, kind, size, count))
                ours = nbytes / (time.perf_counter() - began) / 1e9
                late = max(lag.p99_ms(), await sides[0].server_lag(channels[0]))
                began = time.perf_counter()
                raw.transfer(kind, size, count, SIZES[size])
                theirs = nbytes / (time.perf_counter() - began) / 1e9
                if turn:  # the first one warms up
                    rates.append((ours, theirs))
                    lags.append(late)
            ratio = statistics.median(ours / theirs for ours, theirs in rates)
            ours, theirs = (statistics.median(side) for side in zip(*rates, strict=True))
            rows.append(Row(scheme, op, size, clients, ours, theirs, ratio, statistics.median(lags)))
    raw.close()
    for channel in channels:
        await channel.close()
    if listener is not None:
        await listener.close()
    return rows


def progress(text: str) -> None:
    """One line that is overwritten on a terminal, one line each in a log."""
    print(f"\r\033[K{text}" if sys.stderr.isatty() else f"{text}\n", end="", file=sys.stderr, flush=True)


def show(rows: Sequence[Row]) -> None:
    table = Table(title="verified payload, GB/s (medians)")
    for name in ("fabric", "op", "payload", "clients", "GB/s", "raw socket", "ratio", "loop lag p99"):
        table.add_column(name, justify="left" if name in ("fabric", "op") else "right")
    for row in rows:
        table.add_row(
            row.fabric,
            row.op,
            f"{row.payload_nbytes >> 10} KiB",
            str(row.clients),
            f"{row.gb_per_s:.2f}",
            f"{row.raw_gb_per_s:.2f}",
            f"{row.ratio_to_raw:.2f}x",
            f"{row.lag_p99_ms:.1f} ms",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fabric", action="append", choices=["tcp", "loop"], help="default: all")
    parser.add_argument("--clients", action="append", type=int, help="default: 1 and 4")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=int, default=64, help="payload per round (default 64)")
    parser.add_argument("--quick", action="store_true", help="5 rounds of 32 MiB")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--role", choices=["serve", "raw"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "serve":
        asyncio.run(serve())
        return
    if args.role == "raw":
        serve_raw_forever()
        return
    if args.quick:
        args.rounds, args.mib = 5, 32
    children = {"tcp": Child("serve"), "raw": Child("raw")}
    uris = {"tcp": children["tcp"].said, "loop": "loop://throughput"}
    arena = Arena()
    rows: list[Row] = []
    try:
        for fabric in args.fabric or uris:
            for clients in args.clients or (1, 4):
                rows += asyncio.run(measure(uris[fabric], int(children["raw"].said), arena, clients, args))
    finally:
        progress("")
        for child in children.values():
            child.close()
    if args.json:
        print(json.dumps({"rounds": args.rounds, "rows": [asdict(row) for row in rows]}))
    else:
        show(rows)


if __name__ == "__main__":
    main()
