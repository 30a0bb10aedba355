"""What the benchmark reports of the codecs is complete and consistent."""

from __future__ import annotations

import pytest

from hypercache import codecs
from hypercache.cli import bench_codecs


def test_measure_reports_every_codec_at_every_dim(monkeypatch):
    monkeypatch.setattr(bench_codecs, "BUFFER_BYTES", 2 << 20)  # a speed out of the cache is as good here
    result = bench_codecs.measure(0.0, dims=(64, 80))
    assert set(result) == set(codecs.names())
    for name, by_dim in result.items():
        assert list(by_dim) == ["64", "80"]
        for figures in by_dim.values():
            assert all(value > 0 for value in figures.values())
            assert figures["relative_error"] ** 2 == pytest.approx(2 - 2 * figures["cosine"], rel=0.1), name
    at_64 = {name: by_dim["64"] for name, by_dim in result.items()}
    assert at_64["raw"]["ratio"] == 1.0 and at_64["int4"]["ratio"] == pytest.approx(128 / 34)
    assert at_64["int4"]["relative_error_outliers"] < at_64["int4-plain"]["relative_error_outliers"]
    assert at_64["int8"]["relative_error"] < at_64["fp8"]["relative_error"] < at_64["int4"]["relative_error"]
    wanted = {"memcpy_gbps"}
    for what in ("encode", "decode", "turned"):
        wanted |= {f"{what}_gbps", f"{what}_to_memcpy"}
    for suffix in ("", "_64k", "_fp32"):
        assert {key + suffix for key in wanted} <= set(at_64["fp8"])


def test_the_sizes_and_errors_that_are_promised_at_head_dim_128(monkeypatch):
    """3.88x and a cosine of 0.993 on Gaussian K/V, which keys with outlier channels keep only if rotated."""
    monkeypatch.setattr(bench_codecs, "_speed", lambda *_: {})
    at_128 = {name: by_dim["128"] for name, by_dim in bench_codecs.measure(0.0, dims=(128,)).items()}
    assert at_128["int4"]["ratio"] == pytest.approx(3.8788, abs=1e-4)
    assert at_128["fp8"]["ratio"] == at_128["int8"]["ratio"] == pytest.approx(1.9692, abs=1e-4)
    for name, least in (("int4", 0.993), ("fp8", 0.9996), ("int8", 0.9999), ("raw", 0.99999)):
        assert at_128[name]["cosine"] >= least
    rotated, plain = at_128["int4"]["cosine_outliers"], at_128["int4-plain"]["cosine_outliers"]
    assert rotated >= 0.993 > plain
    assert 1 - rotated < (1 - plain) / 3
