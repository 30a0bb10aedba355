"""``hypercache``: finds the subcommand and runs it, importing no other subcommand's module.

Each module has ``add_arguments(parser)`` and ``run(args) -> int``. Exit codes: 0 done, 1 it failed,
2 wrong usage, configuration or address, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version

from fabrics.errors import FabricError
from hypercache.errors import HyperCacheError
from hypercache.server.settings import nearest

COMMANDS = {
    "demo": ("hypercache.cli.demo", "two engine processes share the K/V of a real prompt"),
    "serve": ("hypercache.cli.serve", "run a cache server (also: hypercache-serve)"),
    "benchmark": ("hypercache.cli.benchmark", "measure reuse, codecs, hashing, engine and live server here"),
    "doctor": ("hypercache.cli.doctor", "self-test of a model: does moving its K/V work?"),
    "calibrate": ("hypercache.cli.calibrate", "learn for a model which reused tokens to recompute"),
    "inspect": ("hypercache.cli.inspect", "verify .hckv files of the disk tier and count what is in them"),
    "config": ("hypercache.cli.config", "show the effective configuration and where it comes from"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own). Returns the exit code; usage errors exit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name not in COMMANDS:
        return _top_level(arguments)
    return _run(f"hypercache {name}", name, arguments[1:])


def serve_main() -> int:
    """The console script ``hypercache-serve``."""
    return _run("hypercache-serve", "serve", sys.argv[1:])


def _top_level(arguments: list[str]) -> int:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{text}" for name, (_, text) in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="hypercache",
        usage="%(prog)s COMMAND [--help] ...",
        description="An external KV cache for LLM inference.",
        epilog="commands:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_version(parser)
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args(arguments)
    if args.command is not None and args.command not in COMMANDS:
        known = nearest(args.command, COMMANDS) or f"; known: {', '.join(COMMANDS)}"
        parser.error(f"unknown command {args.command!r}{known}")
    if rest or args.command is not None:
        parser.error(f"{' '.join(rest) or args.command}: options come after the command")
    parser.print_help()
    return 0


def _add_version(parser: argparse.ArgumentParser) -> None:
    name = parser.prog.partition(" ")[0]
    text = f"{name} {version('hypercache-llm')}"
    parser.add_argument("--version", action="version", version=text, help="print the version and exit")


def _run(prog: str, name: str, arguments: list[str]) -> int:
    try:
        module = importlib.import_module(COMMANDS[name][0])
        usage = f"{prog} [--help] [OPTIONS]"  # the long form would hide the line that says what is wrong
        parser = argparse.ArgumentParser(prog, usage, module.__doc__, allow_abbrev=False)
        _add_version(parser)
        module.add_arguments(parser)
        args, unknown = parser.parse_known_args(arguments)
        if unknown:
            word = unknown[0].partition("=")[0]
            known = re.findall(r"--[a-z0-9-]+", parser.format_help())
            known_one = nearest(word, known) or f"; {prog} --help lists what is known"
            parser.error(f"unknown flag or argument {word!r}{known_one}")
        return int(module.run(args))
    except (HyperCacheError, FabricError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output went away. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
