"""What the requests of a process, or of several, add up to. Counts everything; times what the warm-up left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ottserve.loadtest.histogram import Histogram
from ottserve.loadtest.stream import CANCELLED, COMPLETED, Timed
from ottserve.loadtest.workload import Limits

TIMES = ("first_token_s", "per_token_s", "inter_token_s", "e2e_s")


class Tally:
    """Counts and histograms.

    Attributes:
        outcomes: every request by how it ended.
        counts: requests and tokens; those named `measured_` leave out the warm-up.
        times: histograms over measured requests; TTFT and gaps of cancelled ones count, their end does not.
    """

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.times = {name: Histogram() for name in TIMES}

    def add(self, timed: Timed, limits: Limits, measured: bool) -> None:
        """Take in one request that has ended."""
        self.outcomes[timed.outcome] += 1
        self.counts["received_tokens"] += timed.num_tokens
        if timed.usage:
            self.counts["prompt_tokens"] += timed.usage.num_prompt_tokens
            self.counts["cached_prompt_tokens"] += timed.usage.num_cached_tokens
            self.counts["completion_tokens"] += timed.usage.num_completion_tokens
        if measured:
            self._measure(timed, limits)

    def _measure(self, timed: Timed, limits: Limits) -> None:
        self.counts["measured_requests"] += 1
        self.counts["measured_tokens"] += timed.num_tokens
        if timed.outcome not in (COMPLETED, CANCELLED):
            return
        if timed.first_token_s is not None:
            self.times["first_token_s"].add(timed.first_token_s)
        for gap_s, num_tokens in timed.gaps:
            self.times["inter_token_s"].add(gap_s / num_tokens, num_tokens)
        if timed.outcome == CANCELLED:
            return
        self.counts["measured_completed"] += 1
        self.counts["measured_good"] += _is_good(timed, limits)
        self.times["e2e_s"].add(timed.e2e_s)
        if timed.per_token_s is not None:
            self.times["per_token_s"].add(timed.per_token_s)

    def drop(self) -> None:
        """A request that could not be sent, because too many were in flight."""
        self.outcomes["dropped"] += 1

    def take(self) -> dict[str, Any]:
        """All so far, as JSON holds it, and begin anew."""
        dumped = {
            "outcomes": dict(self.outcomes),
            "counts": dict(self.counts),
            "times": {name: histogram.dump() for name, histogram in self.times.items()},
        }
        self.__init__()  # type: ignore[misc]
        return dumped

    def merge(self, dumped: Mapping[str, Any]) -> None:
        """Add what another process took."""
        self.outcomes.update(dumped["outcomes"])
        self.counts.update(dumped["counts"])
        for name, histogram in dumped["times"].items():
            self.times[name].merge(Histogram.load(histogram))


def _is_good(timed: Timed, limits: Limits) -> bool:
    checks = ((timed.first_token_s, limits.first_token_s), (timed.per_token_s, limits.per_token_s))
    return all(limit is None or value is None or value <= limit for value, limit in checks)
