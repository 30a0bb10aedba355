"""Kinds of settings: how a value is read from text, checked, and described. No I/O.

Each kind has one parser for typed values (as TOML gives them). Environment variables and flags are text:
:attr:`Kind.from_text` turns that into what TOML would have given, and nothing else differs.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from fractions import Fraction
from typing import Any

from fabrics.address import parse as parse_address

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]+)", re.ASCII)
_SHOWN_SIZE = re.compile(r".* \((\d{1,20})\)", re.ASCII)  # as show_bytes writes it
_DURATION = re.compile(r"(\d{1,15}(?:\.\d{1,25})?)\s*(ms|s|m)", re.ASCII)
_SECONDS_IN = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60)}
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,15})?)\s*%", re.ASCII)


@dataclass(frozen=True, slots=True)
class Kind:
    """allowed: the range as a person reads it. parse: typed value -> setting; ValueError has the reason."""

    allowed: str
    parse: Callable[[object], Any]
    from_text: Callable[[str], object] = str
    show: Callable[[Any], str] = str


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` or nothing: the tail of a message about an unknown word.

    The beginning that all flags or all variables share makes no two of them alike, so it does not count.
    """

    def stem(name: str) -> str:
        return name.lower().removeprefix("--").removeprefix("hypercache_")

    names = {stem(name): name for name in known}
    found = get_close_matches(stem(word), names, n=1, cutoff=0.6)
    return f"; did you mean {names[found[0]]!r}?" if found else ""


