"""A ``hypercache-serve`` process of our own, for commands that need one for a while."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hypercache.errors import Unavailable
from hypercache.server.config import OTHER_VARIABLES, PREFIX

READY_S = 30.0
STOP_S = 15.0


@contextmanager
def local_server(memory: str, more: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Run one on free loopback ports, with ``memory`` as the setting says and ``more`` flags; gives its
    ready line.

    The user's own server settings are kept away from it. It is drained at the end, killed if that does not
    help. Raises Unavailable with its last words when it does not come up.
    """
    ours = [name for name in os.environ if name.startswith(PREFIX) and name not in OTHER_VARIABLES]
    env = {name: value for name, value in os.environ.items() if name not in (*ours, "HYPERCACHE_CONFIG")}
    flags = ["--listen", "tcp://127.0.0.1:0", "--admin", "127.0.0.1:0", "--memory", memory, *more]
    command = [sys.executable, "-m", "hypercache.cli.main", "serve", *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True
        )
        watchdog = threading.Timer(READY_S, process.kill)
        try:
            watchdog.start()
            assert process.stdout is not None
            line = process.stdout.readline()
            watchdog.cancel()
            if not line:
                process.wait()
                log.seek(0)
                words = log.read().strip().splitlines()[-1:] or ["it said nothing"]
                raise Unavailable(f"hypercache-serve did not start (exit {process.returncode}): {words[0]}")
            yield json.loads(line)
        finally:
            watchdog.cancel()
            _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    with process:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
