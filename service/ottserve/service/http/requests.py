"""The bodies of OpenAI's endpoints, with the fields beyond OpenAI's that the contract has. Knows no limit of a value:
those are the contract's own.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from ottserve.service.http import refused
from ottserve.service.http.body import Body, Int32
from ottserve.service.http.prompts import Prompts, Strings, Text

MAX_USER_CHARACTERS = 256
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for a completion that names no number


def _with_numbers(value: object) -> object:
    """JSON has no keys but texts."""
    if isinstance(value, dict) and all(isinstance(key, str) and key.isascii() and key.isdigit() for key in value):
        return {int(key): each for key, each in value.items()}
    raise ValueError("an object from token ids to numbers")


Bias = Annotated[dict[Int32, float], BeforeValidator(_with_numbers)]


class StreamOptions(Body):
    """What a stream tells beside its text."""

    NOT_SERVED: ClassVar = refused.STREAM_OPTIONS

    include_usage: bool = False
    continuous_usage_stats: bool = False


class NamedSchema(Body):
    """A JSON schema; it is always enforced, so `strict` changes nothing."""

    NOT_SERVED: ClassVar = refused.NAMED_SCHEMA

    name: str = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = True


class ResponseFormat(Body):
    """The form of an answer in OpenAI's words."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Body):
    """What OpenAI has no word for; exactly one."""

    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class GenerationBody(Body):
    """What both endpoints take."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Int32 | None = None
    max_completion_tokens: Int32 | None = None
    min_tokens: Int32 = 0
    n: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float = 0.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Bias = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop: Strings = Field(default_factory=list)
    stop_token_ids: list[Int32] = Field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Int32 = 0
    cache_salt: str = ""
    user: Annotated[str, Field(max_length=MAX_USER_CHARACTERS)] | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    NOT_SERVED: ClassVar = refused.COMPLETION

    prompt: Prompts
    logprobs: Int32 | None = None
    echo: bool = False


class Message(Body):
    """One turn of a conversation."""

    NOT_SERVED: ClassVar = refused.MESSAGE

    role: str
    content: Text = ""


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    NOT_SERVED: ClassVar = refused.CHAT

    messages: list[Message]
    logprobs: bool = False
    top_logprobs: Int32 | None = None
    add_generation_prompt: bool = True
