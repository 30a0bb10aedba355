"""The command line from outside: real processes, real signals, real ports (G12, I08, L07, P01, P02)."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fabrics import Channel, Frame, Outgoing, Sink, fabric_for
from hypercache import __version__, protocol
from hypercache.keys import HASH_VERSION
from hypercache.server.config import FIELDS

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("HYPERCACHE_")}
LOCAL = ("--listen", "tcp://127.0.0.1:0", "--admin", "127.0.0.1:0", "--memory", "16MiB")


def hypercache(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``hypercache ARGUMENTS`` to its end."""
    command = [str(BIN / "hypercache"), *arguments]
    return subprocess.run(
        command, env=CLEAN | environ, capture_output=True, text=True, timeout=60, check=False
    )


class Server:
    """A ``hypercache-serve`` process that is ready."""

    def __init__(self, *arguments: str, env: Mapping[str, str] = CLEAN) -> None:
        self.process = subprocess.Popen(
            [str(BIN / "hypercache-serve"), *arguments],
            env=dict(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.end(signal.SIGKILL)
        self.ready: dict[str, Any] = json.loads(line)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal, wait for the end: (exit code, stderr)."""
        self.process.send_signal(number)
        _, text = self.process.communicate(timeout=60)
        return self.process.returncode, text

    def page(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{self.ready['admin']}{path}", timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


@contextmanager
def serving(*arguments: str, env: Mapping[str, str] = CLEAN) -> Iterator[Server]:
    server = Server(*arguments, env=env)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate()


def one_line(text: str) -> str:
    """The only line that is no log message."""
    rows = [row for row in text.splitlines() if not row.startswith("{")]
    assert len(rows) == 1, text
    return rows[0]


# --- help and usage


def test_help_is_cheap_and_lists_the_commands() -> None:
    script = """
import sys
from hypercache.cli.main import main
assert main([]) == 0
heavy = {"torch", "transformers", "numpy", "numba", "structlog", "rich", "h11"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    for command in ("demo", "serve", "benchmark", "doctor", "calibrate", "config"):
        assert f"  {command} " in done.stdout


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["hypercache", "--version"], "hypercache "),
        (["hypercache-serve", "--version"], "hypercache-serve "),
        (["hypercache", "serve", "--version"], "hypercache "),
        (["hypercache", "config", "--version"], "hypercache "),
    ],
)
def test_version(command: list[str], said: str) -> None:
    arguments = [str(BIN / command[0]), *command[1:]]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{said}{__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sreve"], "unknown command 'sreve'; did you mean 'serve'?"),
        (["--json", "serve"], "options come after the command"),
        (["serve", "--memroy", "1GiB"], "unknown flag or argument '--memroy'; did you mean '--memory'?"),
        (["serve", "--mem", "1GiB"], "unknown flag or argument '--mem'; did you mean '--memory'?"),
        (["serve", "now"], "unknown flag or argument 'now'; hypercache serve --help lists what is known"),
        (
            ["frobnicate"],
            "unknown command 'frobnicate'; known: demo, serve, benchmark, doctor, calibrate, inspect, config",
        ),
        (["serve", "--replicas", "3"], "unknown flag or argument '--replicas'; hypercache serve --help"),
        (["config", "sohw"], "invalid choice: 'sohw'"),
    ],
)
def test_p02_wrong_usage_exits_2_with_the_nearest_name(arguments: list[str], words: str) -> None:
    done = hypercache(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_pipe_is_quiet() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [BIN / "hypercache", "config", "show"],
        env=CLEAN,
        stdout=write_end,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, b"")


# --- configuration


