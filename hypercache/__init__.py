"""HyperCache: an external KV cache for LLM inference.

    import hypercache
    client = await hypercache.connect("tcp://127.0.0.1:7440", model=spec)

The names below are loaded on first use, so that ``import hypercache`` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hypercache.client import (
        ChunkBuffers,
        Client,
        ExactSpan,
        FetchResult,
        HintResult,
        Match,
        MissingSpan,
        ModularSpan,
        PinResult,
        Prompt,
        StoreResult,
        SyncClient,
        UnpinResult,
        connect,
        connect_sync,
    )
    from hypercache.errors import HyperCacheError
    from hypercache.keys import MediaSpan, TenantKey
    from hypercache.kv import KVBuffers
    from hypercache.model import KVDtype, ModelSpec

__version__ = "0.1.0"

_HOMES = {
    "hypercache.client": (
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
        "StoreResult",
        "SyncClient",
        "UnpinResult",
        "connect",
        "connect_sync",
    ),
    "hypercache.errors": ("HyperCacheError",),
    "hypercache.keys": ("MediaSpan", "TenantKey"),
    "hypercache.kv": ("KVBuffers",),
    "hypercache.model": ("KVDtype", "ModelSpec"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hypercache' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


__all__ = [
    "ChunkBuffers",
    "Client",
    "ExactSpan",
    "FetchResult",
    "HintResult",
    "HyperCacheError",
    "KVBuffers",
    "KVDtype",
    "Match",
    "MediaSpan",
    "MissingSpan",
    "ModelSpec",
    "ModularSpan",
    "PinResult",
    "Prompt",
    "StoreResult",
    "SyncClient",
    "TenantKey",
    "UnpinResult",
    "__version__",
    "connect",
    "connect_sync",
]
