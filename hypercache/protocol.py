"""The messages between client and server. Versioned, bounded, no I/O.

Bodies are MessagePack arrays (msgspec structs, ``array_like``): a newer peer may append fields, an older
one ignores them. The frame type is the :class:`Op`; the frame's request id ties every answer to its
question for ever. Digests travel concatenated (16 bytes each), fingerprints too (8 bytes each, little
endian), checksums as one u32 a chunk.

::

    client                                   server
    HELLO  versions, tenant              ->
                                         <-  HELLO_OK  version, limits      (or ERROR, then goodbye)
    OPEN   namespace, geometry, codecs   ->
                                         <-  OPENED  handle
    MATCH  digests                       ->
                                         <-  MATCHED  blocks
    LOCATE  digests, fingerprints        ->
                                         <-  LOCATED  blocks, spans         (as MATCHED, and what lies behind)
    FETCH  digests, chains               ->
                                         <-  FETCHING  blocks, chains       (what is leased, in this order)
                                         <-  LAYERS  runs, crcs + payload   (layer after layer)
                                         <-  FETCHED
    STORE  parent, digests, marks        ->
    PUT    runs, crcs + payload          ->                                 (does not wait for STORING)
                                         <-  STORING  runs still wanted
                                         <-  STORED  outcome of each block
    HINT   digests, steps, priority, pin ->
                                         <-  HINTED  blocks, pinned
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from hypercache.errors import ProtocolError, SpecError
from hypercache.model import KVDtype, KVLayout, Part

VERSION = 1
DIGEST_BYTES = 16
FINGERPRINT_BYTES = 8
MARK_BYTES = FINGERPRINT_BYTES + DIGEST_BYTES  # of a stored block: its fingerprint, its modular digest
CHECKSUM = "crc32"  # see hypercache.checksum; named in the handshake so that another can follow
CODECS = ("raw", "fp8", "int8", "int4", "int4-plain")

MAX_BLOCKS = 1 << 17  # a request: 2 million tokens at 16 a block, 2 MiB of digests
MAX_PROBES = 1 << 17  # fingerprints a LOCATE: 1 MiB
MAX_CHAINS = 1 << 12  # a FETCH: more runs than one LOCATE finds
MAX_TOKENS = 1 << 31  # no prompt is longer: what a position may be
MAX_HINT_BLOCKS = 1 << 12  # a HINT of their next use takes 1 to 3 us a block; one that only pins takes less
MAX_STEPS = 10_000  # until blocks are used again: what is so far off is as good as never
MAX_PRIORITY = 3  # and -3 the least
MAX_STORE_BLOCKS = 1024  # a STORE: reserving takes about 10 us a block, and nobody else is served meanwhile
MAX_LAYERS = 1024
MAX_LAYOUTS = 512  # different ones; models have one to three, searched ones a few dozen
MAX_DIM = 1 << 20  # heads of a layer, elements of a head: that their product stays a small number
MAX_CHUNK_BYTES = 64 << 20
MAX_FRAME_CHUNKS = 512
MAX_FRAME_BYTES = (
    1 << 20
)  # of payload, unless a single chunk is larger: what one peer can hold up others with
MAX_LABEL = 256


class Op(enum.IntEnum):
    """Frame types. Numbers are never reused."""

    HELLO = 1
    HELLO_OK = 2
    OPEN = 3
    OPENED = 4
    MATCH = 5
    MATCHED = 6
    FETCH = 7
    FETCHING = 8
    LAYERS = 9
    FETCHED = 10
    STORE = 11
    STORING = 12
    PUT = 13
    STORED = 14
    CONTAINS = 15
    CONTAINED = 16
    EVICT = 17
    CLEAR = 18
    REMOVED = 19
    ERROR = 20
    LOCATE = 21
    LOCATED = 22
    HINT = 23
    HINTED = 24


class ErrorCode(enum.StrEnum):
    VERSION = "version"  # no common protocol version
    HASH_VERSION = "hash_version"  # digests are made in another way: nothing would ever hit
    CHECKSUM = "checksum"  # no common checksum
    CODEC = "codec"  # the server does not know the codec
    SPEC = "spec"  # geometry disagrees with what is stored under this namespace
    HANDLE = "handle"  # namespace handle is not open on this channel
    TOO_LARGE = "too_large"
    BUSY = "busy"  # too many requests or connections
    DRAINING = "draining"
    DEADLINE = "deadline"
    MALFORMED = "malformed"
    UNSUPPORTED = "unsupported"
    INTERNAL = "internal"


Run = tuple[int, int, int]  # layer, first block, number of blocks


class Message(msgspec.Struct, array_like=True, gc=False):
    """Base of all bodies."""


class Hello(Message):
    lowest: int
    highest: int
    agent: str
    hash_version: int
    checksums: tuple[str, ...]
    tenant: str
    tenant_id: bytes


class HelloOk(Message):
    version: int
    agent: str
    checksum: str
    codecs: tuple[str, ...]
    max_blocks: int
    max_payload: int


class Layout(Message):
    """A :class:`hypercache.model.KVLayout`. ``dims``: of its parts, whose names follow from the kind."""

    kind: str
    heads: int
    dims: tuple[int, ...]
    dtype: str


class Open(Message):
    """``chunk_nbytes``: encoded bytes of one layer chunk, per layer. ``label`` is for people.

    layouts: how K/V lie in the chunks, each different one once; none: nobody but the client needs to know.
    layer_layouts: which of them each layer has. below: the codec that blocks have on disk; "" keeps them as
    they came, and any other needs layouts.
    """

    digest: bytes
    block_size: int
    codec: str
    chunk_nbytes: tuple[int, ...]
    label: str
    layouts: tuple[Layout, ...] = ()
    layer_layouts: tuple[int, ...] = ()
    below: str = ""


class Opened(Message):
    """``others``: labels of this tenant's other namespaces, to explain an empty one."""

    handle: int
    blocks: int
    others: tuple[str, ...]


