"""What a person gets wrong: a typed error at once that names the thing and the remedy, never an outage."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest

import hypercache
from hypercache import KVBuffers, TenantKey
from hypercache.client.environment import tenant_from_environment
from hypercache.errors import ConfigError, HyperCacheError, SpecError

from .conftest import Connect, fill, make_spec, running_node, tokens_of

GOOD: dict[str, Any] = {"model": make_spec(), "codec": "raw", "tenant": TenantKey.public(), "deadline": 1.0}


BAD_URIS = """
    127.0.0.1:7440 http://127.0.0.1:7440 tpc://127.0.0.1 tcp:// tcp://h:99999 tcp://h:port tcp://::1:7440
    tcp://h:1,tcp://h:2 loop:// loop://a/b
"""


@pytest.mark.parametrize("uri", BAD_URIS.split())
async def test_addresses_that_can_never_work(uri: str) -> None:
    with pytest.raises(ConfigError):
        await hypercache.connect(uri, **GOOD)


@pytest.mark.parametrize(
    ("argument", "value", "says"),
    [
        ("model", None, "model must be a ModelSpec, got NoneType"),
        ("model", {"layers": 4}, "model must be a ModelSpec, got dict"),
        ("tenant", "acme", "tenant must be a TenantKey, got str"),
        ("codec", None, "codec must be a str, got NoneType"),
        ("codec", "INT8", "int8"),
        ("codec", "zip", "known are raw"),
        ("deadline", "5", "deadline='5' must be a number"),
        ("deadline", 0, "deadline=0 must be"),
        ("block_size", 32, "16"),
        ("block_size", "16", "16"),
    ],
)
async def test_arguments_of_the_wrong_kind(argument: str, value: Any, says: str) -> None:
    with pytest.raises(HyperCacheError, match=says):
        await hypercache.connect("tcp://127.0.0.1:1", **{**GOOD, argument: value})


async def test_buffers_of_the_wrong_kind(connect: Connect) -> None:
    client = await connect()
    tokens = tokens_of(1, 65)
    for wrong in (None, [1, 2], "kv"):
        with pytest.raises(SpecError, match=r"KVBuffers\.wrap"):
            await client.fetch(tokens, wrong)
        with pytest.raises(SpecError, match=r"KVBuffers\.wrap"):
            await client.store(tokens, wrong)
    with pytest.raises(SpecError, match="within the prompt's 65 tokens"):
        await client.store(tokens, KVBuffers.allocate(client.model, 65), start=512)
    kv = fill(KVBuffers.allocate(client.model, 65), 1)
    assert (await client.store(tokens, kv)).stored == 4
    assert (await client.store(tokens, kv, start=64)).reason == "nothing new"


async def test_reasons_do_not_send_people_hunting(connect: Connect) -> None:
    """Hints about empty namespaces are for those who never stored: after that it is eviction."""
    client = await connect()
    tokens = tokens_of(2, 65)
    assert "nothing of tenant 'public'" in (await client.match(tokens)).reason
    await client.store(tokens, fill(KVBuffers.allocate(client.model, 65), 1))
    await client.evict(tokens)
    assert (await client.match(tokens)).reason == "not stored"


def test_tenants_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef0123456789abcdef\n")
    secret.chmod(0o600)
    full = {"HYPERCACHE_TENANT": "acme", "HYPERCACHE_SECRET_FILE": str(secret)}
    tenant = tenant_from_environment(full)
    same = TenantKey.from_secret(secret.read_bytes().strip(), "acme")
    assert (tenant.name, tenant.tenant_id) == ("acme", same.tenant_id)
    assert tenant_from_environment({}).name == "public"
    for name in full:
        with pytest.raises(ConfigError, match=next(other for other in full if other != name)):
            tenant_from_environment({name: full[name]})
    with pytest.raises(ConfigError, match="No such file"):
        tenant_from_environment({**full, "HYPERCACHE_SECRET_FILE": str(tmp_path / "none")})
    assert not caplog.records
    secret.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        tenant_from_environment(full)
    assert "chmod 600" in caplog.text


async def test_mistyped_variables_are_not_the_public_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """P02 on the client's side; what belongs to the server, or to nobody we know, is left alone."""
    monkeypatch.setenv("HYPERCACHE_LISTEN", "tcp://127.0.0.1:1")
    monkeypatch.setenv("HYPERCACHE_SERVICE_HOST", "10.0.0.1")
    async with running_node() as node, contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(await hypercache.connect(node.uris[0], **GOOD))
        for name in ("HYPERCACHE_TENNANT", "HYPERCACHE_SECRETFILE", "HYPERCACHE_URL"):
            with monkeypatch.context() as patch:
                patch.setenv(name, "x")
                with pytest.raises(ConfigError, match=f"{name} is unknown; did you mean HYPERCACHE_"):
                    await hypercache.connect(node.uris[0], **GOOD)
