"""The client: what an engine embeds."""

from hypercache.client.buffers import ChunkBuffers
from hypercache.client.client import Client, connect
from hypercache.client.finding import Reuse
from hypercache.client.handles import Saving, Transfer
from hypercache.client.plan import ExactSpan, MissingSpan, ModularSpan
from hypercache.client.results import (
    FetchResult,
    HintResult,
    Match,
    PinResult,
    Prompt,
    StoreResult,
    UnpinResult,
)
from hypercache.client.sync import SyncClient, connect_sync

__all__ = [
    "ChunkBuffers",
    "Client",
    "ExactSpan",
    "FetchResult",
    "HintResult",
    "Match",
    "MissingSpan",
    "ModularSpan",
    "PinResult",
    "Prompt",
    "Reuse",
    "Saving",
    "StoreResult",
    "SyncClient",
    "Transfer",
    "UnpinResult",
    "connect",
    "connect_sync",
]
