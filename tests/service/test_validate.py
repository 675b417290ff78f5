"""Every field of every request is read or refused, and no message whatever is our fault."""

from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ottserve.v1 import generation_pb2 as pb

TEXT = "hi"
USER = pb.ChatMessage(role="user", content=TEXT)

# For each field that is served: a request that holds the field, and one that differs in it alone. Both are valid, and
# what reaches the replica or comes back must differ too; so a field that nothing reads fails here.
PAIRS: dict[str, tuple[Any, Any]] = {
    "GenerateRequest.request_id": (pb.GenerateRequest(text=TEXT, request_id="a"), pb.GenerateRequest(text=TEXT)),
    "GenerateRequest.text": (pb.GenerateRequest(text="a"), pb.GenerateRequest(text="b")),
    "GenerateRequest.token_ids": (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5])),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[6])),
    ),
    "GenerateRequest.chat": (
        pb.GenerateRequest(chat=pb.Chat(messages=[USER])),
        pb.GenerateRequest(chat=pb.Chat(messages=[USER, USER])),
    ),
    "Chat.add_generation_prompt": (
        pb.GenerateRequest(chat=pb.Chat(messages=[USER], add_generation_prompt=False)),
        pb.GenerateRequest(chat=pb.Chat(messages=[USER])),
    ),
    "ChatMessage.role": (
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="a", content="x")])),
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="b", content="x")])),
    ),
    "ChatMessage.content": (
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="a", content="x")])),
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="a", content="y")])),
    ),
    "StopParams.max_new_tokens": (
        pb.GenerateRequest(text=TEXT, stops=pb.StopParams(max_new_tokens=1)),
        pb.GenerateRequest(text=TEXT),
    ),
    "StopParams.stop": (pb.GenerateRequest(text=TEXT, stops=pb.StopParams(stop=["a"])), pb.GenerateRequest(text=TEXT)),
    "StopParams.include_stop_text": (
        pb.GenerateRequest(text=TEXT, stops=pb.StopParams(include_stop_text=True)),
        pb.GenerateRequest(text=TEXT),
    ),
    "OutputParams.skip_special_tokens": (
        pb.GenerateRequest(text=TEXT, output=pb.OutputParams(skip_special_tokens=False)),
        pb.GenerateRequest(text=TEXT),
    ),
    "TokenizeRequest.text": (pb.TokenizeRequest(text="a"), pb.TokenizeRequest(text="b")),
    "TokenizeRequest.chat": (
        pb.TokenizeRequest(chat=pb.Chat(messages=[USER])),
        pb.TokenizeRequest(chat=pb.Chat(messages=[USER, USER])),
    ),
    "TokenizeRequest.add_special_tokens": (
        pb.TokenizeRequest(text="a", add_special_tokens=False),
        pb.TokenizeRequest(text="a"),
    ),
    "DetokenizeRequest.token_ids": (pb.DetokenizeRequest(token_ids=[80]), pb.DetokenizeRequest(token_ids=[81])),
    "DetokenizeRequest.skip_special_tokens": (
        pb.DetokenizeRequest(token_ids=[1], skip_special_tokens=False),
        pb.DetokenizeRequest(token_ids=[1]),
    ),
    "AbortRequest.request_id": (pb.AbortRequest(request_id="a"), pb.AbortRequest(request_id="b")),
} | {
    f"SamplingParams.{name}": (
        pb.GenerateRequest(text=TEXT, sampling=pb.SamplingParams(**{name: value})),
        pb.GenerateRequest(text=TEXT),
    )
    for name, value in {
        "temperature": 1.0,
        "top_k": 3,
        "top_p": 0.5,
        "seed": 9,
        "min_p": 0.5,
        "repetition_penalty": 2,
        "presence_penalty": -1,
        "frequency_penalty": 1,
        "logit_bias": {5: 1.0},
    }.items()
}
PAIRS |= {
    f"StopParams.{name}": (
        pb.GenerateRequest(text=TEXT, stops=pb.StopParams(**{name: value})),
        pb.GenerateRequest(text=TEXT),
    )
    for name, value in {"min_new_tokens": 1, "stop_token_ids": [5], "ignore_eos": True}.items()
}
PAIRS |= {
    f"OutputParams.{name}": (
        pb.GenerateRequest(text=TEXT, output=pb.OutputParams(**{name: 0})),
        pb.GenerateRequest(text=TEXT),
    )
    for name in ("logprobs", "prompt_logprobs")
}
PAIRS |= {
    name: (
        pb.GenerateRequest(text=TEXT, structured_output=pb.StructuredOutput(**{name.partition(".")[2]: value})),
        pb.GenerateRequest(text=TEXT),
    )
    for name, value in {
        "StructuredOutput.json_schema": "{}",
        "StructuredOutput.regex": "a",
        "StructuredOutput.choice": pb.Choices(options=["a"]),
        "StructuredOutput.grammar": 'root ::= "a"',
    }.items()
}
PAIRS |= {
    f"GenerateRequest.{name}": (pb.GenerateRequest(text=TEXT, **{name: value}), pb.GenerateRequest(text=TEXT))
    for name, value in {"n": 2, "priority": -3, "cache_salt": "s"}.items()
}
# These take one value only; that another is refused is shown in test_refusals.py.
ONE_VALUE = {f"{name}Request.model" for name in ("Generate", "Tokenize", "Detokenize", "GetModelInfo")}
# Only there to hold others, which are found below.
HOLDERS = {
    "GenerateRequest.sampling",
    "GenerateRequest.stops",
    "GenerateRequest.output",
    "GenerateRequest.structured_output",
    "TokenIds.ids",
    "Chat.messages",
    "Choices.options",
}


