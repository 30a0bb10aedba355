"""The benchmark of the disk tier, small: it measures what it says, and reports nothing that it did not do."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from hypercache import codecs
from hypercache.cli import bench_disk, bench_index, bench_tiers, main
from hypercache.cli.bench_live import NotMeasured, kv_spec
from hypercache.kv import KVBuffers
from hypercache.store import hckv, transcode
from hypercache.store.disk import Disk

ROWS = ("write_end", "write_batch", "read_cached", "read_cold", "get_cached", "get_cold")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    directory = tmp_path_factory.mktemp("disk")
    found = bench_tiers.measure(directory, rounds=1, blocks=3000, small=True)
    assert list(directory.iterdir()) == []
    return found


def test_each_figure_is_there_and_positive(found: dict) -> None:
    assert list(found["files"]) == ["raw", "int4"]
    for codec, rows in found["files"].items():
        assert list(rows) == [*ROWS, *(("encode", "decode") if codec == "int4" else ())]
        for what, row in rows.items():
            assert all(value > 0 for value in row.values()), (codec, what)
            if what in ROWS:
                assert {"gbps", "plain_gbps", "to_plain", "kv_to_plain"} <= set(row)
            if what.startswith("get"):
                assert row["time_to_plain"] * row["to_plain"] == pytest.approx(1)
    int4 = found["files"]["int4"]
    assert set(int4["encode"]) == {"gbps", "to_write"} and set(int4["decode"]) == {"gbps", "to_read"}
    write = int4["write_end"]
    assert 3 < write["kv_to_plain"] / write["to_plain"] < 3.88  # a record has a header, and is padded
    assert found["restart"]["blocks"] == 300
    assert found["restart"]["footer_s"] > 0 and found["restart"]["scan_s"] > 0


def test_the_index_is_measured_in_a_process_of_its_own(found: dict) -> None:
    index = found["index"]
    assert index["blocks"] == 3000
    assert 300 < index["bytes_per_block"] < 3 * index["charged"]
    with pytest.raises(NotMeasured, match="the index of -5 blocks"):
        bench_index.index(-5)


def test_servers_are_measured_with_a_client(found: dict) -> None:
    gets, tail = found["gets"], found["tail"]
    assert gets["blocks"] == 2 and gets["record_bytes"] % hckv.ALIGN == 0
    for state in ("cached", "cold"):
        assert set(gets[state]) == {"tier_ms", "memory_ms", "plain_ms", "time_to_plain"}
        assert all(value > 0 for value in gets[state].values())
    sides = {f"{what}_{side}_ms" for what in ("p50", "p99") for side in ("with", "without")}
    assert set(tail) == sides | {"to_without", "demoted_bytes"} and all(value > 0 for value in tail.values())
    assert tail["p99_with_ms"] >= tail["p50_with_ms"]


def test_people_see_the_figures(found: dict) -> None:
    output = io.StringIO()
    tail = {"p99_with_ms": 3.25, "p99_without_ms": 2.5, "to_without": 1.3}
    bench_tiers.show(found | {"tail": found["tail"] | tail}, Console(file=output, width=110))
    text = output.getvalue()
    row = found["files"]["int4"]["read_cold"]
    assert ["int4", "read,", "cold", f"{row['gbps']:.2f}"] in [line.split()[:4] for line in text.splitlines()]
    for words in (
        "p99 3.25 ms, 2.50",
        "1.30x",
        "3,000 small blocks",
        "measured with 300",
        "int4 encodes K/V",
        "a get of 2 blocks, cold",
    ):
        assert words in text


def test_footers_that_were_cut_off_make_restarts_scan(tmp_path: Path) -> None:
    bench_index.restart(tmp_path, 50, 1)
    directory = tmp_path / "restart"
    (path,) = directory.glob("*.hckv")
    sealed = path.stat().st_size
    bench_index._cut_footers(directory)
    records = 50 * hckv.block_nbytes(bench_index._INFO)
    assert path.stat().st_size == hckv.ALIGN + records < sealed
    disk = Disk(directory, capacity=1 << 30)
    assert [len(contents) for _, contents in disk.restore()] == [50]
    disk.close()
    assert path.stat().st_size == sealed  # a scan ends with a new footer


def test_cold_is_out_of_the_page_cache(tmp_path: Path) -> None:
    """Else "cold" would be a second figure of "cached"."""
    path = tmp_path / "0000000000000001.hckv"
    path.write_bytes(bytes(8 << 20))
    before = _cached_pages(path)
    bench_disk.drop(tmp_path)
    assert before == 2048
    if _cached_pages(path) == before:
        pytest.skip("this file system keeps its files in memory")
    assert _cached_pages(path) == 0


def _cached_pages(path: Path) -> int:
    """By mincore(2)."""
    import ctypes
    import mmap

    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        vector = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        size = ctypes.c_size_t(len(mapped))
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), size, vector) == 0
        del start
        return sum(one & 1 for one in vector)


def test_the_command_has_the_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[object, ...]] = []

    def measure(directory: object = None, rounds: int = 5, blocks: int = 0) -> dict[str, int]:
        asked.append((directory, blocks))
        return {"figure": 1}

    monkeypatch.setattr(bench_tiers, "measure", measure)
    arguments = ["benchmark", "--part", "tiers", "--json", "--disk", "/mnt", "--blocks", "2000000"]
    assert main.main(arguments) == 0
    assert json.loads(capsys.readouterr().out) == {"tiers": {"figure": 1}}
    assert main.main(arguments[:4]) == 0
    assert asked == [(Path("/mnt"), 2_000_000), (None, bench_tiers.BLOCKS)]


def test_the_plain_side_of_a_get_decodes_what_the_tier_would(tmp_path: Path) -> None:
    kv = KVBuffers.allocate(kv_spec(2), 3 * 16)
    plain = bench_disk.Plain(tmp_path / "plain", 3, kv)
    data = bench_disk.sample("int8", "int4", 2)
    for part in (part for layer in range(2) for part in kv.layer(layer)):
        part[...] = 0
    plain.drop()
    plain.read()
    out = memoryview(bytearray(sum(data.info.below_nbytes)))
    for block in range(3):
        transcode.down(data.info, data.chunks[block], data.crcs[block], out)
        rows = np.frombuffer(out, np.uint8).reshape(2, -1)
        for layer in range(2):
            parts = [np.empty((8, 16, 128), np.uint16) for _ in range(2)]
            codecs.get("int4").decode(data.info.layouts[0], rows[layer : layer + 1], parts)
            for part, want in zip(kv.layer(layer), parts, strict=True):
                assert np.array_equal(part[:, 16 * block : 16 * block + 16], want)
