"""Settings: precedence, origins, and a clear refusal for everything that is not right (class P)."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest

from hypercache.errors import ConfigError
from hypercache.server.config import FIELDS, OTHER_VARIABLES, ServerConfig, flag_of, kind_of, load
from hypercache.server.settings import host_port, is_loopback, nearest, parse_bytes, show_bytes
from hypercache.store.limits import memory_limit

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_valid_and_local() -> None:
    effective = load({}, {})
    assert set(effective.origin) == set(FIELDS)
    assert set(effective.origin.values()) == {"default"}
    assert effective.config == ServerConfig()
    assert effective.config.listen == ("tcp://127.0.0.1:7440",)
    assert effective.config.memory == int(memory_limit() * 0.25)


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path / "hc.toml", "# ours\ndrain_s = 1\nlease_limit_s = 2\n\nstore_stall_s = 3\n")
    environ = {"HYPERCACHE_LEASE_LIMIT_S": "20", "HYPERCACHE_STORE_STALL_S": "30", "PATH": "/bin"}
    effective = load({"store_stall_s": "300"}, environ, file)
    config, origin = effective.config, effective.origin
    assert (config.drain_s, origin["drain_s"]) == (1.0, f"file {file}:2")
    assert (config.lease_limit_s, origin["lease_limit_s"]) == (20.0, "env HYPERCACHE_LEASE_LIMIT_S")
    assert (config.store_stall_s, origin["store_stall_s"]) == (300.0, "flag --store-stall-s")
    assert (config.stall_timeout_s, origin["stall_timeout_s"]) == (30.0, "default")
    assert effective.rows()[list(FIELDS).index("drain_s")] == ("drain_s", "1 s", f"file {file}:2")
    assert effective.as_dict()["drain_s"] == {"value": 1.0, "origin": f"file {file}:2"}


def test_same_value_from_file_environment_and_flag(tmp_path: Path) -> None:
    """Text is read as TOML would read it, for every kind of setting."""
    toml = {
        "listen": '["tcp://127.0.0.1:0", "tcp://[::1]:0"]',
        "admin": '"[::1]:0"',
        "memory": '"64MiB"',
        "drain_s": "0.5",
        "max_connections": "7",
        "log_level": '"error"',
        "allow_unauthenticated_network": "true",
    }
    text = {key: value.strip('"') for key, value in toml.items()}
    text["listen"] = "tcp://127.0.0.1:0,tcp://[::1]:0"
    file = write(tmp_path / "hc.toml", "\n".join(f"{key} = {value}" for key, value in toml.items()))
    from_file = load({}, {}, file).config
    assert from_file == load({}, {f"HYPERCACHE_{key.upper()}": value for key, value in text.items()}).config
    assert from_file == load(text, {}).config
    assert from_file.listen == ("tcp://127.0.0.1:0", "tcp://[::1]:0")
    assert from_file.memory == 64 * MIB


def test_empty_admin_switches_it_off() -> None:
    for text in ("", "off"):
        effective = load({}, {"HYPERCACHE_ADMIN": text})
        assert effective.config.admin == ""
        assert ("admin", "off", "env HYPERCACHE_ADMIN") in effective.rows()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10", 10.0),
        ("10s", 10.0),
        ("10 s", 10.0),
        ("1.5s", 1.5),
        ("500ms", 0.5),
        ("2m", 120.0),
        ("0.1 s", 0.1),
        ("7.3 ms", 0.0073),
    ],
)
def test_times_may_have_a_unit(text: str, seconds: float, tmp_path: Path) -> None:
    assert load({"drain_s": text}, {}).config.drain_s == seconds
    value = text if text.isdigit() else f'"{text}"'
    assert load({}, {}, write(tmp_path / "hc.toml", f"drain_s = {value}")).config.drain_s == seconds


def test_what_is_shown_can_be_typed_back() -> None:
    given = {"drain_s": "0.00001", "lease_limit_s": "1234.56789", "memory": "33333333", "admin": "off"}
    given |= {"pin_share": "33.3%", "lrfu_half_life_s": "0.7", "l3_capacity": "100MiB", "policy": "s3-fifo"}
    for flags in (
        {},
        given,
        {"l3_dir": "a/b c", "pin_share": "0%"},
        {"listen": "tcp://127.0.0.1:1, tcp://[::1]:2", "max_frame_payload": "70001"},
    ):
        effective = load(flags, {})
        assert load({key: value for key, value, _ in effective.rows()}, {}).config == effective.config


def test_environment_names_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "hc.toml", "max_connections = 5")
    assert load({}, {"HYPERCACHE_CONFIG": str(file)}).config.max_connections == 5
    other = write(tmp_path / "other.toml", "max_connections = 6")
    assert load({}, {"HYPERCACHE_CONFIG": str(file)}, other).config.max_connections == 6


# --- P01: a file that was asked for is used, or the reason is named


def test_p01_missing_file_is_an_error(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    with pytest.raises(ConfigError, match=rf"--config: .*{re.escape(str(missing))}.*No such file"):
        load({}, {}, missing)
    with pytest.raises(ConfigError, match=r"HYPERCACHE_CONFIG: .*No such file"):
        load({}, {"HYPERCACHE_CONFIG": str(missing)})


def test_p01_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load({}, {}, tmp_path)


def test_p01_unreadable_file_is_an_error() -> None:
    """Also for root, whom permissions do not stop: the kernel refuses to read this one."""
    with pytest.raises(ConfigError, match="cannot be read: Input/output error"):
        load({}, {}, "/proc/self/mem")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"drain_s = 1\nlisten = [\n", 2),
        (b'drain_s = 1\n\nmemory "4GiB"\n', 3),
        (b"drain_s = 1\ndrain_s = 2\n", 2),
        (b"drain_s = 1\nlog_level = info\n", 2),
        (b"# caf\xe9\n", 1),
        (b"a = 1\nb = \xff\n", 2),
    ],
)
def test_p01_wrong_syntax_names_the_line(tmp_path: Path, content: bytes, line: int) -> None:
    file = tmp_path / "hc.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"hc\.toml:{line}: .*TOML"):
        load({}, {}, file)


# --- P02: unknown names are errors, with the nearest known one


def test_p02_unknown_key_in_file(tmp_path: Path) -> None:
    file = write(tmp_path / "hc.toml", "drain_s = 1\nmemroy = '1GiB'\n")
    with pytest.raises(ConfigError, match=r"hc\.toml:2: unknown key 'memroy'; did you mean 'memory'\?"):
        load({}, {}, file)
    with pytest.raises(ConfigError, match=r"hc\.toml:1: unknown key 'server'; settings stand at the top"):
        load({}, {}, write(file, "[server]\nmemory = '1GiB'\n"))
    with pytest.raises(ConfigError, match=r"unknown key 'pd_backends'; known: listen, admin, memory"):
        load({}, {}, write(file, "pd_backends = 1\n"))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("HYPERCACHE_MEMROY", "HYPERCACHE_MEMORY"),
        ("HYPERCACHE_LISTEN_", "HYPERCACHE_LISTEN"),
        ("HYPERCACHE_memory", "HYPERCACHE_MEMORY"),
        ("HYPERCACHE_CONFIGS", "HYPERCACHE_CONFIG"),
    ],
)
def test_p02_unknown_environment_variable(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown environment variable {name}; did you mean '{hint}'\?"):
        load({}, {name: "1"})


def test_p02_variables_of_other_parts_are_known() -> None:
    environ = {name: "x" for name in OTHER_VARIABLES if name != "HYPERCACHE_CONFIG"}
    assert load({}, environ).config == ServerConfig()


def test_p02_unknown_flag() -> None:
    with pytest.raises(ConfigError, match=r"unknown flag --drain; did you mean '--drain-s'\?"):
        load({"drain": "1"}, {})


@pytest.mark.parametrize(
    ("word", "known"),
    [
        ("verbose", ("debug", "info", "warning", "error")),
        ("HYPERCACHE_REPLICAS", [f"HYPERCACHE_{key.upper()}" for key in FIELDS]),
        ("--replicas", [flag_of(key) for key in FIELDS]),
        ("frobnicate", ("demo", "serve", "benchmark", "config")),
        ("x", ()),
    ],
)
def test_p02_nothing_is_guessed_where_nothing_is_near(word: str, known: list[str]) -> None:
    assert nearest(word, known) == ""
    assert nearest("memroy", ["memory"]) == "; did you mean 'memory'?"


def test_p02_an_unknown_choice_lists_the_allowed() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"log_level": "verbose"}, {})
    assert str(caught.value) == (
        "log_level = 'verbose' (flag --log-level) is unknown; allowed: debug | info | warning | error"
    )


def service(name: str, port: str = "7440", proto: str = "TCP", named: str = "DATA") -> dict[str, str]:
    """What Kubernetes injects for a Service: one port, with a name."""
    uri = f"{proto.lower()}://10.96.0.17:{port}"
    return {
        f"{name}_SERVICE_HOST": "10.96.0.17",
        f"{name}_SERVICE_PORT": port,
        f"{name}_SERVICE_PORT_{named}": port,
        f"{name}_PORT": uri,
        f"{name}_PORT_{port}_{proto}": uri,
        f"{name}_PORT_{port}_{proto}_PROTO": proto.lower(),
        f"{name}_PORT_{port}_{proto}_PORT": port,
        f"{name}_PORT_{port}_{proto}_ADDR": "10.96.0.17",
    }


@pytest.mark.parametrize(
    "environ",
    [
        service("HYPERCACHE"),
        service("HYPERCACHE_XYZ", "80", "UDP", "A_B_1"),
        service("HYPERCACHE_ADMIN_0", "65535", "SCTP"),
        service("HYPERCACHE_MEMORY", "7440"),
    ],
)
def test_p02_service_variables_of_kubernetes_are_no_settings(environ: dict[str, str]) -> None:
    assert load({}, environ) == load({}, {})
    assert load({}, environ | {"HYPERCACHE_MEMORY": "64MiB"}).config.memory == 64 * MIB


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HYPERCACHE_PORT", "7440"),  # a person's: no such setting
        ("HYPERCACHE_XYZ_PORT", "7440"),
        ("HYPERCACHE_PORT_7440_TCP", "7440"),
        ("HYPERCACHE_HOST", "10.0.0.1"),
        ("HYPERCACHE_SERVICE_HOSTS", "10.0.0.1"),
        ("HYPERCACHE_SERVICE", "x"),
        ("HYPERCACHE_PORT_7440_TCP_NAME", "x"),
        ("HYPERCACHE_PORT_DATA_TCP_ADDR", "10.0.0.1"),
        ("HYPERCACHE_service_host", "10.0.0.1"),
    ],
)
def test_p02_what_only_resembles_them_is_unknown(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown environment variable {name}"):
        load({}, {name: value})


# --- P03: every setting is checked; the message names key, value, origin and allowed range

WRONG = {
    "listen": [
        *["", "127.0.0.1:7440", "tcp://127.0.0.1:", "tcp://127.0.0.1:70000", "tcp://127.0.0.1:-1"],
        *["tcp://127.0.0.1:x", "tcp://::1:7440", "tcp://:7440", "udp://127.0.0.1:7440"],
        *["tcp://127.0.0.1:7440,tcp://127.0.0.1:7440", "tcp://127.0.0.1:7440,"],
    ],
    "admin": [
        "127.0.0.1",
        "OFF",
        "http://127.0.0.1",
        "127.0.0.1:7441/metrics",
        "127.0.0.1:70000",
        ":7441",
        "::1:7441",
        "http://127.0.0.1:7441",
        "127.0.0.1:７441",
    ],
    "memory": [
        "0",
        "5",
        "-1",
        "5GB",
        "4G",
        "4gib",
        "nan",
        "0%",
        "101%",
        "-5%",
        "1e9",
        "",
        "16.5",
        "9" * 15 + "TiB",
    ],
    "drain_s": ["-1", "nan", "inf", "3601", "10 h", "-1s", "61m", "1.s", "s", "ms", "1e3s", "5 sec", ""],
    "lease_limit_s": ["0", "-1", "nan", "1e9", "x"],
    "store_stall_s": ["0", "-0.5", "NaN"],
    "stall_timeout_s": ["0", "-1", "-inf"],
    "max_connections": ["0", "-1", "16.5", "nan", "65536", "1e3", "many", ""],
    "max_frame_payload": ["0", "-1", "5", "2GiB", "5MB", "nan"],
    "policy": ["", "LRU", "fifo", "s3fifo", "nan"],
    "lrfu_half_life_s": ["0", "-1", "nan", "inf", "604801", "1 h"],
    "pin_limit_s": ["0", "-1", "nan", "1e9", ""],
    "pin_share": ["", "-1%", "91%", "25", "0", "nan", "1.5", "-0.1", "a quarter", "25 percent"],
    "l3_dir": ["/dev/null", "/dev/null/cache", "~/cache", "a\0b", "/" + "x" * 300],
    "l3_capacity": ["0", "-1", "5", "1MiB", "10GB", "nan", "50%", "2000TiB", ""],
    "l3_segment": ["0", "-1", "5", "1023KiB", "5GiB", "256MB", "nan", "16.5"],
    "l3_fsync": ["", "always", "NEVER", "1"],
    "l3_on_exit": ["", "delete", "Keep"],
    "log_level": ["", "verbose", "INFO", "inf"],
    "log_format": ["", "xml", "JSON"],
    "allow_unauthenticated_network": ["", "1", "yes", "nan"],
}


def test_p03_table_covers_every_setting() -> None:
    assert set(WRONG) == set(FIELDS)


@pytest.mark.parametrize(("key", "text"), [(key, text) for key, texts in WRONG.items() for text in texts])
def test_p03_wrong_text_is_refused(key: str, text: str) -> None:
    for origin, flags, environ in (
        (f"flag {flag_of(key)}", {key: text}, {}),
        (f"env HYPERCACHE_{key.upper()}", {}, {f"HYPERCACHE_{key.upper()}": text}),
    ):
        with pytest.raises(ConfigError) as caught:
            load(flags, environ)
        message = str(caught.value)
        assert message.startswith(f"{key} = ")
        assert f"({origin})" in message
        assert kind_of(key).allowed in message


WRONG_TOML = [
    ("listen", '"tcp://127.0.0.1:7440"'),
    ("listen", "[]"),
    ("listen", "[7440]"),
    ("admin", "7441"),
    ("admin", "false"),
    ("memory", "true"),
    ("memory", "4.5"),
    ("memory", "nan"),
    ("memory", "[1]"),
    ("memory", '"5 GB"'),
    ("memory", "5"),
    ("drain_s", '"10"'),
    ("drain_s", '"10 hours"'),
    ("drain_s", "true"),
    ("drain_s", "nan"),
    ("drain_s", "2026-01-01"),
    ("max_connections", "1.0"),
    ("max_connections", '"10"'),
    ("max_connections", "true"),
    ("log_level", "1"),
    ("log_level", '["info"]'),
    ("policy", "true"),
    ("pin_share", "25"),
    ("pin_share", "true"),
    ("pin_share", '"25"'),
    ("l3_dir", "1"),
    ("l3_dir", "false"),
    ("l3_dir", '["/tmp"]'),
    ("l3_capacity", "true"),
    ("l3_capacity", "1e10"),
    ("l3_segment", '"256 MB"'),
    ("l3_fsync", "false"),
    ("allow_unauthenticated_network", "1"),
    ("allow_unauthenticated_network", '"true"'),
    ("drain_s", "{ a = 1 }"),
]


@pytest.mark.parametrize(("key", "value"), WRONG_TOML)
def test_p03_wrong_type_in_file_is_refused_with_its_line(tmp_path: Path, key: str, value: str) -> None:
    file = write(tmp_path / "hc.toml", f"# a comment that names {key} = x\n\n{key} = {value}\n")
    with pytest.raises(ConfigError) as caught:
        load({}, {}, file)
    message = str(caught.value)
    assert message.startswith(f"{key} = ")
    assert f"(file {file}:3)" in message
    assert kind_of(key).allowed in message


def test_p03_more_memory_than_the_machine_has() -> None:
    limit = memory_limit()
    with pytest.raises(ConfigError, match=r"memory = .* is more than this process may use"):
        load({"memory": str(limit + 1)}, {})
    assert load({"memory": str(limit)}, {}).config.memory == limit
    assert load({"memory": "50%"}, {}).config.memory == int(limit * 0.5)


def test_a_share_is_a_fraction() -> None:
    for text in ("25%", "25 %", "0.25"):
        assert load({"pin_share": text}, {}).config.pin_share == 0.25
    assert load({"pin_share": "0%"}, {}).config.pin_share == 0.0
    assert ("pin_share", "25%", "default") in load({}, {}).rows()


def test_the_disk_tier_is_off_unless_it_has_a_directory(tmp_path: Path) -> None:
    for text in ("", "off"):
        effective = load({"l3_dir": text}, {})
        assert effective.config.l3_dir == ""
        assert ("l3_dir", "off", "flag --l3-dir") in effective.rows()
    assert load({}, {}).config.l3_dir == ""
    for path in (tmp_path, tmp_path / "not" / "there" / "yet"):
        assert load({"l3_dir": str(path)}, {}).config.l3_dir == str(path)
    assert not (tmp_path / "not").exists()
    file = write(tmp_path / "file", "")
    with pytest.raises(
        ConfigError, match=r"^l3_dir = '.*file' \(flag --l3-dir\) .*is no directory; allowed: "
    ):
        load({"l3_dir": str(file)}, {})


@pytest.mark.parametrize(
    ("capacity", "segment"),
    [("10GiB", 256 << 20), ("1GiB", 256 << 20), ("100MiB", 25 << 20), ("3MiB", 1 << 20), ("2MiB", 1 << 20)],
)
def test_a_small_disk_tier_has_smaller_segments(capacity: str, segment: int) -> None:
    assert load({"l3_capacity": capacity}, {}).config.l3_segment == segment


def test_p03_segments_that_somebody_chose_must_fit_twice() -> None:
    assert load({"l3_capacity": "8GiB", "l3_segment": "4GiB"}, {}).config.l3_segment == 4 << 30
    with pytest.raises(ConfigError) as caught:
        load({"l3_segment": "256MiB"}, {"HYPERCACHE_L3_CAPACITY": "511MiB"})
    assert str(caught.value) == (
        "l3_capacity = 535822336 (env HYPERCACHE_L3_CAPACITY) is not two segments of l3_segment = "
        "256 MiB (268435456); raise it (--l3-capacity) or lower l3_segment (--l3-segment)"
    )


def test_p03_a_config_made_in_code_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"^drain_s = -1 is out of range; allowed: 0 to 3600 seconds"):
        ServerConfig(drain_s=-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServerConfig().drain_s = 1  # type: ignore[misc]


def test_port_0_is_allowed_more_than_once() -> None:
    uris = ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
    assert ServerConfig(listen=uris, admin="127.0.0.1:0").listen == uris


# --- nobody opens the cache to a network by accident


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.7", "[2001:db8::1]"])
def test_reachable_addresses_need_the_frightening_setting(host: str) -> None:
    for flags in ({"listen": f"tcp://127.0.0.1:0,tcp://{host}:7440"}, {"admin": f"{host}:7441"}):
        with pytest.raises(ConfigError, match="allow_unauthenticated_network = true") as caught:
            load(flags, {})
        assert host in str(caught.value)
        assert f"{flag_of(next(iter(flags)))}), or" in str(caught.value)
        assert "(--allow-unauthenticated-network)" in str(caught.value)
        assert load({**flags, "allow_unauthenticated_network": "true"}, {}).config


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "[::1]", "localhost"])
def test_loopback_addresses_do_not(host: str) -> None:
    assert load({"listen": f"tcp://{host}:0", "admin": f"{host}:0"}, {}).config


@pytest.mark.parametrize("flags", [{"listen": "tcp://nohost.invalid:7440"}, {"admin": "nohost.invalid:7441"}])
def test_a_host_that_does_not_resolve_is_said_to_be_that(flags: dict[str, str]) -> None:
    """RFC 2606: nobody's name. Not resolving comes before being reachable from elsewhere."""
    with pytest.raises(ConfigError, match=r"cannot be resolved \(.+\): 'nohost\.invalid'; check the name"):
        load(flags, {})


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        ("http://127.0.0.1:7441", "write 127.0.0.1:7441;"),
        ("https://[::1]:7441/", "write [::1]:7441;"),
        ("127.0.0.1:7441/metrics", "write 127.0.0.1:7441;"),
        ("http://127.0.0.1", "write HOST:PORT;"),
        ("::1:7441", "write [ADDRESS]:PORT;"),
        ("127.0.0.1:70000", "is not a number in 0..65535;"),
    ],
)
def test_remedies_for_the_admin_address_do_not_repeat_the_mistake(typed: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"admin": typed}, {})
    said = str(caught.value).removeprefix(f"admin = {typed!r} (flag --admin) cannot be used: ")
    assert remedy in said
    assert "://" not in said


