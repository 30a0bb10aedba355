"""The frame layout and its decoder, without any socket."""

from __future__ import annotations

import random
import struct
import tracemalloc
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabrics import Frame, Limits
from fabrics.errors import BadMagic, FrameError, FrameTooLarge, FrameVersionMismatch
from fabrics.framing import (
    HEADER_NBYTES,
    VERSION,
    Decoder,
    FabricType,
    Goodbye,
    encode_head,
    goodbye_body,
)

LIMITS = Limits(max_body=100_000, max_payload=1 << 20)


def decode(data: bytes, cuts: list[int], limits: Limits = LIMITS) -> list[tuple[int, int, int, bytes, bytes]]:
    """All frames of a stream that arrives in pieces of the given sizes."""
    decoder = Decoder(limits)
    frames: list[tuple[int, int, int, bytes, bytearray]] = []
    left = at = 0
    sizes = iter(cuts)
    while at < len(data):
        size = max(1, next(sizes, len(data)))
        room = decoder.room(size)
        count = min(len(room), size, len(data) - at)
        room[:count] = data[at : at + count]
        decoder.wrote(count)
        at += count
        while True:
            if left:
                taken = decoder.take(left)
                frames[-1][4].extend(taken)
                left -= len(taken)
                if left:
                    break
            frame = decoder.next()
            if frame is None:
                break
            frames.append((frame.type, frame.flags, frame.request_id, bytes(frame.body), bytearray()))
            left = frame.payload_nbytes
    return [(*head, bytes(payload)) for *head, payload in frames]  # type: ignore[misc]


def encode(type_: int, flags: int, request_id: int, body: bytes, payload: bytes) -> bytes:
    return encode_head(type_, flags, request_id, body, len(payload)) + body + payload


frames_strategy = st.lists(
    st.tuples(
        st.integers(0, 255),
        st.integers(0, 65535),
        st.integers(0, 2**64 - 1),
        st.binary(max_size=200),
        st.binary(max_size=300),
    ),
    max_size=8,
)


def test_the_layout_is_what_the_documentation_says() -> None:
    head = encode_head(7, 0x0102, 0x1122334455667788, b"body", 5 << 32)
    assert len(head) == HEADER_NBYTES == 32
    assert head[:28] == b"HYPC" + struct.pack("<BBHQIQ", 1, 7, 0x0102, 0x1122334455667788, 4, 5 << 32)
    assert struct.unpack("<I", head[28:])[0] == crc32(head[:28] + b"body")


