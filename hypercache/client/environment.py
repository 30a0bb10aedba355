"""What a client takes from its environment: tenant, codec on disk; and a guard against mistyped names."""

from __future__ import annotations

import difflib
import logging
import os
from pathlib import Path

from hypercache.errors import ConfigError
from hypercache.keys import TenantKey

VARIABLES = ("HYPERCACHE_URI", "HYPERCACHE_TENANT", "HYPERCACHE_SECRET_FILE", "HYPERCACHE_DISK_CODEC")
_log = logging.getLogger("hypercache.client")


def tenant_from_environment(environ: os._Environ[str] | dict[str, str] = os.environ) -> TenantKey:
    """HYPERCACHE_TENANT and HYPERCACHE_SECRET_FILE; the public tenant when neither is set.

    Raises ConfigError for half a tenant and an unreadable secret.
    """
    name, path = environ.get("HYPERCACHE_TENANT"), environ.get("HYPERCACHE_SECRET_FILE")
    if not name and not path:
        return TenantKey.public()
    if not name or not path:
        missing = "HYPERCACHE_TENANT" if not name else "HYPERCACHE_SECRET_FILE"
        raise ConfigError(f"{missing} is not set: a tenant needs both a name and a file with its secret")
    try:
        secret = Path(path).read_bytes().strip()
        if os.name == "posix" and Path(path).stat().st_mode & 0o077:
            _log.warning("HYPERCACHE_SECRET_FILE=%s can be read by others; chmod 600 it", path)
    except OSError as error:
        raise ConfigError(f"HYPERCACHE_SECRET_FILE={path!r} cannot be read: {error.strerror}") from error
    return TenantKey.from_secret(secret, name)


def check() -> None:
    """A mistyped tenant must not become the public one, silently."""
    for variable in os.environ:
        if variable.startswith("HYPERCACHE_") and variable not in VARIABLES:
            near = difflib.get_close_matches(variable, VARIABLES, n=1, cutoff=0.85)
            if near:
                raise ConfigError(f"environment variable {variable} is unknown; did you mean {near[0]}?")
