"""`ottserve evaluate`: what a cache policy costs in answers, measured on texts. Needs no server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ottserve.cli.connect import fail
from ottserve.cli.model import Device, Dtype, Model, load
from ottserve.cli.tables import print_table

if TYPE_CHECKING:
    from ottserve.evaluation.quality import Evaluation
    from ottserve.evaluation.sweep import Outcome
    from ottserve.workers.models.loading import LoadedModel

Text = Annotated[
    list[Path],
    typer.Option(help="Plain .txt, or .jsonl of question and answer; may be given again.", exists=True, dir_okay=False),
]
Policies = Annotated[
    str, typer.Option(help="Rows with blanks between, any cache setting overridden: 'kivi ott ott:k_bits=4,pool=8'.")
]

DEFAULT_ROWS = (
    "fp16 kivi ott:preset=paper,keep=largest ott:preset=paper "
    "ott:preset=smallest ott:preset=lean ott:k_bits=1,k_fine=32 ott ott:k_fine=32 ott:k_bits=4 ott:preset=accurate"
)
"""What the paper compares, then every preset and what lies between them, from few bits to many."""


def evaluate(
    text: Text,
    policies: Policies = DEFAULT_ROWS,
    tokens: Annotated[int, typer.Option(help="Tokens of each text, from its beginning.", min=1)] = 8192,
    out: Annotated[Path, typer.Option(help="Folder of the report.", file_okay=False)] = Path("evaluation"),
    attention: Annotated[
        bool, typer.Option(help="Measure attention by layer and head too; keeps all keys and values exact beside.")
    ] = True,
    simulate: Annotated[bool, typer.Option(help="Compute each KL once more without a cache, to compare.")] = False,
    pictures: Annotated[
        Path | None, typer.Option(help="Folder of the plots, where it is not --out.", file_okay=False)
    ] = None,
    model: Model = "smollm2-135m-instruct",
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Measure KL to the exact cache, same-top-1, perplexity and attention of cache policies, in the cache that serves.

    A run that was cut short goes on where it ended when started again with the same --out.
    """
    from pydantic import ValidationError

    from ottserve.evaluation.policies import parse_policies
    from ottserve.evaluation.quality import Evaluation

    try:
        rows = tuple(parse_policies(policies))
        wanted = Evaluation(tuple(text), rows, tokens, out, pictures or out, attention, simulate)
        loaded = load(model, dtype, device)
        outcomes = _with_progress(loaded, wanted)
    except (ValidationError, ValueError, OSError) as error:
        fail(str(error))
    _show(outcomes, out)


def _with_progress(model: LoadedModel, wanted: Evaluation) -> list[Outcome]:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from ottserve.evaluation.quality import evaluate

    with Progress(console=Console(stderr=True)) as progress:
        tasks: dict[str, TaskID] = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.advance(tasks[what], done)

        return evaluate(model, wanted, advance)


def _show(outcomes: list[Outcome], out: Path) -> None:
    from ottserve.evaluation import report

    for title, found in report.by_text(outcomes):
        print_table(title, report.COLUMNS, [report.row(outcome) for outcome in found])
        simulated = report.simulated_rows(found)
        if simulated:
            print_table("through the cache, and simulated without one", report.SIMULATED_COLUMNS, simulated)
    typer.echo(f"written to {out}")
