"""What a node counts, in Prometheus naming, on a registry of its own.

Label values that are known beforehand are there from the start, at 0: Prometheus' rate() does not see a
counter's first step if the counter appears with it.

Counting never fails a request: a bad value or an error inside the library is counted itself
(``hypercache_metrics_errors_total``) and goes no further. Label values are bounded: after
:data:`LABEL_LIMIT` different ones the rest is counted under "other". No token, tenant or key is a label.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any, get_args

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fabrics.errors import BadMagic, FrameChecksum, FrameError, FrameTooLarge, FrameVersionMismatch
from hypercache.errors import ProtocolError
from hypercache.protocol import ErrorCode
from hypercache.store.holds import Reason

LABEL_LIMIT = 32
LAG_INTERVAL_S = 0.05
LAG_WINDOW = 1200  # samples in the percentile of /status: one minute
_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)

OPERATIONS = ("open", "match", "locate", "fetch", "store", "contains", "hint", "evict", "clear")
OUTCOMES = (
    *((op, "ok") for op in OPERATIONS),
    ("fetch", "deadline"),
    ("fetch", "cancelled"),
)
LOOKUPS = (("match",), ("fetch",), ("fetch_modular",))  # the first two in their own context
SKIPPED = (*get_args(Reason), "corrupt", "aborted")
_FAULTS = (ProtocolError, FrameError, BadMagic, FrameVersionMismatch, FrameTooLarge, FrameChecksum)
PROTOCOL_ERRORS = ("NoHello", *(error.__name__ for error in _FAULTS))

#: What the numbers of the store mean (StoreStats), and those of the disk tier (:func:`flat`).
STORE_TEXTS = {
    "capacity": "bytes that arena and index may take together",
    "bytes_data": "bytes of the arena",
    "bytes_used": "bytes of the arena's slots that have an owner, rounding included",
    "bytes_stored": "bytes of visible blocks in the arena",
    "bytes_held": "bytes of slots that leases, writers and pins keep in place",
    "bytes_pinned": "bytes that clients have pinned, in memory or on disk",
    "bytes_pinned_limit": "bytes that clients may pin",
    "bytes_index": "bytes of the index, as charged",
    "bytes_index_limit": "bytes that the index may have; then blocks go, from whatever tier",
    "bytes_leases": "bytes that leases themselves take, beside the capacity",
    "largest_free_run": "bytes of the arena's longest run of free regions",
    "blocks": "visible blocks, in memory or on disk",
    "blocks_cold": "visible blocks that are on disk alone",
    "blocks_hidden": "blocks that are being written, wait for their prefix, or wait to be freed",
    "arena_per_block": "bytes of slot for each block that has one, rounding included",
    "index_per_block": "bytes of index for each block in it",
    "namespaces": "namespaces that have blocks",
    "pins": "runs of blocks that clients have pinned",
    "leases": "holds of readers",
    "reservations": "blocks that clients are writing",
    "committed_total": "blocks that became visible by a store",
    "cooled_total": "blocks that left memory while the disk has them",
    "evicted_total": "visible blocks that went for room and are nowhere any more",
    "removed_total": "visible blocks that clients removed, or that went with their namespace",
    "aborted_total": "writers that ended without a block",
    "stalled_total": "of these, writers that made no progress",
    "expired_total": "leases that reached their time limit",
}
L3_TEXTS = {
    "paused": "1 while the disk takes no blocks; /status and the log say why",
    "blocks_waiting": "blocks in memory that the disk is to get",
    "bytes_waiting": "bytes of memory that these take",
    "blocks_writing": "blocks that are being written to the disk now",
    "bytes_writing_limit": "bytes of records that are written at a time, unless one alone has more",
    "blocks_loading": "blocks that are being read from the disk now",
    "bytes_sending": "bytes of blocks that are sent as they lie on the disk",
    "bytes_sending_limit": "bytes that these may have; what is more comes through the arena",
    "reads_waiting": "pieces to be read from the disk that no thread has begun",
    "reads_waiting_limit": "pieces that may wait; then a fetch gets what memory has",
    "removals_owed": "removals that the disk has not taken note of; a restart may bring their blocks back",
    "removals_owed_limit": "removals that are kept until the disk takes them",
    "demoted_total": "blocks written to the disk",
    "promoted_total": "blocks brought back to memory for a fetch",
    "admitted_total": "of these, blocks that stay like others; the rest goes first again",
    "damaged_total": "blocks given up since their bytes, in memory or on disk, are not what was stored",
    "loads_failed_total": "blocks that a fetch wanted and the disk did not give",
    "reclaimed_total": "segments whose room was used again",
    "faults_total": "calls that the disk refused",
    "pauses_total": "times that the tier paused",
    "disk_bytes_files": "bytes of all files of the tier",
    "disk_capacity": "bytes that they may have",
    "disk_segments": "segment files",
    "disk_records": "records in them, dead ones and removals included",
    "disk_bytes_per_record": "bytes of files for each record",
    "disk_writes": "calls that wrote records",
    "disk_bytes_written": "bytes of records written",
    "disk_reads": "records read",
    "disk_bytes_read": "bytes of records read and found intact",
    "disk_damaged": "records that did not verify",
    "disk_refused": "blocks that could not be made a record",
    "disk_torn_bytes": "bytes cut off at start, behind the last intact record of a file",
    "disk_fsyncs": "times that written bytes were forced to the disk",
    "disk_quarantined": "files put aside as .bad, since nothing in them was intact",
    "disk_foreign": "files in the directory that are not ours, as found at start",
    "disk_unreadable": "segments that the disk did not let us read at start",
    "disk_unsealed": "segments that the disk did not let us mend at start",
    "disk_open_files": "files that the tier has open",
    "disk_open_files_limit": "files that it has open, unless a closed segment is still being read",
    "disk_restore_s": "seconds that reading the directory took at start",
    "disk_restored_blocks": "records of blocks found at start",
}
L3_TOTALS = frozenset(
    f"disk_{name}"
    for name in ("writes", "bytes_written", "reads", "bytes_read", "damaged", "refused", "fsyncs")
)

log = structlog.get_logger("hypercache.metrics")


class _Registry(CollectorRegistry):
    """Leaves out the ``_created`` sample of each counter: twice the lines, and nobody asks for them.

    The library can switch them off for the whole process only, which is not ours alone.
    """

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            family.samples = [one for one in family.samples if not one.name.endswith("_created")]
            yield family


class Count:
    """A monotone counter, with up to two labels of bounded variety. known: labels that start at 0."""

    def __init__(
        self,
        owner: Metrics,
        name: str,
        text: str,
        labels: tuple[str, ...] = (),
        known: Iterable[tuple[str, ...]] = (),
    ) -> None:
        self._owner = owner
        self._counter = Counter(f"hypercache_{name}", text, labels, registry=owner.registry)
        self._labels = _Labels(len(labels))
        for values in known:
            self._counter.labels(*self._labels.bound(values))

    def inc(self, *labels: str, by: float = 1) -> None:
        """Add ``by`` (>= 0)."""
        try:
            (self._counter.labels(*self._labels.bound(labels)) if labels else self._counter).inc(by)
        except Exception as error:
            self._owner.failed(error)


class _Labels:
    """Lets the first :data:`LABEL_LIMIT` values of each label through."""

    def __init__(self, count: int) -> None:
        self._seen: list[set[str]] = [set() for _ in range(count)]

    def bound(self, values: tuple[str, ...]) -> list[str]:
        return [self._one(seen, str(value)) for seen, value in zip(self._seen, values, strict=True)]

    @staticmethod
    def _one(seen: set[str], value: str) -> str:
        if value in seen:
            return value
        if len(seen) >= LABEL_LIMIT or len(value) > 64:
            return "other"
        seen.add(value)
        return value


class _Pulled(Collector):
    """Gauges and counters ``hypercache_PREFIX_NAME``, read from what a source says when somebody asks.

    What is named in ``totals`` or ends in ``_total`` only grows and becomes a counter. Values that are no
    numbers are passed over.
    """

    def __init__(self, owner: Metrics, prefix: str, texts: Mapping[str, str]) -> None:
        self._owner = owner
        self._prefix = prefix
        self._texts = texts
        self.source: Callable[[], Mapping[str, Any]] | None = None
        self.totals: frozenset[str] = frozenset()
        owner.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        if self.source is None:
            return
        try:
            values = dict(self.source())
        except Exception as error:
            self._owner.failed(error)
            return
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            rises = name in self.totals or name.endswith("_total")
            family = CounterMetricFamily if rises else GaugeMetricFamily
            text = self._texts.get(name, name.replace("_", " "))
            yield family(f"hypercache_{self._prefix}_{name}", text[0].upper() + text[1:] + ".", value)


def flat(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The disk tier's numbers (``Tiers.numbers``, empty without one) as /metrics has them: those of the
    directory as ``disk_*``, and ``paused`` 1 or 0 for the state, whose reason only /status tells."""
    if not numbers:
        return {}
    own = {name: value for name, value in numbers.items() if name not in ("state", "reason", "disk")}
    disk = {f"disk_{name}": value for name, value in numbers["disk"].items()}
    return {"paused": int(numbers["state"] == "paused"), **own, **disk}


