"""The server's settings: one table that drives file, environment, flags, validation and documentation.

Order of precedence: default < TOML file < ``HYPERCACHE_*`` environment < flags. Every value keeps its origin,
every refusal names key, value, origin and allowed range, and unknown names are refused with the nearest
known one. Secrets are never settings: they are read from files that a setting names.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import socket
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fabrics
from fabrics.address import DEFAULT_PORT
from fabrics.address import parse as parse_address
from hypercache.errors import ConfigError
from hypercache.server import settings
from hypercache.server.settings import Kind
from hypercache.store.limits import memory_limit

PREFIX = "HYPERCACHE_"
PAGE = 4096
SEGMENTS = 4  # of the disk tier, at least, where nobody chose their size

# Variables with the prefix that other parts of the product read. A name in neither list is a mistake.
OTHER_VARIABLES = {
    "HYPERCACHE_CONFIG": "path of the server's TOML file, where --config is not given",
    "HYPERCACHE_HOME": "where models, the fingerprints of weights and calibrated selectors are kept",
    "HYPERCACHE_URI": "what the client connects to",
    "HYPERCACHE_TENANT": "the client's tenant",
    "HYPERCACHE_SECRET_FILE": "file with the client's tenant secret",
    "HYPERCACHE_DISK_CODEC": "the client's codec for blocks on the server's disk: connect's disk_codec",
}

# What Kubernetes puts into every pod for a Service named hypercache or hypercache-NAME: nobody's settings.
# https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
_SERVICE = r"HYPERCACHE(_[A-Z0-9_]*[A-Z0-9])?"
_SERVICE_PART = re.compile(
    _SERVICE + r"_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d{1,5}_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR))"
)
_SERVICE_URI = re.compile(_SERVICE + r"_PORT(_\d{1,5}_(TCP|UDP|SCTP))?=(tcp|udp|sctp)://.*")


def _setting(default: Any, kind: Kind, help_text: str) -> Any:
    return dataclasses.field(default=default, metadata={"kind": kind, "help": help_text})


def _host_of(uri: str) -> str | None:
    """The host that a URI listens on; None for fabrics that never leave the machine. Raises ValueError."""
    scheme, separator, _ = uri.partition("://")
    if not separator:
        raise ValueError(f"{uri!r} is not a fabric URI; write tcp://HOST:PORT")
    if scheme not in fabrics.schemes():
        raise ValueError(f"{uri!r} has an unknown scheme; known here: {', '.join(fabrics.schemes())}")
    if scheme in ("loop", "shm"):
        return None
    return parse_address(uri, scheme, listening=True).host


def _check_directory(path: str) -> None:
    """Raises ValueError for a path that is no directory and can become none. It need not exist yet."""
    if path.startswith("~"):
        raise ValueError("nobody expands '~' here; write the whole path")
    if "\0" in path:
        raise ValueError("a path has no NUL in it")
    try:
        mode = Path(path).stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    if not stat.S_ISDIR(mode):
        raise ValueError("it is there, and is no directory")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Validated settings of one server. Raises ConfigError. Sizes in bytes, times in seconds."""

    listen: tuple[str, ...] = _setting(
        (f"tcp://127.0.0.1:{DEFAULT_PORT}",),
        settings.uris(_host_of, f"tcp://127.0.0.1:{DEFAULT_PORT}"),
        "Where engines connect. Port 0 takes any free port.",
    )
    admin: str = _setting(
        "127.0.0.1:7441",
        settings.address(),
        "Where /healthz, /readyz, /metrics and /status are served over HTTP.",
    )
    memory: int = _setting(
        "25%",
        settings.share_of_memory(8 << 20, memory_limit),
        "Cap of the RAM tier, index and buffers included. A share counts from the cgroup's limit, "
        "or the machine's memory where there is none.",
    )
    policy: str = _setting(
        "lrfu",
        settings.choice("lrfu", "lru", "s3-fifo"),
        "Which blocks go first when room is needed: lrfu weighs how recently and how often each was used.",
    )
    lrfu_half_life_s: float = _setting(
        600.0,
        settings.seconds(0.1, 604800),
        "Of lrfu: after so long, a use counts half. Short: like lru; long: the most often used stay.",
    )
    pin_limit_s: float = _setting(
        3600.0, settings.seconds(0.1, 604800), "Longest time for which a client may pin blocks in memory."
    )
    pin_share: float = _setting(
        0.25,
        settings.share(0, 90),
        "Part of memory that all pins together may keep; one tenant gets half of it. 0%: no pins.",
    )
    l3_dir: str = _setting(
        "off",
        settings.directory(_check_directory),
        "Where the disk tier keeps its files; made if it is not there. One server owns a directory.",
    )
    l3_capacity: int = _setting(
        10 << 30,
        settings.size(2 << 20, 1 << 50),
        "Cap of the disk tier, counted from its files. At least two segments.",
    )
    l3_segment: int = _setting(
        256 << 20,
        settings.size(1 << 20, 4 << 30),
        "Size of the disk tier's files; no block may be larger. By default at most a quarter of l3_capacity.",
    )
    l3_fsync: str = _setting(
        "interval",
        settings.choice("never", "batch", "interval"),
        "When what was written is forced to the disk: by the system alone, after each batch, or once a "
        "second. Removals always are, before they are answered.",
    )
    l3_on_exit: str = _setting(
        "keep",
        settings.choice("keep", "purge"),
        "What becomes of the disk tier's files when the server ends in order.",
    )
    drain_s: float = _setting(
        10.0, settings.seconds(0, 3600), "How long running streams may go on after SIGTERM or SIGINT."
    )
    lease_limit_s: float = _setting(
        30.0, settings.seconds(0.1, 3600), "Longest time a reader may keep blocks in place."
    )
    store_stall_s: float = _setting(
        5.0,
        settings.seconds(0.1, 3600),
        "A store that makes no progress for so long loses its place to another writer of the same block.",
    )
    stall_timeout_s: float = _setting(
        30.0,
        settings.seconds(0.1, 3600),
        "A peer that takes no bytes, or sends none it owes, for so long is disconnected.",
    )
    max_connections: int = _setting(1024, settings.integer(1, 65535), "Data connections served at once.")
    max_frame_payload: int = _setting(
        256 << 20,
        settings.size(64 << 10, 1 << 30),
        "Largest payload of one frame; larger ones are refused. By default not above memory.",
    )
    log_level: str = _setting(
        "info", settings.choice("debug", "info", "warning", "error"), "Least severe message that is logged."
    )
    log_format: str = _setting(
        "auto",
        settings.choice("auto", "json", "console"),
        "How messages are written to stderr; auto: console on a terminal, JSON elsewhere.",
    )
    allow_unauthenticated_network: bool = _setting(
        False,
        settings.boolean(),
        "Lets other machines connect although nothing proves who they are: whoever reaches the port can "
        "read and change what is cached.",
    )

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for key, value in _validated(values, {}).items():
            object.__setattr__(self, key, value)


