"""The client: what an engine embeds."""

from hypercache.client.buffers import ChunkBuffers
from hypercache.client.client import Client, connect
from hypercache.client.handles import Saving, Transfer
from hypercache.client.results import FetchResult, Match, Prompt, StoreResult
from hypercache.client.sync import SyncClient, connect_sync

__all__ = [
    "ChunkBuffers",
    "Client",
    "FetchResult",
    "Match",
    "Prompt",
    "Saving",
    "StoreResult",
    "SyncClient",
    "Transfer",
    "connect",
    "connect_sync",
]
