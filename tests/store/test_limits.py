from __future__ import annotations

from pathlib import Path

import pytest

from hypercache.store import memory_limit

MEMINFO = "MemTotal:       16384 kB\nMemFree:         1024 kB\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, 16 << 20),
        ({"proc/self/cgroup": "0::/a/b\n"}, 16 << 20),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, 16 << 20),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "4096\n"}, 4096),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "8192\n"}, 8192),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "8192\n",
                "sys/fs/cgroup/a/b/memory.max": "9000\n",
            },
            8192,
        ),
        # In a container the mount's root is the own group, and the path belongs to the host.
        ({"proc/self/cgroup": "0::/../x\n", "sys/fs/cgroup/memory.max": "4096\n"}, 4096),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "99999999999\n"}, 16 << 20),
        (
            {
                "proc/self/cgroup": "5:cpu,memory:/d\n0::/\n",
                "sys/fs/cgroup/memory/d/memory.limit_in_bytes": "4096\n",
            },
            4096,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/d\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            16 << 20,
        ),
    ],
)
def test_the_smallest_limit_counts(tmp_path: Path, files: dict[str, str], limit: int) -> None:
    assert memory_limit(machine(tmp_path, files)) == limit


def test_this_machine_has_a_limit() -> None:
    assert 1 << 20 < memory_limit() < 1 << 50
