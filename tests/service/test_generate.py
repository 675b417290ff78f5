"""The path of a request through the real server: what comes back, and what reaches the replica."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from ottserve.v1 import generation_pb2 as pb
from ottserve.workers import api


def request(max_new_tokens: int = 3, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hi", stops=pb.StopParams(max_new_tokens=max_new_tokens), **fields)


async def test_a_stream_is_chunks_and_then_one_final_message(gateway: Any) -> None:
    messages = [message async for message in gateway.stub.GenerateStream(request(request_id="r1"))]
    assert {message.request_id for message in messages} == {"r1"}
    assert [message.WhichOneof("event") for message in messages] == ["chunk", "chunk", "chunk", "finish"]
    assert [message.chunk.text for message in messages[:3]] == ["0 ", "1 ", "2 "]
    assert [list(message.chunk.token_ids) for message in messages[:3]] == [[0], [1], [2]]
    finish = messages[-1].finish
    assert finish.reason == pb.FINISH_REASON_LENGTH
    assert finish.WhichOneof("matched") is None
    assert (finish.usage.num_prompt_tokens, finish.usage.num_completion_tokens) == (3, 3)
    assert finish.timings.queue.ToMilliseconds() == 250
    assert finish.timings.first_token.ToMilliseconds() == 750


async def test_the_whole_answer_equals_the_stream(gateway: Any) -> None:
    answer = await gateway.stub.Generate(request(request_id="r1"))
    [sample] = answer.samples
    assert answer.request_id == "r1"
    assert (sample.text, list(sample.token_ids)) == ("0 1 2 ", [0, 1, 2])
    assert sample.finish.reason == pb.FINISH_REASON_LENGTH


async def test_what_a_request_leaves_out_is_the_models_default(gateway: Any, replicas: Any) -> None:
    answer = await gateway.stub.Generate(pb.GenerateRequest(text="hi"))
    [task] = replicas.tasks
    drawn = answer.samples[0].finish.seed
    assert task.sampling == api.SamplingParams(temperature=0.5, top_k=40, top_p=0.75, seed=drawn)
    assert task.stops == api.StopParams(max_new_tokens=97)
    assert task.skip_special_tokens
    assert task.deadline_at is None
    assert task.prompt_ids == (0, 2 + 71, 2 + 72)  # <s>, "h", "i" in the alphabet of bytes


async def test_zero_is_not_absence(gateway: Any, replicas: Any) -> None:
    sampling = pb.SamplingParams(temperature=0, top_k=0, seed=0)
    output = pb.OutputParams(skip_special_tokens=False)
    await gateway.stub.Generate(request(sampling=sampling, output=output))
    [task] = replicas.tasks
    assert (task.sampling.temperature, task.sampling.top_k, task.sampling.seed) == (0.0, 0, 0)
    assert not task.skip_special_tokens


async def test_seeds_are_drawn_over_64_bits_and_given_ones_kept(gateway: Any) -> None:
    answers = [await gateway.stub.Generate(request(1)) for _ in range(8)]
    seeds = {answer.samples[0].finish.seed for answer in answers}
    assert len(seeds) == 8
    assert max(seeds) > 2**56
    largest = 2**64 - 1
    answer = await gateway.stub.Generate(request(1, sampling=pb.SamplingParams(seed=largest)))
    assert answer.samples[0].finish.seed == largest


@pytest.mark.parametrize(("asked", "served"), [(1, 1), (97, 97), (98, 97), (2**31 - 1, 97)])
async def test_the_context_clamps_max_new_tokens(gateway: Any, asked: int, served: int) -> None:
    """3 of 100 tokens are the prompt's."""
    answer = await gateway.stub.Generate(request(asked))
    assert answer.samples[0].finish.usage.num_completion_tokens == served
    assert answer.samples[0].finish.reason == pb.FINISH_REASON_LENGTH


async def test_the_gateways_own_limit_holds_where_a_request_says_none(start: Any) -> None:
    gateway = await start(default_max_new_tokens=5)
    answer = await gateway.stub.Generate(pb.GenerateRequest(text="hi"))
    assert answer.samples[0].finish.usage.num_completion_tokens == 5
    answer = await gateway.stub.Generate(request(6))
    assert answer.samples[0].finish.usage.num_completion_tokens == 6


async def test_a_chat_reaches_the_replica_as_its_template_writes_it(gateway: Any, replicas: Any) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    await gateway.stub.Generate(pb.GenerateRequest(chat=chat))
    tokens = await gateway.stub.Tokenize(pb.TokenizeRequest(chat=chat))
    assert replicas.tasks[0].prompt_ids == tuple(tokens.token_ids)
    assert tokens.text == "<user>hi</s>\n<assistant>"


async def test_request_ids_come_from_message_metadata_or_are_drawn(gateway: Any) -> None:
    stub = gateway.stub
    metadata = (("x-request-id", "from-metadata"),)
    given = await stub.Generate(request(1, request_id="from-message"), metadata=metadata)
    call = stub.Generate(request(1), metadata=metadata)
    drawn = await stub.Generate(request(1))
    assert given.request_id == "from-message"
    assert (await call).request_id == "from-metadata"
    assert len(drawn.request_id) == 32
    assert ("x-request-id", "from-metadata") in tuple(await call.initial_metadata())