class Match(Message):
    handle: int
    digests: bytes


class Matched(Message):
    blocks: int


class Locate(Message):
    """Where what a prompt needs is stored: its prefix, and blocks of other prompts anywhere behind that.

    digests: causal, of the prompt's blocks; may be empty where that part is known. fingerprints: of the
    windows that begin at tokens ``first``, ``first + 1``, ..., 0 where none is looked for. least: blocks
    that a run must have.
    """

    handle: int
    digests: bytes
    first: int
    fingerprints: bytes
    least: int


class Span(Message):
    """A run of stored blocks that hold what the prompt has from token ``at`` on.

    source: the token at which it begins in the prompt that it was stored with. context: the name of the block
    before them there (``keys.context_name``), empty at the start of that prompt. seals: the causal digests of
    its blocks there, for who knows their tokens (``keys.seal``): a digest in clear is the right to read.
    """

    at: int
    source: int
    context: bytes
    seals: bytes


class Located(Message):
    """``blocks``: as in MATCHED. ``spans``: behind those, ascending, none overlaps another. ``complete``:
    whether the server looked at everything; it spends a bounded time."""

    blocks: int
    spans: tuple[Span, ...]
    complete: bool


class Fetch(Message):
    """``layers``: first and stop. ``deadline_ms`` from arrival. ``frame_bytes``: preferred payload size.

    ``chains``: further runs, each the causal digest of its last block and how many blocks it has. The blocks
    of ``digests`` travel first, then those of each chain. ``below``: what is on disk may come as it lies.
    """

    handle: int
    digests: bytes
    layers: tuple[int, int]
    deadline_ms: int
    frame_bytes: int
    chains: tuple[tuple[bytes, int], ...] = ()
    below: bool = False


class Fetching(Message):
    """``blocks``: of the run. ``chains``: blocks of each chain, all that were asked for or none."""

    blocks: int
    chains: tuple[int, ...] = ()


class Layers(Message):
    """Payload: the chunks of ``runs``, in order, each run (layer, first block, count). ``crcs``: one a chunk.

    Chunks come layer after layer, block after block, each once. A frame may end and begin anywhere.
    ``below``: all of this one are in the namespace's codec on disk; only if FETCH allows it.
    """

    runs: tuple[Run, ...]
    crcs: tuple[int, ...]
    below: bool = False


class Fetched(Message):
    blocks: int


class Store(Message):
    """``parent``: digest of the block before the first, None at the start of a prompt. ``marks``: one for
    each digest, or none at all: then the blocks are not found out of their context."""

    handle: int
    parent: bytes | None
    digests: bytes
    deadline_ms: int
    marks: bytes = b""


class Storing(Message):
    """``wanted``: (first, count) runs, relative to the request."""

    wanted: tuple[tuple[int, int], ...]


class Put(Message):
    """As :class:`Layers`, in any order; blocks count from the first that the request names."""

    runs: tuple[Run, ...]
    crcs: tuple[int, ...]


