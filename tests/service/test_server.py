"""Start and end of a gateway."""

import asyncio
import time
from typing import Any

import grpc
import pytest

from ottserve.v1 import generation_pb2 as pb


def request(max_new_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hi", stops=pb.StopParams(max_new_tokens=max_new_tokens))


async def test_running_streams_finish_and_new_calls_are_refused(start: Any, replicas: Any, refusal: Any) -> None:
    """Four streams at the time of the drain end normally; calls that come during it are UNAVAILABLE."""
    gateway = await start(drain={"probe_period_s": 0.2, "grace_s": 10})
    replicas.pause_s = 0.01
    streams = [aiter(gateway.stub.GenerateStream(request(40))) for _ in range(4)]
    for stream in streams:
        await anext(stream)
    draining = asyncio.create_task(gateway.server.drain())
    await asyncio.sleep(0.05)
    told = await refusal(gateway.stub.Generate(request(1)))
    assert (told.code, told.message) == (grpc.StatusCode.UNAVAILABLE, "the gateway is draining")
    ends = [[message async for message in stream][-1].finish for stream in streams]
    assert [end.usage.num_completion_tokens for end in ends] == [40] * 4
    await draining


async def test_what_outlasts_the_grace_time_is_cancelled(start: Any, replicas: Any, until: Any) -> None:
    gateway = await start(drain={"probe_period_s": 0.0, "grace_s": 0.2})
    replicas.pause_s = 0.1
    stream = aiter(gateway.stub.GenerateStream(request(90)))
    await anext(stream)
    began = time.monotonic()
    await gateway.server.drain()
    assert time.monotonic() - began < 2.0
    with pytest.raises(grpc.aio.AioRpcError):
        [message async for message in stream]
    await until(lambda: len(replicas.cancelled) == 1)


async def test_a_taken_port_is_an_error(start: Any) -> None:
    first = await start()
    with pytest.raises(RuntimeError, match=str(first.server.port)):
        await start(port=first.server.port)


async def test_the_models_description(gateway: Any) -> None:
    info = await gateway.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model, info.context_length, info.vocab_size) == ("toy", 100, 258)
    assert list(info.eos_token_ids) == [1]
    assert info.has_chat_template
    sampling = info.default_sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 40, 0.75)


async def test_the_settings_in_effect(start: Any) -> None:
    gateway = await start(admission={"max_requests": 7}, default_max_new_tokens=11)
    info = await gateway.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.cache.policy, info.cache.k_bits, info.cache.v_bits, info.cache.group) == ("ott", 2, 2, 128)
    assert (info.cache.k_fine, info.cache.k_fine_bits, info.cache.fit_rounds) == (32, 2, 8)
    assert (info.cache.bytes_per_token, info.cache.token_capacity) == (32.0, 8192)
    assert (info.engine.backend, info.engine.max_running) == ("torch", 16)
    assert (info.gateway.max_requests, info.gateway.default_max_new_tokens) == (7, 11)


async def test_every_number_of_a_load_report_is_told(gateway: Any, replicas: Any) -> None:
    [load] = (await gateway.stub.GetLoad(pb.GetLoadRequest())).replicas
    [report] = replicas.loads
    names = {field.name for field in load.DESCRIPTOR.fields} - {"last_step_time"}
    assert {name: getattr(load, name) for name in names} == {name: getattr(report, name) for name in names}
    assert load.last_step_time.ToMilliseconds() == 1_000_500


async def test_tokens_and_back(gateway: Any) -> None:
    text = "naïve 🙂 text"
    tokens = await gateway.stub.Tokenize(pb.TokenizeRequest(text=text))
    assert tokens.token_ids[0] == 0
    assert len(tokens.token_ids) == 1 + len(text.encode())
    assert tokens.text == text
    back = await gateway.stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))
    whole = await gateway.stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids, skip_special_tokens=False))
    assert (back.text, whole.text) == (text, "<s>" + text)


async def test_tokenising_refuses_what_it_cannot_do(gateway: Any, refusal: Any) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    with_special = await refusal(gateway.stub.Tokenize(pb.TokenizeRequest(chat=chat, add_special_tokens=True)))
    nothing = await refusal(gateway.stub.Tokenize(pb.TokenizeRequest()))
    unknown = await refusal(gateway.stub.Detokenize(pb.DetokenizeRequest(token_ids=[0, 258])))
    assert list(with_special.violations) == ["add_special_tokens"]
    assert list(nothing.violations) == ["input"]
    assert list(unknown.violations) == ["token_ids[1]"]