def test_p01_config_show_tells_where_each_value_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "hc.toml"
    file.write_text("\nadmin = '[::1]:7441'\n", encoding="utf-8")
    done = hypercache(
        "config", "show", "--config", str(file), "--memory", "64MiB", HYPERCACHE_LOG_LEVEL="error"
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = [row.split(maxsplit=1) for row in done.stdout.splitlines()]
    shown = {key: rest.strip() for key, rest in rows}
    assert shown["admin"].endswith(f"file {file}:2")
    assert shown["admin"].startswith("[::1]:7441 ")
    assert shown["memory"].split("  ")[0] == "64 MiB (67108864)"
    assert shown["memory"].endswith("flag --memory")
    assert shown["log_level"].endswith("env HYPERCACHE_LOG_LEVEL")
    assert shown["drain_s"].endswith("default")

    done = hypercache("config", "show", "--json", "--config", str(file))
    assert hypercache("config", "--json", "--config", str(file)).stdout == done.stdout
    assert json.loads(done.stdout)["admin"] == {"value": "[::1]:7441", "origin": f"file {file}:2"}


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (["--config", "/nowhere/hc.toml"], {}, "No such file"),
        (["--memory", "5GB"], {}, "memory = '5GB' (flag --memory)"),
        ([], {"HYPERCACHE_MEMROY": "1GiB"}, "did you mean 'HYPERCACHE_MEMORY'?"),
        (["--listen", "tcp://0.0.0.0:7440"], {}, "allow_unauthenticated_network"),
        (["--listen", "loop://x"], {}, "no engine could connect"),
        (["--listen", "tcp://nohost.invalid:7440"], {}, "cannot be resolved"),
        (["--admin", "http://127.0.0.1:7441"], {}, "write 127.0.0.1:7441"),
        (["--admin", "127.0.0.1:7440"], {}, "has the port that listen"),
        (["--memory", "16MiB", "--max-frame-payload", "17MiB"], {}, "is more than memory"),
        (["--log-level", "verbose"], {}, "is unknown; allowed: debug | info | warning | error"),
    ],
)
@pytest.mark.parametrize("command", [["serve"], ["config", "show"]])
def test_p01_wrong_settings_exit_2_with_one_line(
    command: list[str], arguments: list[str], environ: dict[str, str], words: str
) -> None:
    done = hypercache(*command, *arguments, **environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in one_line(done.stderr)


def test_the_documentation_names_every_page_and_no_other_prefix() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    with serving(*LOCAL) as server:
        prefixes = {
            line.removeprefix("# TYPE ").partition("_")[0] + "_"
            for line in server.page("/metrics")[1].splitlines()
            if line.startswith("# TYPE ")
        }
        status = json.loads(server.page("/status")[1])
        for path in ("/healthz", "/readyz", "/metrics", "/status"):
            assert f"| `{path}` |" in page
            assert server.page(path)[0] == 200
    assert prefixes == {"hypercache_", "process_"}
    assert all(f"`{prefix}`" in page for prefix in prefixes)
    assert {"store", "counters", "loop_lag"} <= set(status)


def test_a_checkout_pins_what_the_extras_leave_open() -> None:
    """``make install`` resolves both together: the newest torch is neither wanted nor downloaded."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = project["dependency-groups"]
    pins = [line for line in groups["pins"] if "==" in line]
    assert {line.partition("==")[0] for line in pins} == {"torch", "transformers"}
    assert {"include-group": "pins"} in groups["dev"]
    assert not [line for line in project["project"]["optional-dependencies"]["transformers"] if "==" in line]
    assert "--editable '.[demo]' --group dev" in (ROOT / "Makefile").read_text(encoding="utf-8")


# --- the server's life


def test_server_life() -> None:
    with serving(*LOCAL, "--drain-s", "7") as server:
        assert server.ready["pid"] == server.process.pid
        assert server.page("/readyz")[0] == 200
        status = json.loads(server.page("/status")[1])
        assert (status["state"], status["uris"]) == ("ready", server.ready["uris"])
        assert "hypercache_connections 0.0" in server.page("/metrics")[1]
        code, text = server.end()
    assert code == 0
    logged = [json.loads(line) for line in text.splitlines()]
    settings = {
        line["name"]: (line["value"], line["origin"]) for line in logged if line["event"] == "setting"
    }
    assert set(settings) == {"listen", "admin", "memory", "drain_s"}
    assert settings["drain_s"] == ("7 s", "flag --drain-s")
    (counts,) = [line for line in logged if line["event"] == "configuration"]
    assert (counts["chosen"], counts["at_default"]) == (4, len(FIELDS) - 4)


def test_p01_at_debug_the_defaults_are_logged_too() -> None:
    with serving(*LOCAL, "--log-level", "debug") as server:
        logged = [json.loads(line) for line in server.end()[1].splitlines()]
    origins = {line["name"]: line["origin"] for line in logged if line["event"] == "setting"}
    assert set(origins) == set(FIELDS)
    assert origins["max_connections"] == "default"


def test_kubernetes_variables_do_not_stop_the_server() -> None:
    env = CLEAN | {
        "HYPERCACHE_SERVICE_HOST": "10.96.0.17",
        "HYPERCACHE_SERVICE_PORT_DATA": "7440",
        "HYPERCACHE_PORT": "tcp://10.96.0.17:7440",
        "HYPERCACHE_PORT_7440_TCP": "tcp://10.96.0.17:7440",
        "HYPERCACHE_PORT_7440_TCP_ADDR": "10.96.0.17",
        "HYPERCACHE_HEADLESS_SERVICE_HOST": "None",
    }
    with serving(*LOCAL, env=env) as server:
        assert server.end()[0] == 0


def test_status_has_each_number_once() -> None:
    with serving(*LOCAL) as server:
        status = json.loads(server.page("/status")[1])
        assert "_created" not in server.page("/metrics")[1]
    assert status["store"]["committed_total"] == 0
    assert all(name.partition("{")[0].endswith("_total") for name in status["counters"])
    assert not [name for name in status["counters"] if "store_" in name]


def test_admin_can_be_off() -> None:
    with serving(*LOCAL, "--admin", "") as server:
        assert server.ready["admin"] == ""
        assert server.end()[0] == 0


@pytest.mark.parametrize("key", ["listen", "admin"])
def test_g12_port_in_use(key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        value = f"tcp://{address}" if key == "listen" else address
        done = hypercache("serve", *LOCAL, f"--{key}", value)
    assert (done.returncode, done.stdout) == (2, "")
    assert address in one_line(done.stderr)
    assert str(errno.EADDRINUSE) in one_line(done.stderr)


@pytest.mark.parametrize("key", ["listen", "admin"])
def test_g12_address_of_another_machine(key: str) -> None:
    address = "192.0.2.1:7449"  # RFC 5737: nobody's
    value = f"tcp://{address}" if key == "listen" else address
    done = hypercache("serve", *LOCAL, f"--{key}", value, "--allow-unauthenticated-network")
    assert (done.returncode, done.stdout) == (2, "")
    assert address in one_line(done.stderr)
    assert str(errno.EADDRNOTAVAIL) in one_line(done.stderr)


def test_i08_ends_leave_nothing_behind_and_a_restart_binds_at_once(tmp_path: Path) -> None:
    """A handful of rounds on the same two ports, with a client connected when the signal comes."""
    home, scratch = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    scratch.mkdir()
    env = CLEAN | {"HOME": str(home), "TMPDIR": str(scratch), "XDG_RUNTIME_DIR": str(scratch)}
    shared_memory = set(Path("/dev/shm").iterdir())
    flags = LOCAL
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        with serving(*flags, env=env) as server:
            (uri,) = server.ready["uris"]
            flags = ("--listen", uri, "--admin", server.ready["admin"], "--memory", "16MiB")
            host, _, port = uri.removeprefix("tcp://").rpartition(":")
            with socket.create_connection((host, int(port)), timeout=30):
                code, text = server.end(number)
            assert code == 0, text
    assert list(home.rglob("*")) == []
    assert list(scratch.rglob("*")) == []
    assert set(Path("/dev/shm").iterdir()) - shared_memory == set()


def test_a_starter_that_does_not_read_the_ready_line_is_served_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.Popen(
        [BIN / "hypercache-serve", "--listen", f"tcp://127.0.0.1:{port}", "--admin", "", "--memory", "16MiB"],
        env=CLEAN,
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write_end)
    assert process.stderr is not None
    for line in process.stderr:
        if json.loads(line)["event"] == "ready":
            break
    with socket.create_connection(("127.0.0.1", port), timeout=30):
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0


# --- draining, with a store that never ends


class Peer:
    """A client that says what it is told to, and keeps the answers."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[int] = asyncio.Queue()
        self.lost = asyncio.Event()

    def on_frame(self, channel: Channel, frame: Frame) -> Sink | None:
        self.answers.put_nowait(frame.type)
        return None

    def on_payload(self, channel: Channel, frame: Frame, sink: Sink) -> None:
        raise AssertionError("no sink was given")

    def on_cancel(self, channel: Channel, request_id: int) -> None:
        raise AssertionError("servers cancel nothing")

    def on_lost(self, channel: Channel, error: Exception | None) -> None:
        self.lost.set()

    async def say(self, channel: Channel, request_id: int, message: protocol.Message) -> int:
        op, body = protocol.encode(message)
        channel.send(Outgoing(op, request_id, body))
        return await asyncio.wait_for(self.answers.get(), 30)


async def begin_a_store(uri: str) -> tuple[Peer, Channel]:
    peer = Peer()
    channel = await fabric_for(uri).connect(uri, peer, timeout=30)
    hello = protocol.Hello(
        protocol.VERSION, protocol.VERSION, "test", HASH_VERSION, (protocol.CHECKSUM,), "public", bytes(16)
    )
    assert await peer.say(channel, 1, hello) == protocol.Op.HELLO_OK
    namespace = protocol.Open(bytes(32), 16, "raw", (4096,), "test")
    assert await peer.say(channel, 2, namespace) == protocol.Op.OPENED
    assert await peer.say(channel, 3, protocol.Store(0, None, bytes(16), 30_000)) == protocol.Op.STORING
    return peer, channel


async def until_draining(server: Server) -> None:
    while (await asyncio.to_thread(server.page, "/readyz"))[0] == 200:  # noqa: ASYNC110 (another process)
        await asyncio.sleep(0.02)


async def test_drain_waits_for_streams_and_accepts_no_others() -> None:
    with serving(*LOCAL, "--drain-s", "60") as server:
        (uri,) = server.ready["uris"]
        peer, channel = await begin_a_store(uri)
        server.process.send_signal(signal.SIGTERM)
        await until_draining(server)
        assert (await asyncio.to_thread(server.page, "/healthz"))[0] == 200
        assert json.loads((await asyncio.to_thread(server.page, "/status"))[1])["state"] == "draining"
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", int(uri.rpartition(":")[2])), timeout=30).close()
        assert server.process.poll() is None
        channel.cancel(3)  # the stream is over: so is the drain
        await asyncio.wait_for(peer.lost.wait(), 30)
        assert await asyncio.to_thread(server.process.wait, 60) == 0


async def test_drain_ends_at_its_limit() -> None:
    with serving(*LOCAL, "--drain-s", "0.2") as server:
        peer, _ = await begin_a_store(server.ready["uris"][0])
        server.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(peer.lost.wait(), 30)
        assert await asyncio.to_thread(server.process.wait, 60) == 0


@pytest.mark.parametrize(("first", "second"), [("SIGTERM", "SIGTERM"), ("SIGTERM", "SIGINT")])
async def test_a_second_signal_stops_at_once(first: str, second: str) -> None:
    with serving(*LOCAL, "--drain-s", "600") as server:
        peer, _ = await begin_a_store(server.ready["uris"][0])
        server.process.send_signal(signal.Signals[first])
        await until_draining(server)
        server.process.send_signal(signal.Signals[second])
        await asyncio.wait_for(peer.lost.wait(), 30)
        code = await asyncio.to_thread(server.process.wait, 60)
        assert code == 128 + signal.Signals[second]
