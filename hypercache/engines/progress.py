"""Results of a long run, kept as they come, so that a run that was ended goes on where it was.

A file of JSON lines: a head with a digest of everything that the results depend on, then one line for each
result. Lines are written whole and checked when they are read; behind the first that is not whole nothing
counts. Another head means other inputs: then the file is begun anew.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from hypercache.errors import SpecError

Array = npt.NDArray[Any]
MAX_LINE = 64 << 20
_DTYPES = ("<f4", "<f8")


class Progress:
    """Arrays by key, in ``path``; a context manager, which closes the file, and deletes an empty one.

    inputs: digest of what they depend on. Raises SpecError if it cannot be written, or another run writes it.
    """

    def __init__(self, path: Path, inputs: str) -> None:
        self._path, self._done = path, {}  # type: Path, dict[str, list[Array]]
        self._inputs = inputs
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file: IO[bytes] = path.open("a+b")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.close()
                raise SpecError(
                    f"{path} is written by another run; wait for it, or choose another --out"
                ) from None
            self._file.seek(0)
            if self._read(json.dumps({"progress": inputs}).encode() + b"\n") == 0:
                self._append(json.dumps({"progress": inputs}))
        except OSError as error:
            raise SpecError(f"{path} cannot be written: {error.strerror}; choose another --out") from None

    def __len__(self) -> int:
        """Results that are there."""
        return len(self._done)

    def get(self, key: str) -> list[Array] | None:
        """What was kept under ``key``; None if nothing was."""
        return self._done.get(key)

    def put(self, key: str, arrays: list[Array]) -> list[Array]:
        """Keep float32 or float64 ``arrays`` under ``key``; gives them back."""
        packed = [_pack(array) for array in arrays]
        body = {"key": key, "arrays": packed}
        self._append(json.dumps({**body, "check": _check(body, self._inputs)}))
        self._done[key] = arrays
        return arrays

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *ended: object) -> None:
        with contextlib.suppress(OSError):  # what could not be written was told when it was tried
            self._file.close()
        if not self._done:
            self.remove()

    def remove(self) -> None:
        """Delete the file: the run has come to its end."""
        self._path.unlink(missing_ok=True)

    def _read(self, head: bytes) -> int:
        """Take over what is whole, cut off the rest; how many lines stay."""
        good = lines = 0
        while line := self._file.readline(MAX_LINE):
            if lines == 0 and line != head:
                break
            if lines and not self._take(line):
                break
            good, lines = self._file.tell(), lines + 1
        self._file.truncate(good)
        return lines

    def _take(self, line: bytes) -> bool:
        try:
            found = json.loads(line)
            check = found.pop("check")
            if not line.endswith(b"\n") or check != _check(found, self._inputs):
                return False
            self._done[found["key"]] = [_unpack(item) for item in found["arrays"]]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False
        return True

    def _append(self, line: str) -> None:
        try:
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise SpecError(f"{self._path} cannot be written: {error.strerror}; make room") from None


def _pack(array: Array) -> dict[str, Any]:
    dtype = array.dtype.newbyteorder("<").str
    if dtype not in _DTYPES:
        raise SpecError(f"progress keeps float32 and float64, not {array.dtype}")
    data = base64.b64encode(np.ascontiguousarray(array, dtype).tobytes()).decode()
    return {"dtype": dtype, "shape": list(array.shape), "data": data}


def _unpack(item: Mapping[str, Any]) -> Array:
    if item["dtype"] not in _DTYPES:
        raise ValueError(item["dtype"])
    return np.frombuffer(base64.b64decode(item["data"]), item["dtype"]).reshape(item["shape"])


def _check(body: Mapping[str, Any], inputs: str) -> str:
    """Of a line and of what it depends on: a line of other inputs is none of ours."""
    text = json.dumps([inputs, body], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
