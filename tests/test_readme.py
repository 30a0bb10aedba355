"""The README's programs run as they stand there, against a real server; and what pages name is there."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hypercache.cli.local_server import local_server
from hypercache.cli.main import COMMANDS
from hypercache.server.config import FIELDS, flag_of
from hypercache.server.metrics import L3_TEXTS, STORE_TEXTS

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
CODE, REUSE = (
    re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    for page in ("README.md", "docs/reuse.md")
)


@pytest.fixture(scope="module")
def uri() -> Any:
    with local_server("64MiB") as server:
        yield server["uris"][0]


@pytest.fixture(scope="module")
def llama() -> Any:
    pytest.importorskip("torch", reason="the Transformers adapter needs torch")
    transformers = pytest.importorskip("transformers", reason="the Transformers adapter needs transformers")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return transformers.LlamaForCausalLM(config)


def test_transformers_in_a_few_lines(uri: str, llama: Any) -> None:
    names: dict[str, Any] = {"model": llama, "token_ids": list(range(100))}
    program = CODE[0].replace("tcp://127.0.0.1:7440", uri)
    exec(program, names)
    assert names["result"].fetch.hit_tokens == 0 and len(names["result"].tokens) == 64
    first = names["result"].tokens
    names = {"model": llama, "token_ids": list(range(100))}
    exec(program, names)
    assert names["result"].fetch.hit_tokens == 96 and len(first) == 64


def test_an_engine_of_your_own(uri: str, llama: Any, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path)
    names: dict[str, Any] = {"config": llama.config, "tokens": np.arange(100)}
    program = CODE[1].replace("tcp://127.0.0.1:7440", uri).replace("/models/my-model", str(tmp_path))
    program = program.replace("    ...  #", "    hits.append(result.hit_tokens)  #")
    wrapped = "async def program():\n" + textwrap.indent(program, "    ")
    names["hits"] = []
    exec(wrapped, names)
    asyncio.run(names["program"]())
    asyncio.run(names["program"]())
    assert names["hits"] == [0, 96]


@pytest.mark.parametrize("programs", [[CODE[0], CODE[2]], REUSE], ids=["README", "docs/reuse.md"])
def test_a_document_at_another_position(uri: str, llama: Any, programs: list[str]) -> None:
    document = np.random.default_rng(len(programs[-1])).integers(0, 256, 200).tolist()
    names: dict[str, Any] = {"model": llama, "token_ids": document}
    exec(CODE[0].replace("tcp://127.0.0.1:7440", uri), names)
    names["token_ids"] = names["tokens"] = [1, 2, 3, *document, 4, 5]
    for program in programs[-1:] if programs is not REUSE else REUSE[:1]:
        exec(program.replace("tcp://127.0.0.1:7440", uri), names)
    report = names["result"].report
    assert report.exact == 0 and report.reused == 192 and 0 < report.recomputed < 100
    if programs is REUSE:
        with names["connect_sync"](uri, model=names["engine"].spec) as names["client"]:
            exec(REUSE[1], names)
        assert [(span.kind, span.start, span.stop) for span in names["match"].spans] == [
            ("missing", 0, 3),
            ("modular", 3, 195),
            ("missing", 195, 205),
        ]


def test_hints_and_pins(uri: str, llama: Any) -> None:
    names: dict[str, Any] = {"model": llama, "token_ids": list(range(50, 150))}
    exec(CODE[0].replace("tcp://127.0.0.1:7440", uri), names)
    exec(CODE[3].replace("tcp://127.0.0.1:7440", uri), names)
    assert names["pinned"].blocks == 6 and names["pinned"].seconds == 60


def parser_of(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(name)
    importlib.import_module(COMMANDS[name][0]).add_arguments(parser)
    return parser


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_a_page_names_are_there(page: str) -> None:
    """In code, with their flags, and the parts that a benchmark has."""
    lines = re.findall(r"`(hypercache[ -][^`]+)`|^    (?:\$ )?(hypercache[ -].+)$", PAGES[page], re.M)
    for line in (one or other for one, other in lines):
        command = re.match(r"hypercache(?:-(serve)\b| ([a-z]+))", line)
        if command is None:
            continue  # the name of a package, or of a Service
        name = command[1] or command[2]
        assert name in COMMANDS, line
        options = {text: action for action in parser_of(name)._actions for text in action.option_strings}
        for flag, value in re.findall(r"(--[a-z0-9-]+)(?:[ =]([a-z]+))?", line):
            assert flag in options, line
            assert not options[flag].choices or value in options[flag].choices, line


@pytest.mark.parametrize("page", PAGES)
def test_settings_that_a_page_names_are_there(page: str) -> None:
    groups = {key.partition("_")[0] for key in FIELDS if key.startswith(("l3_", "pin_", "lrfu_"))}
    named = re.findall(rf"`((?:{'|'.join(groups)})_[a-z0-9_]+)[` =]", PAGES[page])
    assert set(named) <= set(FIELDS)
    flags = re.findall(rf"`(--(?:{'|'.join(groups)})-[a-z0-9-]+)", PAGES[page])
    assert set(flags) <= {flag_of(key) for key in FIELDS}


def test_numbers_that_the_page_of_tiers_names_are_there() -> None:
    known = {"state", "reason", "hot", "disk_*"}
    known |= {name.removesuffix("_total") for name in (*L3_TEXTS, *STORE_TEXTS)}
    table = PAGES["tiers.md"].partition("## Reading /status")[2].partition("## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \| (.+) \|$", table, re.M)
    named = [name for row in rows for name in re.findall(r"`([a-z0-9_.*]+)`", " ".join(row))]
    assert len(named) > 20
    for name in named:
        plain = re.sub(r"^(l3|store)\.|_total$", "", name).replace("disk.", "disk_")
        assert {plain, f"disk_{plain}"} & known or plain in ("on", "paused"), name
