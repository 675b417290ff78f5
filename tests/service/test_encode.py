"""How logprobs and matched stops travel: complete, in order, and in messages of bounded size."""

from __future__ import annotations

from ottserve.service.encode import PROMPT_TOKENS_PER_MESSAGE, stream_messages, whole_answer
from ottserve.workers import api

TOP = tuple((token_id, -token_id / 7) for token_id in range(100_000, 100_020))


def finish(**more: object) -> api.Finish:
    return api.Finish(
        api.FinishReason.STOP_TOKEN, api.Usage(1, 0, 1), api.Timings(0.0, 0.0, 0.0, 0.0), 2**64 - 1, **more
    )


def test_prompt_logprobs_come_in_pieces_that_no_limit_refuses() -> None:
    prompt = (None, *(api.TokenLogprob(i, -0.5, TOP) for i in range(10_000)))
    messages = list(stream_messages(api.TextChunk("r", "", (), prompt_logprobs=prompt)))
    assert all(message.ByteSize() < 1 << 20 for message in messages)
    assert len(messages) == -(-len(prompt) // PROMPT_TOKENS_PER_MESSAGE)
    tokens = [token for message in messages for token in message.prompt_logprobs.tokens]
    assert not tokens[0].HasField("chosen")
    assert [token.chosen.token_id for token in tokens[1:]] == list(range(10_000))
    assert [each.token_id for each in tokens[-1].top] == [token_id for token_id, _ in TOP]


def test_logprobs_stand_beside_their_tokens() -> None:
    chunks = [
        api.TextChunk("r", "", (), prompt_logprobs=(None,)),
        api.TextChunk("r", "a", (5,), logprobs=(api.TokenLogprob(5, -0.25, ((6, -0.125),)),)),
        api.TextChunk("r", "", (7,), finish(matched_stop_token_id=7), logprobs=(api.TokenLogprob(7, -3.0),)),
    ]
    answer = whole_answer("r", chunks)
    [sample] = answer.samples
    assert [(each.chosen.token_id, each.chosen.logprob) for each in sample.logprobs] == [(5, -0.25), (7, -3.0)]
    assert [(each.token_id, each.logprob) for each in sample.logprobs[0].top] == [(6, -0.125)]
    assert len(answer.prompt_logprobs) == 1
    assert sample.finish.WhichOneof("matched") == "matched_stop_token_id"
    streamed = [message for chunk in chunks for message in stream_messages(chunk)]
    assert [message.WhichOneof("event") for message in streamed] == ["prompt_logprobs", "chunk", "chunk", "finish"]
    assert [each.chosen.token_id for message in streamed for each in message.chunk.logprobs] == [5, 7]
