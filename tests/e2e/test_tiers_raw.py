"""Blocks that travel as they lie on disk, because decoding them twice would take longer than recomputing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from hypercache import ChunkBuffers

from .conftest import tokens_of
from .test_tiers import spoil
from .tiers_kit import MIB, PROMPT, client_of, get, l3, put, tiered, until, written

HIT = PROMPT - 1


async def test_what_is_read_once_takes_no_place_in_memory(tmp_path: Path) -> None:
    """Admission: a scan over the disk does not touch what is used in memory."""
    big = {"memory": 64 * MIB, "l3_capacity": 256 * MIB}
    async with tiered(tmp_path, **big) as node, client_of(node, codec="int8") as client:
        for seed in range(150):
            await put(client, seed)
            await written(node)
        await until(lambda: l3(node)["blocks_loading"] == 0)
        store = node.status()["store"]
        assert store["blocks"] == 1200 and store["blocks_cold"] > 200
        for seed in range(20):  # the first that were stored, and the first that have gone
            assert await get(client, seed, cosine=0.99) == HIT
        await until(lambda: l3(node)["blocks_loading"] == 0)
        promoted = l3(node)["promoted_total"]
        assert promoted < 160 and node.status()["store"]["cooled_total"] == store["cooled_total"]
        assert 0 <= l3(node)["bytes_sending"] <= l3(node)["bytes_sending_limit"] == 4 * MIB
        await asyncio.sleep(1.1)  # within a second uses count once
        assert await get(client, 19, cosine=0.99) == HIT
        await until(lambda: l3(node)["promoted_total"] == promoted + 8)


async def test_what_is_asked_for_again_gets_its_place(tmp_path: Path) -> None:
    async with tiered(tmp_path) as node, client_of(node, codec="int8") as client:
        await put(client, 1)
        await written(node)
    async with tiered(tmp_path) as node, client_of(node, codec="int8") as client:
        assert await get(client, 1, cosine=0.99) == HIT
        await until(lambda: l3(node)["promoted_total"] == 8)  # there was room
        assert node.status()["store"]["blocks_cold"] == 0
        assert await get(client, 1, cosine=0.99) == HIT


@pytest.mark.parametrize("codec", ["int8", "fp8"])
async def test_one_fetch_of_both_tiers(tmp_path: Path, codec: str) -> None:
    """The beginning lies in memory, what follows on the disk; and the reverse of it."""
    async with tiered(tmp_path) as node, client_of(node, codec=codec) as client:
        await put(client, 1)
        await put(client, 2)
        await written(node)
    for tail in (False, True):
        async with tiered(tmp_path) as node, client_of(node, codec=codec) as client:
            if tail:  # asked for behind a start, so that the end alone comes into memory
                into = ChunkBuffers([np.zeros((4, n), np.uint8) for n in client.chunk_nbytes])
                assert (await client.fetch(tokens_of(1, PROMPT), into, start=64)).hit_tokens == HIT
            else:
                assert await get(client, 1, 65, cosine=0.99, of=PROMPT) == 64
            await until(lambda: node.status()["store"]["blocks_cold"] == 12)
            assert await get(client, 1, cosine=0.99) == HIT
            assert await get(client, 2, cosine=0.99) == HIT


async def test_ready_chunks_come_in_the_codec_they_travel_in(tmp_path: Path) -> None:
    """ChunkBuffers hold chunks of the wire codec, wherever the blocks lay."""
    async with tiered(tmp_path) as node, client_of(node, codec="int8") as client:
        await put(client, 1)
        rows = ChunkBuffers([np.zeros((8, n), np.uint8) for n in client.chunk_nbytes])
        assert (await client.fetch(tokens_of(1, PROMPT), rows)).hit_tokens == HIT
        await written(node)
    async with tiered(tmp_path) as node, client_of(node, codec="int8") as client:
        again = ChunkBuffers([np.zeros((8, n), np.uint8) for n in client.chunk_nbytes])
        assert (await client.fetch(tokens_of(1, PROMPT), again)).hit_tokens == HIT
        for layer in range(client.model.num_layers):
            a, b = (np.frombuffer(one.layer(layer), np.int8).astype(float) for one in (rows, again))
            assert (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()) > 0.97  # scales and codes alike


async def test_damage_shortens_the_run(tmp_path: Path) -> None:
    async with tiered(tmp_path, l3_segment=8 * MIB) as node, client_of(node, codec="int8") as client:
        await put(client, 1)
        await written(node)
    spoil(tmp_path)
    async with tiered(tmp_path, l3_segment=8 * MIB) as node, client_of(node, codec="int8") as client:
        found = await get(client, 1, cosine=0.99)
        assert 0 < found < HIT
        assert l3(node)["damaged_total"] == 1
        await put(client, 1)
        assert await get(client, 1, cosine=0.99) == HIT