class Stored(Message):
    """How many blocks ended how: stored, exists, pending, orphan, full, too_large, corrupt, aborted."""

    outcome: dict[str, int]


class Contains(Message):
    handle: int
    digests: bytes


class Contained(Message):
    present: bytes  # one byte a digest, 0 or 1


class Evict(Message):
    handle: int
    digests: bytes


class Clear(Message):
    handle: int


class Hint(Message):
    """What the client knows of the stored run of ``digests``, in its own context.

    steps: until it is used again, 0..MAX_STEPS; -1: nobody knows. priority: -MAX_PRIORITY..MAX_PRIORITY, 0 is
    none. pin_ms: keep the run for so long, whoever needs the room; -1: no more; 0: no word of that. A HINT
    that pins or unpins, and has neither steps nor priority, leaves what was said of them before.
    """

    handle: int
    digests: bytes
    steps: int = -1
    priority: int = 0
    pin_ms: int = 0


class Hinted(Message):
    """blocks: of the run that are stored. pinned: blocks that are kept for ``pin_ms``, from the first on;
    where a pin was to end, the blocks that it kept."""

    blocks: int
    pinned: int
    pin_ms: int


class Removed(Message):
    blocks: int
    nbytes: int


class Error(Message):
    code: str
    message: str


BODIES: dict[Op, type[Message]] = {
    Op.HELLO: Hello,
    Op.HELLO_OK: HelloOk,
    Op.OPEN: Open,
    Op.OPENED: Opened,
    Op.MATCH: Match,
    Op.MATCHED: Matched,
    Op.FETCH: Fetch,
    Op.FETCHING: Fetching,
    Op.LAYERS: Layers,
    Op.FETCHED: Fetched,
    Op.STORE: Store,
    Op.STORING: Storing,
    Op.PUT: Put,
    Op.STORED: Stored,
    Op.CONTAINS: Contains,
    Op.CONTAINED: Contained,
    Op.EVICT: Evict,
    Op.CLEAR: Clear,
    Op.REMOVED: Removed,
    Op.ERROR: Error,
    Op.LOCATE: Locate,
    Op.LOCATED: Located,
    Op.HINT: Hint,
    Op.HINTED: Hinted,
}
#: What a client may send, and the largest body each can have. Checked before anything is decoded.
REQUESTS: dict[int, int] = {
    Op.HELLO: 4 << 10,
    Op.OPEN: 48 << 10,
    Op.MATCH: MAX_BLOCKS * DIGEST_BYTES + 64,
    Op.LOCATE: MAX_BLOCKS * DIGEST_BYTES + MAX_PROBES * FINGERPRINT_BYTES + 64,
    Op.FETCH: MAX_BLOCKS * DIGEST_BYTES + MAX_CHAINS * (DIGEST_BYTES + 8) + 64,
    Op.STORE: MAX_STORE_BLOCKS * (DIGEST_BYTES + MARK_BYTES) + 128,
    Op.PUT: MAX_FRAME_CHUNKS * 32 + 64,
    Op.CONTAINS: MAX_BLOCKS * DIGEST_BYTES + 64,
    Op.EVICT: MAX_BLOCKS * DIGEST_BYTES + 64,
    Op.CLEAR: 64,
    Op.HINT: MAX_BLOCKS * DIGEST_BYTES + 64,
}
#: The largest body of each answer, likewise.
ANSWERS: dict[int, int] = {
    Op.HELLO_OK: 4 << 10,
    Op.OPENED: 16 << 10,
    Op.MATCHED: 64,
    # Two digests a block, of which each has 8 tokens or more; and what else a span has.
    Op.LOCATED: MAX_PROBES // 8 * 2 * DIGEST_BYTES + MAX_CHAINS * (DIGEST_BYTES + 32) + 64,
    Op.FETCHING: MAX_CHAINS * 8 + 64,
    Op.LAYERS: MAX_FRAME_CHUNKS * 32 + 64,
    Op.FETCHED: 64,
    Op.STORING: MAX_STORE_BLOCKS * 16 + 64,
    Op.STORED: 4 << 10,
    Op.CONTAINED: MAX_BLOCKS + 64,
    Op.REMOVED: 64,
    Op.HINTED: 64,
    Op.ERROR: 16 << 10,
}
_PARTS = {"split": ("k", "v"), "mla": ("latent", "rope")}
_TYPES = {body: op for op, body in BODIES.items()}
_DECODERS: dict[int, msgspec.msgpack.Decoder[Message]] = {
    int(op): msgspec.msgpack.Decoder(body) for op, body in BODIES.items()
}
_encode = msgspec.msgpack.Encoder().encode

