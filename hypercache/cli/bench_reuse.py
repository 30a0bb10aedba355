"""How much of real prompts was in earlier ones: what a cache finds causally, on a fixed grid, at any offset.

The prompts of a set of logs go one after the other through the real parts, as a client and a node use them:
causal digests and window fingerprints under a tenant's key, the store's index, and the modular digest of each
block that it names. Only the K/V are missing (a block has one byte), and the cache never evicts.
"""

from __future__ import annotations

import errno
import json
import math
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from hypercache import fingerprint
from hypercache.checksum import checksum
from hypercache.cli.bench_live import NotMeasured, kv_spec
from hypercache.client.plan import MIN_RUN, least_blocks
from hypercache.engines import smollm
from hypercache.errors import ConfigError
from hypercache.fingerprint import Fingerprints
from hypercache.keys import (
    BLOCK_SIZES,
    Namespace,
    TenantKey,
    canonical_tokens,
    causal_digests,
    modular_digests,
    usable_blocks,
)
from hypercache.store import BlockStore, Located, NamespaceInfo, Run, Skip
from hypercache.store.arena import MIN_CAPACITY

BLOCK_SIZE = 8  # the headline's: short prompts lose to larger ones what does not fill a block
CAPACITY_PER_BLOCK = 32 << 10  # address space, not memory: blocks so large leave room for their index entries
_STORED_AT_ONCE = 1024  # blocks: one owner may have 8,192 reservations open
MAX_LINE = 16 << 20  # bytes, its end included: some millions of tokens; a longer line is no prompt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Logs:
    """The prompts of one set, in the order in which they are replayed, and what of its files is no prompt."""

    prompts: Sequence[Array]
    files: int
    broken_lines: int


@dataclass(slots=True)
class Found:
    """Of ``tokens`` tokens in all prompts of a set, how many were found in earlier ones.

    fixed_grid: causally, or as blocks on the prompt's own grid of ``block_size``. any_offset: causally, or in
    runs of at least ``min_run`` tokens wherever they begin. runs: of the latter. blocks: stored in the end.
    rejected: blocks that the index named and whose modular digest was another. client_s: CPU seconds of
    hashing, and of checking what was found. complete: False if the store cut a search short.
    """

    block_size: int
    min_run: int
    tokens: int = 0
    causal: int = 0
    fixed_grid: int = 0
    any_offset: int = 0
    runs: int = 0
    blocks: int = 0
    rejected: int = 0
    client_s: float = 0.0
    complete: bool = True

    def row(self) -> dict[str, Any]:
        """Shares instead of tokens, and milliseconds per 1,000 tokens."""
        row = asdict(self)
        for name in ("causal", "fixed_grid", "any_offset"):
            row[name] = row[name] / self.tokens if self.tokens else 0.0
        row["client_ms_per_1000_tokens"] = 1e6 * row.pop("client_s") / max(self.tokens, 1)
        return row


def measure(directory: Path, tokenizer: Path | None, report: Callable[[str], None]) -> dict[str, Any]:
    """One entry for each set of logs in ``directory``: a row of :class:`Found` for blocks of BLOCK_SIZE, and
    under ``by_block_size`` one for each size.

    A set is all files ``NAME_*.jsonl``, one JSON object a line with ``timestamp`` (a number) and ``input``
    (the prompt's text). Files are taken by name, the lines of each by time. ``report`` gets a line before
    what takes long. Raises ConfigError for a directory without logs, what cannot be read, or an unknown
    tokenizer, ModelUnavailable if the default one cannot be had.
    """
    sets = log_sets(directory)
    encode = load_tokenizer(tokenizer, report)
    fingerprint.warm()
    results = {}
    for name, files in sets.items():
        read = read_logs(files, encode)
        rows = {size: replay(read.prompts, size, MIN_RUN).row() for size in BLOCK_SIZES}
        counts = {
            "prompts": len(read.prompts),
            "empty_prompts": sum(not len(prompt) for prompt in read.prompts),
            "files": read.files,
            "broken_lines": read.broken_lines,
        }
        by_size = {str(size): row for size, row in rows.items()}
        results[name] = rows[BLOCK_SIZE] | counts | {"by_block_size": by_size}
    return results


