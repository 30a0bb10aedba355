"""``hypercache inspect``: what people see of `.hckv` files, whatever is in them."""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from hypercache.cli.main import main
from hypercache.store import hckv

from .hckv_kit import DATA, DIGESTS, FIRST, SEGMENT, SPACE, STORE, attacks, block, name, records, segment

ATTACKS = attacks()
NAME = f"{SEGMENT:016x}.hckv"


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command; (exit code, its JSON)."""

    def run(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
        code = main(["inspect", "--json", *map(str, arguments)])
        text = capsys.readouterr().out
        assert text.isascii()
        return code, json.loads(text)

    return run


def tombstones(first: int = 20) -> list[bytearray]:
    """Two of SPACE's three blocks are removed, and all of another namespace."""
    return [
        hckv.write_removal(SPACE.digest, list(DIGESTS[:2]), store=STORE, sequence=first),
        hckv.write_removal(name("other"), None, store=STORE, sequence=first + 1),
    ]


@pytest.mark.parametrize("stem", ATTACKS)
def test_attack(stem: str, tmp_path: Path, show: Any) -> None:
    """All that is wrong is told by the rule it breaks, and nothing else is."""
    attack = ATTACKS[stem]
    path = tmp_path / f"{attack.stem or stem}.hckv"
    path.write_bytes((DATA / f"{stem}.hckv").read_bytes())
    code, found = show(path)
    (report,) = found["files"]
    assert {problem["rule"] for problem in report["problems"]} == set(attack.rules)
    assert code == (1 if attack.rules else 0)
    assert found["intact"] is (code == 0)
    damaged = sum(p["rule"] == "payload-crc" and p["offset"] % 4096 == 0 for p in report["problems"])
    assert len(attack.found) <= report["records"].get("BLOCK", 0) <= len(attack.found) + damaged


def test_what_is_in_a_segment_is_counted(tmp_path: Path, show: Any) -> None:
    path = tmp_path / NAME
    parts = [*records(), *tombstones()]
    path.write_bytes(segment(parts))
    code, found = show(path)
    (report,) = found["files"]
    assert code == 0
    assert report["segment"] == SEGMENT
    assert (report["footer"], report["footer_nbytes"]) == ("present", 4096)
    assert report["records"] == {"BLOCK": 3, "REMOVE": 1, "CLEAR": 1}
    assert report["sequences"] == [11, 21]
    payload = 3 * sum(SPACE.below_nbytes)
    assert report["payload_nbytes"] == payload
    assert report["overhead_nbytes"] == sum(map(len, parts)) - payload
    assert report["dead_nbytes"] == 2 * 4096
    assert report["nbytes"] == path.stat().st_size
    assert report["namespaces"] == [
        {
            "digest": SPACE.digest.hex()[:12],
            "label": "tiny",
            "codec": "int8",
            "below": "int4",
            "block_size": 4,
            "layers": 3,
            "blocks": 3,
            "payload_nbytes": payload,
        }
    ]


def test_what_is_dead_is_found_across_files_in_any_order(tmp_path: Path, show: Any) -> None:
    one, two = tmp_path / "one.hckv", tmp_path / "two.hckv"
    one.write_bytes(segment(records()))
    moved = block(SPACE, 15, DIGESTS[2], DIGESTS[1], 2)  # to the head, with a new sequence
    again = block(SPACE, 30, DIGESTS[0])  # stored again after it was removed
    two.write_bytes(segment([moved, *tombstones(), again]))
    for order in ((one, two), (two, one)):
        code, found = show(*order)
        dead = {Path(report["path"]).name: report["dead_nbytes"] for report in found["files"]}
        assert (code, dead) == (0, {"one.hckv": 3 * 4096, "two.hckv": 0})


def test_people_are_told_where_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / NAME
    data = segment(records())
    data[FIRST + 4096 + 600] ^= 1
    path.write_bytes(data)
    assert main(["inspect", str(path), "--records"]) == 1
    text = capsys.readouterr().out
    assert f"PROBLEM    at {FIRST + 4096}: the chunk of layer 0 is damaged (rule 'payload-crc')" in text
    lines = [line.split() for line in text.splitlines() if " BLOCK " in line and "after" in line]
    assert [line[:5] for line in lines] == [
        [str(FIRST + 4096 * i), "BLOCK", str(11 + i), SPACE.digest.hex()[:12], DIGESTS[i].hex()[:12]]
        for i in range(3)
    ]
    assert "token 8" in text
    assert "3 BLOCK; sequences 11..13" in text
    assert text.endswith("1 file: 1 problem\n")


def test_nothing_printed_is_a_right_to_read_or_the_stores_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / NAME
    path.write_bytes(segment([*records(), *tombstones()]))
    for arguments in (["--records"], ["--json"]):
        assert main(["inspect", str(path), *arguments]) == 0
        text = capsys.readouterr().out
        for secret in (*DIGESTS, SPACE.digest, name("other"), STORE):
            assert secret.hex()[:13] not in text


def test_no_label_and_no_file_name_reaches_the_terminal_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "\x1b[2Ja\nb\udcff\u202e.hckv"
    path.write_bytes(ATTACKS["label-escapes"].data)
    assert main(["inspect", str(path), "--records"]) == 0
    text = capsys.readouterr().out
    assert all(character.isprintable() for line in text.split("\n") for character in line)
    assert "owned" in text


