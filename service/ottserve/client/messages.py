"""Between the client's values and the wire's messages. Pure functions; knows no channel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, TypeVar

from google.protobuf.message import Message

from ottserve.client.types import (
    Answer,
    CacheInfo,
    Chat,
    Chunk,
    DefaultSampling,
    EngineInfo,
    Finish,
    FinishReason,
    GatewayInfo,
    ModelInfo,
    Options,
    Prompt,
    ReplicaLoad,
    ServerInfo,
    Timings,
    TokenLogprob,
    Usage,
)
from ottserve.v1 import generation_pb2 as pb

Value = TypeVar("Value")

SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
STOPS = ("max_new_tokens", "min_new_tokens", "ignore_eos", "include_stop_text")
OUTPUT = ("skip_special_tokens", "logprobs", "prompt_logprobs")
SHARING = ("n", "priority")
FORMS = ("json_schema", "regex", "grammar")


def generate_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """The message that asks for an answer.

    Raises:
        TypeError: the prompt is none of the three kinds.
        ValueError: more than one form is asked for.
    """
    request = pb.GenerateRequest(
        model=options.model,
        request_id=options.request_id,
        sampling=pb.SamplingParams(logit_bias=options.logit_bias, **_given(options, SAMPLING)),
        stops=pb.StopParams(stop=options.stop, stop_token_ids=options.stop_token_ids, **_given(options, STOPS)),
        output=pb.OutputParams(**_given(options, OUTPUT)),
        cache_salt=options.cache_salt,
        **_given(options, SHARING),
    )
    form = _form(options)
    if form is not None:
        request.structured_output.CopyFrom(form)
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, Chat):
        request.chat.CopyFrom(chat_message(prompt))
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))
    return request


def tokenize_request(source: str | Chat, add_special_tokens: bool | None) -> pb.TokenizeRequest:
    """The message that asks for token ids."""
    if isinstance(source, Chat):
        return pb.TokenizeRequest(chat=chat_message(source), add_special_tokens=add_special_tokens)
    return pb.TokenizeRequest(text=source, add_special_tokens=add_special_tokens)


def chat_message(chat: Chat) -> pb.Chat:
    """A conversation."""
    return pb.Chat(messages=[pb.ChatMessage(role=turn.role, content=turn.content) for turn in chat.messages])


def read_answer(response: pb.GenerateResponse) -> Answer:
    """The first sample of a response, with the others."""
    first, *others = (_answer(response.request_id, sample) for sample in response.samples)
    return replace(first, prompt_logprobs=_prompt_logprobs(response.prompt_logprobs), others=tuple(others))


def _answer(request_id: str, sample: pb.Sample) -> Answer:
    return Answer(
        request_id,
        sample.text,
        tuple(sample.token_ids),
        read_finish(sample.finish),
        tuple(_logprob(token) for token in sample.logprobs),
    )


def read_chunk(response: pb.GenerateStreamResponse) -> Chunk:
    """One message of a stream."""
    chunk = response.chunk
    finish = read_finish(response.finish) if response.HasField("finish") else None
    return Chunk(
        response.request_id,
        chunk.text,
        tuple(chunk.token_ids),
        finish,
        tuple(_logprob(token) for token in chunk.logprobs),
        _prompt_logprobs(response.prompt_logprobs.tokens),
        finish.index if finish else chunk.index,
    )


def read_finish(finish: pb.Finish) -> Finish:
    """The end of an answer."""
    timings = finish.timings
    return Finish(
        reason=FinishReason[pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_")],
        usage=_read(Usage, finish.usage),
        timings=Timings(
            queue_s=timings.queue.ToTimedelta().total_seconds(),
            prefill_s=timings.prefill.ToTimedelta().total_seconds(),
            decode_s=timings.decode.ToTimedelta().total_seconds(),
            first_token_s=timings.first_token.ToTimedelta().total_seconds(),
        ),
        seed=finish.seed,
        matched_stop=finish.matched_stop if finish.HasField("matched_stop") else None,
        index=finish.index,
        matched_stop_token_id=finish.matched_stop_token_id if finish.HasField("matched_stop_token_id") else None,
    )


def read_model_info(response: pb.GetModelInfoResponse) -> ModelInfo:
    """What the model is."""
    return _read(
        ModelInfo,
        response,
        eos_token_ids=tuple(response.eos_token_ids),
        default_sampling=_read(DefaultSampling, response.default_sampling),
    )


def read_server_info(response: pb.GetServerInfoResponse) -> ServerInfo:
    """The settings in effect."""
    return ServerInfo(
        version=response.version,
        cache=_read(CacheInfo, response.cache),
        engine=_read(EngineInfo, response.engine),
        gateway=_read(GatewayInfo, response.gateway),
    )


def read_load(response: pb.GetLoadResponse) -> tuple[ReplicaLoad, ...]:
    """The state of every replica that answered."""
    return tuple(
        _read(
            ReplicaLoad,
            replica,
            last_step_at=replica.last_step_time.ToMilliseconds() / 1000 if replica.HasField("last_step_time") else None,
        )
        for replica in response.replicas
    )


def _form(options: Options) -> pb.StructuredOutput | None:
    given = _given(options, FORMS)
    if options.choice is not None:
        given["choice"] = pb.Choices(options=options.choice)
    if len(given) > 1:
        raise ValueError(f"an answer has one form, not {' and '.join(given)}")
    return pb.StructuredOutput(**given) if given else None


def _logprob(message: pb.TokenLogprobs) -> TokenLogprob:
    top = tuple((token.token_id, token.logprob) for token in message.top)
    return TokenLogprob(message.chosen.token_id, message.chosen.logprob, top)


def _prompt_logprobs(messages: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprob | None, ...]:
    return tuple(_logprob(message) if message.HasField("chosen") else None for message in messages)


def _given(options: Options, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _read(kind: type[Value], message: Message, **known: Any) -> Value:
    """A value whose fields are the message's fields of the same names, but for those that are `known`."""
    names = [field.name for field in fields(kind) if field.name not in known]  # type: ignore[arg-type]
    return kind(**{name: getattr(message, name) for name in names}, **known)