M = TypeVar("M", bound=Message)


def encode(message: Message) -> tuple[int, bytes]:
    """Frame type and body of a message."""
    return int(_TYPES[type(message)]), _encode(message)


def decode(frame_type: int, body: memoryview | bytes) -> Message | None:
    """The message of a frame, None for a type this version does not know. Raises ProtocolError."""
    decoder = _DECODERS.get(frame_type)
    if decoder is None:
        return None
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, OverflowError, ValueError) as error:
        raise ProtocolError(f"malformed {Op(frame_type).name} body of {len(body)} bytes: {error}") from error


def join_digests(digests: Sequence[bytes]) -> bytes:
    return b"".join(digests)


def split_digests(joined: bytes, most: int = MAX_BLOCKS, least: int = 1) -> list[bytes]:
    """Raises ProtocolError unless ``joined`` is ``least``..``most`` whole digests."""
    return _split(joined, DIGEST_BYTES, least, most, "digests")


def split_marks(joined: bytes, digests: int) -> list[bytes]:
    """Raises ProtocolError unless ``joined`` is empty or one mark for each of so many digests."""
    return _split(joined, MARK_BYTES, digests, digests, "marks") if joined else []


def count_probes(locate: Locate) -> int:
    """How many fingerprints it has. Raises ProtocolError for a LOCATE that asks nothing or out of range."""
    probes, rest = divmod(len(locate.fingerprints), FINGERPRINT_BYTES)
    if rest or probes > MAX_PROBES:
        raise ProtocolError(
            f"{len(locate.fingerprints)} bytes are not 0..{MAX_PROBES} fingerprints of "
            f"{FINGERPRINT_BYTES} bytes"
        )
    if not probes and not locate.digests:
        raise ProtocolError("LOCATE with neither digests nor fingerprints")
    if not 0 <= locate.first <= MAX_TOKENS - probes or not 0 < locate.least <= MAX_BLOCKS:
        raise ProtocolError(
            f"LOCATE from token {locate.first} for {locate.least} blocks: positions are 0..{MAX_TOKENS}, "
            f"runs 1..{MAX_BLOCKS} blocks"
        )
    return probes


def tells_use(hint: Hint) -> bool:
    """Whether a HINT is about the next use of its blocks, and not about a pin alone. Raises ProtocolError for
    values out of range and for more blocks than such a HINT may have."""
    if not -1 <= hint.steps <= MAX_STEPS or abs(hint.priority) > MAX_PRIORITY or hint.pin_ms < -1:
        raise ProtocolError(
            f"HINT of {hint.steps} steps, priority {hint.priority}, pin {hint.pin_ms} ms: -1..{MAX_STEPS} "
            f"steps, priorities -{MAX_PRIORITY}..{MAX_PRIORITY}, pins of -1, 0 or more"
        )
    if hint.pin_ms and hint.steps == -1 and hint.priority == 0:
        return False
    if len(hint.digests) > MAX_HINT_BLOCKS * DIGEST_BYTES:
        raise ProtocolError(f"HINT of {len(hint.digests) // DIGEST_BYTES} blocks, at most {MAX_HINT_BLOCKS}")
    return True


def tell_layouts(layouts: Sequence[KVLayout]) -> tuple[tuple[Layout, ...], tuple[int, ...]]:
    """``layouts`` and ``layer_layouts`` of an OPEN. layouts: of each layer."""
    numbers = {layout: number for number, layout in enumerate(dict.fromkeys(layouts))}
    told = [
        Layout(layout.kind, layout.heads, tuple(part.dim for part in layout.parts), layout.dtype.value)
        for layout in numbers
    ]
    return tuple(told), tuple(numbers[layout] for layout in layouts)


def read_layouts(message: Open) -> tuple[KVLayout, ...]:
    """The layout of each layer, as an OPEN tells it; none if it tells none. Raises SpecError."""
    if not message.layouts and not message.layer_layouts:
        return ()
    if len(message.layouts) > MAX_LAYOUTS:
        raise SpecError(f"{len(message.layouts)} layouts, at most {MAX_LAYOUTS} different ones can be kept")
    if len(message.layer_layouts) != len(message.chunk_nbytes):
        raise SpecError(
            f"{len(message.layer_layouts)} layers have a layout, {len(message.chunk_nbytes)} have chunks"
        )
    layouts = [_read_layout(layout) for layout in message.layouts]
    for layer, number in enumerate(message.layer_layouts):
        if not 0 <= number < len(layouts):
            raise SpecError(f"layer {layer} has layout {number}, there are {len(layouts)}")
    return tuple(layouts[number] for number in message.layer_layouts)


