"""Errors of the transport layer. Each names the peer or address, what was wrong, and the remedy."""

from __future__ import annotations


class FabricError(Exception):
    """Base of every transport error."""


class AddressError(FabricError, ValueError):
    """A URI or address cannot be parsed, resolved or bound."""


class FabricUnavailable(FabricError):
    """The fabric itself cannot be used here (no device, missing package)."""


class ConnectFailed(FabricError, ConnectionError):
    """No channel could be made to the peer before the deadline."""


class ChannelClosed(FabricError, ConnectionError):
    """The channel is closed; nothing further is sent or received on it."""


class ChannelStalled(ChannelClosed):
    """The peer took no bytes, or sent none it owed, for longer than the stall limit."""


class ChannelFull(FabricError):
    """Too much waits for the peer already; the frame was not queued, the channel is still open."""


class FrameError(FabricError):
    """The byte stream is not a valid sequence of frames."""


class BadMagic(FrameError):
    """The peer speaks something else (HTTP, TLS, another product)."""


class FrameVersionMismatch(FrameError):
    """The peer's frame version is not ours; the message has both."""


class FrameTooLarge(FrameError):
    """A length is above its cap; refused before any allocation."""


class FrameChecksum(FrameError):
    """Header or body do not match their CRC."""


class PeerGoodbye(ChannelClosed):
    """The peer closed the channel and said why."""


class ForkedProcess(ChannelClosed):
    """The channel belongs to the parent process; connect in the child, or start it with 'spawn'."""