def parse_bytes(value: object) -> int:
    """Bytes from an int or from text such as "512MiB". Raises ValueError with the reason."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise ValueError(f"must be bytes as a whole number, or text such as '512MiB', not {_type(value)}")
    shown = _SHOWN_SIZE.fullmatch(value.strip())
    if shown is not None and show_bytes(int(shown[1])) == value.strip():
        return int(shown[1])
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError("is not a size")
    number, unit = match.groups()
    if unit not in UNITS:
        binary = unit[0].upper() + "iB"
        hint = f"; write '{number}{binary}'" if binary in UNITS else ""
        raise ValueError(f"has the unit {unit!r}, which is unknown or has two meanings{hint}")
    return int(float(number) * UNITS[unit])


def show_bytes(value: int) -> str:
    """ "4 GiB" where that is exact to two digits, with the plain bytes beside it."""
    unit = max((name for name in UNITS if UNITS[name] <= max(value, 1)), key=UNITS.__getitem__)
    return f"{value / UNITS[unit]:.2f}".rstrip("0").rstrip(".") + f" {unit} ({value})"


def _type(value: object) -> str:
    names = {bool: "a boolean", int: "a whole number", float: "a decimal number", str: "text", list: "a list"}
    return names.get(type(value), f"of type {type(value).__name__}")


def _number_from_text(text: str) -> object:
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def _check_range(value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError("is out of range")


def integer(low: int, high: int) -> Kind:
    def parse(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"must be a whole number, not {_type(value)}")
        _check_range(value, low, high)
        return value

    return Kind(f"{low} to {high}", parse, _number_from_text)


def seconds(low: float, high: float) -> Kind:
    def parse(value: object) -> float:
        if isinstance(value, str) and (duration := _DURATION.fullmatch(value.strip())):
            value = float(Fraction(duration[1]) * _SECONDS_IN[duration[2]])
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"must be seconds as a number, or text such as '500ms', not {_type(value)}")
        if not math.isfinite(value):
            raise ValueError("must be finite")
        _check_range(value, low, high)
        return float(value)

    allowed = f"{low:g} to {high:g} seconds, as a number or with ms, s, m"
    return Kind(allowed, parse, _number_from_text, _show_seconds)


def _show_seconds(value: float) -> str:
    """Without rounding and exponent, so that it can be typed back."""
    return f"{Decimal(repr(value)):f}".removesuffix(".0") + " s"


def size(low: int, high: int) -> Kind:
    def parse(value: object) -> int:
        nbytes = parse_bytes(value)
        _check_range(nbytes, low, high)
        return nbytes

    allowed = f"{show_bytes(low)} to {show_bytes(high)}, in bytes or with KiB, MiB, GiB"
    return Kind(allowed, parse, _number_from_text, show_bytes)


def share_of_memory(low: int, limit: Callable[[], int]) -> Kind:
    """A size, or a percentage of ``limit()`` (what the cgroup or the machine lets this process use)."""

    def parse(value: object) -> int:
        percent = _PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None
        top = limit()
        if percent is None:
            nbytes = parse_bytes(value)
        elif 0 < float(percent[1]) <= 95:
            nbytes = int(top * float(percent[1]) / 100)
        else:
            raise ValueError("is out of range: a share is above 0% and at most 95%")
        if nbytes > top:
            raise ValueError(f"is more than this process may use, {show_bytes(top)}")
        _check_range(nbytes, low, top)
        return nbytes

    allowed = f"from {show_bytes(low)} to what the cgroup or machine has, as '4GiB', or a share such as '25%'"
    return Kind(allowed, parse, _number_from_text, show_bytes)


def share(low: int, high: int) -> Kind:
    """A fraction of something, ``low`` to ``high`` percent of it: "25%" or 0.25."""

    def parse(value: object) -> float:
        found = _PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None
        if found is not None:
            value = float(Decimal(found[1]) / 100)
        if not isinstance(value, float):
            what = "" if isinstance(value, str) else f", not {_type(value)}"
            raise ValueError(f"must be a share such as '25%' or 0.25{what}")
        _check_range(value, low / 100, high / 100)
        return value

    return Kind(f"{low}% to {high}%, or as a fraction", parse, _number_from_text, _show_share)


def _show_share(value: float) -> str:
    shown = f"{Decimal(repr(value)) * 100:f}"
    return (shown.rstrip("0").rstrip(".") if "." in shown else shown) + "%"


def directory(check: Callable[[str], object]) -> Kind:
    """A path that ``check`` accepts; "" for off."""

    def parse(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"must be text, not {_type(value)}")
        if value in ("", "off"):
            return ""
        _usable(check, value)
        return value

    return Kind("the path of a directory, or off", parse, show=lambda value: value or "off")


def choice(*names: str) -> Kind:
    def parse(value: object) -> str:
        if value not in names:
            raise ValueError("is unknown" + (nearest(value, names) if isinstance(value, str) else ""))
        return str(value)

    return Kind(" | ".join(names), parse)


def boolean() -> Kind:
    def parse(value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, not {_type(value)}")
        return value

    def from_text(text: str) -> object:
        return {"true": True, "false": False}.get(text.lower(), text)

    return Kind("true | false", parse, from_text, lambda value: str(value).lower())


def host_port(text: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` or ``[IPv6]:PORT``. Raises ValueError with the reason."""
    scheme, _, rest = text.rpartition("://")
    bare, _, path = rest.partition("/")
    if scheme or path or bare != rest:
        remedy = f"write {bare}" if re.search(r"[^:]:[0-9]+$", bare) else "write HOST:PORT"
        raise ValueError(f"it stands without scheme and path; {remedy}")
    if re.search(r":[0-9]+$", text) is None:
        raise ValueError("has no port; write HOST:PORT")
    try:
        found = parse_address(f"http://{text}", "http", listening=True)
    except ValueError as error:  # which speaks of URIs, as nobody wrote one here
        raise ValueError(str(error).replace("http://", "")) from None
    return found.host, found.port


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``. Names other than localhost count as reachable."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower() in ("localhost", "ip6-localhost")


def address() -> Kind:
    """``HOST:PORT``; "" for off."""

    def parse(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"must be text, not {_type(value)}")
        if value in ("", "off"):
            return ""
        _usable(host_port, value)
        return value

    return Kind("HOST:PORT with port 0 to 65535, or off", parse, show=lambda value: value or "off")


def _usable(check: Callable[[str], object], text: str) -> None:
    try:
        check(text)
    except ValueError as error:
        raise ValueError(f"cannot be used: {error}") from None


def uris(check: Callable[[str], object], example: str) -> Kind:
    """A list of one or more different URIs, each accepted by ``check``; in text, separated by commas."""

    def parse(value: object) -> tuple[str, ...]:
        if isinstance(value, str) or not isinstance(value, list | tuple):
            raise ValueError(f'must be a list such as ["{example}"], not {_type(value)}')
        if not value:
            raise ValueError("is empty")
        for uri in value:
            if not isinstance(uri, str):
                raise ValueError(f"holds {uri!r}, which is not text")
            _usable(check, uri)
            if value.count(uri) > 1 and not uri.endswith(":0"):
                raise ValueError(f"holds {uri!r} twice")
        return tuple(value)

    return Kind(
        f"fabric URIs such as {example}, port 0 to 65535",
        parse,
        lambda text: [part.strip() for part in text.split(",")],
        ", ".join,
    )
