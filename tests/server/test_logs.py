"""Logs: one JSON object a line, stdlib bridged, and nothing in them that must not leave the process."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import structlog

from hypercache.server import logs


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    """What is logged during the test; puts back the set-up of the test run."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    yield stream
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_bound_fields_and_level(output: io.StringIO) -> None:
    log = structlog.get_logger("hypercache").bind(connection=7, request=2**64 - 1)
    log.info("fetch_done", hit_blocks=3, seconds=0.25, tokens=2048)
    log.debug("not shown")
    (line,) = lines(output)
    assert line["event"] == "fetch_done"
    assert (line["connection"], line["request"], line["hit_blocks"]) == (7, 2**64 - 1, 3)
    assert line["tokens"] == 2048  # a count is no content
    assert line["level"] == "info"
    assert line["logger"] == "hypercache"
    assert "timestamp" in line


def test_stdlib_goes_the_same_way(output: io.StringIO) -> None:
    logging.getLogger("asyncio").warning("slow %s", "callback", extra={"secret": "s3cr3t", "peer": "x"})
    (line,) = lines(output)
    assert (line["event"], line["logger"], line["level"]) == ("slow callback", "asyncio", "warning")
    assert (line["secret"], line["peer"]) == ("<redacted>", "x")


@pytest.mark.parametrize(
    "field",
    [
        {"secret": "hush-hush"},
        {"tenant_secret": b"hush-hush"},
        {"Authorization": "Bearer hush-hush"},
        {"password": "hush-hush"},
        {"key": b"hush-hush"},
        {"outer": {"api_key": "hush-hush"}},
        {"outer": [{"secret": "hush-hush"}]},
        {"token_ids": [104, 117, 115, 104]},
        {"tokens": np.array([104, 117, 115, 104])},
        {"prompt": "hush-hush"},
        {"data": b"hush-hush"},
        {"data": bytearray(b"hush-hush")},
        {"data": memoryview(b"hush-hush")},
        {"values": list(range(100, 200))},
        {"array": np.arange(104, 120)},
    ],
)
@pytest.mark.parametrize("form", ["json", "console"])
def test_secrets_and_content_are_never_written(output: io.StringIO, field: dict[str, Any], form: str) -> None:
    logs.configure("info", form, output)
    structlog.get_logger("hypercache").info("leak", **field)
    # the time is no content, but its digits may look like some
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "", output.getvalue())
    assert "leak" in text
    for piece in ("hush", "104", "117", "115"):
        assert piece not in text


@pytest.mark.parametrize("form", ["json", "console"])
def test_tracebacks_show_no_local_variables(output: io.StringIO, form: str) -> None:
    logs.configure("info", form, output)
    token_ids = [40961, 40962]
    try:
        raise ValueError(f"{len(token_ids)} of them are wrong")
    except ValueError:
        structlog.get_logger("hypercache").exception("failed")
    text = output.getvalue()
    assert "2 of them are wrong" in text
    assert "test_logs.py" in text
    assert "40961" not in text


def test_auto_is_json_where_nobody_watches(output: io.StringIO) -> None:
    logs.configure("info", "auto", output)
    structlog.get_logger("hypercache").info("started")
    assert lines(output)[0]["event"] == "started"


def test_console_keeps_the_order_of_fields(output: io.StringIO) -> None:
    logs.configure("info", "console", output)
    structlog.get_logger("hypercache").info("setting", name="drain_s", value="7 s", origin="flag --drain-s")
    assert "name=drain_s value='7 s' origin='flag --drain-s'" in output.getvalue()


def test_long_text_is_cut(output: io.StringIO) -> None:
    structlog.get_logger("hypercache").info("refused", reason="x" * 10_000)
    assert len(lines(output)[0]["reason"]) < 2_100
