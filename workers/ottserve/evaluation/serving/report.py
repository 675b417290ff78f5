"""Measured points as tables. Measures nothing, keeps nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ottserve.evaluation.markdown import markdown_table
from ottserve.evaluation.serving.plan import Skipped
from ottserve.evaluation.serving.results import SERVICE
from ottserve.evaluation.serving.summary import Spread, Summary

GIB = 2**30
NO_FIGURE = "–"

COLUMNS = (
    "policy", "point", "replicas × ranks", "system",
    "tokens/s", "min–max", "× first", "× one GPU", "of engine", "sequences", "× first",
    "first token p50, p99 ms", "between p50, p99 ms",
    "made/s", "pages", "KV GiB", "GPU GiB", "by graph", "refused", "failed",
)  # fmt: skip

NUM_SHORT = 13
"""Columns from the left that a terminal has room for."""


def row(summary: Summary) -> tuple[str, ...]:
    """The cells of `COLUMNS`."""
    if not summary.num_repeats:
        return (
            summary.policy,
            summary.point,
            str(summary.layout),
            summary.system,
            *[NO_FIGURE] * (len(COLUMNS) - 5),
            str(_failures(summary)),
        )
    return (
        summary.policy,
        summary.point,
        str(summary.layout),
        summary.system,
        _number(summary.spread("tokens_per_s"), 1, "{:,.1f}"),
        _range(summary.spread("tokens_per_s")),
        _number(summary.to_first, 1, "{:.2f}"),
        _number(summary.to_one, 1, "{:.2f}"),
        _number(summary.to_engine, 1, "{:.1%}"),
        _number(summary.spread("sequences"), 1, "{:,.0f}"),
        _number(summary.sequences_to_first, 1, "{:.2f}"),
        _pair(summary, "first_token"),
        _pair(summary, "inter_token"),
        _number(summary.spread("made_per_s"), 1, "{:,.1f}"),
        _number(summary.spread("pages"), 1, "{:,.0f}"),
        _number(summary.spread("kv_bytes"), 1 / GIB, "{:.2f}"),
        _number(summary.spread("gpu_bytes"), 1 / GIB, "{:.1f}"),
        _number(summary.spread("graph_share"), 1, "{:.0%}"),
        _number(summary.spread("refused"), 1, "{:,.0f}"),
        str(_failures(summary)),
    )


def markdown(
    summaries: Sequence[Summary], skipped: Sequence[Skipped], about: Mapping[str, Any], figure: str | None
) -> str:
    """The report.

    Args:
        about: what it was measured on and with: name to value, or to further names.
        figure: file name of the pictures, where there are any.
    """
    lines = ["# The whole service, beside its engine alone", "", *_about(about), ""]
    lines += markdown_table(COLUMNS, [row(summary) for summary in summaries])
    lines += ["", *_notes(summaries)]
    lines += [f"- {one.policy} at {one.point} was skipped: {one.reason}." for one in skipped]
    if figure:
        lines += ["", f"![Tokens a second and times, by point and policy]({figure})"]
    return "\n".join(lines) + "\n"


def ratios(summaries: Sequence[Summary]) -> Iterator[str]:
    """A line for each point whose service and engine were both measured."""
    for summary in summaries:
        if summary.system == SERVICE and summary.to_engine is not None:
            spread = summary.to_engine
            yield (
                f"{summary.policy} at {summary.point}: service tokens/s / engine tokens/s = {spread.median:.1%} "
                f"({spread.least:.1%} to {spread.most:.1%}, {summary.num_repeats} repeats)"
            )


def _about(about: Mapping[str, Any]) -> Iterator[str]:
    for name, value in about.items():
        text = ", ".join(f"{key} {its}" for key, its in value.items()) if isinstance(value, Mapping) else value
        yield f"- {name}: {text}"


def _notes(summaries: Sequence[Summary]) -> Iterator[str]:
    yield (
        "`24x32768` is 24 sequences at once of 32,768 tokens each, `full` as many as the memory holds, `4/s` requests "
        "at that rate. Medians of the repeats; *× first* compares with the first policy at the same point, *× one GPU* "
        "with one replica of one rank that has as many sequences as each replica here, *of engine* with the engine "
        "alone, within each repeat; *made/s* is by the replicas' own counters, *GPU GiB* of the first GPU. No two "
        "prompts begin alike, and the prefix cache is off."
    )
    yield ""
    for summary in summaries:
        shared = sum(figures.cached_tokens or 0 for figures in summary.repeats)
        if shared:
            yield f"- {summary.system}, {summary.policy} at {summary.point}: {shared:,} tokens of prompts were cached."
        for error in dict.fromkeys(summary.errors):
            yield f"- {summary.system}, {summary.policy} at {summary.point} failed: {error}."


def _failures(summary: Summary) -> int:
    """Repeats without figures, and calls that failed in the others."""
    return len(summary.errors) + sum(figures.failed or 0 for figures in summary.repeats)


def _pair(summary: Summary, name: str) -> str:
    half, most = (summary.spread(f"{name}_{quantile}_s") for quantile in ("p50", "p99"))
    return NO_FIGURE if half is None or most is None else f"{half.median * 1e3:,.1f}, {most.median * 1e3:,.1f}"


def _number(spread: Spread | None, factor: float, shape: str) -> str:
    return NO_FIGURE if spread is None else shape.format(spread.median * factor)


def _range(spread: Spread | None) -> str:
    return NO_FIGURE if spread is None else f"{spread.least:,.1f}–{spread.most:,.1f}"
