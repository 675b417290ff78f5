"""Bodies → messages of the contract. Decides nothing: what a value may be, validation says of the message.

`FIELD_NAMES` leads back, so that a refusal names the field as its caller wrote it.
"""

from __future__ import annotations

import json

from ottserve.service.http.prompts import Prompt
from ottserve.service.http.requests import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    GenerationBody,
    ResponseFormat,
    StructuredOutputs,
)
from ottserve.v1 import generation_pb2 as pb
from ottserve.workers.api import invalid

JSON_OBJECT = '{"type": "object"}'
SYSTEM_ROLES = {"developer": "system"}

FIELD_NAMES = {
    "chat.messages": "messages",
    "chat": "messages",
    "input": "prompt",
    "output.logprobs": "logprobs",
    "output.prompt_logprobs": "logprobs",
    "stops.include_stop_text": "include_stop_str_in_output",
    "stops.max_new_tokens": "max_tokens",
    "stops.min_new_tokens": "min_tokens",
    "structured_output.json_schema": "response_format.json_schema.schema",
    "structured_output.choice.options": "structured_outputs.choice",
    "structured_output": "structured_outputs",
    "text": "prompt",
    "token_ids.ids": "prompt",
    "token_ids": "prompt",
    "sampling": "",
    "stops": "",
}


def field_name(field: str) -> str:
    """The name in a body of a field of the contract, such as `stop[0]` for `stops.stop[0]`."""
    for ours, theirs in FIELD_NAMES.items():
        rest = field.removeprefix(ours)
        if rest != field and rest[:1] in ("", ".", "["):
            return (theirs + rest).removeprefix(".")
    return field


def completion_request(body: CompletionBody, prompt: Prompt, request_id: str) -> pb.GenerateRequest:
    """The message of one prompt of a completion. Raises InvalidField."""
    request = _request(body, request_id)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    limit = max_tokens(body)
    request.stops.max_new_tokens = DEFAULT_COMPLETION_TOKENS if limit is None else limit
    if is_score(body):
        request.stops.max_new_tokens = 1
    if body.logprobs is not None:
        request.output.logprobs = body.logprobs
        if body.echo:
            request.output.prompt_logprobs = body.logprobs
    return request


def is_score(body: CompletionBody) -> bool:
    """Whether the prompt alone is asked for. The replicas make at least one token, which is then left out."""
    return body.echo and max_tokens(body) == 0


def chat_request(body: ChatBody, request_id: str) -> pb.GenerateRequest:
    """The message of a chat. Raises InvalidField."""
    request = _request(body, request_id)
    request.chat.add_generation_prompt = body.add_generation_prompt
    for message in body.messages:
        request.chat.messages.add(role=SYSTEM_ROLES.get(message.role, message.role), content=message.content)
    limit = max_tokens(body)
    if limit is not None:
        request.stops.max_new_tokens = limit
    if body.logprobs:
        request.output.logprobs = body.top_logprobs or 0
    elif body.top_logprobs is not None:
        raise invalid("top_logprobs", body.top_logprobs, "only with logprobs: true")
    return request


def _request(body: GenerationBody, request_id: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        model=body.model,
        request_id=request_id,
        n=body.n,
        priority=body.priority,
        cache_salt=body.cache_salt,
        structured_output=_form(body),
        sampling=pb.SamplingParams(
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=body.logit_bias,
            seed=body.seed,
        ),
        stops=pb.StopParams(
            min_new_tokens=body.min_tokens,
            stop=body.stop,
            stop_token_ids=body.stop_token_ids,
            ignore_eos=body.ignore_eos,
            include_stop_text=body.include_stop_str_in_output,
        ),
        output=pb.OutputParams(skip_special_tokens=body.skip_special_tokens),
    )


def max_tokens(body: GenerationBody) -> int | None:
    """The limit under either of its names. Raises InvalidField where they disagree."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise invalid("max_completion_tokens", new, f"the same as max_tokens={old}, or one of them")
    return old if new is None else new


def _form(body: GenerationBody) -> pb.StructuredOutput | None:
    given, wanted = body.response_format, body.structured_outputs
    if wanted is None:
        return None if given is None else _response_format(given)
    if given is not None and given.type != "text":
        raise invalid("structured_outputs", "set", "left out beside response_format")
    return _structured_outputs(wanted)


def _response_format(given: ResponseFormat) -> pb.StructuredOutput | None:
    if (given.json_schema is None) == (given.type == "json_schema"):
        raise invalid("response_format.json_schema", given.type, "given with type json_schema, and with no other")
    if given.json_schema is not None:
        return pb.StructuredOutput(json_schema=json.dumps(given.json_schema.schema_, ensure_ascii=False))
    return pb.StructuredOutput(json_schema=JSON_OBJECT) if given.type == "json_object" else None


def _structured_outputs(wanted: StructuredOutputs) -> pb.StructuredOutput:
    given = wanted.model_fields_set
    if len(given) != 1:
        raise invalid("structured_outputs", f"{len(given)} of them", "one of regex, choice or grammar")
    if wanted.regex is not None:
        return pb.StructuredOutput(regex=wanted.regex)
    if wanted.choice is not None:
        return pb.StructuredOutput(choice=pb.Choices(options=wanted.choice))
    return pb.StructuredOutput(grammar=wanted.grammar or "")