def test_listening_where_no_other_process_can_connect_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "hc.toml", 'listen = ["tcp://127.0.0.1:0", "loop://x"]')
    for flags, environ, path in (
        ({"listen": "loop://x"}, {}, None),
        ({}, {"HYPERCACHE_LISTEN": "loop://x"}, None),
        ({}, {}, file),
    ):
        with pytest.raises(ConfigError, match=r"listen = 'loop://x' .*no engine could connect; use tcp://"):
            load(flags, environ, path)
    assert ServerConfig(listen=("loop://x",)).listen == ("loop://x",)  # in code it has its use


def test_frames_larger_than_the_memory_are_refused() -> None:
    assert load({"memory": "16MiB"}, {}).config.max_frame_payload == 16 * MIB
    assert ServerConfig(memory=16 * MIB).max_frame_payload == 16 * MIB
    assert load({"memory": "16MiB", "max_frame_payload": "16MiB"}, {}).config.max_frame_payload == 16 * MIB
    for size in ("17MiB", "256MiB"):
        with pytest.raises(
            ConfigError,
            match=r"max_frame_payload = .* \(flag --max-frame-payload\) is more than memory = 16 MiB .*"
            r"\(--max-frame-payload\) or raise memory \(--memory\)",
        ):
            load({"memory": "16MiB", "max_frame_payload": size}, {})
    with pytest.raises(ConfigError, match="max_frame_payload = 20971520 is more than memory"):
        ServerConfig(memory=16 * MIB, max_frame_payload=20 * MIB)


