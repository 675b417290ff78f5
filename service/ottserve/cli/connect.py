"""How commands reach the server, and what they say when that fails. Knows no command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from ottserve.target import encryption

if TYPE_CHECKING:
    from ottserve.client import Client, ClientError

INTERRUPTED = 130


@contextmanager
def connection(
    target: str, token: str | None, tls: bool, ca_file: Path | None, client_cert: Path | None
) -> Iterator[Client]:
    """A client for the time of a command. Ends the process with a readable message where a call fails."""
    from ottserve import client as oc

    with oc.Client(target, token=token, tls=encryption(tls, ca_file, client_cert)) as client:
        try:
            yield client
        except oc.ClientError as error:
            fail(explain(error, target))
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def explain(error: ClientError, target: str) -> str:
    """What happened, and what to do about it."""
    from ottserve import client as oc

    match error:
        case oc.Unavailable() if error.retry_after_s is None:
            return (
                f"nobody answers at {target}.\n"
                "Start the server with `make serve` (or `ottserve serve`), or name another with --target.\n"
                "One that speaks TLS wants --tls or --ca-file, one that asks who calls --client-cert."
            )
        case oc.Unavailable() | oc.ResourceExhausted():
            return f"the server can't take the request now: {error.message}.\nTry again in a moment."
        case oc.InvalidArgument() if error.fields:
            return "\n".join(f"{problem.field}: {problem.description}" for problem in error.fields)
        case oc.Unauthenticated():
            return f"{error.message or 'the server wants a token'}.\nGive one with --token or OTTSERVE_TOKEN."
        case oc.StreamBroken():
            return "\nthe replica was lost while it answered; asking again may give another answer."
        case _:
            return f"{error.code.name}: {error.message}"


def fail(message: str) -> NoReturn:
    """Say why on standard error and end with status 1."""
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(1)
