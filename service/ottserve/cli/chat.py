"""`ottserve chat`: a conversation in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ottserve.cli.ask import MaxNewTokens, System, Temperature
from ottserve.cli.connect import connection
from ottserve.target import DEFAULT_TARGET, CaFile, ClientCert, Target, Tls, Token

if TYPE_CHECKING:
    from ottserve.client import Chat, Client, Options

HELP = "/reset forgets the conversation, /exit ends it."


def chat(
    system: System = None,
    temperature: Temperature = None,
    max_new_tokens: MaxNewTokens = None,
    usage: Annotated[bool, typer.Option("--usage", help="Print token counts and times after each answer.")] = False,
    target: Target = DEFAULT_TARGET,
    token: Token = None,
    tls: Tls = False,
    ca_file: CaFile = None,
    client_cert: ClientCert = None,
) -> None:
    """Talk with the model; it remembers the conversation. /reset forgets it, /exit ends it."""
    from ottserve.client import Chat, ChatMessage, Options

    options = Options(temperature=temperature, max_new_tokens=max_new_tokens)
    opening = Chat((ChatMessage("system", system),) if system is not None else ())
    with connection(target, token, tls, ca_file, client_cert) as client:
        typer.echo(f"{client.model_info().model}. {HELP}", err=True)
        _talk(client, opening, options, usage)


def _talk(client: Client, opening: Chat, options: Options, usage: bool) -> None:
    from ottserve.cli import answers
    from ottserve.client import Chat, ChatMessage

    history = opening
    while (line := _read_line()) != "/exit":
        if line == "/reset":
            history = opening
        elif line:
            asked = Chat((*history.messages, ChatMessage("user", line)))
            text, finish = answers.write_stream(client.stream(asked, options))
            history = Chat((*asked.messages, ChatMessage("assistant", text)))
            if usage:
                answers.write_usage(finish)


def _read_line() -> str:
    """What was typed; the end of the input is /exit."""
    try:
        return input("> ").strip()
    except EOFError:
        return "/exit"
