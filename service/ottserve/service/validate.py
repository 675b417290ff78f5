"""Messages → tasks. Total: a task, or an error naming field, value and limit; every field is read here or refused.

Knows the model's limits, not whether a replica has room: that is for admission and the replica to say.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ottserve.service.not_served import not_served, refuse_not_served
from ottserve.service.readiness import ServedModel
from ottserve.service.tokenizer import TokenizedText
from ottserve.v1 import generation_pb2 as pb
from ottserve.workers.api import GenerationTask, ModelInfo, SamplingParams, StopParams, UnknownModel, invalid

MAX_TEMPERATURE = 100.0
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 512
MAX_ROLE_CHARACTERS = 64
REQUEST_ID = re.compile(r"[!-~]{1,128}")
REQUEST_ID_LIMIT = "1 to 128 printable ASCII characters without spaces"


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a call brings beside its message."""

    received_at: float
    deadline_at: float | None


def arrival(received_at: float, remaining_s: float | None) -> Arrival:
    """When a call came, and until when its caller waits; `remaining_s` is None where the caller waits for ever."""
    return Arrival(received_at, None if remaining_s is None else received_at + remaining_s)


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
        InvalidField: malformed, out of range, or of a later version (`NotImplementedField`).
        UnknownModel: another model is asked for.
    """
    refuse_not_served(request)
    known_model(request.model, served.info.model)
    request_id(request.request_id)
    if request.HasField("n") and request.n != 1:
        raise not_served("n", str(request.n)) if 1 < request.n <= 128 else invalid("n", request.n, "1 to 128")
    sampling = _sampling(request.sampling, served.info.model, draw_seed)
    stop = _stop_strings(request.stops.stop)
    prompt_ids = await _prompt(request, served)
    room = served.info.model.context_length - len(prompt_ids)
    return GenerationTask(
        request_id=request.request_id,
        prompt_ids=prompt_ids,
        sampling=sampling,
        stops=StopParams(
            max_new_tokens=_max_new_tokens(request.stops, room, default_max_new_tokens),
            stop=stop,
            include_stop_text=request.stops.include_stop_text,
        ),
        received_at=arrived.received_at,
        deadline_at=arrived.deadline_at,
        skip_special_tokens=_skip_special_tokens(request.output),
    )


async def tokenized(request: pb.TokenizeRequest, served: ServedModel) -> TokenizedText:
    """The tokens of a text or chat, by the tokenizer that generation uses. Raises InvalidField, UnknownModel."""
    refuse_not_served(request)
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
    refuse_not_served(request)
    known_model(request.model, served.info.model)
    _within_vocabulary("token_ids", request.token_ids, served.info.model)
    skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
    return await served.tokenizer.decode(request.token_ids, skip)


def aborted_id(request: pb.AbortRequest) -> str:
    """The id to abort. Raises InvalidField."""
    refuse_not_served(request)
    return request_id(request.request_id)


def model_asked(request: pb.GetModelInfoRequest, served: ServedModel) -> None:
    """Raises UnknownModel for another model than the one served."""
    refuse_not_served(request)
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
            _within_vocabulary("token_ids.ids", ids, served.info.model)
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


def _within_vocabulary(field: str, ids: Sequence[int], model: ModelInfo) -> None:
    for i, token_id in enumerate(ids):
        if not 0 <= token_id < model.vocab_size:
            raise invalid(f"{field}[{i}]", token_id, f"a token id from 0 to {model.vocab_size - 1}")


def _sampling(params: pb.SamplingParams, model: ModelInfo, draw_seed: Callable[[], int]) -> SamplingParams:
    temperature = params.temperature if params.HasField("temperature") else model.default_temperature
    top_k = params.top_k if params.HasField("top_k") else model.default_top_k
    top_p = params.top_p if params.HasField("top_p") else model.default_top_p
    if not (math.isfinite(temperature) and 0 <= temperature <= MAX_TEMPERATURE):
        raise invalid("sampling.temperature", temperature, f"0 to {MAX_TEMPERATURE:g}")
    if top_k < 0:
        raise invalid("sampling.top_k", top_k, "0 or more")
    if not (math.isfinite(top_p) and 0 < top_p <= 1):
        raise invalid("sampling.top_p", top_p, "over 0 to 1")
    return SamplingParams(
        temperature=temperature,
        top_k=min(top_k, model.vocab_size),
        top_p=top_p,
        seed=params.seed if params.HasField("seed") else draw_seed(),
    )


def _stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    if len(stop) > MAX_STOP_STRINGS:
        raise invalid("stops.stop", f"{len(stop)} strings", f"at most {MAX_STOP_STRINGS} strings")
    for i, text in enumerate(stop):
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise invalid(f"stops.stop[{i}]", text, f"1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(stop)


def _max_new_tokens(params: pb.StopParams, room: int, default: int) -> int:
    """Never more than the context has room for; the answer then ends with LENGTH, as with any other limit."""
    if not params.HasField("max_new_tokens"):
        return min(default, room)
    if params.max_new_tokens < 1:
        raise invalid("stops.max_new_tokens", params.max_new_tokens, "1 or more")
    return min(params.max_new_tokens, room)


def _skip_special_tokens(params: pb.OutputParams) -> bool:
    return params.skip_special_tokens if params.HasField("skip_special_tokens") else True
