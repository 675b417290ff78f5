"""n samples, priority and salt between the client's values and the wire."""

from __future__ import annotations

from ottserve.client.messages import generate_request, read_answer, read_chunk
from ottserve.client.types import Options
from ottserve.v1 import generation_pb2 as pb


def test_absent_options_are_absent_on_the_wire() -> None:
    request = generate_request("hi", Options())
    assert not request.HasField("n") and not request.HasField("priority") and request.cache_salt == ""


def test_options_reach_the_wire() -> None:
    request = generate_request("hi", Options(n=3, priority=-5, cache_salt="tenant"))
    assert (request.n, request.priority, request.cache_salt) == (3, -5, "tenant")


def test_an_answer_has_its_other_samples() -> None:
    samples = [
        pb.Sample(index=index, text=text, token_ids=[index], finish=pb.Finish(index=index, reason=1, seed=index))
        for index, text in enumerate("ab")
    ]
    answer = read_answer(pb.GenerateResponse(request_id="r", samples=samples))
    assert (answer.text, answer.finish.index, answer.finish.seed) == ("a", 0, 0)
    [other] = answer.others
    assert (other.request_id, other.text, other.finish.index, other.finish.seed) == ("r", "b", 1, 1)


def test_chunks_tell_their_sample() -> None:
    chunk = read_chunk(pb.GenerateStreamResponse(chunk=pb.Chunk(index=2, text="x")))
    end = read_chunk(pb.GenerateStreamResponse(finish=pb.Finish(index=3, reason=1)))
    assert (chunk.index, end.index) == (2, 3)
