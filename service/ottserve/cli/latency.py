"""`ottserve latency`: what callers wait for, cold, from the prefix cache and beside a long prompt. Needs no server."""

from __future__ import annotations

from typing import Annotated

import typer

from ottserve.cli.connect import fail
from ottserve.cli.model import Device, Dtype, Model, load
from ottserve.cli.tables import print_table


def latency(
    policy: Annotated[str, typer.Option(help="A cache, any setting overridden: 'ott:k_bits=4'.")] = "ott",
    tokens: Annotated[int, typer.Option(help="Tokens of the long prompt.", min=1)] = 2000,
    streams: Annotated[int, typer.Option(help="Sequences that decode while it comes.", min=1)] = 4,
    rounds: Annotated[int, typer.Option(help="Prompts, each new.", min=1)] = 3,
    model: Model = "smollm2-135m-instruct",
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Time the first token of a prompt, cold and from the prefix cache, and others' tokens while a long prompt comes.

    Meant for an otherwise idle machine.
    """
    from pydantic import ValidationError

    from ottserve.evaluation.environment import environment, model_name
    from ottserve.evaluation.latency import COLUMNS, rows, waits
    from ottserve.evaluation.policies import parse_policy

    try:
        row = parse_policy(policy)
        loaded = load(model, dtype, device)
        found = waits(loaded, row, tokens, streams, rounds)
    except (ValidationError, ValueError, OSError) as error:
        fail(str(error))
    print_table(f"latency, policy {row.name}, {rounds} rounds", COLUMNS, rows(found))
    typer.echo(f"{model_name(loaded)}; " + ", ".join(f"{name} {value}" for name, value in environment().items()))
