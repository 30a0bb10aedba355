"""The one place for what engines keep between runs: models, fingerprints of weights, calibrated selectors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_home(environ: Mapping[str, str] = os.environ) -> Path | None:
    """``$HYPERCACHE_HOME``, else ``hypercache`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    None for a user without a home directory. A relative XDG_CACHE_HOME is ignored, as its specification says.
    """
    if own := environ.get("HYPERCACHE_HOME"):
        return Path(own)
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "hypercache"
    except RuntimeError:
        return None
