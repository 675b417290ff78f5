"""`ottserve bench`: how fast this machine decodes, against transformers' own generate. Needs no server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ottserve.cli.connect import fail
from ottserve.cli.evaluate import Policies
from ottserve.cli.model import Device, Dtype, Model, load
from ottserve.cli.tables import print_table

if TYPE_CHECKING:
    from ottserve.evaluation.bench import Benchmark, Report
    from ottserve.workers.models.loading import LoadedModel


def bench(
    policies: Policies = "fp16 kivi ott",
    context: Annotated[list[int] | None, typer.Option(help="Prompt tokens; may be given again.", min=1)] = None,
    streams: Annotated[int, typer.Option(help="Sequences at once, timed against one.", min=1)] = 8,
    new_tokens: Annotated[int, typer.Option(help="Tokens that each sequence generates.", min=2)] = 128,
    rounds: Annotated[int, typer.Option(help="How often all cases are timed in turn.", min=1)] = 3,
    out: Annotated[Path, typer.Option(help="JSON file of every round.", dir_okay=False)] = Path("bench.json"),
    model: Model = "smollm2-135m-instruct",
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Time decoding under each cache policy and in transformers, the same weights and dtype, in turn.

    Contexts are 256 and 2,048 tokens unless others are given. Meant for an otherwise idle machine.
    """
    from pydantic import ValidationError

    from ottserve.evaluation.bench import Benchmark, write_json
    from ottserve.evaluation.policies import parse_policies

    try:
        rows = tuple(parse_policies(policies))
        wanted = Benchmark(rows, tuple(context or (256, 2048)), streams, new_tokens, rounds)
        loaded = load(model, dtype, device)
        report = _with_progress(loaded, wanted)
        write_json(report, out)
    except (ValidationError, ValueError, OSError) as error:
        fail(str(error))
    _show(report)
    typer.echo(f"written to {out}")


def _with_progress(model: LoadedModel, wanted: Benchmark) -> Report:
    from rich.console import Console
    from rich.progress import Progress

    from ottserve.evaluation.bench import bench

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("timing", total=len(wanted.cases) * wanted.num_rounds)
        return bench(model, wanted, lambda case: progress.advance(task))


def _show(report: Report) -> None:
    from ottserve.evaluation import bench as found
    from ottserve.evaluation.environment import environment

    print_table("decoding, median of the rounds", found.SPEED_COLUMNS, found.speed_rows(report))
    print_table("bytes", found.BYTE_COLUMNS, found.byte_rows(report))
    typer.echo(f"{report.model}; " + ", ".join(f"{name} {value}" for name, value in environment().items()))
