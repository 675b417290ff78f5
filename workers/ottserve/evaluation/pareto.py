"""Bits against what they cost: points of this command and of others, and which of them nothing beats.

Another command joins in by a JSON file in the same folder with a list `points`, each an object of `Point`'s attributes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

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


def points_in(folder: Path) -> list[Point]:
    """What the JSON files of a folder have to offer, file by file.

    Raises:
        ValueError: a file's `points` are not of the form; names the file.
    """
    found: list[Point] = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        try:
            found += [Point(**record) for record in content.get("points", [])]
        except (AttributeError, TypeError) as error:
            raise ValueError(f"{path}: not points for a plot of costs: {error}") from None
    return found


def front(points: Sequence[Point]) -> list[Point]:
    """The points of one measure that no other beats by bits and by cost, from few bits to many."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.bits, point.cost)):
        if not best or point.cost < best[-1].cost:
            best.append(point)
    return best
