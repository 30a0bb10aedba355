"""Torch as an oracle for E4M3 and for the dtype conversions."""

from __future__ import annotations

import numpy as np
import pytest
from kvdata import e4m3_values, load, row, store

from hypercache.model import KVDtype

torch = pytest.importorskip("torch", reason="torch is the oracle here; install the extra 'transformers'")


def bits_of(code):
    return torch.from_numpy(np.ascontiguousarray(code)).view(torch.float8_e4m3fn)


def test_decoding_agrees_with_torch_on_all_256_codes():
    codes = np.arange(256, dtype=np.uint8)
    assert np.array_equal(bits_of(codes).to(torch.float64).numpy(), e4m3_values(), equal_nan=True)
    for chosen in (codes[:127], codes[128:255]):  # a scale of 1 needs the 448 that ends each half
        scale, stored, back = row("fp8", e4m3_values()[chosen])
        assert scale == 1.0
        assert stored.tolist() == chosen.tolist()
        assert back.tolist() == e4m3_values()[chosen].tolist()


@pytest.mark.parametrize("dtype", [KVDtype.BF16, KVDtype.FP16, KVDtype.FP32])
@pytest.mark.parametrize("dim", [64, 128, 130])
def test_encoding_agrees_with_the_cast_of_torch(dtype, dim):
    random = np.random.default_rng(7)
    for _ in range(200):
        values = random.standard_normal(dim) * 2.0 ** random.integers(-16, 3, dim)
        values = load(store(values.astype(np.float32), dtype), dtype).astype(np.float32)
        scale, stored, back = row("fp8", values, dtype)
        scaled = torch.from_numpy(values) * (1 / torch.tensor(scale, dtype=torch.float32))
        want = scaled.to(torch.float8_e4m3fn)
        assert stored.tolist() == want.view(torch.uint8).tolist()
        target = {KVDtype.BF16: torch.bfloat16, KVDtype.FP16: torch.float16, KVDtype.FP32: torch.float32}[
            dtype
        ]
        decoded = (want.to(torch.float32) * torch.tensor(scale, dtype=torch.float32)).to(target)
        assert back.tolist() == decoded.to(torch.float64).tolist()


@pytest.mark.parametrize("name", ["int8", "int4-plain"])
@pytest.mark.parametrize("dtype", [KVDtype.BF16, KVDtype.FP16, KVDtype.FP32])
def test_integer_codes_agree_with_torch(name, dtype):
    random = np.random.default_rng(8)
    top = 127 if name == "int8" else 7
    for _ in range(100):
        values = load(store(random.standard_normal(128).astype(np.float32), dtype), dtype).astype(np.float32)
        scale, _, back = row(name, values, dtype)
        s = torch.tensor(scale, dtype=torch.float32)
        codes = torch.round(torch.from_numpy(values) * (1 / s))
        assert codes.abs().max() == top
        target = {KVDtype.BF16: torch.bfloat16, KVDtype.FP16: torch.float16, KVDtype.FP32: torch.float32}[
            dtype
        ]
        assert back.tolist() == (codes * s).to(target).to(torch.float64).tolist()
