"""Pictures of outcomes, three kinds for all tasks. Measures nothing; needs matplotlib when called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from ottserve.evaluation.policies import caption
from ottserve.evaluation.tasks.task import Outcome, Task

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 120


def lines(task: Task, outcomes: Sequence[Outcome], measure: str, axes: Sequence[str], path: Path) -> None:
    """A panel for each axis of the cases' places, in it a line for each row: means of a measure."""
    figure, panels = _figure(len(axes), 6, 4)
    for panel, axis in zip(panels, axes, strict=True):
        for outcome in outcomes:
            points = _means(task, outcome, measure, (axis,))
            panel.plot(
                [place for (place,) in points],
                list(points.values()),
                "o-",
                label=caption(outcome.policy),
                linewidth=1.2,
            )
        panel.set(xlabel=axis, ylabel=_title(task, measure))
        panel.set_ylim(bottom=0)
    panels[-1].legend(fontsize=8)
    figure.savefig(path, dpi=DPI)


def heat_maps(task: Task, outcomes: Sequence[Outcome], measure: str, across: str, down: str, path: Path) -> None:
    """A map for each row: means of a measure over two axes of the cases' places, all in the same colours."""
    figure, panels = _figure(len(outcomes), 3.2, 3.2)
    grids = [_means(task, outcome, measure, (down, across)) for outcome in outcomes]
    top = max(max(grid.values()) for grid in grids)
    for panel, outcome, grid in zip(panels, outcomes, grids, strict=True):
        downs, acrosses = ([*dict.fromkeys(key[part] for key in grid)] for part in (0, 1))
        cells = [[grid[place, length] for length in acrosses] for place in downs]
        image = panel.imshow(cells, vmin=0, vmax=top, cmap="viridis_r", aspect="auto")
        panel.set_xticks(range(len(acrosses)), [f"{length:g}" for length in acrosses])
        panel.set_yticks(range(len(downs)), [f"{place:g}" for place in downs])
        panel.set_title(caption(outcome.policy), fontsize=9)
        panel.set(xlabel=across, ylabel=down)
    figure.colorbar(image, ax=panels, label=_title(task, measure))
    figure.savefig(path, dpi=DPI)


def survival(task: Task, outcomes: Sequence[Outcome], measure: str, longest: int, path: Path) -> None:
    """For each row the share of cases whose measure, a number of tokens, is more than that on the axis."""
    figure, (panel,) = _figure(1, 7, 4)
    for outcome in outcomes:
        found = outcome.figures(task, measure)
        shares = [mean(value > length for value in found) for length in range(longest)]
        panel.step(range(longest), shares, where="post", label=caption(outcome.policy), linewidth=1.2)
    panel.set(xlabel="token of the answer", ylabel="share of answers that still agree", ylim=(0, 1.02))
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=DPI)


def bars(task: Task, outcomes: Sequence[Outcome], measures: Sequence[str], path: Path) -> None:
    """A panel for each measure, in it a bar for each row: means."""
    figure, panels = _figure(len(measures), 5, 1.5 + 0.35 * len(outcomes))
    for panel, measure in zip(panels, measures, strict=True):
        names = [caption(outcome.policy) for outcome in outcomes]
        panel.barh(names, [mean(outcome.figures(task, measure)) for outcome in outcomes])
        panel.set(xlabel=_title(task, measure))
        panel.invert_yaxis()
    figure.savefig(path, dpi=DPI)


def _figure(num_panels: int, width: float, height: float) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure  # noqa: PLC0415 (only a plot needs it)

    figure = Figure(figsize=(width * num_panels, height), layout="constrained")
    return figure, figure.subplots(1, num_panels, squeeze=False)[0]


def _means(task: Task, outcome: Outcome, measure: str, axes: tuple[str, ...]) -> dict[tuple[float, ...], float]:
    """The mean of a measure at each place, by rising place."""
    found: dict[tuple[float, ...], list[float]] = {}
    for result, value in zip(outcome.results, outcome.figures(task, measure), strict=True):
        found.setdefault(tuple(result.place[axis] for axis in axes), []).append(value)
    return {place: mean(found[place]) for place in sorted(found)}


def _title(task: Task, measure: str) -> str:
    return next(one.title for one in task.measures if one.name == measure)
