"""`ottserve experiments`: the papers' findings and rival methods, simulated on texts. Needs no server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ottserve.cli.bars import counted
from ottserve.cli.connect import fail
from ottserve.cli.model import Device, Model, load
from ottserve.cli.tables import print_table

if TYPE_CHECKING:
    from ottserve.evaluation.experiments.report import Table
    from ottserve.evaluation.experiments.suite import Suite
    from ottserve.workers.models.loading import LoadedModel


def experiments(
    names: Annotated[list[str] | None, typer.Argument(help="Which; all unless some are named.")] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Plain .txt, or .jsonl of question and answer; may be given again.", exists=True, dir_okay=False
        ),
    ] = None,
    recall: Annotated[bool, typer.Option(help="Whether a made text that asks for old tokens is another.")] = True,
    tokens: Annotated[int, typer.Option(help="Tokens of each text, from its beginning.", min=1)] = 4096,
    out: Annotated[Path, typer.Option(help="Folder of the report.", file_okay=False)] = Path("experiments"),
    model: Model = "smollm2-135m-instruct",
    device: Device = "auto",
    list_: Annotated[bool, typer.Option("--list", help="Say which experiments there are, and run none.")] = False,
) -> None:
    """Compare ways of storing a cache, those of the papers and of rivals too, simulated in plain fp32 attention.

    A run that was cut short goes on where it ended when started again with the same --out.
    """
    from pydantic import ValidationError

    from ottserve.evaluation.experiments import catalogue
    from ottserve.evaluation.experiments.suite import Suite

    try:
        chosen = catalogue.experiments(names or [])
        if list_:
            for experiment in chosen:
                typer.echo(f"{experiment.name}: {experiment.question} {len(experiment.rows)} rows.")
            return
        suite = Suite(chosen, tuple(text or ()), tokens, out, with_recall=recall)
        loaded = load(model, "float32", device)
        tables = _with_progress(loaded, suite)
    except (ValidationError, ValueError, OSError) as error:
        fail(str(error))
    for table in tables:
        print_table(f"{table.experiment.name}: {table.experiment.question}", table.columns, table.cells)
    typer.echo(f"written to {out}")


def _with_progress(model: LoadedModel, suite: Suite) -> list[Table]:
    from ottserve.evaluation.experiments.suite import run_suite

    with counted("rows", suite.num_rows) as (begin, advance):
        return run_suite(model, suite, begin=begin, advance=lambda: advance(1))
