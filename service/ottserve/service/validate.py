"""Messages → tasks. Total: a task, or an error naming field, value and limit; every field is read here or refused.

Knows the model's limits, not whether a replica has room: that is for admission and the replica to say.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from ottserve.service.callers import MAX_PRIORITY
from ottserve.service.forms import answer_form
from ottserve.service.parameters import num_logprobs, sampling_params, stop_params, within_vocabulary
from ottserve.service.readiness import ServedModel
from ottserve.service.tokenizer import TokenizedText
from ottserve.service.unknown_fields import refuse_unknown
from ottserve.v1 import generation_pb2 as pb
from ottserve.workers.api import GenerationTask, ModelInfo, UnknownModel, invalid

MAX_ROLE_CHARACTERS = 64
MAX_SALT_CHARACTERS = 256
MAX_SAMPLES = 128
MAX_ID_CHARACTERS = 128
REQUEST_ID = re.compile(rf"[!-~]{{1,{MAX_ID_CHARACTERS}}}")
REQUEST_ID_LIMIT = f"1 to {MAX_ID_CHARACTERS} printable ASCII characters without spaces"


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a call brings beside its message."""

    received_at: float
    deadline_at: float | None
    traceparent: str = ""


def arrival(received_at: float, remaining_s: float | None, traceparent: str = "") -> Arrival:
    """When a call came, and until when its caller waits; `remaining_s` is None where the caller waits for ever."""
    return Arrival(received_at, None if remaining_s is None else received_at + remaining_s, traceparent)


def request_id(value: str, field: str = "request_id") -> str:
    """An id that is safe in logs and headers."""
    if not REQUEST_ID.fullmatch(value):
        raise invalid(field, value, REQUEST_ID_LIMIT)
    return value


def known_model(name: str, model: ModelInfo) -> None:
    """Empty is the served model; another name raises UnknownModel."""
    if name not in ("", model.name):
        raise UnknownModel(f"model {name[:256]!r} is not served here, {model.name!r} is")


async def generation_task(
    request: pb.GenerateRequest,
    served: ServedModel,
    default_max_new_tokens: int,
    arrived: Arrival,
    draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
) -> GenerationTask:
    """The task of a request, its prompt tokenised and its defaults filled in.

    Raises:
        InvalidField: malformed, out of range, or unknown here.
        UnknownModel: another model is asked for.
    """
    refuse_unknown(request)
    known_model(request.model, served.info.model)
    request_id(request.request_id)
    n, priority = _num_samples(request), _priority(request)
    if len(request.cache_salt) > MAX_SALT_CHARACTERS:
        raise invalid("cache_salt", request.cache_salt, f"at most {MAX_SALT_CHARACTERS} characters")
    model = served.info.model
    sampling = sampling_params(request.sampling, model, draw_seed)
    logprobs = num_logprobs("logprobs", request.output)
    prompt_logprobs = num_logprobs("prompt_logprobs", request.output)
    prompt_ids = await _prompt(request, served)
    room = model.context_length - len(prompt_ids)
    stops = stop_params(request.stops, room, default_max_new_tokens, model)
    return GenerationTask(
        request_id=request.request_id,
        prompt_ids=prompt_ids,
        sampling=sampling,
        stops=stops,
        received_at=arrived.received_at,
        deadline_at=arrived.deadline_at,
        skip_special_tokens=_skip_special_tokens(request.output),
        priority=priority,
        cache_salt=request.cache_salt,
        n=n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        form=answer_form(request, stops),
        traceparent=arrived.traceparent,
    )


def _num_samples(request: pb.GenerateRequest) -> int:
    if not request.HasField("n"):
        return 1
    if not 1 <= request.n <= MAX_SAMPLES:
        raise invalid("n", request.n, f"1 to {MAX_SAMPLES}")
    return request.n


def _priority(request: pb.GenerateRequest) -> int:
    if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        raise invalid("priority", request.priority, f"-{MAX_PRIORITY} to {MAX_PRIORITY}")
    return request.priority


async def tokenized(request: pb.TokenizeRequest, served: ServedModel) -> TokenizedText:
    """The tokens of a text or chat, by the tokenizer that generation uses. Raises InvalidField, UnknownModel."""
    refuse_unknown(request)
    known_model(request.model, served.info.model)
    match request.WhichOneof("input"):
        case "text":
            add = request.add_special_tokens if request.HasField("add_special_tokens") else True
            return await served.tokenizer.encode(request.text, add)
        case "chat":
            if request.HasField("add_special_tokens"):
                given = request.add_special_tokens
                raise invalid("add_special_tokens", given, "only with text, since a chat template writes them")
            return await _chat(request.chat, served)
        case _:
            raise invalid("input", None, "one of text or chat")


async def detokenized(request: pb.DetokenizeRequest, served: ServedModel) -> str:
    """The text of token ids. Raises InvalidField, UnknownModel."""
    refuse_unknown(request)
    known_model(request.model, served.info.model)
    within_vocabulary("token_ids", request.token_ids, served.info.model)
    skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
    return await served.tokenizer.decode(request.token_ids, skip)


def aborted_id(request: pb.AbortRequest) -> str:
    """The id to abort. Raises InvalidField."""
    refuse_unknown(request)
    return request_id(request.request_id)


def model_asked(request: pb.GetModelInfoRequest, served: ServedModel) -> None:
    """Raises UnknownModel for another model than the one served."""
    refuse_unknown(request)
    known_model(request.model, served.info.model)


async def _prompt(request: pb.GenerateRequest, served: ServedModel) -> tuple[int, ...]:
    field = request.WhichOneof("input")
    match field:
        case "text":
            if not request.text:
                raise invalid("text", "", "at least one character")
            ids = (await served.tokenizer.encode(request.text)).ids
        case "token_ids":
            ids = tuple(request.token_ids.ids)
            within_vocabulary("token_ids.ids", ids, served.info.model)
        case "chat":
            ids = (await _chat(request.chat, served)).ids
        case _:
            raise invalid("input", None, "one of text, token_ids or chat")
    limit = served.info.model.context_length - 1
    if not 1 <= len(ids) <= limit:
        raise invalid(field, f"{len(ids)} tokens", f"1 to {limit} tokens, so that the context has room for an answer")
    return ids


async def _chat(chat: pb.Chat, served: ServedModel) -> TokenizedText:
    if not chat.messages:
        raise invalid("chat.messages", [], "at least one message")
    for i, message in enumerate(chat.messages):
        if not 1 <= len(message.role) <= MAX_ROLE_CHARACTERS:
            raise invalid(f"chat.messages[{i}].role", message.role, f"1 to {MAX_ROLE_CHARACTERS} characters")
    add = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    messages = [{"role": message.role, "content": message.content} for message in chat.messages]
    return await served.tokenizer.encode_chat(messages, add)


def _skip_special_tokens(params: pb.OutputParams) -> bool:
    return params.skip_special_tokens if params.HasField("skip_special_tokens") else True
