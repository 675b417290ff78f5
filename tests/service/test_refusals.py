"""Every way to be refused: status, details, and that nothing was begun."""

from typing import Any

import grpc
import pytest

from ottserve.v1 import generation_pb2 as pb
from ottserve.workers import api

NAN, INF = float("nan"), float("inf")


def generate(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**({"text": "hi"} | fields))


def sampling(**fields: Any) -> pb.GenerateRequest:
    return generate(sampling=pb.SamplingParams(**fields))


def stops(**fields: Any) -> pb.GenerateRequest:
    return generate(stops=pb.StopParams(**fields))


def form(**fields: Any) -> pb.GenerateRequest:
    return generate(structured_output=pb.StructuredOutput(**fields))


def token_ids(*ids: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))


def chat(*messages: tuple[str, str]) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role=role, content=content) for role, content in messages])
    )


@pytest.mark.parametrize(
    ("request_", "field", "limit"),
    [
        (pb.GenerateRequest(), "input", "one of text, token_ids or chat"),
        (generate(text=""), "text", "at least one character"),
        (generate(text="x" * 99), "text", "1 to 99 tokens"),
        (token_ids(), "token_ids", "1 to 99 tokens"),
        (token_ids(5, -1), "token_ids.ids[1]", "0 to 257"),
        (token_ids(5, 258), "token_ids.ids[1]", "0 to 257"),
        (token_ids(*range(100)), "token_ids", "1 to 99 tokens"),
        (chat(), "chat.messages", "at least one message"),
        (chat(("", "hi")), "chat.messages[0].role", "1 to 64 characters"),
        (chat(("tool", "hi")), "chat.messages", "no tools here"),
        (sampling(temperature=-0.5), "sampling.temperature", "0 to 100"),
        (sampling(temperature=100.5), "sampling.temperature", "0 to 100"),
        (sampling(temperature=NAN), "sampling.temperature", "0 to 100"),
        (sampling(temperature=INF), "sampling.temperature", "0 to 100"),
        (sampling(top_k=-1), "sampling.top_k", "0 or more"),
        (sampling(top_p=0), "sampling.top_p", "over 0 to 1"),
        (sampling(top_p=1.5), "sampling.top_p", "over 0 to 1"),
        (sampling(top_p=NAN), "sampling.top_p", "over 0 to 1"),
        (sampling(min_p=-0.1), "sampling.min_p", "0 to 1"),
        (sampling(min_p=NAN), "sampling.min_p", "0 to 1"),
        (sampling(repetition_penalty=0), "sampling.repetition_penalty", "over 0 to 100"),
        (sampling(repetition_penalty=INF), "sampling.repetition_penalty", "over 0 to 100"),
        (sampling(presence_penalty=-101), "sampling.presence_penalty", "-100 to 100"),
        (sampling(frequency_penalty=NAN), "sampling.frequency_penalty", "-100 to 100"),
        (sampling(logit_bias={258: 1.0}), "sampling.logit_bias", "0 to 257"),
        (sampling(logit_bias={-1: 1.0}), "sampling.logit_bias", "0 to 257"),
        (sampling(logit_bias={5: INF}), "sampling.logit_bias[5]", "-100 to 100"),
        (sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "sampling.logit_bias", "at most 1024 tokens"),
        (stops(min_new_tokens=-1), "stops.min_new_tokens", "0 to 97"),
        (stops(max_new_tokens=3, min_new_tokens=4), "stops.min_new_tokens", "0 to 3"),
        (stops(stop_token_ids=[5, 258]), "stops.stop_token_ids[1]", "0 to 257"),
        (stops(stop_token_ids=[5] * 65), "stops.stop_token_ids", "at most 64 tokens"),
        (generate(output=pb.OutputParams(logprobs=-1)), "output.logprobs", "0 to 20"),
        (generate(output=pb.OutputParams(prompt_logprobs=21)), "output.prompt_logprobs", "0 to 20"),
        (form(), "structured_output", "one of json_schema, regex, choice or grammar"),
        (form(json_schema=""), "structured_output.json_schema", "1 to 65536 bytes"),
        (form(regex="x" * 4097), "structured_output.regex", "1 to 4096 bytes"),
        (form(grammar="x" * 65537), "structured_output.grammar", "1 to 65536 bytes"),
        (form(choice=pb.Choices()), "structured_output.choice.options", "1 to 1024 texts"),
        (form(choice=pb.Choices(options=["a", ""])), "structured_output.choice.options[1]", "1 to 4096 characters"),
        (
            form(choice=pb.Choices(options=["x" * 4096] * 17)),
            "structured_output.choice.options",
            "65536 bytes together",
        ),
        (
            generate(structured_output=pb.StructuredOutput(regex="a"), stops=pb.StopParams(ignore_eos=True)),
            *("stops.ignore_eos", "false with structured_output"),
        ),
        (
            generate(structured_output=pb.StructuredOutput(regex="a"), stops=pb.StopParams(min_new_tokens=1)),
            *("stops.min_new_tokens", "0 with structured_output"),
        ),
        (stops(max_new_tokens=0), "stops.max_new_tokens", "1 or more"),
        (stops(max_new_tokens=-1), "stops.max_new_tokens", "1 or more"),
        (stops(stop=["ok", ""]), "stops.stop[1]", "1 to 512 characters"),
        (stops(stop=["x" * 513]), "stops.stop[0]", "1 to 512 characters"),
        (stops(stop=["x"] * 17), "stops.stop", "at most 16 strings"),
        (generate(n=0), "n", "1 to 128"),
        (generate(n=129), "n", "1 to 128"),
        (generate(n=-1), "n", "1 to 128"),
        (generate(priority=101), "priority", "-100 to 100"),
        (generate(priority=-101), "priority", "-100 to 100"),
        (generate(cache_salt="x" * 257), "cache_salt", "at most 256 characters"),
        (generate(request_id="two words"), "request_id", "printable ASCII"),
        (generate(request_id="x" * 129), "request_id", "1 to 128"),
    ],
)
async def test_bad_values_name_field_and_limit(
    gateway: Any, replicas: Any, refusal: Any, request_: pb.GenerateRequest, field: str, limit: str
) -> None:
    told = await refusal(gateway.stub.Generate(request_))
    assert told.code == grpc.StatusCode.INVALID_ARGUMENT
    assert list(told.violations) == [field]
    assert limit in told.violations[field]
    assert field in told.message
    assert ", got " in told.message
    assert replicas.tasks == []