@given(frames_strategy, st.lists(st.integers(1, 400), max_size=40))
def test_frames_survive_any_segmentation(
    frames: list[tuple[int, int, int, bytes, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(encode(*frame) for frame in frames)
    assert decode(stream, cuts) == frames


def test_a_body_larger_than_the_staging_buffer() -> None:
    rng = random.Random(5)
    frames = [
        (1, 0, number, rng.randbytes(size), b"tail") for number, size in enumerate([0, 60_000, 3, 99_999])
    ]
    stream = b"".join(encode(*frame) for frame in frames)
    for step in (1_000, 16_384, 70_000, len(stream)):
        assert decode(stream, [step] * (len(stream) // step + 1)) == frames


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"GET / HTTP/1.1\r\n", "HTTP request"),
        (b"HTTP/1.1 400 Bad", "HTTP answer"),
        (b"PRI * HTTP/2.0\r\n", "HTTP/2"),
        (b"\x16\x03\x01\x02\x00\x01", "TLS hello"),
        (b"SSH-2.0-OpenSSH", "SSH"),
        (b"-ERR unknown command", "Redis"),
        (b"\x80\x04\x95\x10", "pickle"),
        (b"\x00" * 64, "unknown data"),
        (b"\x99", "unknown data"),
        (b"HYP_", "unknown data"),
    ],
)
def test_g14_strangers_are_named_at_the_first_byte_that_differs(data: bytes, name: str) -> None:
    with pytest.raises(BadMagic, match=name) as caught:
        decode(data, [])
    assert data[4:12].decode("latin-1") not in str(caught.value) or len(data) < 12


@pytest.mark.parametrize("version", [0, 2, 255])
def test_g14_another_version_is_told_with_both(version: int) -> None:
    head = encode_head(1, 0, 1, b"", 0, version=version)
    with pytest.raises(FrameVersionMismatch, match=f"version {version}, this side {VERSION}"):
        decode(head[:6], [])  # no need to wait for the rest


def test_g14_the_goodbye_of_another_version_is_read() -> None:
    body = goodbye_body(FrameVersionMismatch("peer speaks frame version 1, this side 9"))
    stream = encode_head(FabricType.GOODBYE, 0, 0, body, 0, version=9) + body
    for cut in (1, 6, 32, len(stream)):
        with pytest.raises(FrameVersionMismatch, match=r"version 9, this side 1.*\(peer: .*this side 9\)"):
            decode(stream, [cut])


def test_goodbye_says_why() -> None:
    assert Goodbye.parse(memoryview(goodbye_body(None))).error("peer") is None
    error = Goodbye.parse(memoryview(goodbye_body(FrameTooLarge("x" * 9000)))).error("peer")
    assert "peer closed the channel (too-large): xxx" in str(error)
    assert Goodbye.parse(memoryview(b"\xff\xfe")).error("peer") is not None


@pytest.mark.parametrize(
    ("body", "payload", "limit"),
    [
        (LIMITS.max_body + 1, 0, "max_body is 100000"),
        (2**31, 0, "max_body"),
        (2**32 - 1, 0, "max_body"),
        (0, LIMITS.max_payload + 1, "max_payload is 1048576"),
        (0, 2**63, "max_payload"),
        (0, 2**64 - 1, "max_payload"),
    ],
)
def test_h10_lengths_are_checked_before_memory_is_taken(body: int, payload: int, limit: str) -> None:
    fields = struct.pack("<4sBBHQIQ", b"HYPC", 1, 1, 0, 1, body, payload)
    head = fields + struct.pack("<I", crc32(fields))
    decoder = Decoder(LIMITS)
    decoder.room()[: len(head)] = head
    decoder.wrote(len(head))
    tracemalloc.start()
    try:
        with pytest.raises(FrameTooLarge, match=limit):
            decoder.next()
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()


def test_h06_the_caps_count_body_and_payload_alone_and_are_inclusive() -> None:
    limits = Limits(max_body=10, max_payload=20)
    assert decode(encode(1, 0, 1, b"b" * 10, b"p" * 20), [], limits) == [(1, 0, 1, b"b" * 10, b"p" * 20)]
    for body, payload in ((11, 0), (0, 21)):
        with pytest.raises(FrameTooLarge):
            decode(encode(1, 0, 1, b"b" * body, b"p" * payload), [], limits)


def test_fabric_frames_have_a_small_body() -> None:
    with pytest.raises(FrameTooLarge, match="4096"):
        decode(encode(FabricType.GOODBYE, 0, 0, b"x" * 4097, b""), [])


@given(st.integers(0, 39), st.integers(1, 255))
def test_any_damaged_byte_of_head_or_body_is_noticed(at: int, flip: int) -> None:
    stream = bytearray(encode(1, 2, 3, b"12345678", b""))
    stream[at] ^= flip
    try:
        frames = decode(bytes(stream) + bytes(64), [])
    except FrameError:
        return
    assert frames == []  # a length grew: the decoder waits for the rest


@pytest.mark.parametrize(
    "field", [("type", 256), ("flags", 65536), ("request_id", 2**64), ("request_id", -1)], ids=str
)
def test_fields_out_of_range_are_refused(field: tuple[str, int]) -> None:
    values = {"type": 1, "flags": 0, "request_id": 1} | dict([field])
    with pytest.raises(ValueError, match="do not fit"):
        encode_head(values["type"], values["flags"], values["request_id"], b"", 0)


def mutate(rng: random.Random, stream: bytearray) -> None:
    """Damage of the kinds that networks, bugs and attackers make."""
    at = rng.randrange(len(stream))
    match rng.randrange(7):
        case 0:
            stream[at] ^= 1 << rng.randrange(8)
        case 1:
            del stream[at:]
        case 2:
            del stream[at : at + rng.randrange(1, 9)]
        case 3:
            stream[at:at] = rng.randbytes(rng.randrange(1, 9))
        case 4:
            stream[4 + rng.randrange(24) :] = rng.randbytes(rng.randrange(40))
        case 5:
            struct.pack_into("<I", stream, 16, rng.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1)))
        case 6:
            struct.pack_into("<Q", stream, 20, rng.choice((0, 1, 2**31, 2**32, 2**63, 2**64 - 1)))


