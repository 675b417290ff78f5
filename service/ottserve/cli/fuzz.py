"""`ottserve fuzz`: malformed requests to a running service, and whether it withstood them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ottserve.cli.bars import counted
from ottserve.cli.tables import print_table
from ottserve.target import DEFAULT_TARGET, CaFile, ClientCert, Target, Tls, Token, encryption

if TYPE_CHECKING:
    from ottserve.loadtest.fuzz import Fuzzing, Outcome

MOST_SHOWN = 20


def fuzz(
    requests: Annotated[int, typer.Option(help="How many to send.", min=1)] = 10_000,
    seed: Annotated[int, typer.Option(help="Of what is sent.", min=0)] = 0,
    only: Annotated[int | None, typer.Option(help="Send this one alone, to look into it.", min=0)] = None,
    at_once: Annotated[int, typer.Option(help="Calls in flight.", min=1)] = 16,
    timeout_s: Annotated[float, typer.Option(help="Deadline of a call.", min=0.01)] = 5.0,
    target: Target = DEFAULT_TARGET,
    token: Token = None,
    tls: Tls = False,
    ca_file: CaFile = None,
    client_cert: ClientCert = None,
) -> None:
    """Send requests that are wrong in every way the contract has room for.

    Status 1 if one ended by the service's own fault, if something is held afterwards, or if a sound call fails then.
    It sends FlushCache and Abort too, and takes all the room it gets: not for a service that others use.
    """
    from ottserve.loadtest.fuzz import Fuzzing

    numbers = range(requests) if only is None else range(only, only + 1)
    plan = Fuzzing(target, numbers, seed, at_once, timeout_s, token, encryption(tls, ca_file, client_cert))
    outcome = _run(plan, len(numbers))
    rows = [(method, code, f"{count:,}") for (method, code), count in sorted(outcome.codes.items())]
    print_table(f"{len(numbers):,} malformed requests, seed {seed}", ("method", "status", "calls"), rows)
    for problem in outcome.problems[:MOST_SHOWN]:
        typer.echo(f"error: {problem}", err=True)
    if outcome.problems:
        typer.echo(f"{len(outcome.problems)} problems", err=True)
        raise typer.Exit(1)
    typer.echo("withstood: nothing is held, and a sound call was served")


def _run(plan: Fuzzing, total: int) -> Outcome:
    import asyncio

    from ottserve.loadtest.fuzz import fuzz

    with counted("requests", total) as (_, advance):
        return asyncio.run(fuzz(plan, lambda: advance(1)))
