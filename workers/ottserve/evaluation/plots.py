"""Outcomes as pictures. Knows how figures look, and computes none of what they show."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ottserve.evaluation.measures import NUM_PARTS, POSITIONS_PER_POINT
from ottserve.evaluation.pareto import Point, front
from ottserve.evaluation.policies import caption
from ottserve.evaluation.report import by_text
from ottserve.evaluation.sweep import Outcome

PANEL_INCHES = (6, 4)
LEGEND_INCHES = 0.2
DPI = 120


def draw(outcomes: Sequence[Outcome], points: Sequence[Point], folder: Path) -> None:
    """Write all pictures into a folder: `kl-by-length.png`, `kl-since-seal.png`, `pareto.png`, and of rows whose
    attention was measured `attention-by-layer.png`, `attention-by-head.png`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    coarse = [outcome for outcome in outcomes if outcome.quality.kl]
    if not coarse:
        return
    folder.mkdir(parents=True, exist_ok=True)
    _by_length(coarse, folder / "kl-by-length.png")
    _since_seal(coarse, folder / "kl-since-seal.png")
    _pareto(points, folder / "pareto.png")
    watched = [outcome for outcome in coarse if outcome.attention is not None]
    if watched:
        _by_layer(watched, folder / "attention-by-layer.png")
        _by_head(watched, folder / "attention-by-head.png")


def panels(rows: int, columns: int) -> tuple[Any, Any]:
    """A figure and its panels `[rows, columns]`."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (only a plot needs it)

    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _by_length(outcomes: Sequence[Outcome], path: Path) -> None:
    """KL against position: means of eighths, and behind them of short runs."""
    texts = list(by_text(outcomes))
    figure, axes = panels(1, len(texts))
    for panel, (title, found) in zip(axes[0], texts, strict=True):
        for index, outcome in enumerate(found):
            quality = outcome.quality
            runs = [(run + 0.5) * POSITIONS_PER_POINT for run in range(len(quality.kl_by_position))]
            skipped = -(-quality.first_position // POSITIONS_PER_POINT)
            panel.plot(runs[skipped:], quality.kl_by_position[skipped:], color=f"C{index}", alpha=0.25, linewidth=0.8)
            step = (quality.num_tokens - quality.first_position) / NUM_PARTS
            middles = [quality.first_position + (part + 0.5) * step for part in range(NUM_PARTS)]
            panel.plot(
                middles, _gaps(quality.kl_by_length), color=f"C{index}", marker="o", label=caption(outcome.policy)
            )
        panel.set(title=title, xlabel="position", ylabel="KL, nats", yscale="log")
    _legend(figure, axes)
    figure.savefig(path, dpi=DPI)


def _since_seal(outcomes: Sequence[Outcome], path: Path) -> None:
    """KL against the tokens since the last seal, as a share of a group, since rows may differ in it."""
    texts = list(by_text(outcomes))
    figure, axes = panels(1, len(texts))
    middles = [(part + 0.5) / NUM_PARTS for part in range(NUM_PARTS)]
    for panel, (title, found) in zip(axes[0], texts, strict=True):
        for index, outcome in enumerate(found):
            values = _gaps(outcome.quality.kl_since_seal)
            panel.plot(middles, values, color=f"C{index}", marker="o", label=caption(outcome.policy))
        panel.set(title=title, xlabel="since the last seal, groups", ylabel="KL, nats", yscale="log", xlim=(0, 1))
    _legend(figure, axes)
    figure.savefig(path, dpi=DPI)


def _by_layer(outcomes: Sequence[Outcome], path: Path) -> None:
    """Both errors of attention against the layer, mean of heads; a row of panels for each text."""
    texts = list(by_text(outcomes))
    figure, axes = panels(len(texts), 2)
    for (output, scores), (title, found) in zip(axes, texts, strict=True):
        for outcome in found:
            if outcome.attention is not None:
                output.plot(outcome.attention.output_by_layer, marker=".", label=caption(outcome.policy))
                scores.plot(outcome.attention.scores_by_layer, marker=".", label=caption(outcome.policy))
        output.set(title=title, xlabel="layer", ylabel="output error, relative L2", ylim=(0, None))
        scores.set(title=title, xlabel="layer", ylabel="score error, share of attention", ylim=(0, None))
    _legend(figure, axes)
    figure.savefig(path, dpi=DPI)


def _by_head(outcomes: Sequence[Outcome], path: Path) -> None:
    """The output error of every layer and head; a panel for each row, a row of panels for each text."""
    texts = list(by_text(outcomes))
    figure, axes = panels(len(texts), max(len(found) for _, found in texts))
    worst = max(max(map(max, outcome.attention.output)) for outcome in outcomes if outcome.attention is not None)
    for row, (title, found) in zip(axes, texts, strict=True):
        for panel in row[len(found) :]:
            panel.remove()
        for panel, outcome in zip(row, found, strict=False):
            if outcome.attention is not None:
                image = panel.imshow(
                    list(zip(*outcome.attention.output, strict=True)), aspect="auto", vmin=0, vmax=worst
                )
            panel.set(title=f"{caption(outcome.policy)}\n{title}", xlabel="layer", ylabel="query head")
            panel.title.set_fontsize("small")
    figure.colorbar(image, ax=axes, label="output error, relative L2")
    figure.savefig(path, dpi=DPI)


def _pareto(points: Sequence[Point], path: Path) -> None:
    """Cost against bits, a panel for each measure; the line joins what nothing beats."""
    measures = [(name, list(group)) for name, group in groupby(points, key=lambda point: point.measure)]
    figure, axes = panels(1, len(measures))
    for panel, (name, found) in zip(axes[0], measures, strict=True):
        for point in found:
            beyond = [[max(0, point.cost - point.low)], [max(0, point.high - point.cost)]]
            panel.errorbar(point.bits, point.cost, yerr=beyond, fmt="o", color="C0", capsize=2)
            panel.annotate(
                caption(point.policy), (point.bits, point.cost), xytext=(5, 5), textcoords="offset points", fontsize=8
            )
        best = front(found)
        panel.plot([point.bits for point in best], [point.cost for point in best], color="C1", linewidth=1)
        panel.set(xlabel="bits an element", ylabel=name, yscale="log")
        panel.margins(x=0.25)
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=DPI)


def _legend(figure: Any, axes: Any) -> None:
    """One legend for all panels, that of the first, below them: with many rows it would cover lines inside."""
    handles, labels = axes[0, 0].get_legend_handles_labels()
    columns = axes.shape[1]
    figure.set_figheight(figure.get_figheight() + LEGEND_INCHES * -(-len(labels) // columns))
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, fontsize="small")


def _gaps(values: Sequence[float | None]) -> list[float]:
    """What has no figure is left out of a line."""
    return [float("nan") if value is None else value for value in values]