def test_h10_a_hundred_thousand_damaged_frames() -> None:
    """H10: whatever comes, the decoder gives the true frame, waits, or raises FrameError."""
    rng = random.Random(10)
    limits = Limits(max_body=4096, max_payload=1 << 20)
    samples = [
        encode(
            rng.randrange(256),
            rng.randrange(65536),
            rng.getrandbits(64),
            rng.randbytes(rng.randrange(60)),
            b"",
        )
        for _ in range(64)
    ]
    outcomes = {"frame": 0, "waits": 0, "refused": 0}
    tracemalloc.start()
    try:
        decoder = Decoder(limits)
        for _ in range(100_000):
            sample = rng.choice(samples)
            stream = bytearray(sample)
            mutate(rng, stream)
            room = decoder.room()
            room[: len(stream)] = stream
            decoder.wrote(len(stream))
            try:
                frame: Frame | None = decoder.next()
            except FrameError:
                outcomes["refused"] += 1
                decoder = Decoder(limits)
                continue
            if frame is None:
                outcomes["waits"] += 1
                decoder = Decoder(limits)
                continue
            outcomes["frame"] += 1  # damage behind the frame, or none: what was decoded is what was encoded
            assert bytes(stream[: HEADER_NBYTES + len(frame.body)]) in samples
            decoder = Decoder(limits)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20, f"{peak} bytes were allocated at the peak"
    assert min(outcomes.values()) > 100, outcomes


def test_h10_memory_for_a_body_grows_with_what_came_and_goes_with_the_frame() -> None:
    """A header that announces 4 MiB costs nothing; the body costs at most twice what is there of it."""
    size = 4 << 20
    stream = encode_head(1, 0, 1, bytes(size), 0) + bytes(size)
    decoder, at = Decoder(Limits()), 0
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        while at < len(stream):
            assert decoder.next() is None
            room = decoder.room()
            count = min(len(room), 40_000, len(stream) - at)
            room[:count] = stream[at : at + count]
            decoder.wrote(count)
            at += count
            del room
            held = tracemalloc.get_traced_memory()[0] - start
            assert held <= 2 * at + 10_000, f"{held} bytes are held for {at} that came"
        frame = decoder.next()
        assert frame is not None
        assert frame.body == bytes(size)
        frame.body.release()
        assert decoder.next() is None
        assert tracemalloc.get_traced_memory()[0] - start < 10_000
    finally:
        tracemalloc.stop()


def test_the_first_frames_of_a_stranger_are_small() -> None:
    limits = Limits(max_body=10_000, first_body=100)
    decoder = Decoder(limits, guest=True)
    for body, fits in ((bytes(100), True), (bytes(101), False)):
        stream = encode(1, 0, 1, body, b"")
        decoder.room()[: len(stream)] = stream
        decoder.wrote(len(stream))
        if fits:
            assert decoder.next() is not None
            continue
        with pytest.raises(FrameTooLarge, match=r"101 bytes, the limit first_body is 100; say hello first"):
            decoder.next()
        decoder.welcome()
        assert decoder.next() is not None
    assert decode(encode(1, 0, 1, bytes(10_000), b""), [], limits)
    with pytest.raises(FrameTooLarge, match="max_body is 10000"):
        decode(encode(1, 0, 1, bytes(10_001), b""), [], limits)
