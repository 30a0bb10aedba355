"""Which blocks are used most, in bounded memory, however many there are.

Space-Saving (Metwally et al., ICDT 2005) with counts that decay: what has no counter takes over the count of
those that lost theirs, as the error of its own. Counters are thrown out many at a time, so a use costs a
dictionary look-up.
"""

from __future__ import annotations

import math
from heapq import nlargest
from typing import Any, Final

from hypercache.errors import ConfigError

SHOWN: Final = 12  # hex digits of a digest: who knows all of it may read the block
_RESCALE: Final = 500.0  # half-lives after which counts are brought back to the range of a float


class Hot:
    """Counts uses that are worth half after ``half_life_s``. Has at most twice ``capacity`` counters; no
    count is off by more than the sum of all, divided by ``capacity``.

    Raises ConfigError for values out of range.
    """

    def __init__(self, capacity: int = 1024, half_life_s: float = 60.0) -> None:
        if type(capacity) is not int or capacity < 1:
            raise ConfigError(f"hot blocks capacity={capacity!r}: need an integer >= 1")
        if not 0 < half_life_s < math.inf:
            raise ConfigError(f"hot blocks half_life_s={half_life_s!r}: need a finite number of seconds > 0")
        self.capacity = capacity
        self.half_life_s = half_life_s
        self._counters: dict[bytes, tuple[float, float, str]] = {}  # count, error in it, label
        self._floor = 0.0  # the most that a block without a counter can have
        self._origin = 0.0  # seconds: a use then counts for 1, and later ones for more
        self._at = (0.0, 1.0)  # the last time asked for, and what a use then counts for

    def __len__(self) -> int:
        return len(self._counters)

    def use(self, namespace: str, digest: bytes, count: int, now: float) -> None:
        """Block ``digest`` of the namespace labelled so was used ``count`` times at ``now`` (seconds)."""
        weight = count * self._weight(now)
        had = self._counters.get(digest)
        if had is not None:
            self._counters[digest] = (had[0] + weight, had[1], had[2])
            return
        if len(self._counters) >= 2 * self.capacity:
            self._throw_out()
        self._counters[digest] = (self._floor + weight, self._floor, namespace)

    def top(self, n: int, now: float) -> list[dict[str, Any]]:
        """The ``n`` blocks used most, each as ``namespace`` (the label), ``digest`` (12 hex digits) and
        ``per_minute``: uses a minute, the last ones weighing most. Never more than there were."""
        scale = 60 * math.log(2) / self.half_life_s / self._weight(now)
        sure = [(count - error, digest) for digest, (count, error, _) in self._counters.items()]
        return [
            {
                "namespace": self._counters[digest][2],
                "digest": digest.hex()[:SHOWN],
                "per_minute": count * scale,
            }
            for count, digest in nlargest(n, sure)
            if count > 0
        ]

    def _weight(self, now: float) -> float:
        if now == self._at[0]:
            return self._at[1]
        age = (now - self._origin) / self.half_life_s
        if age > _RESCALE:
            self._rescale(math.exp2(-age) if age < 1000 else 0.0)
            self._origin, age = now, 0.0
        weight = math.exp2(max(age, -_RESCALE))
        self._at = now, weight
        return weight

    def _rescale(self, factor: float) -> None:
        self._floor *= factor
        self._counters = {
            digest: (count * factor, error * factor, label)
            for digest, (count, error, label) in self._counters.items()
            if count * factor > 0
        }

    def _throw_out(self) -> None:
        """Keep the larger half. All counts, old and new, are at least the floor of their time; so with m kept
        and as many thrown out, m times the new floor is no more than the sum of all uses."""
        order = sorted(self._counters.items(), key=lambda item: item[1][0], reverse=True)
        self._floor = order[self.capacity][1][0]
        self._counters = dict(order[: self.capacity])
