"""Repeats added up: medians, spreads, and ratios of what was measured alike. Measures and prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from ottserve.evaluation.serving.results import ENGINE, SERVICE, Figures, Measurement


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
    """

    system: str
    policy: str
    point: str
    repeats: tuple[Figures, ...]
    errors: tuple[str, ...]
    to_first: Spread | None = None
    sequences_to_first: Spread | None = None
    to_engine: Spread | None = None

    @property
    def num_repeats(self) -> int:
        """With figures."""
        return len(self.repeats)

    def spread(self, name: str) -> Spread | None:
        """Of a field of `Figures`, over the repeats that have it."""
        values = [value for figures in self.repeats if (value := getattr(figures, name)) is not None]
        return Spread.of(values) if values else None


def summarise(measurements: Iterable[Measurement], policies: Sequence[str]) -> list[Summary]:
    """One summary for each point, in the order of points, systems and policies; ratios within equal repeats.

    Args:
        policies: the first is what the others are compared with.
    """
    found: dict[tuple[str, str, str], dict[int, Measurement]] = {}
    points: dict[str, None] = {}
    for row in measurements:
        if row.policy in policies:
            found.setdefault((row.system, row.policy, row.point), {})[row.repeat] = row
            points[row.point] = None
    summaries = []
    for point in points:
        for system in (SERVICE, ENGINE):
            for policy in policies:
                rows = found.get((system, policy, point), {})
                if rows:
                    first = found.get((system, policies[0], point), {})
                    engine = found.get((ENGINE, policy, point), {}) if system == SERVICE else {}
                    summaries.append(_summary(rows, first, engine))
    return summaries


def _summary(rows: dict[int, Measurement], first: dict[int, Measurement], engine: dict[int, Measurement]) -> Summary:
    some = next(iter(rows.values()))
    return Summary(
        system=some.system,
        policy=some.policy,
        point=some.point,
        repeats=tuple(row.figures for row in rows.values() if row.figures is not None),
        errors=tuple(row.error for row in rows.values() if row.error is not None),
        to_first=_ratio(rows, first, lambda figures: figures.tokens_per_s),
        sequences_to_first=_ratio(rows, first, lambda figures: figures.sequences),
        to_engine=_ratio(rows, engine, lambda figures: figures.tokens_per_s),
    )


def _ratio(
    mine: dict[int, Measurement], other: dict[int, Measurement], read: Callable[[Figures], float | None]
) -> Spread | None:
    """Over the repeats that both have: equal repeats have equal prompts, and a drift of the machine cancels."""
    ratios = []
    for repeat, row in mine.items():
        beside = other.get(repeat)
        if row.figures is not None and beside is not None and beside.figures is not None:
            above, below = read(row.figures), read(beside.figures)
            if above is not None and below:
                ratios.append(above / below)
    return Spread.of(ratios) if ratios else None
