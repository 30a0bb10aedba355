"""Choosing by score with the first tokens ahead, and the features that calibrated selectors are made of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypercache.blend import Seen
from hypercache.blend.policies import choose, feature, mass_layers
from hypercache.errors import SpecError

SEEN = Seen(
    positions=np.array([10, 11, 12, 30, 31]),
    place=np.array([0, 1, 2, 0, 1]),
    segment=np.array([0, 0, 0, 1, 1]),
    segments=2,
    deviation=np.arange(20, dtype=np.float32).reshape(5, 2, 2),
    mass={0: np.arange(15, dtype=np.float32).reshape(5, 3) / 15},
)


@given(
    st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=9), min_size=1, max_size=6),
    st.integers(0, 60),
    st.integers(0, 4),
)
def test_the_lead_of_each_segment_comes_first_then_the_highest_scores(
    segments: list[list[int]], count: int, lead: int
) -> None:
    place = np.concatenate([np.arange(len(segment)) for segment in segments])
    scores = np.concatenate(segments)
    total = len(place)
    count = min(count, total)
    chosen = choose(scores, place, count, lead)
    assert len(chosen) == count and np.all(np.diff(chosen) > 0)
    left = np.setdiff1d(np.arange(total), chosen)
    led = place < lead
    if (led[left]).any():  # the budget went to first tokens alone, and to no later place than is missing
        assert led[chosen].all()
        assert place[chosen].max(initial=0) <= place[left[led[left]]].min()
    else:
        rest = chosen[~led[chosen]]
        assert scores[rest].min(initial=9) >= scores[left].max(initial=-9)


def test_ties_go_to_the_earlier_token() -> None:
    assert choose(np.zeros(6), np.arange(6), 3, 0).tolist() == [0, 1, 2]
    assert choose(np.array([0.0, 2, 2, 1]), np.arange(4), 1, 0).tolist() == [1]


def test_features_by_name() -> None:
    assert feature(SEEN, "mass.0.2").tolist() == SEEN.mass[0][:, 2].tolist()
    assert feature(SEEN, "k.1").tolist() == [2, 6, 10, 14, 18]
    assert feature(SEEN, "v.0").tolist() == [1, 5, 9, 13, 17]
    assert feature(SEEN, "place").tolist() == [0, 1, np.log2(3), 0, 1]
    assert feature(SEEN, "lead").tolist() == [1, 1, 0, 1, 1]
    assert feature(SEEN, "segment").tolist() == [0, 0, 0, 0.5, 0.5]
    assert all(feature(SEEN, name).dtype == np.float64 for name in ("mass.0.0", "k.0", "lead", "segment"))
    assert mass_layers(("place", "mass.1.0", "k.0", "mass.0.3", "mass.1.2")) == (0, 1)


def test_unknown_features_heads_and_layers_are_refused_by_name() -> None:
    for name in ("mass", "mass.0", "mass.0.x", "mass.-1.0", "k", "k.0.1", "place.1", "query", "", "k.²"):
        with pytest.raises(SpecError, match=r"is no feature; they are mass\.LAYER\.HEAD, k\.HEAD"):
            feature(SEEN, name)
        with pytest.raises(SpecError, match="is no feature"):
            mass_layers((name,))
    for name in ("mass.1.0", "mass.0.3", "k.2", "v.2"):
        with pytest.raises(SpecError, match=rf"feature '{name}': this model has no such head, or the layer"):
            feature(SEEN, name)
