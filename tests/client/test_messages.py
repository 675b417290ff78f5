"""Every option reaches the message, and everything told of tokens comes back."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from ottserve import client as oc
from ottserve.client.messages import generate_request, read_answer, read_chunk
from ottserve.v1 import generation_pb2 as pb

CHANGED: dict[str, Any] = {
    "stop": (".",),
    "stop_token_ids": (5,),
    "logit_bias": {5: -1.0},
    "choice": ("a", "b"),
    "json_schema": "{}",
    "regex": "a",
    "grammar": "root ::= [a]",
    "cache_salt": "tenant",
    "request_id": "r",
    "model": "toy",
}


@pytest.mark.parametrize("name", [field.name for field in fields(oc.Options)])
def test_every_option_changes_the_message(name: str) -> None:
    options = replace(oc.Options(), **{name: CHANGED.get(name, 1)})
    assert generate_request("hi", options) != generate_request("hi", oc.Options())


def test_an_answer_has_one_form() -> None:
    with pytest.raises(ValueError, match="json_schema and regex"):
        generate_request("hi", oc.Options(json_schema="{}", regex="a"))


def test_logprobs_come_back() -> None:
    told = pb.TokenLogprobs(chosen=pb.TokenLogprob(token_id=5, logprob=-0.5), top=[pb.TokenLogprob(token_id=6)])
    expected = oc.TokenLogprob(5, -0.5, ((6, 0.0),))
    sample = pb.Sample(token_ids=[5], logprobs=[told], finish=pb.Finish(reason=pb.FINISH_REASON_EOS))
    answer = read_answer(pb.GenerateResponse(samples=[sample], prompt_logprobs=[pb.TokenLogprobs(), told]))
    assert (answer.logprobs, answer.prompt_logprobs) == ((expected,), (None, expected))
    chunk = read_chunk(pb.GenerateStreamResponse(chunk=pb.Chunk(token_ids=[5], logprobs=[told])))
    assert (chunk.logprobs, chunk.prompt_logprobs) == ((expected,), ())
    piece = pb.PromptLogprobs(tokens=[pb.TokenLogprobs(), told])
    assert read_chunk(pb.GenerateStreamResponse(prompt_logprobs=piece)).prompt_logprobs == (None, expected)
