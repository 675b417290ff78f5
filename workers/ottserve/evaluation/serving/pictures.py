"""Measured points as one picture: a panel for each question, a colour for each policy. Computes nothing it shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ottserve.evaluation.plots import DPI, panels
from ottserve.evaluation.serving.layout import ONE, Layout
from ottserve.evaluation.serving.points import Decode, Offered, parse_points
from ottserve.evaluation.serving.results import ENGINE
from ottserve.evaluation.serving.summary import Spread, Summary


def draw(summaries: Sequence[Summary], path: Path) -> None:
    """Write the picture, as far as there are such points: decode rates and sequences by context; under offered load,
    tokens and times by rate.

    Raises:
        ImportError: matplotlib is not installed.
    """
    kinds = {type(point) for summary in summaries for point in parse_points(summary.point)}
    rows = [(fill, label) for kind, fill, label in ROWS if kind in kinds]
    figure, axes = panels(len(rows), 2)
    policies = list(dict.fromkeys(summary.policy for summary in summaries))
    for row, (fill, label) in zip(axes, rows, strict=True):
        for index, policy in enumerate(policies):
            fill(row, [summary for summary in summaries if summary.policy == policy], policy, f"C{index}")
        label(row)
    for panel in axes.flat:
        panel.grid(alpha=0.3)
        if panel.has_data():
            panel.legend(fontsize="x-small")
        else:
            panel.set_axis_off()
    figure.savefig(path, dpi=DPI)


def _label_decodes(row: Any) -> None:
    row[0].set(xlabel="context, tokens", ylabel="tokens/s", title="all sequences decode", xscale="log", yscale="log")
    row[1].set(xlabel="context, tokens", ylabel="sequences at once", title="memory full", xscale="log", yscale="log")


def _label_offered(row: Any) -> None:
    row[0].set(xlabel="requests/s", ylabel="tokens/s", title="offered load")
    title = "first token (—), between tokens (- -): p99 (●), p50 (▼)"
    row[1].set(xlabel="requests/s", ylabel="ms", title=title, yscale="log")


def _decodes(row: Any, summaries: Sequence[Summary], policy: str, color: str) -> None:
    """Tokens a second by context, a line for each number of sequences and system; sequences where memory is full."""
    lines: dict[tuple[str, int | None, Layout], list[tuple[int, Spread]]] = {}
    held: dict[int, Spread] = {}
    for summary in summaries:
        (point,) = parse_points(summary.point)
        rate, sequences = summary.spread("tokens_per_s"), summary.spread("sequences")
        if isinstance(point, Decode) and rate is not None:
            lines.setdefault((summary.system, point.num_sequences, summary.layout), []).append((point.context, rate))
            if point.num_sequences is None and sequences is not None:
                held[point.context] = held.get(point.context, sequences)
    for (system, number, layout), marks in lines.items():
        label = f"{policy}, {'full' if number is None else number}{_place(system, layout)}"
        _plot(row[0], marks, label, color, "--" if system == ENGINE else "-", "s" if number is None else "o")
    if held:
        _plot(row[1], list(held.items()), policy, color, "-", "s")


def _offered(row: Any, summaries: Sequence[Summary], policy: str, color: str) -> None:
    """Tokens a second and times by rate, a line for each system and layout."""
    panels_and_fields = (
        (row[0], "tokens_per_s", "-", "o", 1.0),
        (row[1], "first_token_p99_s", "-", "o", 1e3),
        (row[1], "first_token_p50_s", "-", "v", 1e3),
        (row[1], "inter_token_p99_s", "--", "o", 1e3),
        (row[1], "inter_token_p50_s", "--", "v", 1e3),
    )
    for panel, field, style, marker, factor in panels_and_fields:
        lines: dict[tuple[str, Layout], list[tuple[float, Spread]]] = {}
        for summary in summaries:
            (point,) = parse_points(summary.point)
            spread = summary.spread(field)
            if isinstance(point, Offered) and spread is not None:
                scaled = Spread(spread.median * factor, spread.least * factor, spread.most * factor)
                lines.setdefault((summary.system, summary.layout), []).append((point.requests_per_s, scaled))
        for (system, layout), marks in lines.items():
            is_named = field in ("tokens_per_s", "first_token_p99_s")  # one name for all of a colour and a place
            label = policy + _place(system, layout) if is_named else "_"
            _plot(panel, marks, label, color, style, marker, hollow=system == ENGINE)


def _place(system: str, layout: Layout) -> str:
    """What a name has behind it where something else was measured than a service on one GPU."""
    return (", engine" if system == ENGINE else "") + ("" if layout == ONE else f", {layout}")


def _plot(
    panel: Any,
    marks: Sequence[tuple[float, Spread]],
    label: str,
    color: str,
    style: str,
    marker: str,
    *,
    hollow: bool = False,
) -> None:
    """A line through medians, with bars from least to most."""
    ordered = sorted(marks, key=lambda mark: mark[0])
    middles = [spread.median for _, spread in ordered]
    below = [spread.median - spread.least for _, spread in ordered]
    above = [spread.most - spread.median for _, spread in ordered]
    panel.errorbar(
        [at for at, _ in ordered], middles, yerr=[below, above],
        label=label, color=color, linestyle=style, marker=marker, capsize=2,
        markerfacecolor="none" if hollow else color,
    )  # fmt: skip


ROWS = ((Decode, _decodes, _label_decodes), (Offered, _offered, _label_offered))
"""What is drawn for each kind of point."""
