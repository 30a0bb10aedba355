"""One connected client: turns its frames into calls on the store and answers them.

Everything runs in the channel's callbacks, without tasks: a match is answered in the same loop
iteration in which it arrived. What a client gets wrong within the protocol is answered with ERROR and
the channel lives on; what breaks the protocol closes the channel and is counted.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fabrics import Channel, FabricError, Frame, Outgoing, Sink
from fabrics.errors import ChannelClosed, FrameError
from hypercache import protocol
from hypercache.errors import HyperCacheError, ProtocolError, SpecError, StoreFull, TooLarge
from hypercache.keys import BLOCK_SIZES, HASH_VERSION, SEAL_NBYTES, context_name, seal
from hypercache.protocol import ErrorCode, Op
from hypercache.server.context import Context
from hypercache.server.streams import FetchStream, PutSink, Raw, StoreStream
from hypercache.store import Lease, Namespace, NamespaceInfo, Run

AGENT = "hypercache-serve/0.1.0"
MAX_STREAMS = 256  # fetches and stores in flight on one channel
MAX_HANDLES = 256
MAX_OPEN_LAYERS = 1 << 20  # of all sessions' handles: about 100 MB
MIN_FRAME_BYTES = 64 << 10
LINGER_S = 10.0
PATIENCE = 0.6  # of a fetch's time is for the disk
HOT_BLOCKS = 512  # of one fetch are counted as used: about a third of a millisecond
_CODES: tuple[tuple[type[HyperCacheError], ErrorCode], ...] = (
    (SpecError, ErrorCode.SPEC),
    (TooLarge, ErrorCode.TOO_LARGE),
    (StoreFull, ErrorCode.BUSY),
)
_numbers = itertools.count(1)  # of connections, for the log


class _Refusal(Exception):
    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(eq=False, slots=True)
class _Loading:
    """A fetch whose answer waits for the disk, but no longer than until ``patience``: what memory has of it
    is to arrive before its deadline. asked: blocks of its causal run."""

    namespace: Namespace
    lease: Lease
    message: protocol.Fetch
    deadline: float
    patience: float
    asked: int


class Session:
    """A :class:`fabrics.Handler`. ``owner`` of its leases and reservations is the session itself."""

    def __init__(
        self, context: Context, channel: Channel, on_lost: Callable[[Session], None], *, full: bool = False
    ) -> None:
        self.context = context
        self.channel = channel
        self.log = context.log.bind(connection=next(_numbers), peer=channel.peer)
        self.full = full  # the node has as many connections as it may: say so at HELLO, serve nothing
        self.born = context.clock()
        self.greeted = False
        self.deaf = False  # the channel is being closed for a fault: what was sent behind it means nothing
        self.tenant_id = b""
        self._on_lost = on_lost
        self._handles: list[Namespace] = []
        self._fetches: dict[int, FetchStream] = {}
        self._stores: dict[int, StoreStream] = {}
        self._loading: dict[int, _Loading] = {}  # fetches that wait for the disk
        self._removing = 0  # removals that the disk is taking note of
        self._lingering: list[FetchStream] = []  # over, but the channel still sends from their memory
        self._refusals = 0

    @property
    def busy(self) -> bool:
        return bool(self._fetches or self._stores or self._loading or self._removing)

    # --- channel events

    def on_frame(self, channel: Channel, frame: Frame) -> Sink | None:
        if self.deaf:
            return None
        try:
            return self._take(channel, frame)
        except _Refusal as refusal:
            self._refuse(channel, frame.request_id, refusal.code, str(refusal))
            if not self.greeted:
                self._end(channel)
        except ProtocolError as error:
            self._violation(channel, frame.request_id, error)
        except HyperCacheError as error:
            code = next((code for kind, code in _CODES if isinstance(error, kind)), ErrorCode.INTERNAL)
            self._refuse(channel, frame.request_id, code, str(error))
        except FabricError as error:  # it takes no answers, or is gone already
            channel.abort(error)
        except Exception as error:
            self.log.exception("internal error, closing", request=frame.request_id, exc_info=error)
            self._violation(channel, frame.request_id, error, ErrorCode.INTERNAL, "internal error")
        return None

    def _take(self, channel: Channel, frame: Frame) -> Sink | None:
        """Everything is checked by type and size before a byte of the body is decoded."""
        most = protocol.REQUESTS.get(frame.type)
        if not self.greeted and frame.type != Op.HELLO:
            raise ProtocolError("the first frame must be HELLO")
        if most is None:
            if frame.type in protocol.BODIES:
                raise ProtocolError(f"{Op(frame.type).name} is not a request")
            raise _Refusal(ErrorCode.UNSUPPORTED, f"frame type {frame.type} is unknown to {AGENT}")
        if len(frame.body) > most:
            raise ProtocolError(f"{Op(frame.type).name} has {len(frame.body)} bytes, at most {most}")
        message = protocol.decode(frame.type, frame.body)
        if isinstance(message, protocol.Put):
            return self._put(frame, message)
        if frame.payload_nbytes:
            raise ProtocolError(f"{Op(frame.type).name} carries a payload of {frame.payload_nbytes} bytes")
        assert message is not None
        self._dispatch(channel, frame.request_id, message)
        return None

    def on_payload(self, channel: Channel, frame: Frame, sink: Sink) -> None:
        if isinstance(sink, PutSink):
            sink.stream.arrived(sink)
            self._finish_store(frame.request_id)

    def on_cancel(self, channel: Channel, request_id: int) -> None:
        loading = self._loading.pop(request_id, None)
        if loading is not None:
            self.context.store.release(loading.lease)
            self.context.metrics.request("fetch", "cancelled")
        fetch = self._fetches.get(request_id)
        if fetch is not None:
            channel.remove_source(fetch)
            fetch.cancel()
        store = self._stores.pop(request_id, None)
        if store is not None:
            channel.drop_sink(request_id)
            store.cancel()
            self._store_ended(store)

    def on_lost(self, channel: Channel, error: Exception | None) -> None:
        self._end_streams()
        self.context.open_layers -= sum(namespace.layers for namespace in self._handles)
        self._handles.clear()
        if isinstance(error, FrameError):
            self.context.metrics.protocol_error(type(error).__name__)
            self.log.warning("closed", reason=str(error))
        else:
            self.log.debug("closed", reason=str(error or "by the client"))
        self._on_lost(self)

    def expire(self, now: float, handshake_s: float) -> None:
        """Called now and then: ends what is past its deadline or died in the store."""
        channel = self.channel
        if channel.state != "open":
            return
        if not self.greeted and now > self.born + handshake_s:
            self.context.metrics.protocol_error("NoHello")
            channel.abort(ProtocolError(f"no HELLO within {handshake_s} s"))
            return
        for fetch in list(self._fetches.values()):
            if now > fetch.deadline:
                channel.add_source(fetch)  # its next frame is the error
        for request_id, loading in list(self._loading.items()):
            if now > loading.patience:
                self._loaded(channel, request_id, loading, {})  # with what there is in memory
        for fetch in [fetch for fetch in self._lingering if not fetch.lent]:
            self._lingering.remove(fetch)
        if any(now > fetch.ended_at + LINGER_S for fetch in self._lingering):
            channel.abort(
                ProtocolError(f"the peer took {LINGER_S} s and more over one frame of a fetch that is over")
            )
            return
        for request_id, store in list(self._stores.items()):
            store.drop_dead()
            if now > store.deadline:
                store.cancel()
            self._finish_store(request_id)

    def _end_streams(self) -> None:
        """All transfers end here and now; their memory is free as soon as the channel has let go of it."""
        self.context.store.drop_owner(self)  # all at once, so that it is done in steps
        self._loading.clear()
        for fetch in list(self._fetches.values()):
            self.channel.remove_source(fetch)
            fetch.cancel()
        for request_id, store in list(self._stores.items()):
            self.channel.drop_sink(request_id)
            store.lost()
            self._store_ended(store)
        self._stores.clear()

    def _end(self, channel: Channel) -> None:
        """The peer has broken the protocol, or can never be served: hear no more, end what runs, hang up."""
        self.deaf = True
        self._end_streams()
        channel.hang_up()  # what was said last still goes out

    # --- requests

    def _dispatch(self, channel: Channel, request_id: int, message: protocol.Message) -> None:
        if isinstance(message, protocol.Hello):
            return self._hello(channel, request_id, message)
        match message:
            case protocol.Open():
                self._open(channel, request_id, message)
            case protocol.Match():
                self._match(channel, request_id, message)
            case protocol.Locate():
                self._locate(channel, request_id, message)
            case protocol.Fetch():
                self._fetch(channel, request_id, message)
            case protocol.Store():
                self._store(channel, request_id, message)
            case protocol.Contains():
                namespace, digests = self._request(message.handle, message.digests)
                present = self.context.store.contains(namespace, digests)
                self.context.metrics.request("contains", "ok")
                self._answer(channel, request_id, protocol.Contained(bytes(present)))
            case protocol.Evict():
                self._evict(channel, request_id, message)
            case protocol.Hint():
                self._hint(channel, request_id, message)
            case protocol.Clear():
                self._clear(channel, request_id, message)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not a request")
        return None

    def _hello(self, channel: Channel, request_id: int, hello: protocol.Hello) -> None:
        if self.greeted:
            raise ProtocolError("HELLO twice on one channel")
        if not hello.lowest <= protocol.VERSION <= hello.highest:
            raise _Refusal(
                ErrorCode.VERSION,
                f"{AGENT} speaks protocol {protocol.VERSION}, the client {hello.lowest}..{hello.highest}; "
                "upgrade the older side",
            )
        if hello.hash_version != HASH_VERSION:
            raise _Refusal(
                ErrorCode.HASH_VERSION,
                f"{AGENT} keys blocks by hash version {HASH_VERSION}, the client by {hello.hash_version}: "
                "no block would ever be found; upgrade the older side",
            )
        if protocol.CHECKSUM not in hello.checksums:
            raise _Refusal(
                ErrorCode.CHECKSUM, f"{AGENT} needs {protocol.CHECKSUM}, the client has {hello.checksums}"
            )
        if len(hello.tenant_id) != 16:
            raise ProtocolError(f"tenant id of {len(hello.tenant_id)} bytes, must be 16")
        if self.context.draining:
            raise _Refusal(ErrorCode.DRAINING, "the server is shutting down")
        if self.full:
            raise _Refusal(ErrorCode.BUSY, "the server has as many connections as max_connections allows")
        self.greeted = True
        channel.welcome()  # no stranger any more: bodies of all sizes are taken
        self.tenant_id = hello.tenant_id
        self._answer(
            channel,
            request_id,
            protocol.HelloOk(
                protocol.VERSION,
                AGENT,
                protocol.CHECKSUM,
                protocol.CODECS,
                protocol.MAX_BLOCKS,
                self.context.max_payload,
            ),
        )

    def _open(self, channel: Channel, request_id: int, message: protocol.Open) -> None:
        for codec in (message.codec, message.below or message.codec):
            if codec not in protocol.CODECS:
                raise _Refusal(ErrorCode.CODEC, f"codec {codec[:32]!r} is unknown; known: {protocol.CODECS}")
        if message.block_size not in BLOCK_SIZES:
            allowed = " or ".join(map(str, BLOCK_SIZES))
            raise _Refusal(ErrorCode.SPEC, f"block size {message.block_size} is not {allowed} tokens")
        chunks = message.chunk_nbytes
        if not 0 < len(chunks) <= protocol.MAX_LAYERS:
            raise _Refusal(ErrorCode.SPEC, f"{len(chunks)} layers, allowed are 1..{protocol.MAX_LAYERS}")
        largest = min(protocol.MAX_CHUNK_BYTES, self.context.max_payload)
        if not all(0 < size <= largest for size in chunks):
            raise _Refusal(
                ErrorCode.TOO_LARGE,
                f"layer chunks must have 1..{largest} bytes, got {min(chunks)}..{max(chunks)}; raise "
                "max_frame_payload on the server, or take a smaller block or codec",
            )
        if not 16 <= len(message.digest) <= 32 or len(message.label) > protocol.MAX_LABEL:
            raise ProtocolError("OPEN with a malformed digest or label")
        if len(self._handles) >= MAX_HANDLES:
            raise _Refusal(ErrorCode.BUSY, f"more than {MAX_HANDLES} namespaces on one channel")
        if self.context.open_layers + len(chunks) > MAX_OPEN_LAYERS:
            raise _Refusal(ErrorCode.BUSY, "clients of this server have too many namespaces open")
        namespace = self.context.store.open_namespace(
            NamespaceInfo(
                digest=message.digest,
                chunk_nbytes=tuple(chunks),
                block_size=message.block_size,
                codec=message.codec,
                label=message.label,
                layouts=protocol.read_layouts(message),
                below=message.below,
            )
        )
        self.context.open_layers += len(chunks)
        if self.context.tiers is not None:
            self.context.tiers.reads.opened(namespace.info)
        self._handles.append(namespace)
        blocks = self.context.store.count(namespace)
        self.log.info("namespace", label=message.label, blocks=blocks)
        self.context.metrics.request("open", "ok")
        others = self.context.others(self.tenant_id, message.digest)
        self._answer(channel, request_id, protocol.Opened(len(self._handles) - 1, blocks, others))

    def _match(self, channel: Channel, request_id: int, message: protocol.Match) -> None:
        namespace, digests = self._request(message.handle, message.digests)
        hit = self.context.store.match(namespace, digests, self.context.clock())
        self.context.metrics.matched(asked=len(digests), hit=hit)
        self._answer(channel, request_id, protocol.Matched(hit))

    def _locate(self, channel: Channel, request_id: int, message: protocol.Locate) -> None:
        namespace, digests = self._request(message.handle, message.digests, least=0)
        probes = protocol.count_probes(message)
        fingerprints = np.frombuffer(message.fingerprints, "<u8").astype(np.uint64, copy=False)
        now = self.context.clock()
        found = self.context.store.locate(namespace, digests, message.first, fingerprints, message.least, now)
        self.context.metrics.located(
            asked=len(digests),
            hit=found.hit,
            probes=probes,
            modular=sum([len(run.blocks) for run in found.runs]),
        )
        self._answer(channel, request_id, protocol.Located(found.hit, _spans(found.runs), found.complete))

    def _fetch(self, channel: Channel, request_id: int, message: protocol.Fetch) -> None:
        namespace, digests = self._request(message.handle, message.digests, least=0)
        protocol.check_chains(message)
        first, stop = message.layers
        if not 0 <= first < stop <= len(namespace.info.chunk_nbytes):
            raise _Refusal(
                ErrorCode.SPEC, f"layers {first}..{stop}, there are {len(namespace.info.chunk_nbytes)}"
            )
        self._admit(request_id)
        now = self.context.clock()
        seconds = min(max(message.deadline_ms, 1) / 1000, self.context.lease_limit_s)
        lease = self.context.store.lease(namespace, digests, self, seconds, now, message.chains)
        patience = now + PATIENCE * seconds
        loading = _Loading(namespace, lease, message, now + seconds, patience, len(digests))
        tiers = self.context.tiers
        if tiers is None or lease.ready:
            self._send(channel, request_id, loading, {})
            return
        self._loading[request_id] = loading
        as_it_lies = message.below and namespace.info.transcoded
        tiers.reads.fetch(lease, as_it_lies, partial(self._loaded, channel, request_id, loading))

    def _loaded(self, channel: Channel, request_id: int, loading: _Loading, raw: Raw) -> None:
        """What there is of a fetch's blocks lies in memory now, ``raw`` of it as it lies on disk."""
        if self._loading.get(request_id) is not loading:
            return  # cancelled, too late, or the client is gone
        del self._loading[request_id]
        try:
            self._send(channel, request_id, loading, raw)
        except FabricError as error:
            channel.abort(error)

    def _send(self, channel: Channel, request_id: int, loading: _Loading, raw: Raw) -> None:
        lease, message, namespace = loading.lease, loading.message, loading.namespace
        lease.settle(raw)
        hit, *chains = lease.counts
        self.context.metrics.fetch_started(
            asked=loading.asked,
            hit=hit,
            modular_asked=sum([count for _, count in message.chains]),
            modular_hit=sum(chains),
        )
        label, clock = namespace.info.label, self.context.clock()
        for block in lease.blocks[:HOT_BLOCKS]:
            self.context.hot.use(label, block.digest, 1, clock)
        self._answer(channel, request_id, protocol.Fetching(hit, tuple(chains)))
        stream = FetchStream(
            self.context.store,
            namespace,
            lease,
            request_id,
            layers=range(*message.layers) if lease.blocks else range(0),
            frame_bytes=min(
                max(message.frame_bytes, MIN_FRAME_BYTES), protocol.MAX_FRAME_BYTES, self.context.max_payload
            ),
            deadline=loading.deadline,
            clock=self.context.clock,
            finished=self._fetch_finished,
            raw=raw,
        )
        self._fetches[request_id] = stream
        channel.add_source(stream)

    def _fetch_finished(self, stream: FetchStream) -> None:
        self._fetches.pop(stream.request_id, None)
        if stream.lent:
            self._lingering.append(stream)
        self.context.metrics.fetch_finished(stream.outcome, stream.bytes_sent, stream.modular_bytes_sent)
        self.log.debug("fetch", request=stream.request_id, outcome=stream.outcome, nbytes=stream.bytes_sent)

    def _store(self, channel: Channel, request_id: int, message: protocol.Store) -> None:
        namespace = self._namespace(message.handle)
        digests = protocol.split_digests(message.digests, protocol.MAX_STORE_BLOCKS)
        marks = protocol.split_marks(message.marks, len(digests))
        if message.parent is not None and len(message.parent) != protocol.DIGEST_BYTES:
            raise ProtocolError(f"parent digest of {len(message.parent)} bytes")
        self._admit(request_id)
        now = self.context.clock()
        entries = self.context.store.reserve(namespace, message.parent, digests, self, now, marks)
        stream = StoreStream(
            self.context.store,
            namespace,
            entries,
            request_id,
            deadline=now + min(max(message.deadline_ms, 1) / 1000, self.context.lease_limit_s),
            clock=self.context.clock,
            discard=self.context.discard,
        )
        self._stores[request_id] = stream
        self.context.remember(self.tenant_id, namespace.info.digest, namespace.info.label)
        if not stream.done:
            self._answer(channel, request_id, protocol.Storing(stream.wanted()))
        self._finish_store(request_id)

    def _hint(self, channel: Channel, request_id: int, message: protocol.Hint) -> None:
        """Pins belong to the tenant: they outlive the connection that asked for them."""
        namespace, digests = self._request(message.handle, message.digests)
        store, now = self.context.store, self.context.clock()
        if protocol.tells_use(message):
            blocks = store.hint(namespace, digests, message.steps, message.priority, now)
        else:
            present = store.contains(namespace, digests)
            blocks = next((at for at, there in enumerate(present) if not there), len(present))
        pinned, seconds = 0, 0.0
        if message.pin_ms > 0:
            pinned, seconds = store.pin_run(namespace, digests, self.tenant_id, message.pin_ms / 1000, now)
        elif message.pin_ms:
            pinned = store.unpin_run(namespace, digests, self.tenant_id)
        self.context.metrics.request("hint", "ok")
        self._answer(channel, request_id, protocol.Hinted(blocks, pinned, int(seconds * 1000)))

    def _evict(self, channel: Channel, request_id: int, message: protocol.Evict) -> None:
        namespace, digests = self._request(message.handle, message.digests)
        self._admit(request_id)
        # What is asked for may be on the disk although nobody knows of it any more.
        recorded = list(digests) if self.context.tiers else None
        removed = self.context.store.evict(namespace, digests, recorded)
        self.context.metrics.request("evict", "ok")
        answer = protocol.Removed(removed, removed * sum(namespace.info.chunk_nbytes))
        self._remove(channel, request_id, namespace, recorded, answer)

    def _clear(self, channel: Channel, request_id: int, message: protocol.Clear) -> None:
        namespace = self._namespace(message.handle)
        self._admit(request_id)
        answer = protocol.Removed(*self.context.store.clear(namespace))
        self.context.metrics.request("clear", "ok")
        self._remove(channel, request_id, namespace, None, answer)

    def _remove(
        self,
        channel: Channel,
        request_id: int,
        namespace: Namespace,
        digests: list[bytes] | None,
        answer: protocol.Removed,
    ) -> None:
        """Answer when blocks that are gone cannot come back with a restart either."""
        if self.context.tiers is None:
            self._answer(channel, request_id, answer)
            return
        self._removing += 1

        def done(problem: str) -> None:
            self._removing -= 1
            if problem:
                self._refuse(channel, request_id, ErrorCode.BUSY, problem)
                return
            with contextlib.suppress(FabricError):  # it is gone, and so is who asked
                self._answer(channel, request_id, answer)

        self.context.tiers.remove(namespace.info.digest, digests, done)

    def _put(self, frame: Frame, message: protocol.Put) -> Sink | None:
        stream = self._stores.get(frame.request_id)
        if stream is None:  # refused, finished or cancelled while this was on its way
            return None
        return stream.put(message, frame.payload_nbytes)

    def _finish_store(self, request_id: int) -> None:
        stream = self._stores.get(request_id)
        if stream is None or not stream.done:
            return
        del self._stores[request_id]
        self.channel.drop_sink(request_id)  # a frame may still be landing for what ended otherwise
        self._store_ended(stream)
        self._answer(self.channel, request_id, protocol.Stored(dict(stream.outcome)))

    def _store_ended(self, stream: StoreStream) -> None:
        self.context.metrics.store_finished(stream.outcome, stream.bytes_received)
        self.log.debug(
            "store", request=stream.request_id, outcome=dict(stream.outcome), nbytes=stream.bytes_received
        )

    # --- helpers

    def _namespace(self, handle: int) -> Namespace:
        if not 0 <= handle < len(self._handles):
            raise _Refusal(ErrorCode.HANDLE, f"namespace handle {handle} is not open on this channel")
        return self._handles[handle]

    def _request(self, handle: int, joined: bytes, least: int = 1) -> tuple[Namespace, list[bytes]]:
        return self._namespace(handle), protocol.split_digests(joined, least=least)

    def _admit(self, request_id: int) -> None:
        if request_id in self._fetches or request_id in self._stores or request_id in self._loading:
            raise ProtocolError(f"request id {request_id} is already in use")
        if self.context.draining:
            raise _Refusal(ErrorCode.DRAINING, "the server is shutting down")
        streams = len(self._fetches) + len(self._stores) + len(self._loading) + self._removing
        if streams >= MAX_STREAMS:
            raise _Refusal(ErrorCode.BUSY, f"more than {MAX_STREAMS} transfers in flight on one channel")

    def _answer(self, channel: Channel, request_id: int, message: protocol.Message) -> None:
        op, body = protocol.encode(message)
        channel.send(Outgoing(op, request_id, body))

    def _refuse(self, channel: Channel, request_id: int, code: ErrorCode, message: str) -> None:
        self.context.metrics.refused(code)
        self._refusals += 1
        if str(self._refusals).strip("0") == "1":  # the 1st, 10th, 100th ...: a flood of them is one fault
            self.log.info("refused", request=request_id, code=str(code), reason=message, count=self._refusals)
        try:
            self._answer(channel, request_id, protocol.Error(str(code), message))
        except ChannelClosed:
            return

    def _violation(
        self,
        channel: Channel,
        request_id: int,
        error: Exception,
        code: ErrorCode = ErrorCode.MALFORMED,
        message: str = "",
    ) -> None:
        self.context.metrics.protocol_error(type(error).__name__)
        self.log.warning("protocol violation, closing", request=request_id, reason=message or str(error))
        with contextlib.suppress(ChannelClosed):
            self._answer(channel, request_id, protocol.Error(str(code), message or str(error)))
        self._end(channel)


def _spans(runs: Sequence[Run]) -> tuple[protocol.Span, ...]:
    """Runs of stored blocks, as they are answered: sealed all at once, as thousands one by one cost more."""
    blocks = [block for run in runs for block in run.blocks]
    seals = seal([block.modular for block in blocks], [block.digest for block in blocks])
    spans: list[protocol.Span] = []
    at = 0
    for run in runs:
        end = at + len(run.blocks) * SEAL_NBYTES
        context = run.blocks[0].context
        spans.append(protocol.Span(run.at, run.source, context and context_name(context), seals[at:end]))
        at = end
    return tuple(spans)


__all__ = ["AGENT", "Session"]
