"""Run a cache server until SIGTERM or SIGINT, which drain it; a second signal stops it at once.

When it serves, one line of JSON appears on stdout: {"ready": true, "uris": [...], "admin": "...", "pid": N}.
Settings: default < TOML file (--config or HYPERCACHE_CONFIG) < HYPERCACHE_* environment < flags.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
from typing import Any

import structlog

from hypercache.cli.config import add_server_flags, load_from
from hypercache.server import logs
from hypercache.server.config import Effective, ServerConfig
from hypercache.server.node import Node

COLLECT_S = 0.5
SWITCH_S = 0.0005


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_flags(parser)


def run(args: argparse.Namespace) -> int:
    """0 after a drain, 128 + signal number after a second signal. Raises ConfigError, FabricError."""
    effective = load_from(args)
    logs.configure(effective.config.log_level, effective.config.log_format)
    log = structlog.get_logger("hypercache")
    _log_settings(effective, log)
    return asyncio.run(_serve(effective.config, log))


def _log_settings(effective: Effective, log: Any) -> None:
    """A line for each setting that somebody chose; defaults are only counted, and listed at debug."""
    rows = effective.rows()
    for name, value, origin in rows:
        (log.debug if origin == "default" else log.info)("setting", name=name, value=value, origin=origin)
    at_default = sum(origin == "default" for _, _, origin in rows)
    log.info(
        "configuration", chosen=len(rows) - at_default, at_default=at_default, see="hypercache config show"
    )


async def _keep_collector_off() -> None:
    """Trade Python's own full collections for small ones.

    The index of a large cache is millions of objects that are alive; a full collection walks all of them and
    stops the server for as long. They are freed by their reference counts, so here the collector only looks
    at what is new since the last time, and then sets it aside for good (``gc.freeze``).
    """
    gc.disable()
    while True:
        gc.collect()
        gc.freeze()
        await asyncio.sleep(COLLECT_S)


async def _serve(config: ServerConfig, log: Any) -> int:
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    # A thread of the disk tier that holds the interpreter gives it back when asked; by default after 5 ms,
    # which would be most of what a get from memory takes.
    sys.setswitchinterval(SWITCH_S)
    node = Node(config, log=log)
    await node.start()
    collector = asyncio.create_task(_keep_collector_off(), name="garbage collector")
    with contextlib.suppress(BrokenPipeError):  # whoever started us may not care
        ready = {"ready": True, "uris": list(node.uris), "admin": node.admin_address, "pid": os.getpid()}
        print(json.dumps(ready), flush=True)
    await signals.get()
    collector.cancel()
    drain = asyncio.create_task(node.drain(), name="drain")
    second = asyncio.create_task(signals.get(), name="second signal")
    await asyncio.wait({drain, second}, return_when=asyncio.FIRST_COMPLETED)
    if drain.done():
        second.cancel()
        drain.result()
        return 0
    drain.cancel()
    await asyncio.gather(drain, return_exceptions=True)
    await node.stop()
    return 128 + second.result()
