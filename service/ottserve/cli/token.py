"""`ottserve token`: make a bearer token. Writes to no file; the token is shown once and kept nowhere."""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated, Any

import typer

NUM_BYTES = 32


def token(
    name: Annotated[str, typer.Argument(help="Whose it is: letters, digits, '.', '_' and '-'; shown in logs.")],
    max_requests: Annotated[int | None, typer.Option(help="Generations that it may have in flight.", min=1)] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Tokens of prompts and answers.", min=1)] = None,
    max_priority: Annotated[int, typer.Option(help="Highest priority that it may ask for.", min=-100, max=100)] = 0,
) -> None:
    """Make a token: itself on standard error, its entry for gateway.tokens_file on standard output.

    ottserve token team-a --max-requests 16 >> tokens.yaml
    """
    import yaml
    from pydantic import ValidationError

    from ottserve.service.callers import Caller

    made = f"ott_{secrets.token_urlsafe(NUM_BYTES)}"
    limits = {
        "max_requests": max_requests,
        "tokens_per_minute": tokens_per_minute,
        "max_priority": max_priority or None,
    }
    entry: dict[str, Any] = {"name": name, "sha256": [hashlib.sha256(made.encode()).hexdigest()]}
    entry |= {limit: value for limit, value in limits.items() if value is not None}
    try:
        Caller.model_validate(entry)
    except ValidationError as error:
        raise typer.BadParameter(f"{name!r}: {error.errors()[0]['msg']}", param_hint="NAME") from None
    typer.echo(made, err=True)
    typer.echo(yaml.safe_dump([entry], sort_keys=False), nl=False)
