"""Structured output: messages → forms. Knows sizes and which options exclude each other; what a schema or pattern
means, the replica finds out when it compiles it.
"""

from __future__ import annotations

from ottserve.v1 import generation_pb2 as pb
from ottserve.workers.api import Choice, Form, Grammar, JsonSchema, Regex, StopParams, invalid

MAX_SCHEMA_BYTES = 64 << 10
MAX_REGEX_BYTES = 4 << 10
MAX_GRAMMAR_BYTES = 64 << 10
MAX_OPTIONS = 1024
MAX_OPTION_CHARACTERS = 4096
MAX_CHOICE_BYTES = 64 << 10


def answer_form(request: pb.GenerateRequest, stops: StopParams) -> Form | None:
    """The form that an answer must have, or None. Raises InvalidField."""
    if not request.HasField("structured_output"):
        return None
    form = _form(request.structured_output)
    # Only EOS ends a form, and where it may, nothing else may come.
    if stops.ignore_eos:
        raise invalid("stops.ignore_eos", True, "false with structured_output, whose answers end by EOS")
    if stops.min_new_tokens:
        raise invalid("stops.min_new_tokens", stops.min_new_tokens, "0 with structured_output, which says when to end")
    return form


def _form(message: pb.StructuredOutput) -> Form:
    match message.WhichOneof("form"):
        case "json_schema":
            return JsonSchema(_text("json_schema", message.json_schema, MAX_SCHEMA_BYTES))
        case "regex":
            return Regex(_text("regex", message.regex, MAX_REGEX_BYTES))
        case "choice":
            return Choice(_options(message.choice))
        case "grammar":
            return Grammar(_text("grammar", message.grammar, MAX_GRAMMAR_BYTES))
        case _:
            raise invalid("structured_output", None, "one of json_schema, regex, choice or grammar")


def _text(name: str, text: str, limit: int) -> str:
    size = len(text.encode())
    if not 1 <= size <= limit:
        raise invalid(f"structured_output.{name}", f"{size} bytes", f"1 to {limit} bytes")
    return text


def _options(message: pb.Choices) -> tuple[str, ...]:
    field = "structured_output.choice.options"
    if not 1 <= len(message.options) <= MAX_OPTIONS:
        raise invalid(field, f"{len(message.options)} texts", f"1 to {MAX_OPTIONS} texts")
    for i, option in enumerate(message.options):
        if not 1 <= len(option) <= MAX_OPTION_CHARACTERS:
            raise invalid(f"{field}[{i}]", option, f"1 to {MAX_OPTION_CHARACTERS} characters")
    size = sum(len(option.encode()) for option in message.options)
    if size > MAX_CHOICE_BYTES:
        raise invalid(field, f"{size} bytes", f"at most {MAX_CHOICE_BYTES} bytes together")
    return tuple(dict.fromkeys(message.options))
