"""`ottserve tokenize`: the tokens that the server makes of a text."""

from __future__ import annotations

from typing import Annotated

import typer

from ottserve.cli.connect import connection
from ottserve.target import DEFAULT_TARGET, CaFile, ClientCert, Target, Tls, Token


def tokenize(
    text: Annotated[str, typer.Argument(help="What to tokenise.")],
    chat: Annotated[bool, typer.Option("--chat", help="Put it through the model's chat template first.")] = False,
    target: Target = DEFAULT_TARGET,
    token: Token = None,
    tls: Tls = False,
    ca_file: CaFile = None,
    client_cert: ClientCert = None,
) -> None:
    """Print each token's id and text, and how many there are."""
    from ottserve.client import Chat

    with connection(target, token, tls, ca_file, client_cert) as client:
        token_ids = client.tokenize(Chat.user(text) if chat else text).token_ids
        for token_id in token_ids:
            typer.echo(f"{token_id:>8}  {client.detokenize((token_id,), skip_special_tokens=False)!r}")
    typer.echo(f"{len(token_ids)} tokens", err=True)
