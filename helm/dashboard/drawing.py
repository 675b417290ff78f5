"""A row of panels as one picture: lines, stacks, numbers and tables, as Grafana would show them. Asks nobody."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from history import Series
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

NUM_COLUMNS = 3
SIZE_INCHES = (4.6, 2.4)
MOST_IN_LEGEND = 7
STEPS = {"bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")), "s": ((1, "s"), (1e-3, "ms"), (1e-6, "µs"))}
NUMBERS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))

Panel = dict[str, Any]


def draw(title: str, panels: list[tuple[Panel, list[Series]]], path: Path) -> None:
    """Write a picture of the panels, in the dashboard's order."""
    num_rows = math.ceil(len(panels) / NUM_COLUMNS)
    size = (NUM_COLUMNS * SIZE_INCHES[0], num_rows * SIZE_INCHES[1])
    figure, grid = plt.subplots(num_rows, NUM_COLUMNS, figsize=size, layout="constrained", squeeze=False)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    for axis in grid.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (panel, series) in zip(grid.flat, panels, strict=False):
        axis.set_title(panel["title"], fontsize=9, loc="left")
        kind = _table if panel["type"] == "table" else _now if panel["type"] == "stat" else _lines
        if any(one.values for one in series):
            kind(axis, panel, series)
        else:
            axis.text(0.5, 0.5, "no data", ha="center", va="center", color="gray", transform=axis.transAxes)
            axis.set(xticks=[], yticks=[])
    figure.savefig(path, dpi=70)
    plt.close(figure)


def _lines(axis: Axes, panel: Panel, series: list[Series]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    # Lines at 0 say nothing beside others.
    series = [one for one in series if any(value and math.isfinite(value) for value in one.values)] or series
    if defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal":
        moments = sorted({moment for one in series for moment in one.times_s})
        stacked = [dict(zip(one.times_s, one.values, strict=True)) for one in series]
        heights = [[heights.get(moment, 0.0) for moment in moments] for heights in stacked]
        axis.stackplot(moments, heights, labels=[one.legend for one in series], alpha=0.7)
    else:
        for one in series:
            axis.plot(one.times_s, one.values, label=one.legend, linewidth=1)
    axis.set_ylim(bottom=0, top=defaults.get("max"))
    axis.yaxis.set_major_formatter(lambda value, _: shown(value, defaults["unit"]))
    axis.tick_params(labelsize=7)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g} s")
    axis.grid(alpha=0.3)
    handles, labels = axis.get_legend_handles_labels()
    if any(labels):
        axis.legend(handles[:MOST_IN_LEGEND], labels[:MOST_IN_LEGEND], fontsize=6, loc="upper left", framealpha=0.6)


def _now(axis: Axes, panel: Panel, series: list[Series]) -> None:
    """The newest number, over how it came about."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    for one in series:
        axis.fill_between(one.times_s, one.values, alpha=0.25)
    finite = [[value for value in one.values if math.isfinite(value)] for one in series]
    newest = ", ".join(shown(values[-1], unit) for values in finite if values)
    axis.text(0.5, 0.5, newest or "no data", ha="center", va="center", fontsize=20, transform=axis.transAxes)
    axis.set_ylim(bottom=0)
    axis.set(xticks=[], yticks=[])


def _table(axis: Axes, panel: Panel, series: list[Series]) -> None:
    """A line for each label; Grafana shows a column."""
    names = sorted({name for one in series for name in one.labels})
    cells = [[name, *(one.labels.get(name, "") for one in series)] for name in names]
    table = axis.table(cells, bbox=Bbox.unit(), cellLoc="left", edges="horizontal")
    table.auto_set_font_size(False)
    table.set_fontsize(6)
    axis.set_axis_off()


def shown(value: float, unit: str) -> str:
    """A number with its unit, in three digits."""
    if unit == "percentunit":
        return f"{value:.3g}" if not math.isfinite(value) else f"{100 * value:.3g} %"
    ending = {"reqps": "/s", "cps": "/s"}.get(unit, "")
    for size, name in STEPS.get(unit, NUMBERS):
        if abs(value) >= size:
            return f"{value / size:.3g} {name}{ending}"
    return f"{value:.3g}{' B' if unit == 'bytes' else ''}{ending}"
