"""Many times as two figures. Does not know what was timed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles


def p50_p99(seconds: Sequence[float]) -> tuple[float | None, float | None]:
    """The middle one and the 99th percentile; of less than a hundred, the longest or nearly. None of no times."""
    if len(seconds) < 2:
        only = seconds[0] if seconds else None
        return only, only
    return median(seconds), quantiles(seconds, n=100, method="inclusive")[-1]
