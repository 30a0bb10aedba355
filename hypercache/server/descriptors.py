"""File descriptors: connections and the disk tier's files have one pool, and neither may eat the other's."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final

import structlog

REFUSED: Final = 8  # connections at a time that are accepted to be told that there are too many
SPARE: Final = 12  # the admin port's connections, the event loop's own, what libraries open for a moment
SEGMENTS: Final = 64  # of the disk tier, open for reading ...
DISK_FILES: Final = 6  # ... and what it has open beside them: directory, lock, what it writes and renames
_UNKNOWN: Final = 16  # open already, where the system does not say

log = structlog.get_logger("hypercache.server")


def reserve(max_connections: int, files: int) -> int:
    """How many connections there can be, 1..``max_connections``, beside ``files`` files and listening sockets
    that are yet to be opened.

    Where the process's limit of open files is too low it is raised as far as the system allows. Where that is
    not far enough the log says so.
    """
    others = _open_now() + files + SPARE + REFUSED
    limit = _raised(others + max_connections)
    room = max(1, min(max_connections, limit - others))
    if room < max_connections:
        log.warning(
            "fewer connections than max_connections",
            asked=max_connections,
            now=room,
            limit=limit,
            remedy="raise the limit of open files (ulimit -n, LimitNOFILE=), or lower max_connections",
        )
    return room


def segments() -> int:
    """How many segments the disk tier may keep open for reading: of few descriptors it gets a quarter."""
    return max(1, min(SEGMENTS, _raised(4 * SEGMENTS) // 4))


def _raised(need: int) -> int:
    """The limit of open files, raised if it is below ``need``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return need if soft == resource.RLIM_INFINITY else soft
    for limit in (hard, need):  # some systems say "unlimited" and take no such number
        if limit != resource.RLIM_INFINITY and limit > soft:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            except (OSError, ValueError):
                continue
            log.info("limit of open files raised", was=soft, now=limit)
            return limit
    return soft


def _open_now() -> int:
    try:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:
        return _UNKNOWN
