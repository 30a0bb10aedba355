"""How fast blocks go into and out of a real ``hypercache-serve`` over TCP, against a raw socket, in one run.

Codec ``raw``, caller-owned memory on both sides, every chunk verified against its stored CRC-32 inside the
timed region, stores acknowledged. The raw transfer (``sendall`` to ``recv_into``, two processes, no framing,
no sum) moves the same bytes one way, in turn with ours; a row gives medians over the rounds.

    python tools/cache_throughput.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from fabric_throughput import GET, PUT, Arena, Child, RawClient
from rich.console import Console
from rich.table import Table

import hypercache
from hypercache import ChunkBuffers, TenantKey
from hypercache.model import KVDtype, KVLayout, LayerGroup, ModelSpec, Part, RopeSpec

BLOCK = 16  # tokens
SLAB_MIB = 256


@dataclass(frozen=True)
class Case:
    """``blocks`` blocks a call, each of ``layers`` chunks of ``chunk`` bytes; ``window`` calls under way."""

    name: str
    layers: int
    chunk: int
    blocks: int
    window: int = 1
    clients: int = 1
    raw_size: int = 2 << 20

    @property
    def call_nbytes(self) -> int:
        return self.layers * self.chunk * self.blocks


CASES = (
    Case("2 MiB block, one at a time", 1, 2 << 20, 1),
    Case("2 MiB blocks, 8 a call, 2 calls under way", 1, 2 << 20, 8, window=2),
    Case("2 MiB block of 32 layers, one at a time", 32, 64 << 10, 1),
    Case("64 KiB chunks, 32 layers of 8 blocks a call, 2 calls under way", 32, 64 << 10, 8, window=2),
    Case("64 KiB blocks, 32 a call", 1, 64 << 10, 32, raw_size=64 << 10),
    Case("2 MiB block, 4 clients", 1, 2 << 20, 1, clients=4),
    Case("64 KiB blocks, 32 a call, 4 clients", 1, 64 << 10, 32, clients=4, raw_size=64 << 10),
)


@dataclass
class Row:
    case: str
    op: str
    clients: int
    gb_per_s: float
    raw_gb_per_s: float
    ratio_to_raw: float
    server_lag_p99_ms: float | None


def spec_of(case: Case) -> ModelSpec:
    dim = case.chunk // (BLOCK * 2 * 2)  # one head, K and V, two bytes an element
    layout = KVLayout("split", 1, (Part("k", dim), Part("v", dim)), KVDtype.FP16)
    group = LayerGroup(tuple(range(case.layers)), layout, RopeSpec("none", 1.0, dim))
    return ModelSpec(b"weights of the throughput tool", (group,), name="throughput")


def start_server() -> tuple[subprocess.Popen[str], str, str]:
    command = [sys.executable, "-m", "hypercache.cli.main", "serve", "--listen", "tcp://127.0.0.1:0"]
    command += ["--admin", "127.0.0.1:0", "--memory", "2GiB", "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    return process, ready["uris"][0], ready["admin"]


async def server_lag_ms(admin: str) -> float | None:
    """p99 of the server's event loop lag over the last minute."""
    host, _, port = admin.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    body = (await reader.read()).partition(b"\r\n\r\n")[2]
    writer.close()
    p99 = json.loads(body)["loop_lag"]["p99_s"]
    return None if p99 is None else p99 * 1e3