FIELDS = {field.name: field for field in dataclasses.fields(ServerConfig)}


def kind_of(key: str) -> Kind:
    kind: Kind = FIELDS[key].metadata["kind"]
    return kind


def help_of(key: str) -> str:
    return str(FIELDS[key].metadata["help"])


def flag_of(key: str) -> str:
    return "--" + key.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Effective:
    """A configuration and, for each key, where its value came from."""

    config: ServerConfig
    origin: Mapping[str, str]

    def rows(self) -> list[tuple[str, str, str]]:
        """``(key, value as a person reads it, origin)`` for every setting."""
        return [(key, kind_of(key).show(getattr(self.config, key)), self.origin[key]) for key in FIELDS]

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """``{key: {"value": ..., "origin": ...}}``, ready for JSON."""
        return {key: {"value": getattr(self.config, key), "origin": self.origin[key]} for key in FIELDS}


def load(flags: Mapping[str, str], environ: Mapping[str, str], path: str | Path | None = None) -> Effective:
    """Settings from all sources. Raises ConfigError.

    flags: text by key, only those given. path: the TOML file; None: ``HYPERCACHE_CONFIG``, or no file.
    """
    values: dict[str, Any] = {key: field.default for key, field in FIELDS.items()}
    origin = dict.fromkeys(FIELDS, "default")
    asked_by = "--config"
    if path is None and (path := environ.get("HYPERCACHE_CONFIG")) is not None:
        asked_by = "HYPERCACHE_CONFIG"
    if path is not None:
        for key, (value, where) in _read_file(Path(path), asked_by).items():
            values[key], origin[key] = value, where
    for name in environ:
        if name.startswith(PREFIX) and name not in OTHER_VARIABLES:
            if _is_kubernetes(name, environ[name]):
                continue
            key = name.removeprefix(PREFIX).lower()
            if key not in FIELDS or name != name.upper():
                known = [*OTHER_VARIABLES, *(PREFIX + key.upper() for key in FIELDS)]
                raise ConfigError(f"unknown environment variable {name}" + _or_list(name, known))
            values[key], origin[key] = kind_of(key).from_text(environ[name]), f"env {name}"
    for key, text in flags.items():
        if key not in FIELDS:
            raise ConfigError(f"unknown flag {flag_of(key)}" + _or_list(flag_of(key), map(flag_of, FIELDS)))
        values[key], origin[key] = kind_of(key).from_text(text), f"flag {flag_of(key)}"
    checked = _validated(values, origin)
    for uri in checked["listen"]:
        if uri.startswith("loop://"):
            reason = "is of use within one process alone, no engine could connect; use tcp://HOST:PORT"
            raise ConfigError(_message("listen", uri, origin, reason))
    return Effective(ServerConfig(**checked), origin)