@pytest.mark.parametrize(
    ("listen", "admin", "meet"),
    [
        ("tcp://127.0.0.1:7441", "127.0.0.1:7441", True),
        ("tcp://127.0.0.1:7440,tcp://[::1]:7441", "[::1]:7441", True),
        ("tcp://0.0.0.0:7441", "127.0.0.1:7441", True),
        ("tcp://localhost:7441", "127.0.0.1:7441", True),
        ("tcp://127.0.0.1", "127.0.0.1:7440", True),
        ("tcp://127.0.0.1:0", "127.0.0.1:0", False),
        ("tcp://127.0.0.1:7441", "[::1]:7441", False),
        ("tcp://127.0.0.1:7441", "127.0.0.1:7440", False),
        ("tcp://127.0.0.1:7441", "off", False),
    ],
)
def test_one_port_for_listen_and_admin_is_refused(listen: str, admin: str, meet: bool) -> None:
    flags = {"listen": listen, "admin": admin, "allow_unauthenticated_network": "true"}
    if not meet:
        assert load(flags, {}).config.listen == tuple(listen.split(","))
        return
    with pytest.raises(ConfigError, match=r"^admin = .* has the port that listen = .*\(--admin, --listen\)"):
        load(flags, {})


def test_host_and_port() -> None:
    assert host_port("127.0.0.1:80") == ("127.0.0.1", 80)
    assert host_port("[fe80::1%lo]:0") == ("fe80::1%lo", 0)
    assert not is_loopback("fe80::1%lo")
    assert not is_loopback("localhost.example")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4GiB", 4 << 30), ("512 MiB", 512 << 20), ("1.5KiB", 1536), ("7B", 7), (7, 7), ("2TiB", 2 << 40)],
)
def test_sizes(text: object, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


def test_sizes_are_shown_exactly() -> None:
    assert show_bytes(4 << 30) == "4 GiB (4294967296)"
    assert show_bytes(1536) == "1.5 KiB (1536)"
    assert show_bytes(0) == "0 B (0)"


def test_the_documented_table_is_the_one_in_force() -> None:
    spec = importlib.util.spec_from_file_location("settings_table", ROOT / "tools" / "settings_table.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    page = tool.PAGE.read_text(encoding="utf-8")
    assert page == tool.render(page), "docs/configuration.md is behind the settings: run make docs"
    assert all(f"| `{key}` |" in page for key in FIELDS)
