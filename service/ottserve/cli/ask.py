"""`ottserve generate`: one prompt, one answer."""

from __future__ import annotations

from typing import Annotated

import typer

from ottserve.cli.connect import connection
from ottserve.target import DEFAULT_TARGET, CaFile, ClientCert, Target, Tls, Token

Temperature = Annotated[float | None, typer.Option(help="0 is greedy; default: the model's own.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float | None, typer.Option(help="Keep the smallest set that reaches this probability.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens less likely than this share of the likeliest.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Over 1 makes tokens that were there before rarer.")]
Seed = Annotated[int | None, typer.Option(help="Makes the answer reproducible.")]
MaxNewTokens = Annotated[int | None, typer.Option(help="Most tokens to generate.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given again.")]
Samples = Annotated[int | None, typer.Option("--n", help="Answers to the same prompt, each by a seed of its own.")]
Priority = Annotated[int | None, typer.Option(help="The higher goes first where requests wait; -100 to 100.")]
System = Annotated[str | None, typer.Option(help="System message of the chat.")]


def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer; '-' reads it from standard input.")],
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: System = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    max_new_tokens: MaxNewTokens = None,
    stop: Stop = None,
    n: Samples = None,
    priority: Priority = None,
    json_schema: Annotated[str | None, typer.Option(help="The answer is JSON that this schema accepts.")] = None,
    regex: Annotated[str | None, typer.Option(help="The answer matches this regular expression.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="The answer is one of these; give it again.")] = None,
    include_stop_text: Annotated[bool, typer.Option("--include-stop-text", help="Keep the stop text.")] = False,
    usage: Annotated[bool, typer.Option("--usage", help="Print token counts and times on standard error.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole answer as one JSON object.")] = False,
    timeout_s: Annotated[float | None, typer.Option(help="Give up after this many seconds.")] = None,
    target: Target = DEFAULT_TARGET,
    token: Token = None,
    tls: Tls = False,
    ca_file: CaFile = None,
    client_cert: ClientCert = None,
) -> None:
    """Answer a prompt, word by word as the answer appears; several answers one after the other when all have ended."""
    from ottserve.cli import answers
    from ottserve.client import Options

    options = Options(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        max_new_tokens=max_new_tokens,
        stop=tuple(stop or ()),
        json_schema=json_schema,
        regex=regex,
        choice=tuple(choice) if choice else None,
        include_stop_text=include_stop_text or None,
        n=n,
        priority=priority,
    )
    if sum(form is not None for form in (json_schema, regex, options.choice)) > 1:
        raise typer.BadParameter("an answer has one form: --json-schema, --regex or --choice")
    if raw and system is not None:
        raise typer.BadParameter("--system has no place in a --raw prompt")
    text = typer.get_text_stream("stdin").read() if prompt == "-" else prompt
    source = text if raw else _chat(text, system)
    with connection(target, token, tls, ca_file, client_cert) as client:
        if as_json:
            answers.write_json(client.generate(source, options, timeout_s))
            return
        if n is not None and n > 1:
            finishes = answers.write_samples(client.generate(source, options, timeout_s))
        else:
            finishes = [answers.write_stream(client.stream(source, options, timeout_s))[1]]
    if usage:
        for finish in finishes:
            answers.write_usage(finish)


def _chat(text: str, system: str | None):  # type: ignore[no-untyped-def]
    from ottserve.client import Chat, ChatMessage

    opening = (ChatMessage("system", system),) if system is not None else ()
    return Chat((*opening, ChatMessage("user", text)))
