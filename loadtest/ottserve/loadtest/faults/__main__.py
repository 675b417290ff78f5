"""The command: `python -m ottserve.loadtest.faults`. Starts a service, does every fault to it, prints the times."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from ottserve import client as oc
from ottserve.loadtest.faults import ENVIRONMENT, FAULTS, SETTINGS, do
from ottserve.loadtest.local import local_service
from ottserve.loadtest.observe import ContractBroken

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(only: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(FAULTS)}; all.")] = None) -> None:
    """Do faults to a service with two replicas of the toy model. Status 1 if a caller saw what it never should."""
    typer.echo("| fault | then | s |\n|---|---|---:|")
    status = 0
    with local_service(ENVIRONMENT, **SETTINGS) as service:
        for name in only or FAULTS:
            try:
                for event, at in asyncio.run(do(name, service)).items():
                    typer.echo(f"| {name} | {event} | {at:.2f} |")
            except (ContractBroken, oc.ClientError) as error:
                typer.echo(f"| {name} | **{error}** | |")
                status = 1
    raise typer.Exit(status)


if __name__ == "__main__":
    app()
