"""Prompt logprobs in blocks against all at once, and what may exist at once."""

from __future__ import annotations

import pytest
import torch

from ottserve.workers.engine import logprobs
from ottserve.workers.engine.logprobs import ROWS_PER_BLOCK, read_prompt_logprobs
from ottserve.workers.engine.readout import Readout

VOCAB = 50


@pytest.mark.parametrize("length", [1, ROWS_PER_BLOCK, ROWS_PER_BLOCK + 1, 3 * ROWS_PER_BLOCK - 1])
def test_blocks_give_what_all_rows_at_once_give(length):
    torch.manual_seed(length)
    hidden, weight = torch.randn(length, 8), torch.randn(VOCAB, 8)
    token_ids = torch.randint(VOCAB, (length,)).tolist()
    sizes = []

    def head(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(rows.shape[0])
        return rows @ weight.T

    readout = Readout()
    read = read_prompt_logprobs(readout, head, hidden, token_ids, num_top=2)
    told = read(readout.send().fetch())
    expected = (hidden @ weight.T).log_softmax(-1)
    assert max(sizes) <= ROWS_PER_BLOCK and sum(sizes) == length
    assert [each.token_id for each in told] == token_ids
    assert [each.logprob for each in told] == pytest.approx(expected[range(length), token_ids].tolist(), abs=1e-4)
    top, _ = expected.topk(2)
    assert [[value for _, value in each.top] for each in told] == [pytest.approx(row, abs=1e-4) for row in top.tolist()]


def test_a_vocabulary_smaller_than_the_lookup_is_told_whole():
    readout = Readout()
    read = logprobs.read_logprobs(readout, torch.zeros(1, 3), torch.tensor([1]), [20])
    [told] = read(readout.send().fetch())
    assert [token_id for token_id, _ in told.top] == [0, 1, 2]
