"""Logging: structlog events, JSON where no person watches, one rendering path for ours and stdlib's.

Call :func:`configure` once at start; then ``structlog.get_logger("hypercache")`` and ``log.bind(conn=7)``.
Token ids, K/V and secrets must never be passed to a logger; :func:`redact` is the last defence for the
day someone does. Tracebacks are plain text, since the rich ones print local variables.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

import structlog

LONGEST_LIST = 16
LONGEST_TEXT = 2000
_SECRET_KEYS = frozenset(
    ("secret", "password", "passwd", "credential", "credentials", "authorization", "key", "api_key", "cookie")
)
_SECRET_ENDINGS = ("_secret", "_password", "_credential", "_private_key", "_api_key", "_tenant_key")
_CONTENT_KEYS = frozenset(
    ("tokens", "token", "token_ids", "tokens_ids", "input_ids", "ids", "prompt", "text")
)


def configure(level: str = "info", output: str = "auto", stream: TextIO | None = None) -> None:
    """Send all log messages of the process to ``stream`` (stderr). Calling it again replaces the set-up.

    level: debug | info | warning | error. output: json | console | auto (console on a terminal).
    """
    stream = sys.stderr if stream is None else stream
    console = output == "console" or (output == "auto" and stream.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        redact,
    ]
    renderers: list[structlog.typing.Processor]
    if console:
        plain = structlog.dev.plain_traceback
        # Fields in the order they were given: that is the order in which they read well.
        renderers = [
            structlog.dev.ConsoleRenderer(
                colors=stream.isatty(), exception_formatter=plain, sort_keys=False, pad_event_to=0
            )
        ]
    else:
        renderers = [
            structlog.processors.format_exc_info,
            _head_first,
            structlog.processors.JSONRenderer(sort_keys=False, default=_describe),
        ]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    # Libraries' debug streams (numba's compiler) would drown ours.
    logging.getLogger("numba").setLevel(logging.WARNING)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _head_first(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """What a person reads first stands first in the line."""
    return {name: event[name] for name in ("timestamp", "level", "logger", "event") if name in event} | dict(
        event
    )


def redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Drop the values of fields that can hold secrets, and replace bulk data by its size. Counts stay."""
    for name, value in event.items():
        if name not in ("exc_info", "_record", "_from_structlog"):
            event[name] = _safe(name, value)
    return event


def _safe(name: str, value: Any) -> Any:
    lower = name.lower()
    if value is None or isinstance(value, bool | int | float):
        return "<redacted>" if _is_secret(lower) and value is not None else value
    if _is_secret(lower):
        return "<redacted>"
    if lower in _CONTENT_KEYS:
        return _describe(value)
    if isinstance(value, str):
        return value if len(value) <= LONGEST_TEXT else f"{value[:LONGEST_TEXT]}... ({len(value)} characters)"
    if isinstance(value, Mapping):
        return {str(key): _safe(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        if len(value) > LONGEST_LIST:
            return _describe(value)
        return [_safe("", item) for item in value]
    return str(value) if isinstance(value, BaseException) else _describe(value)


def _is_secret(lower: str) -> bool:
    return lower in _SECRET_KEYS or lower.endswith(_SECRET_ENDINGS)


def _describe(value: Any) -> str:
    """What a value is, never what it holds."""
    name = type(value).__name__
    if isinstance(value, memoryview):
        return f"<{name}, {value.nbytes} bytes>"
    if isinstance(value, bytes | bytearray):
        return f"<{name}, {len(value)} bytes>"
    try:
        return f"<{name}, {len(value)} items>"
    except TypeError:
        return f"<{name}>"
