"""How much memory this process may use: its control group's limit, else the machine's.

Sources: Linux ``Documentation/admin-guide/cgroup-v2.rst`` (``memory.max``), ``cgroup-v1/memory.rst``
(``memory.limit_in_bytes``), ``proc(5)`` (``/proc/meminfo``, ``/proc/self/cgroup``).
"""

from __future__ import annotations

import os
from pathlib import Path

from hypercache.errors import ConfigError


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes this process may use: the smallest of its cgroup limits (v2 and v1) and the machine's memory.

    A limit set on any ancestor group counts. ``root`` is where ``proc`` and ``sys`` are found. Raises
    ConfigError if not even the machine's memory can be read: give an absolute size then.
    """
    return min([_machine_memory(root), *_v2_limits(root), *_v1_limits(root)])


def _machine_memory(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            return int(value.split()[0]) << 10
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError) as error:
        raise ConfigError(
            "the machine's memory size cannot be read; give memory as an absolute size, not as a fraction"
        ) from error


def _v2_limits(root: Path) -> list[int]:
    path = _group_path(root, "")
    return [] if path is None else _limits_up(root / "sys/fs/cgroup", path, "memory.max")


def _v1_limits(root: Path) -> list[int]:
    path = _group_path(root, "memory")
    return [] if path is None else _limits_up(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")


def _group_path(root: Path, controller: str) -> str | None:
    """This process's group in the hierarchy of ``controller`` ("" is the unified one)."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3 and controller in fields[1].split(","):
            return fields[2].strip("/")
    return None


def _limits_up(mount: Path, path: str, name: str) -> list[int]:
    """Limits of the group and its ancestors. In a container the path may lie outside what is mounted:
    missing levels are passed over, and the mount's own root, which then is the container's group, is read."""
    group = mount / path
    found = []
    for level in (group, *group.parents):
        text = _read(level / name).strip()
        if text.isdigit():  # "max" means none
            found.append(int(text))
        if level == mount:
            break
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
