"""What a run has shown, as one JSON object, and whether it kept its objectives. Draws and prints nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ottserve.loadtest.tally import Tally
from ottserve.loadtest.workload import Workload

QUANTILES = (0.5, 0.9, 0.99)
NOT_FAILED = ("completed", "cancelled")


@dataclass(frozen=True, slots=True)
class Objective:
    """One objective and what was reached."""

    name: str
    limit: float
    reached: float
    met: bool


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a run was sent to, and when."""

    workload_name: str
    target: str
    started_at: str
    num_processes: int
    server: dict[str, Any]


def make_report(workload: Workload, tally: Tally, here: Circumstances, measured_s: float) -> dict[str, Any]:
    """The report. `measured_s` is the time from the end of the warm-up to the last answer."""
    counts = tally.counts
    rates = {
        "requests_per_s": counts["measured_completed"] / measured_s,
        "good_requests_per_s": counts["measured_good"] / measured_s,
        "output_tokens_per_s": counts["measured_tokens"] / measured_s,
    }
    return {
        "workload": {"name": here.workload_name, **workload.model_dump(mode="json")},
        "target": here.target,
        "started_at": here.started_at,
        "num_processes": here.num_processes,
        "server": here.server,
        "measured_s": measured_s,
        "requests": dict(sorted(tally.outcomes.items())),
        "tokens": {
            name: counts[name]
            for name in ("prompt_tokens", "cached_prompt_tokens", "completion_tokens", "received_tokens")
        },
        "rates": rates,
        "times": {name: _summary(tally, name) for name in tally.times},
        "objectives": [vars_of(objective) for objective in objectives(workload, tally)],
        "histograms": {name: histogram.dump() for name, histogram in tally.times.items()},
    }


def objectives(workload: Workload, tally: Tally) -> Iterator[Objective]:
    """Each objective that the workload sets. What nothing was measured for is not met."""
    wanted, counts = workload.objectives, tally.counts
    num_ended = sum(tally.outcomes.values())
    num_failed = sum(count for outcome, count in tally.outcomes.items() if outcome not in NOT_FAILED)
    reached = {
        "first_token_p99_s": tally.times["first_token_s"].quantile(0.99),
        "per_token_p99_s": tally.times["per_token_s"].quantile(0.99),
        "inter_token_p99_s": tally.times["inter_token_s"].quantile(0.99),
        "failed_share": num_failed / num_ended if num_ended else math.nan,
        "good_share": counts["measured_good"] / counts["measured_completed"]
        if counts["measured_completed"]
        else math.nan,
    }
    for name, limit in wanted.model_dump().items():
        if limit is not None:
            value = reached[name]
            met = value >= limit if name == "good_share" else value <= limit
            yield Objective(name, limit, value, met)


def vars_of(objective: Objective) -> dict[str, Any]:
    """As JSON holds it: null where nothing was measured."""
    reached = None if math.isnan(objective.reached) else objective.reached
    return {"name": objective.name, "limit": objective.limit, "reached": reached, "met": objective.met}


def _summary(tally: Tally, name: str) -> dict[str, float | int | None]:
    histogram = tally.times[name]
    if not histogram.num:
        return {"num": 0}
    quantiles = {f"p{round(q * 100)}": histogram.quantile(q) for q in QUANTILES}
    return {"num": histogram.num, "mean": histogram.sum / histogram.num, **quantiles, "max": histogram.most}
