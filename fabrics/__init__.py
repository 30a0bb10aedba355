"""Transports that move frames with payload buffers. They know nothing of KV, tokens or tenants."""

from fabrics.base import (
    Channel,
    Fabric,
    Frame,
    Handler,
    Limits,
    Listener,
    Outgoing,
    Sink,
    Source,
    fabric_for,
    register,
    schemes,
)
from fabrics.errors import FabricError

__all__ = [
    "Channel",
    "Fabric",
    "FabricError",
    "Frame",
    "Handler",
    "Limits",
    "Listener",
    "Outgoing",
    "Sink",
    "Source",
    "fabric_for",
    "register",
    "schemes",
]