def _is_kubernetes(name: str, value: str) -> bool:
    """Whether the cluster made this variable. A ``..._PORT`` that is no URI is a person's mistake."""
    return bool(_SERVICE_PART.fullmatch(name) or _SERVICE_URI.fullmatch(f"{name}={value}"))


def _or_list(name: str, known: Any) -> str:
    names = list(known)
    return settings.nearest(name, names) or f"; known: {', '.join(names)}"


def _read_file(path: Path, asked_by: str) -> dict[str, tuple[object, str]]:
    """``{key: (value, "file PATH:LINE")}`` of a TOML file."""
    try:
        text = path.read_bytes().decode("utf-8")
        table = tomllib.loads(text)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{asked_by}: configuration file {str(path)!r} cannot be read: {reason}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: TOML must be UTF-8 text, byte {error.start} is not") from error
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column (\d+)\)$", str(error))
        line = int(found[1]) if found else max(1, len(text.splitlines()))
        reason = re.sub(r" \(at [^)]*\)$", "", str(error))
        raise ConfigError(f"{path}:{line}: this is not TOML: {reason}") from error
    result: dict[str, tuple[object, str]] = {}
    for key, value in table.items():
        where = f"{path}{_line_of(key, text)}"
        if key not in FIELDS:
            hint = _or_list(key, FIELDS)
            if isinstance(value, dict):
                hint = "; settings stand at the top level, not in a table"
            raise ConfigError(f"{where}: unknown key {key!r}{hint}")
        result[key] = value, f"file {where}"
    return result


def _line_of(key: str, text: str) -> str:
    """ ":LINE" of a top-level key (tomllib does not tell); nothing where it is written in an unusual way."""
    pattern = re.compile(rf"""\s*\[?\s*["']?{re.escape(key)}["']?\s*[=.\]]""")
    for number, line in enumerate(text.splitlines(), 1):
        if pattern.match(line):
            return f":{number}"
    return ""


def _validated(values: Mapping[str, Any], origin: Mapping[str, str]) -> dict[str, Any]:
    result = {}
    for key, value in values.items():
        try:
            result[key] = kind_of(key).parse(value)
        except ValueError as error:
            reason = f"{error}; allowed: {kind_of(key).allowed}"
            raise ConfigError(_message(key, value, origin, reason)) from None
    _fit_frames(result, origin)
    _fit_segments(result, origin)
    _refuse_one_port_twice(result, origin)
    _refuse_open_doors(result, origin)
    return result


