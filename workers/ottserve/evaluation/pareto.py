"""Bits against what they cost, in KL and in values that are looked up, and which rows nothing beats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from ottserve.evaluation.sweep import Outcome


@dataclass(frozen=True, slots=True)
class Point:
    """A policy by one measure, of which less is better.

    Attributes:
        measure: what the cost is of, with its unit.
        policy: the row as named.
        bits: of a sealed element, scales, zeros and masks included.
        cost: by the measure.
        low, high: interval of the cost, or the cost itself where there is none.
    """

    measure: str
    policy: str
    bits: float
    cost: float
    low: float
    high: float


def points_of(outcomes: Iterable[Outcome]) -> list[Point]:
    """KL of each row that has any, a measure for each text."""
    return [
        Point(
            measure=f"KL, nats, {outcome.text}",
            policy=outcome.policy,
            bits=outcome.page_bits_per_element,
            cost=outcome.quality.kl,
            low=outcome.quality.kl_low,
            high=outcome.quality.kl_high,
        )
        for outcome in outcomes
        if outcome.quality.kl
    ]


def lookup_points(outcomes: Iterable[Outcome], folder: Path) -> list[Point]:
    """NLL of looked-up values for rows that `ottserve tasks lookup` has measured into the same folder, if it has."""
    path = folder / "lookup.json"
    records = json.loads(path.read_text())["rows"] if path.exists() else []
    bits = {outcome.policy: outcome.page_bits_per_element for outcome in outcomes if outcome.quality.kl}
    costs = {record["policy"]: fmean(case["figures"]["nll"] for case in record["cases"]) for record in records}
    return [
        Point("lookup, NLL a token of the value, nats", policy, bits[policy], cost, cost, cost)
        for policy, cost in costs.items()
        if policy in bits
    ]


def front(points: Sequence[Point]) -> list[Point]:
    """The points of one measure that no other beats by bits and by cost, from few bits to many."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.bits, point.cost)):
        if not best or point.cost < best[-1].cost:
            best.append(point)
    return best
