"""K/V that are put to another place: values as they were, keys turned, nothing else touched."""

from __future__ import annotations

import numpy as np
import pytest

from hypercache.engines.reference import ReferenceConfig, ReferenceModel
from hypercache.errors import SpecError
from hypercache.kv import KVBuffers
from hypercache.stitch import copied, put

ENGINE = ReferenceModel(ReferenceConfig(layers=2))
IDS = np.random.default_rng(3).integers(0, 512, 40)


def computed(ids: np.ndarray) -> KVBuffers:
    kv = KVBuffers.allocate(ENGINE.spec, len(ids))
    ENGINE.forward(ids, kv, 0)
    return kv


@pytest.mark.parametrize("turned", [True, False])
def test_what_is_put_elsewhere_is_the_source_and_its_keys_are_turned(turned: bool) -> None:
    source, kv = computed(IDS), KVBuffers.allocate(ENGINE.spec, 30)
    for layer in range(2):
        for part in kv.layer(layer):
            part[:] = np.nan
    put(source, 5, kv, 20, 8, turned=turned)
    for layer in range(2):
        (keys, values), (k, v) = source.layer(layer), kv.layer(layer)
        assert np.array_equal(v[:, 20:28], values[:, 5:13])
        assert np.array_equal(k[:, 20:28], keys[:, 5:13]) is not turned
        for part in (k, v):
            assert np.isnan(part[:, :20]).all() and np.isnan(part[:, 28:]).all()
    there = computed(np.concatenate([np.zeros(15, np.int64), IDS[:25]]))
    error = np.abs(kv.layer(0)[0][:, 20:28] - there.layer(0)[0][:, 20:28]).max()
    assert bool(error < 1e-5) is turned  # layer 0 depends on the token and its position alone


def test_a_copy_has_memory_of_its_own_and_no_less_room() -> None:
    kv = computed(IDS)
    other = copied(kv, 50)
    assert other.tokens == 50
    for layer in range(2):
        for ours, theirs in zip(other.layer(layer), kv.layer(layer), strict=True):
            assert np.array_equal(ours[:, :40], theirs) and not np.shares_memory(ours, theirs)
    assert copied(kv).tokens == 40
    with pytest.raises(SpecError, match="no room for 40 tokens in 39"):
        copied(kv, 39)
