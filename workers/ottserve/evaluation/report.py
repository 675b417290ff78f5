"""Outcomes as tables: the few columns of a terminal, the whole report in Markdown. Measures nothing, keeps nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import fmean

from ottserve.evaluation.attention import Grid
from ottserve.evaluation.differences import Difference
from ottserve.evaluation.markdown import markdown_table
from ottserve.evaluation.measures import NUM_PARTS
from ottserve.evaluation.sweep import Outcome

COLUMNS = ("policy", "bits an element", "KL, nats", "95 %", "KL p99", "same top-1", "perplexity", "ratio")
PARTS_COLUMNS = ("policy", *(f"{part}/{NUM_PARTS}" for part in range(1, NUM_PARTS + 1)))
DIFFERENCE_COLUMNS = ("policy", "other", "KL − KL of the other", "95 %", "settled")
ATTENTION_COLUMNS = ("policy", "output error", "worst, layer.head", "score error", "worst, layer.head")
SIMULATED_COLUMNS = ("policy", "KL served, nats", "KL simulated, nats", "difference")
NO_FIGURE = "–"


def row(outcome: Outcome) -> tuple[str, ...]:
    """The cells of `COLUMNS`."""
    quality = outcome.quality
    return (
        outcome.policy,
        f"{outcome.page_bits_per_element:.3f}",
        f"{quality.kl:.4f}",
        f"{quality.kl_low:.4f} to {quality.kl_high:.4f}",
        f"{quality.kl_p99:.3f}",
        f"{quality.same_top1:.3f}",
        f"{quality.perplexity:.3f}",
        f"{quality.perplexity_ratio:.4f}",
    )


def simulated_rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """The cells of `SIMULATED_COLUMNS` for rows that were simulated."""
    pairs = [(outcome.policy, outcome.quality.kl, outcome.simulated_kl) for outcome in outcomes]
    return [
        (policy, f"{served:.5f}", f"{simulated:.5f}", f"{100 * (served / simulated - 1):+.2f} %")
        for policy, served, simulated in pairs
        if simulated is not None
    ]


def by_text(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[Outcome]]]:
    """A title for each text, and its outcomes; those of one text must be neighbours."""
    for text, group in groupby(outcomes, key=lambda outcome: outcome.text):
        found = list(group)
        first = found[0].quality
        yield f"{text}, {first.num_tokens:,} tokens, fp16 perplexity {first.reference_perplexity:.2f}", found


def markdown(outcomes: Sequence[Outcome], differences: Sequence[Difference], measured: str) -> str:
    """The report.

    Args:
        differences: between the outcomes.
        measured: one line on the model and the machine.
    """
    lines = [f"# KL to the exact cache\n\nPrinted by `ottserve evaluate`. {measured}\n"]
    for title, found in by_text(outcomes):
        apart = [difference for difference in differences if difference.text == found[0].text]
        by_length = [_parts(outcome.policy, outcome.quality.kl_by_length) for outcome in found]
        since_seal = [_parts(outcome.policy, outcome.quality.kl_since_seal) for outcome in found]
        lines.append(f"\n## {title}\n")
        lines += markdown_table(COLUMNS, [row(outcome) for outcome in found])
        lines += ["", "KL by context length, in eighths of the positions that count:", ""]
        lines += markdown_table(PARTS_COLUMNS, by_length)
        lines += ["", "KL by the tokens since the last seal, in eighths of a group:", ""]
        lines += markdown_table(PARTS_COLUMNS, since_seal)
        lines += _attention(found)
        simulated = simulated_rows(found)
        if simulated:
            lines += ["", "Through the cache, and in a simulation that has none:", ""]
            lines += markdown_table(SIMULATED_COLUMNS, simulated)
        if apart:
            lines += ["", "How far rows are apart, by blocks of positions drawn for both alike:", ""]
            lines += markdown_table(DIFFERENCE_COLUMNS, [_apart(difference) for difference in apart])
    return "\n".join(lines) + "\n"


def _attention(outcomes: Sequence[Outcome]) -> list[str]:
    """What attention loses: over all layers and heads, and layer by layer."""
    watched = {outcome.policy: outcome.attention for outcome in outcomes if outcome.attention is not None}
    if not watched:
        return []
    totals = [(policy, *_total(errors.output), *_total(errors.scores)) for policy, errors in watched.items()]
    columns = [map(_pair, errors.output_by_layer, errors.scores_by_layer) for errors in watched.values()]
    layers = [(str(layer), *cells) for layer, cells in enumerate(zip(*columns, strict=True))]
    return [
        *(
            "",
            "Attention against exact attention over the same queries, keys and values, mean of layers and heads:",
            "",
        ),
        *markdown_table(ATTENTION_COLUMNS, totals),
        *("", "Layer by layer, output error and score error, mean of heads:", ""),
        *markdown_table(("layer", *watched), layers),
    ]


def _total(grid: Grid) -> tuple[str, str]:
    """The mean, and the largest with its layer and head."""
    worst, layer, head = max((error, i, j) for i, errors in enumerate(grid) for j, error in enumerate(errors))
    return f"{fmean(map(fmean, grid)):.4f}", f"{worst:.4f}, {layer}.{head}"


def _pair(output: float, scores: float) -> str:
    return f"{output:.3f}, {scores:.3f}"


def _parts(policy: str, values: Sequence[float | None]) -> tuple[str, ...]:
    return (policy, *(NO_FIGURE if value is None else f"{value:.4f}" for value in values))


def _apart(difference: Difference) -> tuple[str, ...]:
    kl = difference.kl
    settled = "yes" if kl.excludes_zero else "no"
    return (difference.policy, difference.other, f"{kl.mean:+.4f}", f"{kl.low:+.4f} to {kl.high:+.4f}", settled)
