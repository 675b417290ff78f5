"""`ottserve serve`: reads the settings, then hands over to `running`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def serve(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file with settings.", exists=True, dir_okay=False)
    ] = None,
) -> None:
    """Start the service on this machine: gateway, Ray Serve and replicas. Ctrl-C ends it.

    Every setting of the YAML file is also a flag (--cache.policy fp16) and an environment variable
    (OTTSERVE_CACHE__POLICY=fp16). `ottserve settings` lists them all.
    """
    from ottserve.cli.settings import SettingsError, read_settings

    try:
        settings = read_settings(config, context.args)
        from ottserve.cli.running import run

        status = run(settings)
    except SettingsError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(status)


def settings() -> None:
    """List every setting of `ottserve serve`, with its default and what it does."""
    from ottserve.cli.settings import describe

    for line in describe():
        typer.echo(line)
