"""The store knows no network, no clock and no event loop."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hypercache.store

FILES = sorted(Path(hypercache.store.__file__).parent.glob("*.py"))
FORBIDDEN = {"asyncio", "socket", "fabrics"}
CLOCKS = {"threading", "time"}
OWN = ("hypercache.store", "hypercache.errors", "hypercache.model")
L3 = ("hckv", "disk", "transcode")  # files that touch bytes and files: called from threads, and they decode


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_imports_stay_inside_the_walls(path: Path) -> None:
    names = imported(path)
    l3 = path.stem.startswith(L3)
    assert not {name.split(".")[0] for name in names} & (FORBIDDEN if l3 else FORBIDDEN | CLOCKS)
    if not l3:
        assert all(name.startswith(OWN) for name in names - {"hypercache"} if name.startswith("hypercache"))


def test_a_store_without_a_disk_brings_no_compiler() -> None:
    code = "import sys, hypercache.store, hypercache.server.node; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_check_sees_what_it_should() -> None:
    assert len(FILES) > 8 and "mmap" in set().union(*map(imported, FILES))
