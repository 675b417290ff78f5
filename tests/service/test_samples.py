"""n samples, priority, salts and FlushCache through the real gRPC."""

from typing import Any

import grpc

from ottserve.v1 import generation_pb2 as pb


def three_samples() -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hi", n=3, stops=pb.StopParams(max_new_tokens=2), sampling=pb.SamplingParams(seed=5))


async def test_a_whole_answer_has_every_sample_by_index(gateway: Any) -> None:
    answer = await gateway.stub.Generate(three_samples())
    assert [(s.index, s.text, list(s.token_ids), s.finish.index) for s in answer.samples] == [
        (index, "0 1 ", [0, 1], index) for index in range(3)
    ]


async def test_a_stream_names_the_sample_of_each_chunk_and_ends_with_the_last(gateway: Any) -> None:
    messages = [message async for message in gateway.stub.GenerateStream(three_samples())]
    texts = dict.fromkeys(range(3), "")
    for message in messages:
        if message.HasField("chunk"):
            texts[message.chunk.index] += message.chunk.text
    assert texts == dict.fromkeys(range(3), "0 1 ")
    assert [message.finish.index for message in messages if message.HasField("finish")] == [0, 1, 2]
    assert messages[-1].HasField("finish")


async def test_samples_are_measured_each_and_the_prompt_once(gateway: Any) -> None:
    await gateway.stub.Generate(three_samples())
    counts = {
        name: gateway.value(f"ottserve_gateway_{name}_count")
        for name in ("prompt_tokens", "output_tokens", "time_to_first_token_seconds", "inter_token_seconds")
    }
    assert counts == {
        "prompt_tokens": 1, "output_tokens": 3, "time_to_first_token_seconds": 1, "inter_token_seconds": 3,
    }  # fmt: skip


async def test_all_samples_count_against_the_tokens_in_flight(start: Any, refusal: Any) -> None:
    gateway = await start(admission={"max_tokens": 9})
    task = {"text": "hi", "stops": pb.StopParams(max_new_tokens=2)}
    assert (await gateway.stub.Generate(pb.GenerateRequest(**task, n=3))).samples
    told = await refusal(gateway.stub.Generate(pb.GenerateRequest(**task, n=4)))
    assert told.code == grpc.StatusCode.INVALID_ARGUMENT and "at most 9" in told.message


async def test_priority_and_salt_reach_the_replica(gateway: Any, replicas: Any) -> None:
    await gateway.stub.Generate(pb.GenerateRequest(text="hi", priority=-100, cache_salt="tenant"))
    [task] = replicas.tasks
    assert (task.priority, task.cache_salt, task.n) == (-100, "tenant", 1)


async def test_flush_cache_adds_up_what_was_dropped(gateway: Any) -> None:
    assert (await gateway.stub.FlushCache(pb.FlushCacheRequest())).num_pages_dropped == 2
