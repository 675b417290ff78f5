"""Writes answers to the terminal as they come, and what they took. Calls nothing by itself."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ottserve.client import Answer, Chunk, Finish


def write_stream(chunks: Iterable[Chunk]) -> tuple[str, Finish]:
    """Write the text as it comes; the whole of it and its end."""
    written: list[str] = []
    finish = None
    for chunk in chunks:  # to its very end: a call that is left before that counts as cancelled
        typer.echo(chunk.text, nl=False)
        written.append(chunk.text)
        finish = chunk.finish or finish
    typer.echo()
    if finish is None:
        raise RuntimeError("the stream ended without a finish")
    return "".join(written), finish


def write_samples(answer: Answer) -> list[Finish]:
    """Write every sample, each under a line on standard error that names it; their ends."""
    samples = (answer, *answer.others)
    for sample in samples:
        typer.echo(f"[{sample.finish.index + 1} of {len(samples)}, seed {sample.finish.seed}]", err=True)
        typer.echo(sample.text)
    return [sample.finish for sample in samples]


def write_usage(finish: Finish) -> None:
    """One line on standard error, so that the answer alone can be piped."""
    usage, timings = finish.usage, finish.timings
    rate = (usage.num_completion_tokens - 1) / timings.decode_s if timings.decode_s > 0 else 0.0
    typer.echo(
        f"[{finish.reason.value}; {usage.num_prompt_tokens} prompt tokens, {usage.num_cached_tokens} of them cached, "
        f"{usage.num_completion_tokens} generated; first token after {timings.first_token_s:.3f} s, "
        f"then {rate:.1f} tokens/s; seed {finish.seed}]",
        err=True,
    )


def write_json(answer: Answer) -> None:
    """One JSON object a line."""
    typer.echo(json.dumps(dataclasses.asdict(answer), ensure_ascii=False, default=lambda reason: reason.value))
