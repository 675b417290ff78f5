"""Chat templates with the semantics that transformers' `apply_chat_template` gives them. Knows no tokenizer.

Templates are the model's, not the caller's; they run sandboxed all the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ottserve.workers.api import invalid

# Templates ask `is defined` and `is not none` about these.
NEVER_GIVEN: dict[str, None] = {"tools": None, "documents": None}


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here its contents are just rendered."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template and the special tokens it may name (`bos_token`, `eos_token`, …)."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._template = _environment().from_string(source)
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool) -> str:
        """The conversation as one text. Raises InvalidField where the template refuses the messages."""
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **NEVER_GIVEN,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            roles = [message["role"] for message in messages]
            raise invalid("chat.messages", roles, f"what the chat template accepts ({error})") from error
