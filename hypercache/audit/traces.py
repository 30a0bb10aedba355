"""Readers of public request logs that name the blocks of each prompt by hash: JSON lines, in two dialects.

Mooncake (FAST '25): ``timestamp`` in milliseconds, ``hash_ids`` of blocks of 512 tokens. Qwen-Bailian:
``chat_id``, ``timestamp`` in seconds, ``hash_ids`` of blocks of 16 tokens. Either may have ``input_length``
in tokens. An id stands for a block together with all that is before it, and the last block of a prompt may
be a partial one. A row that is no such request is left out and reported, with its line.
"""

from __future__ import annotations

import errno
import json
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hypercache.errors import ConfigError

MAX_LINE: Final = 16 << 20  # bytes, its end included
MAX_REPORTED: Final = 20  # bad rows that are kept with their reason
MOONCAKE_BLOCK: Final = 512  # tokens
QWEN_BLOCK: Final = 16


class NoBlocks(ConfigError):
    """A file that names no blocks, such as a log of lengths alone: no hit ratio can be computed."""


@dataclass(frozen=True, slots=True)
class Request:
    """``time`` in seconds from the first request on; ``blocks`` are ids, first to last."""

    time: float
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bad:
    """A row that was left out, and why."""

    line: int
    why: str


@dataclass(frozen=True, slots=True)
class Trace:
    """``requests`` by time. ``bad`` holds the first rows that were left out, ``bad_rows`` counts them all."""

    name: str
    block_size: int
    requests: Sequence[Request]
    bad: Sequence[Bad] = ()
    bad_rows: int = 0

    @property
    def references(self) -> int:
        """Blocks asked for, in all requests together."""
        return sum(len(request.blocks) for request in self.requests)

    @property
    def distinct(self) -> int:
        """Blocks that an unlimited cache would end up with."""
        return len({block for request in self.requests for block in request.blocks})


def read(path: Path) -> Trace:
    """The trace in ``path``; its name is the file's, without the ending.

    Raises ConfigError if the file cannot be read, NoBlocks if no row in it is a request with block ids.
    """
    rows: list[tuple[float, tuple[int, ...]]] = []
    bad: list[Bad] = []
    bad_rows = 0
    block_size = 0
    for number, line in _lines(path):
        try:
            seconds, blocks, size = _row(line)
            if block_size not in (0, size):
                raise ValueError("another dialect than the rows before it")
            block_size = size
            rows.append((seconds, blocks))
        except ValueError as error:
            bad_rows += 1
            if len(bad) < MAX_REPORTED:
                bad.append(Bad(number, str(error)))
    if not rows:
        why = f"line {bad[0].line}: {bad[0].why}" if bad else "it is empty"
        raise NoBlocks(
            f"{path.name} names no blocks ({why}), so no hit ratio can be computed from it; give a trace "
            "with timestamp and hash_ids in each line"
        )
    rows.sort(key=lambda row: row[0])
    began = rows[0][0]
    requests = [Request(seconds - began, blocks) for seconds, blocks in rows]
    return Trace(path.stem, block_size, requests, tuple(bad), bad_rows)


def find(directory: Path) -> tuple[list[Trace], list[str]]:
    """All traces ``*.jsonl`` in ``directory``, by name, and for each file there that is none, why.

    Raises ConfigError if the directory, or a file in it, cannot be read, or if nothing in it is a trace.
    """
    try:
        paths = sorted(path for path in directory.iterdir() if path.suffix in (".jsonl", ".csv"))
    except OSError as error:
        raise ConfigError(
            f"--traces {directory} is no directory that can be read: {error.strerror}; give one that holds "
            "traces (*.jsonl with timestamp and hash_ids)"
        ) from None
    traces: list[Trace] = []
    others: list[str] = []
    for path in paths:
        try:
            traces.append(read(path))
        except NoBlocks as error:
            others.append(str(error))
    if not traces:
        raise ConfigError(
            f"--traces {directory} holds no trace that names blocks; a trace is a *.jsonl file with "
            "timestamp and hash_ids in each line"
        )
    return traces, others


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers. What is longer than MAX_LINE is cut, and so no JSON."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe or a device might never end
            raise OSError(errno.EINVAL, "not a regular file")
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE):
                number += 1
                if line.strip():
                    yield number, line
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE)
    except OSError as error:
        raise ConfigError(
            f"trace {path} cannot be read: {error.strerror}; make it readable, or move it elsewhere"
        ) from None


def _row(line: bytes) -> tuple[float, tuple[int, ...], int]:
    """Seconds, block ids, tokens per block. Raises ValueError that says what is wrong."""
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise ValueError("not JSON, or longer than a line may be") from None
    if not isinstance(row, dict):
        raise ValueError("not an object")
    qwen = "chat_id" in row
    blocks = row.get("hash_ids")
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise ValueError("no hash_ids, a list of integers")
    if len(set(blocks)) != len(blocks):
        raise ValueError("hash_ids with the same block twice: a block cannot be its own prefix")
    when: Any = row.get("timestamp")
    if type(when) not in (int, float) or not abs(when) < 1e18:  # nor is it NaN
        raise ValueError("no timestamp, a finite number")
    size = QWEN_BLOCK if qwen else MOONCAKE_BLOCK
    length = row.get("input_length", len(blocks) * size)
    if type(length) is not int or len(blocks) not in (length // size, -(-length // size)):
        raise ValueError(f"input_length {length!r} is not that of {len(blocks)} blocks of {size} tokens")
    return (float(when) if qwen else when / 1000), tuple(blocks), size
