"""Where calibrated selectors are kept: one file a model, under its fingerprint."""

from __future__ import annotations

import errno
import math
import os
import stat
import tempfile
from pathlib import Path

from hypercache.blend import Blend, Shape, rehearse
from hypercache.blend.selector import LIMIT, MAX_NBYTES, Selector, decode
from hypercache.engines.home import cache_home
from hypercache.errors import SpecError
from hypercache.model import ModelSpec


def path_of(spec: ModelSpec) -> Path | None:
    """``selectors/FINGERPRINT.json`` under :func:`hypercache.engines.home.cache_home`; None without one."""
    home = cache_home()
    return None if home is None else home / "selectors" / f"{spec.fingerprint().hex()}.json"


def find(spec: ModelSpec, shape: Shape | None = None) -> Selector | None:
    """The selector calibrated for ``spec``, None if there is none.

    Raises as :func:`load` for a bad file; with ``shape``, that of the engine, also SpecError for a selector
    that no blend on it could use.
    """
    path = path_of(spec)
    if path is None:
        return None
    try:
        data = _read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from None
    found = decode(data, str(path), spec)
    if shape is not None:
        try:
            fit(found, shape)
        except SpecError as error:
            raise SpecError(
                f"{path} does not fit its model: {error}; run hypercache calibrate --model PATH again"
            ) from None
    return found


def fit(selector: Selector, shape: Shape) -> None:
    """Raises SpecError for a check layer, a layer or a head that a model of ``shape`` lacks, and for weights
    so large that they do not add up to a number."""
    rehearse(Blend(selector=selector), shape)
    weights, squares = (sum(map(abs, numbers)) for numbers in (selector.weights, selector.squares))
    if not math.isfinite(abs(selector.bias) + LIMIT * weights + LIMIT**2 * squares):
        raise SpecError("its weights are so large that scores would not be finite")


def load(path: Path, spec: ModelSpec | None = None) -> Selector:
    """The selector in ``path``, for ``spec`` if given.

    Raises SpecError that names the file for one that cannot be read, is no selector, has another version or
    was calibrated for another model; TooLarge for one above ``MAX_NBYTES``.
    """
    try:
        data = _read(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    return decode(data, str(path), spec)


def _read(path: Path) -> bytes:
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
        raise OSError(errno.EINVAL, "not a regular file")
    with path.open("rb") as file:
        return file.read(MAX_NBYTES + 1)


def _unreadable(path: Path, error: OSError) -> SpecError:
    return SpecError(
        f"{path} cannot be read: {error.strerror}; run hypercache calibrate --model PATH, "
        "or name a selector that exists"
    )


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
