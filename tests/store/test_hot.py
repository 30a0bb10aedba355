"""The most used blocks: held against exact counts."""

from __future__ import annotations

import math
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypercache.errors import ConfigError
from hypercache.store.hot import Hot

MINUTE = 60 * math.log(2) / 60  # a decayed count of 1 at a half-life of 60 s, in uses a minute


def name(index: int) -> bytes:
    """A digest; its first 12 hex digits tell it from others."""
    return index.to_bytes(6, "big") * 2 + bytes(4)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5), st.integers(0, 90)), max_size=200),
    st.integers(1, 8),
)
def test_counts_are_within_the_bound(uses: list[tuple[int, int, int]], capacity: int) -> None:
    """Of the exact decayed counts: never above, and below by no more than all uses / capacity."""
    hot = Hot(capacity, half_life_s=60.0)
    exact: dict[str, float] = {}
    now = last = 1000.0
    for index, count, gap in uses:
        now += gap
        exact = {key: value * 2 ** ((last - now) / 60) for key, value in exact.items()}
        key, last = name(index).hex()[:12], now
        exact[key] = exact.get(key, 0.0) + count
        hot.use("a", name(index), count, now)
        assert len(hot) <= 2 * capacity
    total = sum(exact.values())
    found = {row["digest"]: row["per_minute"] / MINUTE for row in hot.top(31, now)}
    for key, value in exact.items():
        assert value - total / capacity - 1e-9 <= found.get(key, 0.0) <= value + 1e-9
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_the_hottest_are_found_among_a_hundred_thousand() -> None:
    hot = Hot(capacity=256, half_life_s=60.0)
    rng = random.Random(3)
    weights = [1 / (rank + 1) for rank in range(100_000)]
    drawn = rng.choices(range(100_000), weights, k=100_000)
    for at, index in enumerate(drawn):
        hot.use("docs", name(index), 1, at / 1000)
    top = hot.top(5, 100.0)
    assert {row["digest"] for row in top} == {name(index).hex()[:12] for index in range(5)}
    assert {row["namespace"] for row in top} == {"docs"}
    # Rank 1 has 1 use of 12.1 (the harmonic number), of 60,000 a minute; 100 s are 1.7 half-lives, so the
    # decayed rate has come to 69 % of that.
    share = 1 - 2 ** (-100 / 60)
    assert top[0]["per_minute"] == pytest.approx(60_000 / 12.1 * share, rel=0.1)


def test_a_steady_rate_is_the_rate() -> None:
    hot = Hot(half_life_s=60.0)
    for second in range(1200):
        hot.use("a", name(1), 3, float(second))
    (row,) = hot.top(5, 1200.0)
    assert row["per_minute"] == pytest.approx(180, rel=0.02)
    (later,) = hot.top(5, 1260.0)
    assert later["per_minute"] == pytest.approx(row["per_minute"] / 2)


def test_what_was_hot_yesterday_is_not_now() -> None:
    hot = Hot(capacity=4, half_life_s=1.0)
    for index in range(100):
        hot.use("a", name(index), 1_000_000, 5.0)
    hot.use("b", name(500), 1, 86_400.0)
    assert [row["namespace"] for row in hot.top(10, 86_400.0)] == ["b"]
    for second in range(86_400, 88_000, 7):  # counts stay finite, however long it runs
        hot.use("b", name(500), 1, float(second))
    (row,) = hot.top(10, 88_000.0)
    assert 0 < row["per_minute"] < 100
    assert hot.top(10, 1e9) == []


def test_no_more_of_a_digest_is_shown_than_tells_it_apart() -> None:
    hot = Hot()
    hot.use("a", bytes(range(32)), 1, 0.0)
    assert [row["digest"] for row in hot.top(1, 0.0)] == ["000102030405"]


def test_memory_is_bounded() -> None:
    hot = Hot()
    for index in range(5_000):
        hot.use("a", name(index), 1, 0.0)
    tracemalloc.start()
    for index in range(5_000, 50_000):
        hot.use("a", name(index), 1, 0.0)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(hot) <= 2048 and grown < 1 << 20


@pytest.mark.parametrize("options", [{"capacity": 0}, {"half_life_s": 0.0}, {"half_life_s": math.inf}])
def test_what_cannot_be_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Hot(**options)  # type: ignore[arg-type]
