"""The path of a request through the real server: what comes back, and what reaches the replica."""

from typing import Any

from ottserve.v1 import generation_pb2 as pb


def request(max_new_tokens: int = 3, **fields: object) -> pb.GenerateRequest:
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
