"""`ottserve tasks`: what a cache policy costs in tasks, lookup of confusable keys first. Needs no server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ottserve.cli.bars import counted
from ottserve.cli.connect import fail
from ottserve.cli.evaluate import Policies
from ottserve.cli.model import Device, Dtype, Model, load
from ottserve.cli.tables import print_table

if TYPE_CHECKING:
    from ottserve.evaluation.tasks.report import TaskTable
    from ottserve.evaluation.tasks.suite import Suite
    from ottserve.workers.models.loading import LoadedModel


def tasks(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Of lookup, needle, agreement, gsm8k, conduct, choice; all whose files are given."),
    ] = None,
    policies: Policies = "kivi ott:preset=paper ott",
    text: Annotated[
        Path | None, typer.Option(help="Text for needle and agreement.", exists=True, dir_okay=False)
    ] = None,
    problems: Annotated[
        Path | None, typer.Option(help=".jsonl of question and answer for gsm8k.", exists=True, dir_okay=False)
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens of a context of lookup and needle; may be given again.", min=384)
    ] = None,
    repeats: Annotated[int, typer.Option(help="Lists of lookup; needles for each depth and length.", min=1)] = 4,
    prompts: Annotated[int, typer.Option(help="Prompts of agreement, problems of gsm8k.", min=1)] = 16,
    out: Annotated[Path, typer.Option(help="Folder of the report.", file_okay=False)] = Path("tasks"),
    model: Model = "smollm2-135m-instruct",
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Measure tasks through the cache that serves, every policy beside fp16 in the same cases.

    Contexts are 512, 1,024, 2,048 and 3,072 tokens long unless lengths are given. A run that was cut short goes on with
    the row where it ended when started again with the same --out.
    """
    from pydantic import ValidationError

    from ottserve.evaluation.policies import parse_policies
    from ottserve.evaluation.tasks.catalogue import Wanted, make_tasks, possible
    from ottserve.evaluation.tasks.suite import Suite

    try:
        wanted = Wanted(text, problems, tuple(sorted(length or (512, 1024, 2048, 3072))), repeats, prompts)
        suite = Suite(make_tasks(names or possible(wanted), wanted), tuple(parse_policies(policies)), out)
        loaded = load(model, dtype, device)
        tables = _with_progress(loaded, suite)
    except (ValidationError, ValueError, OSError) as error:
        fail(str(error))
    for table in tables:
        print_table(table.title, table.columns, table.cells)
    typer.echo(f"written to {out}")


def _with_progress(model: LoadedModel, suite: Suite) -> list[TaskTable]:
    from ottserve.evaluation.tasks.suite import run_suite

    with counted("cases", suite.num_cases) as (begin, advance):
        return run_suite(model, suite, begin=lambda task, row: begin(f"{task.name}, {row.name}"), advance=advance)
