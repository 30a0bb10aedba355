"""The store knows no network, no clock and no event loop."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hypercache.store

FILES = sorted(Path(hypercache.store.__file__).parent.glob("*.py"))
FORBIDDEN = {"asyncio", "socket", "threading", "time", "fabrics"}
OWN = ("hypercache.store", "hypercache.errors")


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
    assert not {name.split(".")[0] for name in names} & FORBIDDEN
    assert all(name.startswith(OWN) for name in names if name.startswith("hypercache"))


def test_the_check_sees_what_it_should() -> None:
    assert len(FILES) > 8 and "mmap" in set().union(*map(imported, FILES))
