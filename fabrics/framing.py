"""The frame layout, and an incremental decoder. No I/O: bytes in, frames out.

A frame is a header, a body and a payload. The header, little endian, 32 bytes, the same in all versions:

====== ===== ==============================================================
offset bytes field
====== ===== ==============================================================
0      4     magic ``HYPC``
4      1     version of everything after this table, now 1
5      1     type; 0xF0..0xFF belong to the fabric, the others to its user
6      2     flags, the user's
8      8     request id
16     4     body length
20     8     payload length
28     4     CRC-32 (IEEE 802.3, as in zlib) of bytes 0..27 and the body
====== ===== ==============================================================

CANCEL (0xF0) has no body: the sender gave up the request. GOODBYE (0xF1) is the last frame of its sender;
its body is ``code "\\n" text`` in UTF-8, in all versions, so that a peer of another version can say why it
left. The payload carries no checksum here: it is end to end, the business of those who use it.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from isal.isal_zlib import crc32

from fabrics.base import Frame, Limits
from fabrics.errors import (
    BadMagic,
    FrameChecksum,
    FrameError,
    FrameTooLarge,
    FrameVersionMismatch,
    PeerGoodbye,
)

MAGIC = b"HYPC"
VERSION = 1
HEADER_NBYTES = 32
FIRST_FABRIC_TYPE = 0xF0
MAX_FABRIC_BODY = 4096

_HEADER = struct.Struct("<4sBBHQIQI")
_FIELDS = struct.Struct("<4sBBHQIQ")  # what the CRC covers
_CRC = struct.Struct("<I")
_SUMMED = _FIELDS.size
_TYPE_OFFSET = 5


class FabricType(enum.IntEnum):
    """Frame types that channels exchange among themselves."""

    CANCEL = 0xF0
    GOODBYE = 0xF1


def encode_head(
    type_: int, flags: int, request_id: int, body: bytes, payload_nbytes: int, *, version: int = VERSION
) -> bytes:
    """The header of a frame; body and payload follow it as they are.
    Raises ValueError for a field out of range."""
    try:
        fields = _FIELDS.pack(MAGIC, version, type_, flags, request_id, len(body), payload_nbytes)
    except struct.error as error:
        raise ValueError(
            f"frame type {type_}, flags {flags}, request id {request_id} do not fit u8, u16, u64: {error}"
        ) from None
    return fields + _CRC.pack(crc32(body, crc32(fields)))


def check_lengths(
    type_: int, body_nbytes: int, payload_nbytes: int, limits: Limits, whose: str, *, guest: bool = False
) -> None:
    """Raise FrameTooLarge if a frame is above a cap. Caps are inclusive and count body and payload only.
    ``guest``: the sender is not welcome yet, see ``Limits.first_body``."""
    name, max_body, remedy = "max_body", limits.max_body, "move bulk data to the payload"
    if type_ >= FIRST_FABRIC_TYPE:
        max_body = MAX_FABRIC_BODY
    elif guest and limits.first_body is not None and limits.first_body < max_body:
        name, max_body, remedy = "first_body", limits.first_body, "say hello first"
    if body_nbytes > max_body:
        raise FrameTooLarge(
            f"{whose}: frame type {type_} has a body of {body_nbytes} bytes, the limit {name} is "
            f"{max_body}; {remedy}"
        )
    if payload_nbytes > limits.max_payload:
        raise FrameTooLarge(
            f"{whose}: frame type {type_} has a payload of {payload_nbytes} bytes, the limit max_payload is "
            f"{limits.max_payload}; split it into several frames"
        )


_CODES: dict[type[FrameError], str] = {
    BadMagic: "magic",
    FrameVersionMismatch: "version",
    FrameTooLarge: "too-large",
    FrameChecksum: "checksum",
}
CLOSED = "closed"


def goodbye_body(error: FrameError | None) -> bytes:
    """The body of a GOODBYE: in order (None), or because of what the peer sent."""
    if error is None:
        return CLOSED.encode() + b"\n"
    code = _CODES.get(type(error), "malformed")
    return f"{code}\n{error}".encode()[:MAX_FABRIC_BODY]


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Why the peer left: a code word and text for people."""

    code: str
    text: str

    @classmethod
    def parse(cls, body: memoryview) -> Goodbye:
        code, _, text = bytes(body[:MAX_FABRIC_BODY]).decode(errors="replace").partition("\n")
        return cls(code, text)

    def error(self, peer: str) -> PeerGoodbye | None:
        """What the goodbye means on this side; None: closed in order."""
        if self.code == CLOSED:
            return None
        return PeerGoodbye(f"{peer} closed the channel ({self.code}): {self.text}")


_PRODUCTS: tuple[tuple[bytes, str], ...] = (
    (b"GET ", "an HTTP request"),
    (b"POST", "an HTTP request"),
    (b"PUT ", "an HTTP request"),
    (b"HEAD", "an HTTP request"),
    (b"OPTIONS", "an HTTP request"),
    (b"DELETE", "an HTTP request"),
    (b"HTTP/", "an HTTP answer"),
    (b"PRI * HTTP/2", "HTTP/2 or gRPC"),
    (b"\x16\x03", "a TLS hello"),
    (b"\x15\x03", "a TLS alert"),
    (b"SSH-", "SSH"),
    (b"*", "Redis"),
    (b"+PONG", "Redis"),
    (b"-ERR", "Redis"),
    (b"get ", "memcached"),
    (b"ERROR\r\n", "memcached"),
    (b"\x80\x04\x95", "a Python pickle"),
)


