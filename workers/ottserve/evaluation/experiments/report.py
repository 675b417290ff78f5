"""Findings as tables and plots. Measures nothing and keeps nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from ottserve.evaluation.experiments.catalogue import Experiment
from ottserve.evaluation.experiments.results import Finding
from ottserve.evaluation.markdown import markdown_table
from ottserve.evaluation.pareto import Point, front
from ottserve.evaluation.plots import DPI, panels


@dataclass(frozen=True, slots=True)
class Table:
    """An experiment's rows by name, each with a finding for every text, in the same order."""

    experiment: Experiment
    rows: dict[str, list[Finding]]

    @property
    def columns(self) -> tuple[str, ...]:
        """Bits and errors are means over the texts."""
        names = [finding.text for finding in next(iter(self.rows.values()))]
        per_text = [f"{measure}, {name}" for measure in ("KL", "p99") for name in names]
        return ("row", "bits an element", *per_text, "same top-1", "K error", "V error", "output error")

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """Of `columns`."""
        return [
            (
                name,
                f"{mean(finding.bits_per_element for finding in found):.3f}",
                *(f"{finding.quality.kl:.4f}" for finding in found),
                *(f"{finding.quality.kl_p99:.2f}" for finding in found),
                f"{mean(finding.quality.same_top1 for finding in found):.3f}",
                *(
                    _mean_error([getattr(finding, error) for finding in found])
                    for error in ("key_error", "value_error", "output_error")
                ),
            )
            for name, found in self.rows.items()
        ]


def markdown(tables: Sequence[Table], measured: str) -> str:
    """The report.

    Args:
        measured: one line on the model, the machine and what counts.
    """
    lines = [f"# Experiments\n\nPrinted by `ottserve experiments`, simulated. {measured}"]
    for table in tables:
        lines.append(f"\n## {table.experiment.name}\n\n{table.experiment.question}\n")
        lines += markdown_table(table.columns, table.cells)
    return "\n".join(lines) + "\n"


def plot(table: Table, path: Path) -> None:
    """Write a PNG: KL of every row as bars, or over bits an element where rows differ in bytes on purpose.

    Raises:
        ImportError: matplotlib is not installed.
    """
    texts = list(zip(*table.rows.values(), strict=True))
    figure, axes = panels(1, len(texts))
    for panel, found in zip(axes[0], texts, strict=True):
        (_scatter if table.experiment.by_bits else _bars)(panel, list(table.rows), found)
        panel.set_title(found[0].text)
    figure.suptitle(table.experiment.question)
    figure.savefig(path, dpi=DPI)


def _bars(panel: Any, names: list[str], found: Sequence[Finding]) -> None:
    quality = [finding.quality for finding in found]
    beyond = [[one.kl - one.kl_low for one in quality], [one.kl_high - one.kl for one in quality]]
    panel.barh(range(len(names)), [one.kl for one in quality], xerr=beyond, color="C0", ecolor="C1", capsize=2)
    panel.set(yticks=range(len(names)), yticklabels=names, xlabel="KL, nats")
    panel.invert_yaxis()


def _scatter(panel: Any, names: list[str], found: Sequence[Finding]) -> None:
    """The line joins what nothing beats."""
    points = [
        Point("KL", name, one.bits_per_element, one.quality.kl, one.quality.kl_low, one.quality.kl_high)
        for name, one in zip(names, found, strict=True)
    ]
    for point in points:
        panel.plot(point.bits, point.cost, "o", color="C0")
        panel.annotate(point.policy, (point.bits, point.cost), xytext=(4, 3), textcoords="offset points", fontsize=7)
    best = front(points)
    panel.plot([point.bits for point in best], [point.cost for point in best], color="C1", linewidth=1)
    panel.set(xlabel="bits an element, metadata included", ylabel="KL, nats", yscale="log")
    panel.margins(x=0.25)


def _mean_error(errors: list[float | None]) -> str:
    known = [error for error in errors if error is not None]
    return f"{mean(known):.3f}" if len(known) == len(errors) else "—"