async def test_a_field_of_a_newer_contract_is_refused(gateway: Any, refusal: Any) -> None:
    """Field 100 of the sampling parameters, a varint, is not in this contract: it must not be passed over."""
    newer = generate(sampling=pb.SamplingParams.FromString(bytes([0xA0, 0x06, 0x01])))
    told = await refusal(gateway.stub.Generate(newer))
    assert list(told.violations) == ["sampling.#100"]


async def test_one_stop_string_may_have_three_hundred_characters(gateway: Any, replicas: Any) -> None:
    await gateway.stub.Generate(stops(stop=["x" * 300], include_stop_text=True))
    assert replicas.tasks[0].stops.stop == ("x" * 300,)
    assert replicas.tasks[0].stops.include_stop_text


@pytest.mark.parametrize("temperature", [1e-10, 100])
async def test_extreme_parameters_are_valid(gateway: Any, replicas: Any, temperature: float) -> None:
    await gateway.stub.Generate(sampling(temperature=temperature, top_k=259, top_p=1e-6))
    [task] = replicas.tasks
    assert task.sampling.temperature == pytest.approx(temperature)
    assert task.sampling.top_k == 258


async def test_an_unusable_id_in_the_metadata_is_refused(gateway: Any, refusal: Any) -> None:
    told = await refusal(gateway.stub.GetLoad(pb.GetLoadRequest(), metadata=(("x-request-id", "two words"),)))
    assert (told.code, list(told.violations)) == (grpc.StatusCode.INVALID_ARGUMENT, ["x-request-id"])


