"""How many replicas there should be: pure functions of what replicas report, and the policy that Ray Serve calls.

Runs in Serve's controller, which gets this file by value: standard library only. Knows no replica and no setting file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEAD_BAND = 0.2  # a fleet shrinks only if the smaller one would stay this share below its targets
MAX_GROWTH = 2  # times as many replicas in one decision
ROUNDING = 1e-9

KV, SLOTS, QUEUED_TOKENS, TOKENS_PER_S = "kv_demand", "slot_demand", "queued_tokens", "tokens_per_s"


@dataclass(frozen=True)
class Demand:
    """What one replica reports.

    Attributes:
        kv, slots: pages and slots that are used or waited for, over those there are; above 1 where more is waited for.
        queued_tokens: prompt tokens that wait.
        tokens_per_s: tokens that it computes a second when it has work; 0 before it had any.
    """

    kv: float
    slots: float
    queued_tokens: float
    tokens_per_s: float


@dataclass(frozen=True)
class Targets:
    """Between how many, at what load, and how long a change has to be wanted."""

    min_replicas: int
    max_replicas: int
    kv_pressure: float
    slot_pressure: float
    queue_s: float
    up_delay_s: float
    down_delay_s: float


@dataclass(frozen=True)
class Wish:
    """A change that was wanted without a break since a moment. `most` is the largest number wanted since then."""

    since: float
    most: int


@dataclass(frozen=True)
class Outlook:
    """What is remembered between two decisions."""

    up: Wish | None = None
    down: Wish | None = None


def load(demands: list[Demand], targets: Targets) -> float:
    """The load in replicas: so many, and all would be exactly at the tightest of the targets."""
    rates = [demand.tokens_per_s for demand in demands if demand.tokens_per_s > 0]
    rate = sum(rates) / len(rates) if rates else math.inf
    return max(
        sum(demand.kv for demand in demands) / targets.kv_pressure,
        sum(demand.slots for demand in demands) / targets.slot_pressure,
        sum(demand.queued_tokens for demand in demands) / (rate * targets.queue_s),
    )


def decide(num_replicas: int, load: float, outlook: Outlook, targets: Targets, now: float) -> tuple[int, Outlook]:
    """How many replicas there should be from `now` on, and what to remember.

    More come when they were wanted for `up_delay_s`, fewer when they were too many for `down_delay_s`: then as many
    stay as were wanted at the worst moment of that time. Between the two lies a band where nothing changes.
    """
    enough = _whole(load)
    spare = _whole(load / (1 - DEAD_BAND))
    up = down = None
    if enough > num_replicas:
        up = Wish(outlook.up.since if outlook.up else now, enough)
        if now - up.since >= targets.up_delay_s:
            return _bounded(min(enough, MAX_GROWTH * num_replicas), targets), Outlook()
    elif spare < num_replicas:
        down = Wish(now, spare) if outlook.down is None else Wish(outlook.down.since, max(outlook.down.most, spare))
        if now - down.since >= targets.down_delay_s:
            return _bounded(down.most, targets), Outlook()
    return _bounded(num_replicas, targets), Outlook(up, down)


def _whole(load: float) -> int:
    return math.ceil(load - ROUNDING)


def _bounded(num_replicas: int, targets: Targets) -> int:
    return max(targets.min_replicas, min(targets.max_replicas, num_replicas))


class Policy:
    """What Serve asks at each turn of its control loop."""

    def __init__(self, **targets: Any) -> None:
        """`targets` are the fields of `Targets`."""
        self._targets = Targets(**targets)
        self._outlook = Outlook()

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and no state of Serve's. While no replica reports, nothing changes."""
        demands = _demands(context.aggregated_metrics or {})
        num_replicas = context.target_num_replicas
        if not demands:
            return num_replicas, {}
        needed = load(demands, self._targets)
        wanted, self._outlook = decide(num_replicas, needed, self._outlook, self._targets, context.current_time)
        return wanted, {}


def _demands(metrics: Mapping[str, Mapping[Any, float]]) -> list[Demand]:
    """One for each replica that reports all four."""
    columns = [metrics.get(name, {}) for name in (KV, SLOTS, QUEUED_TOKENS, TOKENS_PER_S)]
    reporting = set(columns[0]).intersection(*columns[1:])
    return [Demand(*(column[replica] for column in columns)) for replica in reporting]