async def test_a_client_that_leaves_stops_the_work(gateway: Any, replicas: Any, until: Any) -> None:
    replicas.pause_s = 0.01
    call = gateway.stub.GenerateStream(request(90, request_id="r1"))
    await call.read()
    call.cancel()
    await until(lambda: replicas.cancelled == ["r1"])
    assert replicas.num_chunks["r1"] < 20


async def test_a_cancelled_unary_call_stops_the_work(gateway: Any, replicas: Any, until: Any) -> None:
    replicas.pause_s = 0.01
    call = gateway.stub.Generate(request(90, request_id="r1"))
    await until(lambda: replicas.tasks)
    call.cancel()
    await until(lambda: replicas.cancelled == ["r1"])


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_a_deadline_stops_the_work(gateway: Any, replicas: Any, until: Any, method: str) -> None:
    """A deadline of 200 ms on a long generation: the caller is told, and the replica is free at once."""
    replicas.pause_s = 0.05
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        call = getattr(gateway.stub, method)(request(90, request_id="r1"), timeout=0.2)
        await call if method == "Generate" else [message async for message in call]
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: replicas.cancelled == ["r1"], 1.0)
    [task] = replicas.tasks
    assert task.deadline_at == pytest.approx(task.received_at + 0.2, abs=0.1)
    ended = {"method": method, "outcome": "deadline"}
    await until(lambda: gateway.value("ottserve_gateway_requests_finished_total", **ended) == 1)


async def test_a_live_id_is_refused_and_the_first_goes_on(gateway: Any, replicas: Any, refusal: Any) -> None:
    replicas.pause_s = 0.01
    first = aiter(gateway.stub.GenerateStream(request(20, request_id="same")))
    await anext(first)
    told = await refusal(gateway.stub.Generate(request(request_id="same")))
    assert told.code == grpc.StatusCode.ALREADY_EXISTS
    assert [message async for message in first][-1].finish.usage.num_completion_tokens == 20
    again = await gateway.stub.Generate(request(2, request_id="same"))
    assert again.samples[0].text == "0 1 "


async def test_abort_ends_a_stream_with_a_final_message(gateway: Any, replicas: Any, until: Any) -> None:
    replicas.pause_s = 0.01
    call = aiter(gateway.stub.GenerateStream(request(90, request_id="r1")))
    await anext(call)
    answer = await gateway.stub.Abort(pb.AbortRequest(request_id="r1"))
    again = await gateway.stub.Abort(pb.AbortRequest(request_id="r1"))
    messages = [message async for message in call]
    finished = await gateway.stub.Abort(pb.AbortRequest(request_id="r1"))
    unknown = await gateway.stub.Abort(pb.AbortRequest(request_id="r2"))
    assert [answer.found, again.found, finished.found, unknown.found] == [True, False, False, False]
    assert unknown.request_id == "r2"
    assert messages[-1].finish.reason == pb.FINISH_REASON_ABORTED
    ended = {"method": "GenerateStream", "outcome": "aborted"}
    await until(lambda: gateway.value("ottserve_gateway_requests_finished_total", **ended) == 1)


async def settled(read: Callable[[], int]) -> int:
    """The number once it has not changed for half a second."""
    before, now = -1, read()
    while now != before:
        await asyncio.sleep(0.5)
        before, now = now, read()
    return now


async def test_a_reader_that_sleeps_holds_no_memory_and_slows_nobody(gateway: Any, replicas: Any) -> None:
    """One reads a message and sleeps; its replica's stream stands still at what the transport holds (some 4 MB)."""
    replicas.payload = "x" * 500_000
    sleeper = aiter(gateway.stub.GenerateStream(request(90, request_id="sleeper")))
    await anext(sleeper)
    num_sent = await settled(lambda: replicas.num_chunks["sleeper"])
    began = time.monotonic()
    other = [message async for message in gateway.stub.GenerateStream(request(10, request_id="other"))]
    assert len(other) == 11
    assert time.monotonic() - began < 2.0
    assert replicas.num_chunks["sleeper"] == num_sent < 20
    rest = [message async for message in sleeper]
    assert rest[-1].finish.usage.num_completion_tokens == 90


async def test_a_silent_channel_stays_alive_under_keepalive_pings(start: Any) -> None:
    """A client that pings as often as permitted, with no call, is not sent away."""
    options = (
        ("grpc.keepalive_time_ms", 100),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    gateway = await start(options=options, keepalive={"min_ping_interval_s": 0.05})
    await gateway.stub.Generate(request(1))
    states = {gateway.channel.get_state()}
    for _ in range(15):
        await asyncio.sleep(0.1)
        states.add(gateway.channel.get_state())
    assert states == {grpc.ChannelConnectivity.READY}


async def test_a_task_tells_how_many_streams_the_gateway_carries(gateway: Any, replicas: Any, until: Any) -> None:
    """Those that have ended no more."""
    replicas.pause_s = 0.05
    calls = [gateway.stub.GenerateStream(request(50)) for _ in range(2)]
    for call in calls:
        await call.read()
    assert [task.num_streams for task in replicas.tasks] == [1, 2]
    for call in calls:
        call.cancel()
    await until(lambda: not replicas.live)
    replicas.pause_s = 0.0
    await gateway.stub.Generate(request(1))
    assert replicas.tasks[-1].num_streams == 1