def test_a_tail_of_zeros_is_space_not_used_yet(tmp_path: Path, show: Any) -> None:
    path = tmp_path / NAME
    path.write_bytes(segment(records(), sealed=False))
    end = path.stat().st_size
    os.truncate(path, 256 << 20)
    code, found = show(path)
    (report,) = found["files"]
    assert (code, report["footer"]) == (0, "absent")
    assert report["unused_nbytes"] == (256 << 20) - end


@pytest.mark.parametrize(
    ("gap", "blocks", "rules"),
    [(3 << 30, 2, ["magic"]), (1 << 40, 1, ["segment-length"])],
    ids=["GiB", "TiB"],
)
def test_a_huge_sparse_file_is_no_work(
    gap: int, blocks: int, rules: list[str], tmp_path: Path, show: Any
) -> None:
    """A hole between two records is damage; what lies behind the longest segment is not looked at."""
    path = tmp_path / NAME
    path.write_bytes(segment(records()[:1], sealed=False))
    with path.open("r+b") as file:
        try:
            file.seek(gap)
            file.write(records()[1])
        except OSError:
            pytest.skip("no file as long as that can be made here")
    if path.stat().st_blocks * 512 > 1 << 20:
        pytest.skip("the file system here knows no holes")
    code, found = show(path)
    (report,) = found["files"]
    assert code == 1
    assert report["records"] == {"BLOCK": blocks}
    assert [p["rule"] for p in report["problems"]] == rules


def test_a_footer_that_claims_most_of_a_huge_file_is_not_read(tmp_path: Path, show: Any) -> None:
    path = tmp_path / NAME
    locator = struct.pack("<4sBB2xQQ5I16s", b"HCKF", 1, 1, SEGMENT, 1 << 31, 0, 0, 0, 0, 0, bytes(16))
    path.write_bytes(segment(records()[:1], sealed=False))
    with path.open("r+b") as file:
        file.seek((1 << 32) - 64)
        file.write(locator + struct.pack("<I", zlib.crc32(locator)))
    code, found = show(path)
    assert code == 1
    assert "footer-length" in {p["rule"] for p in found["files"][0]["problems"]}


def test_what_is_no_file_is_said_and_the_others_are_read(tmp_path: Path, show: Any) -> None:
    good = tmp_path / NAME
    good.write_bytes(segment(records()))
    folder, fifo, loop, missing = (tmp_path / f"{n}.hckv" for n in ("folder", "fifo", "loop", "missing"))
    folder.mkdir()
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket.hckv"))
    strange = [folder, fifo, loop, missing, tmp_path / "socket.hckv", Path("/dev/null")]
    code, found = show(*strange, good)
    listener.close()
    assert code == 1
    *others, report = found["files"]
    assert report["problem_count"] == 0
    assert report["records"] == {"BLOCK": 3}
    messages = [p["message"] for other in others for p in other["problems"]]
    assert [p["rule"] for other in others for p in other["problems"]] == ["io"] * len(strange)
    assert messages[0] == "is a directory: give the files in it, DIR/*.hckv"
    assert messages[1] == "is a FIFO"
    assert messages[3] == "No such file or directory"
    assert messages[5] == "is a character device"


def test_no_file_at_all_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["inspect"])
    assert caught.value.code == 2
    assert "FILE" in capsys.readouterr().err


def test_it_leaves_files_alone(tmp_path: Path, show: Any) -> None:
    path = tmp_path / NAME
    path.write_bytes(segment(records()))
    path.chmod(stat.S_IRUSR)
    before = path.read_bytes(), path.stat().st_mtime_ns, sorted(tmp_path.iterdir())
    assert show(path)[0] == 0
    assert before == (path.read_bytes(), path.stat().st_mtime_ns, sorted(tmp_path.iterdir()))


def test_a_segment_that_is_being_written_is_no_damage(tmp_path: Path, show: Any) -> None:
    """A record is half there when the file is looked at first; then it is whole, and one more comes."""
    path = tmp_path / NAME
    parts = records()
    path.write_bytes(segment(parts[:1], sealed=False) + parts[1][:1000])
    stop = threading.Event()

    def write() -> None:
        with path.open("r+b", buffering=0) as file:
            end = FIRST + len(parts[0]) + 1000
            for piece in [parts[1][i : i + 100] for i in range(1000, 4096, 100)] + [bytes(parts[2])]:
                time.sleep(0.01)
                file.seek(end)
                file.write(piece)
                end += len(piece)
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    code, found = show(path)
    writer.join()
    (report,) = found["files"]
    assert (code, report["problems"]) == (0, [])
    assert report["records"]["BLOCK"] >= 2
    assert report["payload_nbytes"] == report["records"]["BLOCK"] * sum(SPACE.below_nbytes)


def test_problems_without_number_are_counted_but_not_all_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / NAME
    part = records()[0]
    path.write_bytes(segment([part] * 1100, sealed=False))  # each but the first is a duplicate
    assert main(["inspect", str(path), "--json"]) == 1
    (report,) = json.loads(capsys.readouterr().out)["files"]
    assert report["problem_count"] == 1099
    assert len(report["problems"]) == 1000
    assert main(["inspect", str(path)]) == 1
    text = capsys.readouterr().out
    assert text.count("PROBLEM ") == 20
    assert "1099 in all" in text
