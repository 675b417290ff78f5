"""Reports for people: Markdown, plots, and two reports side by side. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ottserve.loadtest.histogram import Histogram

Report = dict[str, Any]

TITLES = {
    "first_token_s": "time to first token",
    "per_token_s": "time per token after the first",
    "inter_token_s": "time between tokens",
    "e2e_s": "end to end",
}
COLUMNS = ("mean", "p50", "p90", "p99", "max")


def write(report: Report, folder: Path) -> None:
    """The report as report.json, report.md and times.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    (folder / "report.md").write_text(markdown(report))
    plot(report, folder / "times.png")


def markdown(report: Report) -> str:
    """One report."""
    workload = report["workload"]
    lines = [
        f"# {workload['name']}: {workload['about']}",
        "",
        f"{report['started_at']}, {report['target']}, {report['num_processes']} process(es), seed {workload['seed']}, "
        f"{report['measured_s']:.1f} s measured after {workload['warm_up_s']:g} s of warm-up.",
        "",
        "Server: " + ", ".join(f"{name} {value}" for name, value in report["server"].items()) + ".",
        "",
        "Requests: " + ", ".join(f"{count} {outcome}" for outcome, count in report["requests"].items()) + ".",
        "Tokens, warm-up included: "
        + ", ".join(f"{count:,} {name.removesuffix('_tokens')}" for name, count in report["tokens"].items())
        + ".",
        "",
        _rates(report),
        "",
        f"| ms | {' | '.join(COLUMNS)} | n |",
        f"|---|{'---:|' * (len(COLUMNS) + 1)}",
        *(_row(TITLES[name], summary) for name, summary in report["times"].items()),
        "",
        *_objectives(report),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _rates(report: Report) -> str:
    if not any(summary["num"] for summary in report["times"].values()):
        return "Nothing was measured: no request began after the warm-up. Send for longer, or warm up for less."
    rates = report["rates"]
    return (
        f"{rates['requests_per_s']:.2f} requests/s, of which {rates['good_requests_per_s']:.2f} within the limits; "
        f"{rates['output_tokens_per_s']:.1f} tokens/s."
    )


def _row(title: str, summary: dict[str, Any]) -> str:
    cells = [f"{summary[column] * 1000:.1f}" if summary["num"] else "—" for column in COLUMNS]
    return f"| {title} | {' | '.join(cells)} | {summary['num']:,} |"


def _objectives(report: Report) -> Iterator[str]:
    for objective in report["objectives"]:
        reached = "nothing measured" if objective["reached"] is None else f"{objective['reached']:.4g}"
        verdict = "met" if objective["met"] else "**missed**"
        yield f"- {objective['name']}: {reached}, limit {objective['limit']:g}: {verdict}"


def compare(before: Report, after: Report) -> str:
    """Two reports side by side, with the ratio of the second to the first.

    Raises:
        ValueError: they are not of the same workload, so the numbers would not compare.
    """
    for field in ("requests", "arrivals", "seed", "duration_s", "warm_up_s"):
        if before["workload"][field] != after["workload"][field]:
            raise ValueError(f"workload.{field} differs: {before['workload'][field]} and {after['workload'][field]}")
    if before["num_processes"] != after["num_processes"]:
        raise ValueError(
            f"processes differ: {before['num_processes']} and {after['num_processes']} draw unlike requests"
        )
    lines = [
        f"# {before['workload']['name']}: {before['started_at']} and {after['started_at']}",
        "",
        *_differences(before["server"], after["server"]),
        "| | before | after | ratio |",
        "|---|---:|---:|---:|",
        *(_pair(name, before["rates"][name], after["rates"][name], 1) for name in before["rates"]),
    ]
    lines += [
        _pair(f"{name.replace('_', ' ')}, warm-up included", before["tokens"][name], after["tokens"][name], 1)
        for name in ("prompt_tokens", "cached_prompt_tokens")
    ]
    for outcome in sorted(before["requests"].keys() | after["requests"].keys()):
        counts = [run["requests"].get(outcome, 0) for run in (before, after)]
        lines.append(_pair(f"requests, {outcome}", counts[0], counts[1], 1))
    for name, title in TITLES.items():
        for column in ("p50", "p99"):
            pair = (before["times"][name].get(column), after["times"][name].get(column))
            if None not in pair:
                lines.append(_pair(f"{title}, {column}, ms", *pair, 1000))
    return "\n".join(lines) + "\n"


def _differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for name, value in before.items():
        if value != after.get(name):
            yield f"- {name}: {value} → {after.get(name)}"
            yield ""


def _pair(title: str, before: float, after: float, factor: float) -> str:
    ratio = f"{after / before:.2f}" if before else "—"
    return f"| {title} | {before * factor:.2f} | {after * factor:.2f} | {ratio} |"


def plot(report: Report, path: Path) -> None:
    """Distributions of the times as one picture."""
    import matplotlib.pyplot as plt  # noqa: PLC0415  slow to import, and only reports need it

    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for axis, (name, dumped) in zip(axes.flat, report["histograms"].items(), strict=True):
        durations, shares = Histogram.load(dumped).points()
        axis.step([duration * 1000 for duration in durations], shares, where="post")
        axis.set(title=TITLES[name], xlabel="ms", ylabel="share of observations", ylim=(0, 1))
        if durations:
            axis.set_xscale("log")
        axis.grid(alpha=0.3)
    figure.suptitle(report["workload"]["name"])
    figure.savefig(path, dpi=120)
    plt.close(figure)
