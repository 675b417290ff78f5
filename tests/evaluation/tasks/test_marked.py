"""Going on from a mark, again and again, is as if nothing had come between."""

from __future__ import annotations

import pytest
import torch

from ottserve.evaluation.policies import parse_policy
from ottserve.evaluation.tasks.marked import MOST_EXACT, MarkedStream, marked_stream
from ottserve.workers.models.loading import LoadedModel

ROWS = ["fp16:group=32,window=16", "ott:group=32,window=16", "kivi:group=32,window=16"]


def stream_of(model: LoadedModel, row: str) -> MarkedStream:
    return marked_stream(model, parse_policy(row), 400)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(
    "num_read", [40, 110, 111, 112]
)  # no page yet; a seal within, at and right before the question
def test_a_rewound_stream_goes_on_as_a_fresh_one(
    tiny_model: LoadedModel, token_ids: tuple[int, ...], row: str, num_read: int
) -> None:
    context, first, second = token_ids[:num_read], token_ids[150:250], token_ids[250:270]
    stream = stream_of(tiny_model, row)
    stream.read(context)
    mark = stream.mark()
    stream.logits(first)  # seals three pages that the other way on must not see
    stream.rewind(mark)
    found = stream.logits(second)
    fresh = stream_of(tiny_model, row)
    fresh.read(context)
    torch.testing.assert_close(found, fresh.logits(second), atol=0, rtol=0)


def test_logits_are_those_of_each_token(tiny_model: LoadedModel, token_ids: tuple[int, ...]) -> None:
    whole = stream_of(tiny_model, ROWS[0]).logits(token_ids[:200])
    assert whole.shape == (200, 32)
    stream = stream_of(tiny_model, ROWS[0])
    stream.read(token_ids[:150])
    torch.testing.assert_close(stream.logits(token_ids[150:200]), whole[150:], atol=0.02, rtol=0)


def test_tails_that_would_hold_what_is_asked_are_refused(tiny_model: LoadedModel) -> None:
    with pytest.raises(ValueError, match=f"window=100: 356 tokens are kept exact, at most {MOST_EXACT} can be"):
        stream_of(tiny_model, "ott:group=256,window=100")
    with pytest.raises(ValueError, match="1025 tokens are needed, the model has positions for 1024"):
        marked_stream(tiny_model, parse_policy("ott"), 1025)
