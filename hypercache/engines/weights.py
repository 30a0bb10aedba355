"""Content digests of checkpoints and adapters: which weights a model's K/V came from.

A path or a name says nothing: the same checkpoint lies elsewhere on another host, other weights lie under
the same name after an update. What counts:

- safetensors: the set of tensors, each by name, dtype, shape and bytes. File names, sharding and metadata
  do not count, so a checkpoint that was resharded or merged into one file keeps its fingerprint.
- PyTorch ``.bin`` and GGUF: the bytes of the files in the order of their names (nothing is unpickled).
- the model's configuration does not count here: it is in :class:`hypercache.model.ModelSpec`.

Reading a checkpoint takes seconds per ten gigabytes, so per-file results are kept in the user's cache
directory under (device, inode, size, mtime, ctime). A damaged or unwritable cache is no cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypercache.engines.home import cache_home
from hypercache.errors import SpecError
from hypercache.identity import Value, canonical, commit

PIECE_NBYTES = (
    32 << 20
)  # ranges are hashed in pieces of this size, in parallel; part of the digest's definition
READ_NBYTES = 1 << 20
HEADER_LIMIT = 100_000_000  # the safetensors format's own limit
# A file touched this recently may change again within its file system's clock tick: hash it, but do not
# remember the result.
SETTLE_NS = 2_000_000_000

_SPLIT_GGUF = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<total>\d{5})\.gguf")
# Entries of adapter_config.json that do not change what the adapter computes.
_ADAPTER_LABELS = frozenset(
    {"base_model_name_or_path", "revision", "auto_mapping", "task_type", "inference_mode", "peft_version"}
    | {"lora_dropout", "init_lora_weights", "loftq_config", "eva_config", "corda_config", "runtime_config"}
)

Record = tuple[str, str]  # tensor name ("" for a whole file), hex digest of its dtype, shape and bytes


@dataclass(frozen=True, slots=True)
class _Range:
    """Bytes ``start..start+nbytes`` of a file and what they are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def weights_fingerprint(path: str | os.PathLike[str], *, cache_dir: Path | None = None) -> bytes:
    """32-byte content digest of the checkpoint at ``path``: a model directory, or one weight file.

    In a directory the files that transformers would load count: ``model.safetensors``, else the shards of
    its index, else other ``*.safetensors``; then ``pytorch_model*.bin`` likewise; then one GGUF model.
    cache_dir: where results are kept; None takes ``weights`` under
        :func:`hypercache.engines.home.cache_home`.
    Raises SpecError, naming the file and the remedy, for a missing, damaged or ambiguous checkpoint.
    """
    return _fingerprint("hypercache.weights.v1", _weight_files(Path(path)), {}, cache_dir)


def adapter_fingerprint(path: str | os.PathLike[str], *, cache_dir: Path | None = None) -> bytes:
    """32-byte content digest of the LoRA adapter in directory ``path``: its weights and its settings.

    Settings are those of ``adapter_config.json`` (``r``, ``lora_alpha``, ``target_modules``, ...) except
    names and training-only ones; entries that are null, false or empty are absent, and the order of lists
    does not count. Raises SpecError as :func:`weights_fingerprint`.
    """
    folder = Path(path)
    config = _read_json(folder / "adapter_config.json", "give the directory that the adapter was saved to")
    settings: dict[str, Value] = {}
    for key, item in config.items():
        if key in _ADAPTER_LABELS or item is None or item is False or item in ([], {}):
            continue
        settings[key] = canonical(sorted(item, key=str) if isinstance(item, list) else item)
    for name in ("adapter_model.safetensors", "adapter_model.bin"):
        if (folder / name).exists():
            return _fingerprint("hypercache.adapter.v1", [folder / name], settings, cache_dir)
    raise SpecError(f"{folder} has no adapter_model.safetensors or adapter_model.bin; save the adapter again")


def _fingerprint(tag: str, files: Sequence[Path], settings: Value, cache_dir: Path | None) -> bytes:
    if cache_dir is None and (home := cache_home()) is not None:
        cache_dir = home / "weights"
    cache = _Cache(cache_dir)
    tensors: dict[str, str] = {}
    whole: list[str] = []
    for file in files:
        for name, digest in _records(file, cache):
            if file.suffix != ".safetensors":
                whole.append(digest)
            elif name in tensors:
                raise SpecError(f"{file}: tensor {name!r} is also in another shard; remove the stale files")
            else:
                tensors[name] = digest
    return commit(tag, {"tensors": tensors, "files": whole, "settings": settings})


# --- which files -------------------------------------------------------------------------------------


def _weight_files(path: Path) -> list[Path]:
    if not path.exists():
        raise SpecError(f"no checkpoint at {path}; give a model directory or a weight file that exists")
    if path.is_file():
        return _gguf_parts(path) if path.suffix == ".gguf" else [path]
    for stem, suffix, others in (("model", "safetensors", "*.safetensors"), ("pytorch_model", "bin", None)):
        if (single := path / f"{stem}.{suffix}").exists():
            return [single]
        if (index := path / f"{stem}.{suffix}.index.json").exists():
            return _indexed(index)
        if others and (found := sorted(f for f in path.glob(others) if not f.name.startswith("adapter_"))):
            return found
    models = sorted({_gguf_parts(file)[0] for file in path.glob("*.gguf")})
    if len(models) > 1:
        raise SpecError(
            f"{path} holds several GGUF models: {', '.join(m.name for m in models)}; give one file"
        )
    if models:
        return _gguf_parts(models[0])
    raise SpecError(
        f"{path} has no weights (*.safetensors, pytorch_model*.bin or *.gguf); download the checkpoint first"
    )