async def test_an_empty_id_cannot_be_aborted(gateway: Any, refusal: Any) -> None:
    told = await refusal(gateway.stub.Abort(pb.AbortRequest()))
    assert (told.code, list(told.violations)) == (grpc.StatusCode.INVALID_ARGUMENT, ["request_id"])


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Generate", generate(model="other")),
        ("Tokenize", pb.TokenizeRequest(model="other", text="hi")),
        ("Detokenize", pb.DetokenizeRequest(model="other")),
        ("GetModelInfo", pb.GetModelInfoRequest(model="other")),
    ],
)
async def test_another_model_is_not_found(gateway: Any, refusal: Any, method: str, request_: Any) -> None:
    told = await refusal(getattr(gateway.stub, method)(request_))
    assert told.code == grpc.StatusCode.NOT_FOUND
    assert "'other'" in told.message
    assert "'toy'" in told.message


async def test_the_models_own_name_is_found(gateway: Any) -> None:
    assert (await gateway.stub.Generate(generate(model="toy", n=1))).samples


async def test_too_many_requests(start: Any, replicas: Any, refusal: Any) -> None:
    gateway = await start(admission={"max_requests": 1, "retry_after_ms": 250})
    replicas.pause_s = 0.01
    first = gateway.stub.GenerateStream(generate(stops=pb.StopParams(max_new_tokens=50)))
    await first.read()
    told = await refusal(gateway.stub.Generate(generate()))
    assert told.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert told.retry_after_ms == 250
    assert "1 requests" in told.message
    assert len(replicas.tasks) == 1
    first.cancel()


async def test_too_many_tokens(start: Any, replicas: Any, refusal: Any) -> None:
    """Two requests of 3 + 20 tokens pass a limit of 40; one of 3 + 38 can never fit."""
    gateway = await start(admission={"max_tokens": 40})
    replicas.pause_s = 0.01
    first = aiter(gateway.stub.GenerateStream(stops(max_new_tokens=20)))
    await anext(first)
    full = await refusal(gateway.stub.Generate(stops(max_new_tokens=20)))
    never = await refusal(gateway.stub.Generate(stops(max_new_tokens=38)))
    assert (full.code, full.retry_after_ms) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 1000)
    assert (never.code, list(never.violations)) == (grpc.StatusCode.INVALID_ARGUMENT, ["input"])
    assert [message async for message in first]
    assert await gateway.stub.Generate(stops(max_new_tokens=20))


async def test_a_message_over_the_limit_names_the_limit(start: Any, refusal: Any) -> None:
    gateway = await start(messages={"max_request_bytes": 100_000})
    told = await refusal(gateway.stub.Generate(generate(text="x" * 100_001)))
    assert told.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "100000" in told.message


