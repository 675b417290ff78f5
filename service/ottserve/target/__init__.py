"""Options of every command that calls a service: where it is, and how to show who calls.

Imports no gRPC until it is asked for credentials: a load test has to import locust first.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ottserve.client import Tls as ClientTls

Target = Annotated[str, typer.Option(help="Service to call, as host:port.", envvar="OTTSERVE_TARGET")]
Token = Annotated[str | None, typer.Option(help="Bearer token.", envvar="OTTSERVE_TOKEN")]
Tls = Annotated[bool, typer.Option("--tls", help="Encrypt; trusts the system's certificates.")]
CaFile = Annotated[
    Path | None,
    typer.Option(
        help="Encrypt; trusts these PEM certificates.", exists=True, dir_okay=False, envvar="OTTSERVE_CA_FILE"
    ),
]
ClientCert = Annotated[
    Path | None,
    typer.Option(
        help="Encrypt, and show who calls: PEM certificate and key in one file.",
        exists=True,
        dir_okay=False,
        envvar="OTTSERVE_CLIENT_CERT",
    ),
]

DEFAULT_TARGET = "127.0.0.1:50051"


def encryption(tls: bool, ca_file: Path | None, client_cert: Path | None) -> ClientTls | None:
    """What the options say of TLS; None is plain text."""
    from ottserve.client import Tls  # noqa: PLC0415  gRPC

    if not (tls or ca_file or client_cert):
        return None
    pair = client_cert.read_bytes() if client_cert else None  # each reader takes its own blocks of a PEM file
    return Tls(ca_file.read_bytes() if ca_file else None, pair, pair)