def _indexed(index: Path) -> list[Path]:
    shards = _read_json(index, "download it again").get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise SpecError(f"{index} has no 'weight_map'; download it again")
    names = sorted(set(map(str, shards.values())))
    for name in names:
        if Path(name).name != name or not (index.parent / name).exists():
            raise SpecError(
                f"{index} names shard {name!r}, which is not beside it; download the missing file"
            )
    return [index.parent / name for name in names]


def _gguf_parts(path: Path) -> list[Path]:
    """All parts of the GGUF model that ``path`` is, or is a part of."""
    match = _SPLIT_GGUF.fullmatch(path.name)
    if match is None:
        return [path]
    total = int(match["total"])
    parts = [path.with_name(f"{match['stem']}-{n:05}-of-{total:05}.gguf") for n in range(1, total + 1)]
    for part in parts:
        if not part.exists():
            raise SpecError(f"{part} is missing; download all {total} parts of {match['stem']}")
    return parts or [path]


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise SpecError(f"{path} does not exist; {remedy}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{path} cannot be read as JSON: {error}; {remedy}") from None
    if not isinstance(found, dict):
        raise SpecError(f"{path} must hold a JSON object; {remedy}")
    return found


# --- what is in them ---------------------------------------------------------------------------------


def _records(path: Path, cache: _Cache) -> list[Record]:
    try:
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            if (known := cache.load(before)) is not None:
                return known
            started = time.time_ns()
            if path.suffix == ".safetensors":
                ranges = _tensor_ranges(path, file.fileno(), before.st_size)
            else:
                ranges = [_Range("", "file", (before.st_size,), 0, before.st_size)]
            records = _hash_ranges(path, file.fileno(), ranges)
            after = os.fstat(file.fileno())
    except OSError as error:
        raise SpecError(
            f"{path} cannot be read: {error.strerror}; check that it exists and is readable"
        ) from None
    if _identity(after) != _identity(before):
        raise SpecError(f"{path} changed while it was read; wait until it is written and start again")
    if started - max(before.st_mtime_ns, before.st_ctime_ns) > SETTLE_NS:
        cache.save(before, records)
    return records


def _tensor_ranges(path: Path, fd: int, size: int) -> list[_Range]:
    """The tensors of a safetensors file: u64 header length, JSON header, then the tensors' bytes."""
    remedy = (
        "it is not a whole safetensors file (a Git LFS pointer, or a broken download?); download it again"
    )
    prefix = os.pread(fd, 8, 0)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > HEADER_LIMIT or 8 + length > size:
        raise SpecError(f"{path}: {remedy}")
    ranges: list[_Range] = []
    try:
        header = json.loads(os.pread(fd, length, 8))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, stop = entry["data_offsets"]
            if not 0 <= first <= stop <= size - 8 - length:
                raise ValueError(name)
            shape = tuple(int(dim) for dim in entry["shape"])
            ranges.append(_Range(name, str(entry["dtype"]), shape, 8 + length + first, stop - first))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise SpecError(f"{path}: {remedy}") from None
    return ranges


def _hash_ranges(path: Path, fd: int, ranges: Sequence[_Range]) -> list[Record]:
    pieces = [
        (item.start + offset, min(PIECE_NBYTES, item.nbytes - offset))
        for item in ranges
        for offset in range(0, item.nbytes, PIECE_NBYTES)
    ]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # reading and hashing release the GIL
        digests = pool.map(lambda piece: _hash_piece(path, fd, *piece), pieces)
        records: list[Record] = []
        for item in ranges:
            content = [next(digests) for _ in range(0, item.nbytes, PIECE_NBYTES)]
            fields: Mapping[str, Value] = {"dtype": item.dtype, "shape": list(item.shape), "pieces": content}
            records.append((item.name, commit("hypercache.tensor.v1", fields).hex()))
    return records


def _hash_piece(path: Path, fd: int, start: int, nbytes: int) -> bytes:
    state = hashlib.sha256()  # 2-3 times the speed of BLAKE2b where the CPU has SHA instructions
    while nbytes:
        data = os.pread(fd, min(READ_NBYTES, nbytes), start)
        if not data:
            raise SpecError(
                f"{path} became shorter while it was read; wait until it is written and start again"
            )
        state.update(data)
        start += len(data)
        nbytes -= len(data)
    return state.digest()


# --- what was found last time ------------------------------------------------------------------------


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    # ctime as well as mtime: a copy that preserves mtime still moves ctime, and nobody can set it back.
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


class _Cache:
    """Per-file records on disk, one small file each, written whole or not at all."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def _file(self, stat: os.stat_result) -> Path | None:
        name = hashlib.blake2b(struct.pack("<5Q", *(n % 2**64 for n in _identity(stat))), digest_size=16)
        return None if self._folder is None else self._folder / f"{name.hexdigest()}.v1.json"

    def load(self, stat: os.stat_result) -> list[Record] | None:
        if (file := self._file(stat)) is None:
            return None
        try:
            entry = json.loads(file.read_bytes())
            records = [(str(name), str(digest)) for name, digest in entry["records"]]
            return records if entry["check"] == self._check(stat, records) else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def save(self, stat: os.stat_result, records: list[Record]) -> None:
        if (file := self._file(stat)) is None:
            return
        entry = json.dumps({"records": records, "check": self._check(stat, records)})
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=file.parent)
            new = Path(name)
            try:
                with os.fdopen(handle, "w") as out:
                    out.write(entry)
                new.replace(file)
            finally:
                new.unlink(missing_ok=True)
        except OSError:
            return  # a read-only or full home costs a second reading next time, nothing else

    @staticmethod
    def _check(stat: os.stat_result, records: list[Record]) -> str:
        return commit("hypercache.weights.cache.v1", {"of": _identity(stat), "records": records}).hex()
