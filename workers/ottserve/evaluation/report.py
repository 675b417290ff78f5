"""Outcomes as a table and as a plot. Measures nothing and keeps nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from ottserve.evaluation.measures import POSITIONS_PER_POINT
from ottserve.evaluation.sweep import Outcome

COLUMNS = ("policy", "bits an element", "KL, nats", "KL p99", "same top-1", "perplexity", "ratio")


def row(outcome: Outcome) -> tuple[str, ...]:
    """The cells of `COLUMNS`."""
    quality = outcome.quality
    return (
        outcome.policy,
        f"{outcome.page_bits_per_element:.3f}",
        f"{quality.kl:.4f}",
        f"{quality.kl_p99:.3f}",
        f"{quality.same_top1:.3f}",
        f"{quality.perplexity:.3f}",
        f"{quality.perplexity_ratio:.4f}",
    )


def by_text(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[Outcome]]]:
    """A title for each text, and its outcomes; those of one text must be neighbours."""
    for text, group in groupby(outcomes, key=lambda outcome: outcome.text):
        found = list(group)
        first = found[0].quality
        yield f"{text}, {first.num_tokens:,} tokens, fp16 perplexity {first.reference_perplexity:.2f}", found


def markdown(outcomes: Sequence[Outcome], measured: str) -> str:
    """The report.

    Args:
        measured: one line on the model and the machine.
    """
    lines = [f"# KL to the exact cache\n\nPrinted by `ottserve evaluate`. {measured}\n"]
    for title, found in by_text(outcomes):
        lines.append(f"\n## {title}\n")
        lines += [_table_line(COLUMNS), _table_line(["---"] * len(COLUMNS)), *map(_table_line, map(row, found))]
    return "\n".join(lines) + "\n"


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write a PNG of KL against position, a panel for each text.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 (only a plot needs it)

    panels = list(by_text(outcomes))
    figure = Figure(figsize=(6 * len(panels), 4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, (title, found) in zip(axes, panels, strict=True):
        for outcome in found:
            points = outcome.quality.kl_by_position
            positions = [(index + 0.5) * POSITIONS_PER_POINT for index in range(len(points))]
            panel.plot(positions, points, label=outcome.policy, linewidth=1.2)
        panel.set(title=title, xlabel="position", ylabel=f"KL, nats (mean of {POSITIONS_PER_POINT} positions)")
        panel.set_ylim(bottom=0)
        panel.legend()
    figure.savefig(path, dpi=120)


def _table_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
