"""`ottserve info`: what runs, how its cache is held, and how busy it is."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer

from ottserve.cli.connect import connection
from ottserve.target import DEFAULT_TARGET, CaFile, ClientCert, Target, Tls, Token


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    target: Target = DEFAULT_TARGET,
    token: Token = None,
    tls: Tls = False,
    ca_file: CaFile = None,
    client_cert: ClientCert = None,
) -> None:
    """Show the model, the settings in effect and the load of each replica."""
    with connection(target, token, tls, ca_file, client_cert) as client:
        facts = {
            "model": dataclasses.asdict(client.model_info()),
            "server": dataclasses.asdict(client.server_info()),
            "replicas": [dataclasses.asdict(load) for load in client.load()],
        }
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        _show(facts)


def _show(facts: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for title, values in _sections(facts):
        console.print(f"[bold]{title}[/bold]")
        for name, value in values.items():
            console.print(f"  {name:<22} {value}", markup=False)


def _sections(facts: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    server = dict(facts["server"])
    parts = {name: server.pop(name) for name in ("cache", "engine", "gateway")}
    replicas = [(f"replica {load['replica_id']}", load) for load in facts["replicas"]]
    return [("model", facts["model"]), ("server", server), *parts.items(), *replicas]