def log_sets(directory: Path) -> dict[str, list[Path]]:
    """Files ``NAME_*.jsonl`` by NAME, sorted. Raises ConfigError if there are none, or they cannot be
    listed."""
    try:
        paths = sorted(path for path in directory.iterdir() if path.name.endswith(".jsonl"))
    except OSError as error:
        raise ConfigError(
            f"--logs {directory} is no directory that can be read: {error.strerror}; give one that holds "
            "prompt logs (*.jsonl)"
        ) from None
    sets: dict[str, list[Path]] = {}
    for path in paths:
        sets.setdefault(path.stem.partition("_")[0], []).append(path)
    if not sets:
        raise ConfigError(
            f"--logs {directory} holds no *.jsonl files; a log has one JSON object a line, with "
            '"timestamp" and "input"'
        )
    return sets


def load_tokenizer(path: Path | None, report: Callable[[str], None]) -> Callable[[str], Sequence[int]]:
    """Text -> ids, without special tokens. path: a tokenizer.json or its directory; None: SmolLM2's."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            f"{error}; install the extra: pip install 'hypercache-llm[transformers]'"
        ) from error
    given = smollm.ensure(report=report) if path is None else path
    try:
        file = given / "tokenizer.json" if given.is_dir() else given
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f"--tokenizer {given}: {error}; give a tokenizer.json, or a directory with one"
        ) from error

    def encode(text: str) -> Sequence[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode


def read_logs(files: Sequence[Path], encode: Callable[[str], Sequence[int]]) -> Logs:
    """Tokenizes the prompts. Lines that hold none, or more than MAX_LINE bytes, are counted as broken; blank
    ones are nothing. Raises ConfigError that names a file which cannot be read."""
    prompts: list[Array] = []
    broken = 0
    for path in files:
        rows: list[tuple[float, str]] = []
        for row in _lines(path):
            if row is None:
                broken += 1
            else:
                rows.append(row)
        rows.sort(key=lambda row: row[0])
        prompts += [canonical_tokens(list(encode(text))) for _, text in rows]
    return Logs(prompts, len(files), broken)


def _lines(path: Path) -> Iterator[tuple[float, str] | None]:
    """(time, prompt) of each line that is not blank, None for one without them."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe or a device might never end
            raise OSError(errno.EINVAL, "not a regular file")
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE + 1):
                if len(line) > MAX_LINE:
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MAX_LINE)
                    yield None
                elif line.strip():
                    yield _row(line)
    except OSError as error:
        raise ConfigError(
            f"--logs: {path} cannot be read: {error.strerror}; make it readable, or move it elsewhere"
        ) from None


def _row(line: bytes) -> tuple[float, str] | None:
    try:
        row = json.loads(line)
        when, text = row["timestamp"], row["input"]
        text.encode()  # half of a surrogate pair is no text
        number = isinstance(when, (int, float)) and not isinstance(when, bool)
        return (when, text) if number and math.isfinite(when) else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        return None  # OverflowError: an integer that is no float


class _Node:
    """A store with room for ``blocks`` blocks of one byte, and the namespace in it."""

    def __init__(self, block_size: int, blocks: int) -> None:
        self.tenant = TenantKey.public()
        self.ns = Namespace.build(kv_spec(), block_size=block_size, codec="raw", tenant=self.tenant)
        self.store = BlockStore(MIN_CAPACITY + blocks * CAPACITY_PER_BLOCK)
        info = NamespaceInfo(self.ns.digest, (1,), block_size, "raw", "reuse")
        self.handle = self.store.open_namespace(info)

    def locate(self, digests: Sequence[bytes], windows: Fingerprints, least: int) -> Located:
        return self.store.locate(self.handle, digests, 0, windows, least, 0.0)

    def verified(self, run: Run, prompt: Array) -> int:
        """How many blocks of a run, from its first on, have the prompt's tokens by the digest of both."""
        stop = run.at + len(run.blocks) * self.ns.block_size
        own = modular_digests(self.ns, self.tenant, prompt[run.at : stop])
        same = [block.modular == digest for block, digest in zip(run.blocks, own, strict=True)]
        return ([*same, False]).index(False)

    def keep(self, digests: Sequence[bytes], prompt: Array) -> None:
        """Store a prompt's full blocks. Raises NotMeasured if one finds no room."""
        marks = fingerprint.marks(self.ns, self.tenant, prompt)
        for at in range(0, len(digests), _STORED_AT_ONCE):
            some = slice(at, at + _STORED_AT_ONCE)
            parent = digests[at - 1] if at else None
            for entry in self.store.reserve(self.handle, parent, digests[some], "replay", 0.0, marks[some]):
                if isinstance(entry, Skip):
                    if entry.reason != "exists":
                        raise NotMeasured(f"the cache of the replay is not unlimited: {entry.reason}")
                    continue
                chunk = entry.chunk(0)
                chunk[:] = b"\0"
                self.store.fill(entry, 0, checksum(chunk), 0.0)


