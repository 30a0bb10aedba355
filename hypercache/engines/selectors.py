"""Where calibrated selectors are kept: one file a model, under its fingerprint."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypercache.blend.selector import MAX_NBYTES, Selector, decode
from hypercache.engines.home import cache_home
from hypercache.errors import SpecError
from hypercache.model import ModelSpec


def path_of(spec: ModelSpec) -> Path | None:
    """``selectors/FINGERPRINT.json`` under :func:`hypercache.engines.home.cache_home`; None without one."""
    home = cache_home()
    return None if home is None else home / "selectors" / f"{spec.fingerprint().hex()}.json"


def find(spec: ModelSpec) -> Selector | None:
    """The selector calibrated for ``spec``, None if there is none. Raises as :func:`load` for a bad file."""
    path = path_of(spec)
    return load(path, spec) if path is not None and path.exists() else None


def load(path: Path, spec: ModelSpec | None = None) -> Selector:
    """The selector in ``path``, for ``spec`` if given.

    Raises SpecError that names the file for one that cannot be read, is no selector, has another version or
    was calibrated for another model; TooLarge for one above ``MAX_NBYTES``.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_NBYTES + 1)
    except OSError as error:
        raise SpecError(
            f"{path} cannot be read: {error.strerror}; run hypercache calibrate --model PATH, "
            "or name a selector that exists"
        ) from None
    return decode(data, str(path), spec)


def save(selector: Selector, path: Path) -> None:
    """Write ``path`` whole or not at all. Raises SpecError if it cannot be written."""
    write(path, selector.encode())


def write(path: Path, data: bytes) -> None:
    """``data`` into ``path``, atomically. Raises SpecError, naming the path, if that cannot be done."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:16]}-")
        new = Path(name)
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}; choose another with --out") from None