async def test_five_megabytes_are_over_the_limit_unless_it_is_raised(start: Any, replicas: Any, refusal: Any) -> None:
    large = token_ids(*([5] * 5_000_000))
    assert large.ByteSize() > 5_000_000
    told = await refusal((await start()).stub.Generate(large))
    assert (told.code, "4194304" in told.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    raised = await refusal((await start(messages={"max_request_bytes": 6 << 20})).stub.Generate(large))
    assert list(raised.violations) == ["token_ids"], "it is looked at, and too long for the model"
    assert replicas.tasks == []


async def test_an_answer_over_the_limit_names_the_limit(start: Any, replicas: Any, refusal: Any, until: Any) -> None:
    gateway = await start(messages={"max_response_bytes": 100_000})
    replicas.payload = "x" * 10_000
    told = await refusal(gateway.stub.Generate(stops(max_new_tokens=60)))
    assert (told.code, "100000" in told.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    await until(lambda: gateway.value("ottserve_gateway_requests_in_flight", method="Generate") == 0)


async def test_a_response_over_four_megabytes_works(start: Any, replicas: Any) -> None:
    gateway = await start(options=(("grpc.max_receive_message_length", 2**26),))
    replicas.payload = "x" * 100_000
    answer = await gateway.stub.Generate(stops(max_new_tokens=60))
    assert len(answer.samples[0].text) > 6_000_000


async def test_while_loading_callers_may_try_again(start: Any, replicas: Any, refusal: Any) -> None:
    replicas.loads = ()
    gateway = await start(is_ready=False)
    for call in (
        gateway.stub.Generate(generate()),
        gateway.stub.Tokenize(pb.TokenizeRequest(text="hi")),
        gateway.stub.GetModelInfo(pb.GetModelInfoRequest()),
    ):
        told = await refusal(call)
        assert (told.code, told.retry_after_ms) == (grpc.StatusCode.UNAVAILABLE, 1000)
        assert "loading" in told.message


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (api.QueueFull("full", 70), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (api.invalid("token_ids", 900, "at most 800 tokens, which all pages hold"), grpc.StatusCode.INVALID_ARGUMENT),
        (api.DuplicateRequest("request_id is in use"), grpc.StatusCode.ALREADY_EXISTS),
        (api.DeadlineExceeded("too late"), grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
async def test_what_a_replica_refuses_is_passed_on(
    gateway: Any, replicas: Any, refusal: Any, error: api.OttserveError, code: grpc.StatusCode
) -> None:
    replicas.failures = [(0, error)]
    told = await refusal(gateway.stub.Generate(generate()))
    assert (told.code, told.message) == (code, error.message)
    assert len(replicas.tasks) == 1


async def test_a_replicas_own_fault_is_counted_by_its_reason(gateway: Any, replicas: Any, refusal: Any) -> None:
    replicas.failures = [(0, api.Internal("the step failed", "step"))]
    told = await refusal(gateway.stub.Generate(generate(request_id="r1")))
    assert (told.code, told.message) == (grpc.StatusCode.INTERNAL, "the step failed (request r1)")
    assert gateway.value("ottserve_gateway_internal_errors_total", reason="step") == 1


async def test_a_replica_lost_before_the_first_token_is_tried_again(gateway: Any, replicas: Any) -> None:
    replicas.failures = [(0, api.Unavailable("gone"))]
    answer = await gateway.stub.Generate(stops(max_new_tokens=2))
    assert answer.samples[0].text == "0 1 "
    assert len(replicas.tasks) == 2


async def test_a_replica_lost_twice_is_unavailable(gateway: Any, replicas: Any, refusal: Any) -> None:
    replicas.failures = [(0, api.Unavailable("gone", 300)), (0, api.Unavailable("gone", 400))]
    told = await refusal(gateway.stub.Generate(generate()))
    assert (told.code, told.retry_after_ms, told.reason) == (grpc.StatusCode.UNAVAILABLE, 400, None)
    assert len(replicas.tasks) == 2


async def test_a_replica_lost_after_the_first_token_breaks_the_stream(gateway: Any, replicas: Any) -> None:
    replicas.failures = [(2, api.Unavailable("gone"))]
    call = gateway.stub.GenerateStream(generate())
    texts = []
    with pytest.raises(grpc.aio.AioRpcError):
        async for message in call:
            texts.append(message.chunk.text)
    assert texts == ["0 ", "1 "]
    assert len(replicas.tasks) == 1


async def test_a_broken_stream_says_so(gateway: Any, replicas: Any, refusal: Any) -> None:
    replicas.failures = [(2, api.Unavailable("gone"))]
    told = await refusal(gateway.stub.Generate(generate()))
    assert (told.code, told.reason, told.retry_after_ms) == (grpc.StatusCode.UNAVAILABLE, "STREAM_BROKEN", None)


async def test_our_fault_tells_the_request_id_and_nothing_more(gateway: Any, replicas: Any, refusal: Any) -> None:
    replicas.failures = [(1, RuntimeError("/secret/path.py broke"))]
    told = await refusal(gateway.stub.Generate(generate(request_id="r1")))
    assert told.code == grpc.StatusCode.INTERNAL
    assert told.message == "internal error in request r1"
    assert (await gateway.stub.Generate(generate())).samples