def looks_like(data: bytes) -> str:
    """A name for a peer that speaks something else. Never repeats its bytes."""
    return next((name for prefix, name in _PRODUCTS if data.startswith(prefix)), "unknown data")


class Decoder:
    """Frames out of a byte stream. Payload passes by: its reader takes what was staged with the head
    (:meth:`take`) and reads the rest itself.

    Use: read into :meth:`room`, say :meth:`wrote`, call :meth:`next` until it gives None. After a frame
    with payload, its bytes come first out of :meth:`take`. Every length is checked before memory is taken
    for it, and memory grows with what has come, not with what was announced; it goes back with the frame.
    ``peer`` names the other side in errors; an error is final. ``guest``: ``Limits.first_body`` holds until
    :meth:`welcome`.
    """

    __slots__ = ("_buffer", "_end", "_guest", "_limits", "_max_body", "_need", "_peer", "_standard", "_start")

    def __init__(
        self, limits: Limits, peer: str = "peer", *, staging: int = 16 << 10, guest: bool = False
    ) -> None:
        self._limits = limits
        self._guest = guest
        self._max_body = limits.max_body
        if guest and limits.first_body is not None:
            self._max_body = min(limits.first_body, limits.max_body)
        self._peer = peer
        self._standard = memoryview(bytearray(staging))
        self._buffer = self._standard
        self._start = self._end = 0
        self._need = HEADER_NBYTES  # bytes from _start that complete the present head

    def welcome(self) -> None:
        """Bodies may be as large as ``Limits.max_body`` from here on."""
        self._guest = False
        self._max_body = self._limits.max_body

    @property
    def missing(self) -> int:
        """Bytes that the present head still lacks, as far as is known; 0: none has begun, or it is there."""
        return max(0, self._need - (self._end - self._start)) if self.partial else 0

    @property
    def partial(self) -> bool:
        """Whether a head has begun and not ended."""
        return self._end > self._start

    def room(self, limit: int | None = None) -> memoryview:
        """Where the next bytes of the stream go (at least one, at most ``limit``)."""
        if self._start == self._end:
            self._start = self._end = 0
        if self._start + self._need > len(self._buffer):
            staged = self._buffer[self._start : self._end]
            if len(staged) == len(self._buffer):
                self._buffer = memoryview(bytearray(min(self._need, 2 * len(staged))))
                self._buffer[: len(staged)] = staged
            elif self._start:
                self._buffer[: len(staged)] = bytes(staged)
            self._start, self._end = 0, len(staged)
        stop = len(self._buffer) if limit is None else min(self._end + limit, len(self._buffer))
        return self._buffer[self._end : stop]

    def wrote(self, count: int) -> None:
        """``count`` bytes were put into :meth:`room`."""
        self._end += count

    def take(self, limit: int) -> memoryview:
        """Staged bytes that belong to the payload of the frame last given, at most ``limit``; maybe none."""
        stop = min(self._start + limit, self._end)
        taken = self._buffer[self._start : stop]
        self._start = stop
        return taken

    def next(self) -> Frame | None:
        """The next frame whose head is complete. Its body is valid until this or :meth:`room` is called
        again. None: more has to come.

        Raises BadMagic, FrameVersionMismatch, FrameTooLarge, FrameChecksum.
        """
        buffer, start = self._buffer, self._start
        have = self._end - start
        if have < HEADER_NBYTES:
            if have:
                self._check_prefix(have)
            else:  # the memory of a large body goes at once: it may be long until the next
                self._start = self._end = 0
                self._buffer = self._standard
            return None
        magic, version, type_, flags, request_id, body, payload, total = _HEADER.unpack_from(buffer, start)
        if magic != MAGIC or version != VERSION:
            self._check_prefix(have)
        limits = self._limits
        if type_ >= FIRST_FABRIC_TYPE or body > self._max_body or payload > limits.max_payload:
            check_lengths(type_, body, payload, limits, self._peer, guest=self._guest)
        self._need = need = HEADER_NBYTES + body
        if have < need:
            return None
        view = buffer[start + HEADER_NBYTES : start + need]
        if version != VERSION:
            raise self._mismatch(Goodbye.parse(view).text)
        if crc32(view, crc32(buffer[start : start + _SUMMED])) != total:
            raise FrameChecksum(
                f"{self._peer}: header or body of a frame (type {type_}) do not match their CRC-32; "
                "the stream is damaged, connect again"
            )
        self._start = start + need
        self._need = HEADER_NBYTES
        return Frame(type_, flags, request_id, view, payload)

    @property
    def _version(self) -> int:
        return self._buffer[self._start + len(MAGIC)]

    def _check_prefix(self, have: int) -> None:
        """Tell a stranger by its first bytes, as soon as they differ from ours."""
        prefix = bytes(self._buffer[self._start : self._start + min(have, HEADER_NBYTES)])
        if prefix[: len(MAGIC)] != MAGIC[:have]:
            raise BadMagic(
                f"{self._peer} does not speak HyperCache frames; this looks like {looks_like(prefix)}. "
                "Check host and port, and that nothing between alters the stream"
            )
        if have <= _TYPE_OFFSET or self._version == VERSION or prefix[_TYPE_OFFSET] == FabricType.GOODBYE:
            return  # a goodbye of another version is read first: it says why
        raise self._mismatch("")

    def _mismatch(self, said: str) -> FrameVersionMismatch:
        return FrameVersionMismatch(
            f"{self._peer} speaks frame version {self._version}, this side {VERSION}; "
            "run the same HyperCache release on both sides" + (f" (peer: {said})" if said else "")
        )