class Metrics:
    """All counters of one node. Loop thread only, except for scraping."""

    def __init__(self) -> None:
        self.registry: CollectorRegistry = _Registry()
        ProcessCollector(registry=self.registry)
        build = Info("hypercache_build", "Which version runs.", registry=self.registry)
        build.info({"version": version("hypercache-llm")})
        self._errors = Counter(
            "hypercache_metrics_errors", "Wrong values or errors met while counting.", registry=self.registry
        )
        self._first_error = True
        self._requests = self._count("requests", "Requests ended.", ("op", "outcome"), OUTCOMES)
        self._refused = self._count("refused", "Requests refused.", ("code",), _one_label(ErrorCode))
        self._protocol_errors = self._count(
            "protocol_errors", "Connections closed for a fault.", ("kind",), _one_label(PROTOCOL_ERRORS)
        )
        self._asked = self._count("blocks_asked", "Blocks asked for: hit + missed.", ("op",), LOOKUPS)
        self._hit = self._count("blocks_hit", "Asked blocks that were usable.", ("op",), LOOKUPS)
        self._missed = self._count("blocks_missed", "Asked blocks that were not.", ("op",), LOOKUPS)
        self._stored = self._count("blocks_stored", "Blocks made visible by a store.")
        self._skipped = self._count(
            "blocks_skipped", "Offered blocks that were not stored.", ("reason",), _one_label(SKIPPED)
        )
        self._checksum_failures = self._count("checksum_failures", "Offered blocks with a wrong checksum.")
        self._received = self._count("received_bytes", "K/V bytes received by stores.")
        self._sent = self._count("sent_bytes", "K/V bytes sent by fetches.")
        self._modular_sent = self._count("modular_sent_bytes", "Of these, of blocks out of their context.")
        self._modular_asked = self._count("modular_matches", "Matches that looked for blocks at any token.")
        self._modular_found = self._count("modular_matches_found", "Of these, found a run of blocks.")
        self._modular_blocks = self._count("modular_blocks_found", "Blocks in the runs that matches found.")
        self._accepted = self._count("connections_accepted", "Data connections accepted.")
        self.connections = Gauge("hypercache_connections", "Open data connections.", registry=self.registry)
        self._lag = Histogram(
            "hypercache_loop_lag_seconds",
            "How much later than due the event loop ran a timer.",
            buckets=_LAG_BUCKETS,
            registry=self.registry,
        )
        self._recent_lag: deque[float] = deque(maxlen=LAG_WINDOW)
        self._store = _Pulled(self, "store", STORE_TEXTS)
        self._l3 = _Pulled(self, "l3", L3_TEXTS)
        self._l3.totals = L3_TOTALS

    def _count(
        self, name: str, text: str, labels: tuple[str, ...] = (), known: Iterable[tuple[str, ...]] = ()
    ) -> Count:
        return Count(self, name, text, labels, known)

    def request(self, op: str, outcome: str) -> None:
        """A request ended."""
        self._requests.inc(op, outcome)

    def refused(self, code: str) -> None:
        """A request was answered with a typed refusal."""
        self._refused.inc(code)

    def protocol_error(self, kind: str) -> None:
        """A connection is closed because of what the peer sent."""
        self._protocol_errors.inc(kind)

    def matched(self, *, asked: int, hit: int) -> None:
        """A match was answered."""
        self._looked_up("match", asked, hit)
        self.request("match", "ok")

    def located(self, *, asked: int, hit: int, probes: int, modular: int) -> None:
        """A locate was answered: ``hit`` of ``asked`` blocks in their context, and ``modular`` ones that were
        found by ``probes`` fingerprints."""
        self.request("locate", "ok")
        self._looked_up("match", asked, hit)
        self._modular_asked.inc(by=probes > 0)
        self._modular_found.inc(by=modular > 0)
        self._modular_blocks.inc(by=modular)

    def fetch_started(self, *, asked: int, hit: int, modular_asked: int = 0, modular_hit: int = 0) -> None:
        """A fetch found ``hit`` of ``asked`` blocks and will send them; likewise those of its chains."""
        self._looked_up("fetch", asked, hit)
        self._looked_up("fetch_modular", modular_asked, modular_hit)

    def fetch_finished(self, outcome: str, nbytes: int, modular_nbytes: int = 0) -> None:
        """A fetch ended after ``nbytes`` bytes of K/V, ``modular_nbytes`` of them out of context."""
        self.request("fetch", outcome)
        self._sent.inc(by=nbytes)
        self._modular_sent.inc(by=modular_nbytes)

    def store_finished(self, outcome: Mapping[str, int], nbytes: int) -> None:
        """A store ended: blocks by what became of them ("stored", "corrupt", "exists", ...)."""
        self.request("store", "ok")
        self._received.inc(by=nbytes)
        for how, blocks in outcome.items():
            if how == "stored":
                self._stored.inc(by=blocks)
            else:
                self._skipped.inc(how, by=blocks)
            if how == "corrupt":
                self._checksum_failures.inc(by=blocks)

    def connection_opened(self) -> None:
        self._accepted.inc()
        self.connections.inc()

    def connection_closed(self) -> None:
        self.connections.dec()

    def _looked_up(self, op: str, asked: int, hit: int) -> None:
        """Nothing but the error is counted unless ``0 <= hit <= asked``: the parts must add up."""
        if not 0 <= hit <= asked:
            self.failed(ValueError(f"a {op} of {asked} blocks cannot hit {hit}"))
            return
        self._asked.inc(op, by=asked)
        self._hit.inc(op, by=hit)
        self._missed.inc(op, by=asked - hit)

    def watch_store(self, stats: Callable[[], Mapping[str, Any]], *, totals: Iterable[str] = ()) -> None:
        """Export the numbers of ``stats()`` as ``hypercache_store_NAME``.

        They are read at each scrape. Names in ``totals``, and those in ``_total``, only grow and become
        counters.
        """
        self._store.totals = frozenset(totals)
        self._store.source = stats

    def watch_l3(self, numbers: Callable[[], Mapping[str, Any]]) -> None:
        """Export the numbers of a disk tier as ``hypercache_l3_NAME``, as long as ``numbers()`` has any."""
        self._l3.source = lambda: flat(numbers())

    def failed(self, error: Exception) -> None:
        """Count an error in counting; the first is logged, so that a broken call site can be found."""
        self._errors.inc()
        if self._first_error:
            self._first_error = False
            log.error("metrics_error", error=str(error), exc_info=error)

    def observe_lag(self, seconds: float) -> None:
        self._lag.observe(seconds)
        self._recent_lag.append(seconds)

    async def sample_lag(self) -> None:
        """Measure the event loop's lag until cancelled: a timer is due every 50 ms, how late does it run?"""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self.observe_lag(max(0.0, loop.time() - due))

    def lag(self) -> dict[str, float | int | None]:
        """Percentiles (nearest rank) and maximum of the last minute's lag in seconds; None: no sample."""
        ordered = sorted(self._recent_lag)

        def rank(share: float) -> float | None:
            return ordered[math.ceil(share * len(ordered)) - 1] if ordered else None

        return {"samples": len(ordered), "p50_s": rank(0.5), "p99_s": rank(0.99), "max_s": rank(1.0)}

    def snapshot(self) -> dict[str, float]:
        """Our own counters as /metrics has them: ``{'name{label="value"}': number}``. Not those of the
        store and of the disk tier."""
        return dict(self._samples())

    def _samples(self) -> Iterator[tuple[str, float]]:
        for family in self.registry.collect():
            if family.type != "counter" or not family.name.startswith("hypercache_"):
                continue
            if family.name.startswith(("hypercache_store_", "hypercache_l3_")):
                continue
            for sample in family.samples:
                labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
                yield sample.name + (f"{{{labels}}}" if labels else ""), sample.value


def _one_label(values: Iterable[str]) -> list[tuple[str, ...]]:
    return [(str(value),) for value in values]
