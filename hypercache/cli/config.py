"""Show the server's effective configuration: every value and where it comes from.

Precedence: default < TOML file (--config or HYPERCACHE_CONFIG) < HYPERCACHE_* environment < flags.
"""

from __future__ import annotations

import argparse
import json
import os

from rich.console import Console
from rich.table import Table

from hypercache.server.config import FIELDS, Effective, flag_of, help_of, kind_of, load


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """``--config`` and one flag for each setting of the server."""
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file with settings (default: HYPERCACHE_CONFIG)"
    )
    for key in FIELDS:
        kind = kind_of(key)
        text = f"{help_of(key)} {kind.allowed}. Default: {show_default(key)}".replace("%", "%%")
        if isinstance(FIELDS[key].default, bool):
            parser.add_argument(
                flag_of(key), dest=key, nargs="?", const="true", metavar="true|false", help=text
            )
        elif isinstance(FIELDS[key].default, tuple):
            parser.add_argument(flag_of(key), dest=key, action="append", metavar="VALUE", help=text)
        else:
            parser.add_argument(flag_of(key), dest=key, metavar="VALUE", help=text)


def show_default(key: str) -> str:
    """A setting's default as a person writes it: "25%", not the bytes it comes to here."""
    default = FIELDS[key].default
    return default if isinstance(default, str) else kind_of(key).show(default)


def load_from(args: argparse.Namespace) -> Effective:
    """The effective configuration of a command line made by :func:`add_server_flags`. Raises ConfigError."""
    given = {key: getattr(args, key) for key in FIELDS if getattr(args, key) is not None}
    flags = {key: value if isinstance(value, str) else ",".join(value) for key, value in given.items()}
    return load(flags, os.environ, args.config)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=["show"],
        nargs="?",
        default="show",
        help="print each setting, its value and its origin (the default)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_server_flags(parser)


def run(args: argparse.Namespace) -> int:
    effective = load_from(args)
    if args.json:
        print(json.dumps(effective.as_dict(), indent=2))
        return 0
    table = Table("setting", "value", "from", box=None, pad_edge=False)
    for row in effective.rows():
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console.width = 10_000  # one setting a line, for grep
    console.print(table, markup=False)
    return 0