def replay(prompts: Sequence[Array], block_size: int, min_run: int) -> Found:
    """Look up and then store each prompt, in order, in a cache that starts empty and never evicts.

    prompts: uint32 token ids. The last token of a prompt is always left to compute. Raises NotMeasured if the
    cache did not take a block after all, SpecError for a block size or minimum run that cannot be.
    """
    least = least_blocks(min_run, block_size)
    node = _Node(block_size, sum(len(prompt) // block_size for prompt in prompts))
    found = Found(block_size, min_run)
    for prompt in prompts:
        began = time.process_time()
        digests = causal_digests(node.ns, node.tenant, prompt)
        windows = fingerprint.fingerprints(node.ns, node.tenant, prompt[:-1])
        spent = time.process_time() - began

        usable = digests[: usable_blocks(len(prompt), block_size)]
        located = node.locate(usable, windows, least)
        began = time.process_time()
        good = [node.verified(run, prompt) for run in located.runs]
        found.client_s += spent + time.process_time() - began

        grid = np.zeros_like(windows)  # 0: not asked for
        grid[::block_size] = windows[::block_size]
        aligned = node.locate(usable, grid, 1)
        on_grid = sum(node.verified(run, prompt) for run in aligned.runs)

        found.tokens += len(prompt)
        found.causal += located.hit * block_size
        found.fixed_grid += (located.hit + on_grid) * block_size
        found.any_offset += (located.hit + sum(good)) * block_size
        found.runs += len(good)
        found.rejected += sum(len(run.blocks) for run in located.runs) - sum(good)
        found.complete &= located.complete and aligned.complete
        node.keep(digests, prompt)
    found.blocks = node.store.count(node.handle)
    return found


def show(results: Mapping[str, Any], console: Console) -> None:
    """Print what :func:`measure` found."""
    console.print("[bold]Reuse in logs[/bold] (share of prompt tokens found in earlier prompts of the set)")
    table = Table("set", box=None, pad_edge=False)
    for heading in ("prompts", "tokens", "block", "causal", "fixed grid", "any offset", "runs", "CPU ms/1k"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, result in results.items():
        for index, row in enumerate(result["by_block_size"].values()):
            first = (name, f"{result['prompts']:,}", f"{row['tokens']:,}") if not index else ("", "", "")
            shares = (f"{row[way]:.2%}" for way in ("causal", "fixed_grid", "any_offset"))
            cpu = f"{row['client_ms_per_1000_tokens']:.2f}"
            table.add_row(*first, str(row["block_size"]), *shares, f"{row['runs']:,}", cpu)
    console.print(table)
    console.print(f"  any offset: in runs of at least {MIN_RUN} tokens behind the causal hit")
    console.print(f"  --json gives blocks of {BLOCK_SIZE} for each set, and all sizes below that")
    console.print("  CPU: of a client, for hashing a prompt and checking what was found, per 1,000 tokens")
    for name, result in results.items():
        if result["broken_lines"]:
            console.print(
                f"  {name}: {result['broken_lines']} lines hold no prompt with a time, and are left out"
            )
        if not all(row["complete"] for row in result["by_block_size"].values()):
            console.print(f"  {name}: a search was cut short, there may be more to find")
