"""Codecs by name, their start-up, and where their compiled kernels live."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from kvdata import encode, gaussian, mla, split

from hypercache import codecs
from hypercache.codecs import kernels
from hypercache.errors import ConfigError
from hypercache.model import KVDtype


def test_names_and_wire_ids_are_fixed():
    """They are on the wire and on disk: a number is never given to another format."""
    assert {name: codecs.get(name).wire_id for name in codecs.names()} == {
        "raw": 0,
        "fp8": 1,
        "int8": 2,
        "int4": 3,
        "int4-plain": 4,
    }
    for name in codecs.names():
        assert codecs.get(name).name == name
        assert repr(codecs.get(name)) == f"<codec {name}>"
        assert codecs.get(name).lossless == (name == "raw")


@pytest.mark.parametrize(
    ("name", "near"), [("int-8", "int8"), ("FP8", "fp8"), ("int4plain", "int4-plain"), ("rwa", "raw")]
)
def test_an_unknown_name_is_answered_with_the_nearest_and_all_known(name, near):
    with pytest.raises(ConfigError, match=f"did you mean '{near}'") as caught:
        codecs.get(name)
    assert all(known in str(caught.value) for known in codecs.names())


def test_a_name_like_nothing_gets_no_guess():
    with pytest.raises(ConfigError, match="'brotli' is unknown") as caught:
        codecs.get("brotli")
    assert "did you mean" not in str(caught.value)


def test_warm_leaves_nothing_to_compile():
    """One kernel a direction and head dim, whatever codec, dtype, strides and flags come later."""
    codecs.warm(codecs.get("int8"), [split(2, 64), mla(512, 64), split(1, 128, dtype=KVDtype.FP32)])
    codecs.warm(codecs.get("raw"), [split(1, 8, dtype=KVDtype.FP8_E4M3)])
    kept = [kernels.encoder(dim) for dim in (64, 128, 512)] + [kernels.decoder(dim) for dim in (64, 128, 512)]
    assert [len(kernel.signatures) for kernel in kept] == [1] * 6
    for dtype in (KVDtype.BF16, KVDtype.FP16, KVDtype.FP32):
        for name in codecs.names():
            layout = split(3, 128, 64, dtype)
            parts = [part[::-1] for part in gaussian(layout, 32)]
            parts[0].flags.writeable = False
            chunks = encode(name, layout, parts, 2)
            codecs.get(name).decode(layout, chunks, [np.empty(part.shape, part.dtype) for part in parts])
    assert [len(kernel.signatures) for kernel in kept] == [1] * 6


def test_codecs_hold_no_state_and_run_side_by_side():
    layout = split(4, 128)
    inputs = [gaussian(layout, 64, seed) for seed in range(4)]
    want = {(name, i): encode(name, layout, inputs[i], 4) for name in codecs.names() for i in range(4)}
    differing = []

    def work(i):
        for _ in range(10):
            differing.extend(
                (name, i)
                for name in codecs.names()
                if not np.array_equal(encode(name, layout, inputs[i], 4), want[name, i])
            )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not differing


NOWHERE = """
import os, sys
import hypercache.codecs  # loads what else is needed: the installation may be out of another user's reach
for name in [name for name in sys.modules if name.startswith("hypercache")]:
    del sys.modules[name]
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
sys.path.insert(0, sys.argv[1])
from hypercache import codecs
from hypercache.codecs import kernels
assert kernels.__file__.startswith(sys.argv[1]), kernels.__file__
print(kernels.encoder(64).stats.cache_path, codecs.names()[0])
"""


def test_import_works_where_no_directory_is_writable():
    """Read-only site-packages and no home: kernels are then compiled anew in every process."""
    source = Path(codecs.__file__).parent.parent
    env = {key: value for key, value in os.environ.items() if not key.startswith(("NUMBA_", "XDG_"))}
    env |= {"HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory() as site:
        copy = Path(site) / "hypercache"
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "data"))
        folders = [Path(site), copy, *(path for path in copy.rglob("*") if path.is_dir())]
        for folder in folders:
            folder.chmod(0o555)
        command = [sys.executable, "-c", NOWHERE, site]
        done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=source.parent)
        for folder in folders:
            folder.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["None", "raw"]
