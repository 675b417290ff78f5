"""Parts of bodies that come in several shapes, each brought to one. Knows no tokenizer."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, PlainValidator

LIMIT = "a text, a list of token ids, or a list of either"

Prompt = str | tuple[int, ...]


def _prompts(value: object) -> tuple[Prompt, ...]:
    match value:
        case str():
            return (value,)
        case [int(), *_]:
            return (_token_ids(value),)
        case [str() | list(), *_]:
            return tuple(each if isinstance(each, str) else _token_ids(each) for each in value)
    raise ValueError(LIMIT)


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < 2**31 for each in value):
        raise ValueError(LIMIT)
    return tuple(value)


def _text(value: object) -> str:
    match value:
        case str():
            return value
        case [*parts] if parts:
            return "".join(_text_of_part(part) for part in parts)
    raise ValueError("a text, or a list of parts of type text")


def _text_of_part(part: object) -> str:
    match part:
        case {"type": "text", "text": str() as text, **rest} if not rest:
            return text
        case {"type": str() as kind}:
            raise ValueError(f"parts of type text alone (type {kind[:32]!r} is not served)")
    raise ValueError('parts such as {"type": "text", "text": "Hello"}')


def _list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Prompts = Annotated[tuple[Prompt, ...], PlainValidator(_prompts)]
Text = Annotated[str, PlainValidator(_text)]
Strings = Annotated[list[str], BeforeValidator(_list)]