class Worker:
    """One client and its share of the slab: calls that put and get runs of blocks."""

    def __init__(self, client: hypercache.Client, case: Case, calls: int, seed: int) -> None:
        self.client = client
        self.calls = calls
        self.window = case.window
        rng = np.random.default_rng(seed)
        shape = (calls * case.blocks, case.chunk)
        self.source = [rng.integers(0, 256, shape, np.uint8) for _ in range(case.layers)]
        self.target = [np.zeros(shape, np.uint8) for _ in range(case.layers)]
        self.sources, self.targets, self.prompts = [], [], []
        for call in range(calls):
            rows = slice(call * case.blocks, (call + 1) * case.blocks)
            self.sources.append(ChunkBuffers([layer[rows] for layer in self.source]))
            self.targets.append(ChunkBuffers([layer[rows] for layer in self.target]))
            tokens = rng.integers(0, 50_000, case.blocks * BLOCK + 1)
            self.prompts.append(client.prompt(tokens))

    async def put(self) -> None:
        await self._windowed(self._put)

    async def get(self) -> None:
        await self._windowed(self._get)

    async def _windowed(self, call: Callable[[int], Awaitable[None]]) -> None:
        numbers = iter(range(self.calls))

        async def lane() -> None:
            for number in numbers:
                await call(number)

        await asyncio.gather(*(lane() for _ in range(self.window)))

    async def _put(self, number: int) -> None:
        result = await self.client.store(self.prompts[number], self.sources[number])
        if result.stored != result.blocks:
            raise RuntimeError(f"stored {dict(result.outcome)}: {result.reason}")

    async def _get(self, number: int) -> None:
        prompt = self.prompts[number]
        result = await self.client.fetch(prompt, self.targets[number])
        if result.hit_tokens != prompt.usable_blocks * BLOCK:
            raise RuntimeError(f"fetched {result.hit_tokens} tokens: {result.reason}")

    async def forget(self) -> None:
        await self.client.clear()

    def check(self) -> None:
        for source, target in zip(self.source, self.target, strict=True):
            if not np.array_equal(source, target):
                raise RuntimeError("fetched bytes are not the stored ones")
            target[...] = 0


async def measure(
    case: Case, uri: str, admin: str, raw_port: int, arena: Arena, args: argparse.Namespace
) -> list[Row]:
    spec, tenant = spec_of(case), TenantKey.public()
    calls = max(1, (args.mib << 20) // case.call_nbytes // case.clients)
    nbytes = calls * case.call_nbytes * case.clients
    workers = []
    for seed in range(case.clients):
        client = await hypercache.connect(
            uri, model=spec, codec="raw", tenant=tenant, salt=f"client {seed}", deadline=60
        )
        workers.append(Worker(client, case, calls, seed))
    raw = RawClient(raw_port, arena, case.clients)
    gc.collect()
    gc.freeze()  # as engines do once they have started
    rates: dict[str, list[tuple[float, float]]] = {"put": [], "get": []}
    for turn in range(args.rounds + 1):
        for op, kind in (("put", PUT), ("get", GET)):
            ours = nbytes / await timed([getattr(worker, op) for worker in workers]) / 1e9
            began = time.perf_counter()
            count = nbytes // case.clients // case.raw_size
            raw.transfer(kind, case.raw_size, count, count)  # as ours: each payload in a place of its own
            theirs = nbytes / (time.perf_counter() - began) / 1e9
            if turn:  # the first one warms up
                rates[op].append((ours, theirs))
        for worker in workers:
            worker.check()
            await worker.forget()
    lag = await server_lag_ms(admin)
    raw.close()
    for worker in workers:
        await worker.client.close()
    rows = []
    for op, pairs in rates.items():
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
        rows.append(Row(case.name, op, case.clients, ours, theirs, ratio, lag))
    return rows


async def timed(jobs: Sequence[Callable[[], Awaitable[None]]]) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(job() for job in jobs))
    return time.perf_counter() - began


def show(rows: Sequence[Row]) -> None:
    table = Table(title="blocks through hypercache-serve, codec raw, verified, GB/s (medians)")
    for name in ("case", "op", "GB/s", "raw socket", "ratio", "server loop lag p99"):
        table.add_column(name, justify="left" if name in ("case", "op") else "right")
    for row in rows:
        lag = "n/a" if row.server_lag_p99_ms is None else f"{row.server_lag_p99_ms:.1f} ms"
        cells = (f"{row.gb_per_s:.2f}", f"{row.raw_gb_per_s:.2f}", f"{row.ratio_to_raw:.2f}x", lag)
        table.add_row(row.case, row.op, *cells)
    Console().print(table)


async def run(args: argparse.Namespace) -> list[Row]:
    raw_server = Child("raw")
    process, uri, admin = start_server()
    try:
        arena = Arena()
        rows = []
        for case in CASES:
            print(f"{case.name} ...", file=sys.stderr, flush=True)
            rows += await measure(case, uri, admin, int(raw_server.said), arena, args)
        return rows
    finally:
        process.terminate()
        process.wait(15)
        raw_server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=SLAB_MIB, help=f"payload per round (default {SLAB_MIB})")
    parser.add_argument("--quick", action="store_true", help="5 rounds of 64 MiB")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.mib = 5, 64
    rows = asyncio.run(run(args))
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    else:
        show(rows)


if __name__ == "__main__":
    main()