def _read_layout(layout: Layout) -> KVLayout:
    names = _PARTS.get(layout.kind, ())
    if len(layout.dims) != len(names) or not all(0 < n <= MAX_DIM for n in (layout.heads, *layout.dims)):
        raise SpecError(
            f"layout {layout.kind[:32]!r} of {layout.heads} heads with {len(layout.dims)} parts: known are "
            f"{', '.join(_PARTS)} with two, and 1..{MAX_DIM} heads and elements of a part"
        )
    parts = tuple(Part(name, dim) for name, dim in zip(names, layout.dims, strict=True))
    try:
        return KVLayout(layout.kind, layout.heads, parts, KVDtype(layout.dtype))
    except ValueError:
        raise SpecError(f"K/V of dtype {layout.dtype[:32]!r} are unknown here") from None


def check_chains(fetch: Fetch) -> None:
    """Raises ProtocolError unless each chain is a digest and a count, all within the limits of a request."""
    chains = fetch.chains
    if len(chains) > MAX_CHAINS or not (chains or fetch.digests):
        raise ProtocolError(f"FETCH with {len(chains)} chains, at most {MAX_CHAINS}, or nothing to fetch")
    for tail, count in chains:
        if len(tail) != DIGEST_BYTES or not 0 < count <= MAX_BLOCKS:
            raise ProtocolError(
                f"FETCH of a chain of {count} blocks, 1..{MAX_BLOCKS}, whose digest has {len(tail)} bytes"
            )
    blocks = len(fetch.digests) // DIGEST_BYTES + sum([count for _, count in chains])
    if blocks > MAX_BLOCKS:
        raise ProtocolError(f"FETCH of {blocks} blocks, at most {MAX_BLOCKS}")


def _split(joined: bytes, size: int, least: int, most: int, what: str) -> list[bytes]:
    count, rest = divmod(len(joined), size)
    if rest or not least <= count <= most:
        raise ProtocolError(f"{len(joined)} bytes are not {least}..{most} {what} of {size} bytes")
    return [joined[at : at + size] for at in range(0, len(joined), size)]


def payload_nbytes(runs: Sequence[Run], chunk_nbytes: Sequence[int]) -> int:
    """Bytes of the chunks of ``runs``; layers must exist."""
    return sum([count * chunk_nbytes[layer] for layer, _, count in runs])


def plan_frame(wanted: Iterable[Run], chunk_nbytes: Sequence[int], frame_bytes: int) -> list[Run]:
    """The head of ``wanted`` that makes one frame: as much as fits ``frame_bytes``, at least one chunk."""
    runs: list[Run] = []
    room, chunks = frame_bytes, MAX_FRAME_CHUNKS
    for layer, first, count in wanted:
        size = chunk_nbytes[layer]
        fit = min(count, chunks, max(0, room) // size)
        if not fit and not runs:
            fit = 1
        if fit:
            runs.append((layer, first, fit))
            room -= fit * size
            chunks -= fit
        if fit < count:
            break
    return runs


class Cursor:
    """A position in the order that chunks travel: layer after layer, and in each the blocks 0..blocks-1."""

    __slots__ = ("block", "blocks", "layer", "stop")

    def __init__(self, layers: range, blocks: int) -> None:
        self.layer = layers.start
        self.stop = layers.stop if blocks else layers.start
        self.block = 0
        self.blocks = blocks

    @property
    def done(self) -> bool:
        return self.layer == self.stop

    def ahead(self) -> Iterator[Run]:
        """All that is left, a run a layer."""
        block = self.block
        for layer in range(self.layer, self.stop):
            yield layer, block, self.blocks - block
            block = 0

    def take(self, run: Run) -> bool:
        """Move past ``run``; False, and no move, if it is not what comes next."""
        layer, first, count = run
        end = first + count
        if self.done or (layer, first) != (self.layer, self.block) or count < 1 or end > self.blocks:
            return False
        if end < self.blocks:
            self.block = end
        else:
            self.layer, self.block = layer + 1, 0
        return True
