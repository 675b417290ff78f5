"""A histogram of durations that processes can add up. Each bucket is 2 % wide, so that is how exact a quantile is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

WIDTH = math.log(1.02)
SMALLEST_S = 1e-6


class Histogram:
    """Counts by logarithmic bucket; sum, least and most are exact."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.sum = 0.0
        self.least = math.inf
        self.most = 0.0

    @property
    def num(self) -> int:
        """Observations."""
        return self.counts.total()

    def add(self, seconds: float, times: int = 1) -> None:
        """Observe a duration, several times over where tokens share it."""
        self.counts[_bucket(seconds)] += times
        self.sum += seconds * times
        self.least = min(self.least, seconds)
        self.most = max(self.most, seconds)

    def quantile(self, q: float) -> float:
        """The middle of the bucket in which the quantile lies, in seconds; NaN when empty."""
        if not self.num:
            return math.nan
        left = q * self.num
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left <= 0:
                return min(max(SMALLEST_S * math.exp((bucket + 0.5) * WIDTH), self.least), self.most)
        return self.most

    def points(self) -> tuple[list[float], list[float]]:
        """Durations, and the share of observations up to each, rising."""
        durations, shares, seen = [], [], 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            durations.append(SMALLEST_S * math.exp((bucket + 1) * WIDTH))
            shares.append(seen / self.num)
        return durations, shares

    def dump(self) -> dict[str, Any]:
        """As JSON holds it; `load` takes it back."""
        counts = {str(bucket): count for bucket, count in sorted(self.counts.items())}
        return {"counts": counts, "sum": self.sum, "least": self.least if self.num else 0.0, "most": self.most}

    @classmethod
    def load(cls, dumped: Mapping[str, Any]) -> Histogram:
        """What `dump` gave."""
        made = cls()
        made.counts.update({int(bucket): count for bucket, count in dumped["counts"].items()})
        made.sum, made.most = dumped["sum"], dumped["most"]
        made.least = dumped["least"] if made.num else math.inf
        return made

    def merge(self, other: Histogram) -> None:
        """Add another's observations."""
        self.counts.update(other.counts)
        self.sum += other.sum
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)


def _bucket(seconds: float) -> int:
    return max(0, math.floor(math.log(max(seconds, SMALLEST_S) / SMALLEST_S) / WIDTH))