def _fit_frames(values: dict[str, Any], origin: Mapping[str, str]) -> None:
    """A frame must fit the memory: the default gives way, a size that somebody chose is refused."""
    frame, memory = values["max_frame_payload"], values["memory"]
    if frame <= memory:
        return
    if (
        frame != FIELDS["max_frame_payload"].default
        or origin.get("max_frame_payload", "default") != "default"
    ):
        reason = (
            f"is more than memory = {settings.show_bytes(memory)}; lower it ({flag_of('max_frame_payload')}) "
            f"or raise memory ({flag_of('memory')})"
        )
        raise ConfigError(_message("max_frame_payload", frame, origin, reason))
    values["max_frame_payload"] = memory


def _fit_segments(values: dict[str, Any], origin: Mapping[str, str]) -> None:
    """The disk tier gives room back a segment at a time, so it needs some: likewise."""
    segment, capacity = values["l3_segment"], values["l3_capacity"]
    default = origin.get("l3_segment", "default") == "default" and segment == FIELDS["l3_segment"].default
    if default and capacity < SEGMENTS * segment:
        values["l3_segment"] = max(1 << 20, capacity // SEGMENTS // PAGE * PAGE)
    elif capacity < 2 * segment:
        reason = (
            f"is not two segments of l3_segment = {settings.show_bytes(segment)}; raise it "
            f"({flag_of('l3_capacity')}) or lower l3_segment ({flag_of('l3_segment')})"
        )
        raise ConfigError(_message("l3_capacity", capacity, origin, reason))


def _refuse_one_port_twice(values: Mapping[str, Any], origin: Mapping[str, str]) -> None:
    if not values["admin"]:
        return
    admin = settings.host_port(values["admin"])
    for uri in values["listen"]:
        if _host_of(uri) is None:
            continue
        found = parse_address(uri, uri.partition("://")[0], listening=True)
        if admin[1] == found.port != 0 and _may_meet(admin[0], found.host):
            reason = (
                f"has the port that listen = {uri!r} has; choose another port for one of them "
                f"({flag_of('admin')}, {flag_of('listen')})"
            )
            raise ConfigError(_message("admin", values["admin"], origin, reason))


def _may_meet(host: str, other: str) -> bool:
    """Whether two hosts can stand for one address. A name can stand for any."""
    try:
        one, two = (ipaddress.ip_address(text.partition("%")[0]) for text in (host, other))
    except ValueError:
        return True
    return one == two or one.is_unspecified or two.is_unspecified


def _refuse_open_doors(values: Mapping[str, Any], origin: Mapping[str, str]) -> None:
    if values["allow_unauthenticated_network"]:
        return
    hosts = [("listen", uri, _host_of(uri)) for uri in values["listen"]]
    if values["admin"]:
        hosts.append(("admin", values["admin"], settings.host_port(values["admin"])[0]))
    for key, address, host in hosts:
        if host is not None and not settings.is_loopback(host):
            try:
                socket.getaddrinfo(host, None)  # a misspelt host is no open door: say what it is
            except (OSError, UnicodeError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                reason = f"names a host that cannot be resolved ({why}): {host!r}; check the name"
                raise ConfigError(_message(key, address, origin, reason)) from None
            remedy = (
                "can be reached from other machines, and nothing proves who they are. Use a loopback address "
                f"such as 127.0.0.1 ({flag_of(key)}), or, on a network where every machine is trusted, set "
                f"allow_unauthenticated_network = true ({flag_of('allow_unauthenticated_network')})"
            )
            raise ConfigError(_message(key, address, origin, remedy))


def _message(key: str, value: object, origin: Mapping[str, str], reason: str) -> str:
    where = f" ({origin[key]})" if key in origin else ""
    return f"{key} = {value!r}{where} {reason}"