def request_fields() -> set[str]:
    """All fields that a caller can send and that are not refused by name."""
    service = pb.DESCRIPTOR.services_by_name["GenerationService"]
    found: dict[str, FieldDescriptor] = {}
    for method in service.methods:
        _collect(method.input_type, found)
    return set(found)


def _collect(message: Descriptor, found: dict[str, FieldDescriptor]) -> None:
    for field in message.fields:
        name = f"{message.name}.{field.name}"
        if name in found:
            continue
        found[name] = field
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            _collect(field.message_type, found)


def test_every_field_is_accounted_for() -> None:
    """A field added to the contract is unknown here until someone says what it does."""
    assert request_fields() == PAIRS.keys() | ONE_VALUE | HOLDERS


@pytest.mark.parametrize("name", sorted(PAIRS))
async def test_every_served_field_makes_a_difference(gateway: Any, replicas: Any, name: str) -> None:
    seen = []
    for request in PAIRS[name]:
        method = type(request).__name__.removesuffix("Request")
        answer = await getattr(gateway.stub, method)(request)
        task = replicas.tasks.pop() if replicas.tasks else None
        seen.append(_parts(task) if task else answer)
    if name not in ("GenerateRequest.request_id", "SamplingParams.seed") and isinstance(seen[0], tuple):
        seen = [_without_drawn(parts) for parts in seen]
    assert seen[0] != seen[1]


def _parts(task: Any) -> tuple[Any, ...]:
    """A task without its times."""
    output = task.skip_special_tokens, task.logprobs, task.prompt_logprobs, task.form
    sharing = task.n, task.priority, task.cache_salt
    return task.request_id, task.prompt_ids, task.sampling, task.stops, output, sharing


def _without_drawn(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """A task without what is drawn anew for each request."""
    _, prompt_ids, sampling, *rest = parts
    return prompt_ids, replace(sampling, seed=0), *rest


FLOATS = st.floats(width=32)
INT32 = st.integers(-(2**31), 2**31 - 1)
TEXTS = st.text(max_size=20)
SAMPLING = st.builds(
    pb.SamplingParams,
    temperature=FLOATS | st.none(),
    top_k=INT32 | st.none(),
    top_p=FLOATS | st.none(),
    min_p=FLOATS | st.none(),
    repetition_penalty=FLOATS | st.none(),
    logit_bias=st.dictionaries(INT32 | st.integers(0, 257), FLOATS, max_size=2),
)
STOPS = st.builds(
    pb.StopParams,
    max_new_tokens=INT32 | st.none(),
    min_new_tokens=INT32 | st.none(),
    stop=st.lists(TEXTS, max_size=3),
    stop_token_ids=st.lists(INT32 | st.integers(0, 257), max_size=2),
)
FORMS = st.none() | st.one_of(
    st.builds(pb.StructuredOutput, regex=TEXTS),
    st.builds(pb.StructuredOutput, choice=st.builds(pb.Choices, options=st.lists(TEXTS, max_size=2))),
    st.just(pb.StructuredOutput()),
)
MESSAGES = st.builds(pb.ChatMessage, role=TEXTS | st.sampled_from(["user", "tool"]), content=TEXTS)
INPUTS = st.one_of(
    st.fixed_dictionaries({"text": TEXTS}),
    st.fixed_dictionaries({"token_ids": st.builds(pb.TokenIds, ids=st.lists(INT32 | st.integers(0, 257), max_size=4))}),
    st.fixed_dictionaries({"chat": st.builds(pb.Chat, messages=st.lists(MESSAGES, max_size=3))}),
    st.just({}),
)
WHOLE = st.builds(
    lambda given, **fields: pb.GenerateRequest(**given, **fields),
    INPUTS,
    model=st.sampled_from(["", "toy", "x"]),
    request_id=st.just("") | TEXTS,
    sampling=SAMPLING,
    stops=STOPS,
    structured_output=FORMS,
    output=st.builds(pb.OutputParams, logprobs=st.none() | INT32, prompt_logprobs=st.none() | INT32),
    n=st.none() | INT32 | st.integers(1, 4),
    priority=st.none() | INT32,
    cache_salt=TEXTS,
)


def _parsed(wire: bytes) -> pb.GenerateRequest | None:
    try:
        return pb.GenerateRequest.FromString(wire)
    except Exception:  # noqa: BLE001 - what cannot be parsed never reaches the service
        return None


REQUESTS = WHOLE | st.binary(max_size=40).map(_parsed).filter(lambda request: request is not None)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(message=REQUESTS)
async def test_no_message_is_our_fault(gateway: Any, message: pb.GenerateRequest) -> None:
    code = await _code_of(gateway, message)
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)


async def _code_of(gateway: Any, message: pb.GenerateRequest) -> grpc.StatusCode:
    try:
        await gateway.stub.Generate(message)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
