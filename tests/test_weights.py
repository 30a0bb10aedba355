"""Content identity of checkpoints and adapters (cases A02, A06, B05)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hypercache.engines import weights
from hypercache.engines.home import cache_home
from hypercache.engines.smollm import ModelUnavailable, models_dir
from hypercache.engines.weights import adapter_fingerprint, weights_fingerprint
from hypercache.errors import SpecError

Tensors = dict[str, np.ndarray[Any, Any]]
_DTYPE_NAMES = {"float32": "F32", "float16": "F16", "int32": "I32"}


def write_safetensors(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> Path:
    """The published format: u64 header length, JSON header, data."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, array in tensors.items():
        raw = array.tobytes()
        offsets = [len(data), len(data) + len(raw)]
        dtype = _DTYPE_NAMES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def with_header(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"data"


def checkpoint(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    return folder


@pytest.fixture
def tensors() -> Tensors:
    rng = np.random.default_rng(7)
    return {f"layers.{n}.k_proj": rng.standard_normal((8, 4), np.float32) for n in range(3)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HYPERCACHE_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hypercache" / "weights"


def test_results_are_kept_where_models_are(
    tmp_path: Path, tensors: Tensors, settled: None, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "a", tensors)
    monkeypatch.setenv("HYPERCACHE_HOME", str(tmp_path / "home"))
    weights_fingerprint(folder)
    assert len(list((tmp_path / "home" / "weights").iterdir())) == 1 and not cache.exists()
    monkeypatch.delenv("HYPERCACHE_HOME")
    weights_fingerprint(folder)
    assert len(list(cache.iterdir())) == 1
    assert models_dir({"HYPERCACHE_HOME": str(tmp_path / "home")}) == tmp_path / "home" / "models"


@pytest.mark.parametrize(
    ("environ", "home"),
    [
        ({"HYPERCACHE_HOME": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"HYPERCACHE_HOME": "", "XDG_CACHE_HOME": "/b"}, Path("/b/hypercache")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache/hypercache"),
        ({}, Path.home() / ".cache/hypercache"),
    ],
)
def test_one_home_for_all_that_is_kept(environ: dict[str, str], home: Path) -> None:
    assert cache_home(environ) == home
    assert models_dir(environ) == home / "models"


def test_without_a_home_nothing_is_kept(
    tmp_path: Path, tensors: Tensors, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless(cls: type) -> Path:
        raise RuntimeError("Could not determine home directory.")

    want = weights_fingerprint(checkpoint(tmp_path / "a", tensors))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HYPERCACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", classmethod(homeless))
    assert cache_home() is None
    assert weights_fingerprint(tmp_path / "a") == want
    with pytest.raises(ModelUnavailable, match="set HYPERCACHE_HOME"):
        models_dir()


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files just written count as old, so that results are remembered."""
    monkeypatch.setattr(weights, "SETTLE_NS", -(10**18))


def test_b05_same_weights_under_two_paths_share(tmp_path: Path, tensors: Tensors) -> None:
    a = checkpoint(tmp_path / "a" / "x", tensors)
    b = checkpoint(tmp_path / "b" / "y", tensors)
    assert (
        weights_fingerprint(a) == weights_fingerprint(str(b)) == weights_fingerprint(b / "model.safetensors")
    )
    assert len(weights_fingerprint(a)) == 32


def test_a06_other_weights_under_the_same_path_do_not(tmp_path: Path, tensors: Tensors) -> None:
    folder = checkpoint(tmp_path / "m", tensors)
    first = weights_fingerprint(folder)
    tensors["layers.1.k_proj"][3, 2] = np.nextafter(tensors["layers.1.k_proj"][3, 2], np.float32(9))
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    assert weights_fingerprint(folder) != first


def test_sharding_order_and_metadata_do_not_count(tmp_path: Path, tensors: Tensors) -> None:
    whole = weights_fingerprint(checkpoint(tmp_path / "whole", tensors))
    names = list(tensors)
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    write_safetensors(
        sharded / "model-00001-of-00002.safetensors", {n: tensors[n] for n in reversed(names[1:])}
    )
    write_safetensors(sharded / "model-00002-of-00002.safetensors", {names[0]: tensors[names[0]]})
    assert weights_fingerprint(sharded) == whole
    shards = {n: f"model-0000{1 + (n == names[0])}-of-00002.safetensors" for n in names}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    # A second copy in another form, as some repositories carry, is not read once there is an index.
    write_safetensors(sharded / "consolidated.safetensors", tensors)
    assert weights_fingerprint(sharded) == whole


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "missing", "extra"])
def test_every_property_of_a_tensor_counts(tmp_path: Path, tensors: Tensors, change: str) -> None:
    before = weights_fingerprint(checkpoint(tmp_path / "a", tensors))
    name = "layers.0.k_proj"
    match change:
        case "name":
            tensors["layers.9.k_proj"] = tensors.pop(name)
        case "dtype":
            tensors[name] = tensors[name].view(np.int32)
        case "shape":
            tensors[name] = tensors[name].reshape(4, 8)
        case "missing":
            del tensors[name]
        case "extra":
            tensors["empty"] = np.empty((0,), np.float32)
    assert weights_fingerprint(checkpoint(tmp_path / "b", tensors)) != before


def test_values_swapped_between_two_tensors_count(tmp_path: Path, tensors: Tensors) -> None:
    before = weights_fingerprint(checkpoint(tmp_path / "a", tensors))
    a, b = "layers.0.k_proj", "layers.1.k_proj"
    tensors[a], tensors[b] = tensors[b], tensors[a]
    assert weights_fingerprint(checkpoint(tmp_path / "b", tensors)) != before


def test_large_ranges_are_hashed_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors: Tensors
) -> None:
    """Many pieces in parallel: every byte counts, also the last one of a piece and of a file."""
    monkeypatch.setattr(weights, "PIECE_NBYTES", 64)
    monkeypatch.setattr(weights, "READ_NBYTES", 24)
    file = tmp_path / "m.gguf"
    data = bytes(range(256)) + b"x" * 44
    seen = set()
    for index in (None, 0, 63, 64, 255, 299):
        changed = bytearray(data)
        if index is not None:
            changed[index] ^= 1
        file.write_bytes(changed)
        seen.add(weights_fingerprint(file))
    file.write_bytes(data[:-1])
    seen.add(weights_fingerprint(file))
    file.write_bytes(data + b"\0")
    seen.add(weights_fingerprint(file))
    assert len(seen) == 8


def test_gguf_alone_and_in_a_directory(tmp_path: Path) -> None:
    folder = tmp_path / "g"
    folder.mkdir()
    (folder / "q4.gguf").write_bytes(b"GGUF four")
    assert weights_fingerprint(folder) == weights_fingerprint(folder / "q4.gguf")
    (folder / "q8.gguf").write_bytes(b"GGUF eight")
    with pytest.raises(SpecError, match=r"several GGUF models: q4\.gguf, q8\.gguf; give one file"):
        weights_fingerprint(folder)
    assert weights_fingerprint(folder / "q4.gguf") != weights_fingerprint(folder / "q8.gguf")


def test_split_gguf_is_one_model(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    parts[0].write_bytes(b"one")
    with pytest.raises(SpecError, match=r"m-00002-of-00002\.gguf is missing; download all 2 parts"):
        weights_fingerprint(parts[0])
    parts[1].write_bytes(b"two")
    assert weights_fingerprint(tmp_path) == weights_fingerprint(parts[0]) == weights_fingerprint(parts[1])
    before = weights_fingerprint(tmp_path)
    parts[1].write_bytes(b"TWO")
    assert weights_fingerprint(tmp_path) != before


def test_bin_shards_follow_the_index(tmp_path: Path) -> None:
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "p1.bin", "b": "p2.bin"}}))
    (tmp_path / "p1.bin").write_bytes(b"1")
    with pytest.raises(SpecError, match=r"names shard 'p2\.bin', which is not beside it"):
        weights_fingerprint(tmp_path)
    (tmp_path / "p2.bin").write_bytes(b"2")
    (tmp_path / "training_args.bin").write_bytes(b"noise")
    before = weights_fingerprint(tmp_path)
    (tmp_path / "training_args.bin").write_bytes(b"other noise")
    assert weights_fingerprint(tmp_path) == before
    (tmp_path / "p2.bin").write_bytes(b"3")
    assert weights_fingerprint(tmp_path) != before
    index.write_text(json.dumps({"weight_map": {"a": "../p1.bin"}}))
    with pytest.raises(SpecError, match="not beside it"):
        weights_fingerprint(tmp_path)


def test_missing_and_damaged_files_are_named(tmp_path: Path, tensors: Tensors) -> None:
    with pytest.raises(SpecError, match=r"no checkpoint at .*/nowhere; give a model directory"):
        weights_fingerprint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError, match=r"/empty has no weights .*download the checkpoint first"):
        weights_fingerprint(tmp_path / "empty")
    whole = write_safetensors(tmp_path / "model.safetensors", tensors).read_bytes()
    attacks = {
        "lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "truncated": whole[:-1],
        "only a length": whole[:8],
        "shorter than a length": whole[:5],
        "length past the end": (10**12).to_bytes(8, "little") + whole[8:],
        "header is a list": (2).to_bytes(8, "little") + b"[]",
        "header is deep": (100_000).to_bytes(8, "little") + b"[" * 100_000,
        "negative offset": with_header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [-1, 0]}}),
        "offset past the end": with_header({"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}),
        "no offsets": with_header({"a": {"dtype": "U8", "shape": [1]}}),
    }
    for data in attacks.values():
        (tmp_path / "model.safetensors").write_bytes(data)
        with pytest.raises(SpecError, match=r"model\.safetensors: it is not a whole safetensors file"):
            weights_fingerprint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    write_safetensors(tmp_path / "a.safetensors", tensors)
    write_safetensors(tmp_path / "b.safetensors", {"layers.0.k_proj": tensors["layers.0.k_proj"]})
    with pytest.raises(
        SpecError, match=r"b\.safetensors: tensor 'layers\.0\.k_proj' is also in another shard"
    ):
        weights_fingerprint(tmp_path)


# --- the cache ---------------------------------------------------------------------------------------


def _count_hashing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    real = weights._hash_ranges
    monkeypatch.setattr(weights, "_hash_ranges", lambda *args: (calls.append(1), real(*args))[1])
    return calls


@pytest.mark.usefixtures("settled")
def test_second_start_reads_no_weights(
    tmp_path: Path, cache: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "m", tensors)
    calls = _count_hashing(monkeypatch)
    first = weights_fingerprint(folder)
    assert (len(calls), len(list(cache.iterdir()))) == (1, 1)
    assert weights_fingerprint(folder) == first
    assert len(calls) == 1
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("settled")
def test_change_with_size_and_mtime_kept_is_seen(tmp_path: Path, tensors: Tensors) -> None:
    """As `rsync --inplace --times` leaves it: same inode, same size, same mtime."""
    folder = checkpoint(tmp_path / "m", tensors)
    file = folder / "model.safetensors"
    stat = file.stat()
    first = weights_fingerprint(folder)
    with file.open("r+b") as out:
        out.seek(-1, os.SEEK_END)
        out.write(b"\x7f")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_mtime_ns, file.stat().st_size) == (stat.st_mtime_ns, stat.st_size)
    assert weights_fingerprint(folder) != first


def test_files_just_written_are_not_remembered(tmp_path: Path, cache: Path, tensors: Tensors) -> None:
    """Within one tick of the file system's clock a second write would leave no trace."""
    weights_fingerprint(checkpoint(tmp_path / "m", tensors))
    assert not cache.exists()


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("damage", ["garbage", "empty", "flipped digit", "other file's entry", "wrong type"])
def test_damaged_cache_is_ignored(tmp_path: Path, cache: Path, tensors: Tensors, damage: str) -> None:
    folder = checkpoint(tmp_path / "m", tensors)
    first = weights_fingerprint(folder)
    (entry,) = cache.iterdir()
    text = entry.read_text()
    match damage:
        case "garbage":
            entry.write_bytes(os.urandom(64))
        case "empty":
            entry.write_bytes(b"")
        case "flipped digit":
            digest = json.loads(text)["records"][0][1]
            entry.write_text(text.replace(digest, digest[:-1] + ("0" if digest[-1] != "0" else "1")))
        case "other file's entry":
            other = checkpoint(tmp_path / "other", {"x": np.zeros(4, np.float32)})
            weights_fingerprint(other)
            (theirs,) = set(cache.iterdir()) - {entry}
            shutil.copy(theirs, entry)
        case "wrong type":
            entry.write_text("[1, 2]")
    assert weights_fingerprint(folder) == first
    assert entry.read_text() == text  # and it was put right


@pytest.mark.usefixtures("settled")
def test_no_place_for_a_cache_is_no_error(tmp_path: Path, tensors: Tensors) -> None:
    folder = checkpoint(tmp_path / "m", tensors)
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    assert weights_fingerprint(folder, cache_dir=blocked / "sub") == weights_fingerprint(folder)


# --- adapters ----------------------------------------------------------------------------------------


def adapter(folder: Path, value: float = 1.0, **settings: Any) -> Path:
    folder.mkdir()
    write_safetensors(folder / "adapter_model.safetensors", {"lora_A": np.full((2, 4), value, np.float32)})
    config = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "peft_type": "LORA"} | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_a02_adapters_are_their_content_not_their_name(tmp_path: Path) -> None:
    base = adapter_fingerprint(adapter(tmp_path / "x", base_model_name_or_path="/one/path"))
    (tmp_path / "elsewhere").mkdir()
    assert (
        adapter_fingerprint(adapter(tmp_path / "elsewhere" / "y", base_model_name_or_path="/other")) == base
    )
    (tmp_path / "v2").mkdir()
    assert adapter_fingerprint(adapter(tmp_path / "v2" / "x", value=2.0)) != base


@pytest.mark.parametrize(
    "setting",
    [
        {"r": 3},
        {"lora_alpha": 8},
        {"target_modules": ["q_proj"]},
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 3}},
        {"peft_type": "LOHA"},
    ],
)
def test_every_setting_of_an_adapter_counts(tmp_path: Path, setting: dict[str, Any]) -> None:
    base = adapter_fingerprint(adapter(tmp_path / "x"))
    assert adapter_fingerprint(adapter(tmp_path / "y", **setting)) != base


def test_settings_that_mean_nothing_do_not_count(tmp_path: Path) -> None:
    base = adapter_fingerprint(adapter(tmp_path / "x"))
    same = {
        "target_modules": ["v_proj", "q_proj"],  # a set, written in any order
        "lora_alpha": 4.0,
        "use_dora": False,
        "rank_pattern": {},
        "layers_to_transform": None,
        "lora_dropout": 0.1,
        "peft_version": "0.99",
    }
    assert adapter_fingerprint(adapter(tmp_path / "y", **same)) == base


def test_incomplete_adapters_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"adapter_config\.json does not exist; give the directory"):
        adapter_fingerprint(tmp_path)
    folder = adapter(tmp_path / "x")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(SpecError, match=r"has no adapter_model\.safetensors"):
        adapter_fingerprint(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(SpecError, match="cannot be read as JSON"):
        adapter_fingerprint(folder)


def test_an_adapter_is_never_a_model(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "x")
    assert adapter_fingerprint(folder) != weights_fingerprint(folder / "adapter_model.safetensors")
    with pytest.raises(SpecError, match="has no weights"):
        weights_fingerprint(folder)
