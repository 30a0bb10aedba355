"""The walls between the rooms, read from the imports: who may know whom, and what nobody may use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "fabrics").rglob("*.py"), *(ROOT / "hypercache").rglob("*.py")])
PURE = (
    "model",
    "hf_config",
    "hf_types",
    "identity",
    "checks",
    "keys",
    "rope",
    "codecs",
    "protocol",
    "checksum",
    "kv",
    "segments",
    "stitch",
)
IO = {"asyncio", "socket", "ssl", "selectors", "subprocess"}


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "fabrics" if parts[0] == "fabrics" else parts[1]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def forbidden(path: Path, name: str) -> bool:
    root = name.partition(".")[0]
    match room(path):
        case "fabrics":
            return root == "hypercache"
        case pure if pure in PURE:
            return root in IO or name.startswith(("fabrics", "hypercache.server", "hypercache.client"))
        case "store":
            return (
                root in IO or root == "fabrics" or name.startswith(("hypercache.server", "hypercache.client"))
            )
        case "audit":
            known = ("audit", "store.policy", "keys", "errors")
            return root in IO | {"fabrics"} or (
                root == "hypercache" and not name.startswith(tuple(f"hypercache.{room}." for room in known))
            )
        case "server":
            return name.startswith(("hypercache.client", "hypercache.engines", "hypercache.codecs"))
        case "client":
            return name.startswith(("hypercache.server", "hypercache.engines", "hypercache.store"))
        case "blend":
            others = ("server", "client", "engines", "store", "codecs", "cli")
            return root in IO | {"fabrics"} or name.startswith(
                tuple(f"hypercache.{other}" for other in others)
            )
        case "engines":
            return name.startswith(("hypercache.server", "hypercache.store", "fabrics"))
    return False


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_stay_within_the_walls(path: Path) -> None:
    assert [name for name in imports(path) if forbidden(path, name)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_runs_data_is_used(path: Path) -> None:
    """N04: no format that executes what it reads, no eval."""
    tree = ast.parse(path.read_text())
    assert {name.partition(".")[0] for name in imports(path)}.isdisjoint(
        {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    )
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert calls.isdisjoint({"eval", "exec", "torch.load", "np.load", "numpy.load", "__import__"})


def test_the_serving_core_needs_no_torch() -> None:
    for path in FILES:
        if room(path) in ("engines", "cli"):
            continue
        assert not {"torch", "transformers", "safetensors"} & {
            name.partition(".")[0] for name in imports(path)
        }, path
