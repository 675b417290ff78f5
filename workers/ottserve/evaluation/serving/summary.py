"""Repeats added up: medians, spreads, and ratios of what was measured alike. Measures and prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from ottserve.evaluation.serving.layout import ONE, Layout
from ottserve.evaluation.serving.points import parse_points
from ottserve.evaluation.serving.results import ENGINE, SERVICE, Figures, Measurement

Rows = dict[int, Measurement]
"""By the number of the repeat."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle one of the repeats, the least and the most."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Summary:
    """All repeats of one point.

    Attributes:
        num_repeats: of which there are figures.
        errors: of those that failed.
        to_first: tokens a second over the first policy's at the same point of the same system.
        sequences_to_first: sequences at once, likewise.
        to_engine: a service's tokens a second over its engine's at the same point; None where one is missing.
        to_one: over those of one GPU with what one replica has of the point; None for one GPU itself.
    """

    system: str
    policy: str
    point: str
    layout: Layout
    repeats: tuple[Figures, ...]
    errors: tuple[str, ...]
    to_first: Spread | None = None
    sequences_to_first: Spread | None = None
    to_engine: Spread | None = None
    to_one: Spread | None = None

    @property
    def num_repeats(self) -> int:
        """With figures."""
        return len(self.repeats)

    def spread(self, name: str) -> Spread | None:
        """Of a field of `Figures`, over the repeats that have it."""
        values = [value for figures in self.repeats if (value := getattr(figures, name)) is not None]
        return Spread.of(values) if values else None


def summarise(measurements: Iterable[Measurement], policies: Sequence[str]) -> list[Summary]:
    """One for each point and layout, in the order in which these came, then of systems and policies.

    Ratios are within equal repeats.

    Args:
        policies: the first is what the others are compared with.
    """
    found: dict[tuple[str, str, str, Layout], Rows] = {}
    places: dict[tuple[str, Layout], None] = {}
    for row in measurements:
        if row.policy in policies:
            found.setdefault((row.system, row.policy, row.point, row.layout), {})[row.repeat] = row
            places[row.point, row.layout] = None
    summaries = []
    for point, layout in places:
        for system in (SERVICE, ENGINE):
            for policy in policies:
                rows = found.get((system, policy, point, layout), {})
                if rows:
                    first = found.get((system, policies[0], point, layout), {})
                    engine = found.get((ENGINE, policy, point, layout), {}) if system == SERVICE else {}
                    of_one = str(layout.of_one(parse_points(point)[0]))
                    one = {} if layout == ONE else found.get((system, policy, of_one, ONE), {})
                    summaries.append(_summary(rows, first, engine, one))
    return summaries


def _summary(rows: Rows, first: Rows, engine: Rows, one: Rows) -> Summary:
    some = next(iter(rows.values()))
    return Summary(
        system=some.system,
        policy=some.policy,
        point=some.point,
        layout=some.layout,
        repeats=tuple(row.figures for row in rows.values() if row.figures is not None),
        errors=tuple(row.error for row in rows.values() if row.error is not None),
        to_first=_ratio(rows, first, lambda figures: figures.tokens_per_s),
        sequences_to_first=_ratio(rows, first, lambda figures: figures.sequences),
        to_engine=_ratio(rows, engine, lambda figures: figures.tokens_per_s),
        to_one=_ratio(rows, one, lambda figures: figures.tokens_per_s),
    )


def _ratio(mine: Rows, other: Rows, read: Callable[[Figures], float | None]) -> Spread | None:
    """Over the repeats that both have: equal repeats have equal prompts, and a drift of the machine cancels."""
    ratios = []
    for repeat, row in mine.items():
        beside = other.get(repeat)
        if row.figures is not None and beside is not None and beside.figures is not None:
            above, below = read(row.figures), read(beside.figures)
            if above is not None and below:
                ratios.append(above / below)
    return Spread.of(ratios) if ratios else None
