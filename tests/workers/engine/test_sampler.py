"""Sampling against what its definition gives."""

from __future__ import annotations

import math

import pytest
import torch

from ottserve.workers.api import SamplingParams
from ottserve.workers.engine.sampler import SampledRow, sample, uniform

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5])


def draws(params: SamplingParams, logits: torch.Tensor = LOGITS, count: int = 4000) -> list[float]:
    """Share of each token over many tokens of one seed."""
    rows = [SampledRow(params, index) for index in range(count)]
    tokens = torch.tensor(sample(logits.expand(count, -1), rows))
    return (torch.bincount(tokens, minlength=logits.numel()) / count).tolist()


def test_shares_follow_the_probabilities():
    expected = (LOGITS / 0.7).softmax(-1).tolist()
    assert draws(SamplingParams(temperature=0.7, seed=3)) == pytest.approx(expected, abs=0.03)


def test_top_k_keeps_k_and_renormalises():
    shares = draws(SamplingParams(temperature=1.0, top_k=2, seed=3))
    odds = 1 / (1 + math.exp(-0.5))
    assert shares == pytest.approx([0, odds, 0, 0, 1 - odds], abs=0.03)


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    first, second = LOGITS.softmax(-1)[[1, 4]].tolist()
    just_one = draws(SamplingParams(temperature=1.0, top_p=first - 1e-6, seed=3), count=200)
    assert just_one[1] == 1.0
    two = draws(SamplingParams(temperature=1.0, top_p=first + second - 1e-6, seed=3))
    assert two[4] > 0.2 and two[0] == two[2] == two[3] == 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-10, seed=5),
        SamplingParams(temperature=100.0, top_k=1, seed=5),
        SamplingParams(temperature=100.0, top_p=1e-6, seed=5),
    ],
)
def test_the_narrowest_settings_are_greedy(params):
    assert draws(params, count=50)[1] == 1.0


def test_a_temperature_of_100_and_more_places_than_tokens_stay_valid():
    shares = draws(SamplingParams(temperature=100.0, top_k=6, seed=1))
    assert sum(shares) == pytest.approx(1.0) and min(shares) > 0.1


def test_no_token_of_probability_zero_is_ever_chosen():
    logits = torch.full((300,), -torch.inf)
    logits[7] = 0.0
    for params in (SamplingParams(1.0, seed=1), SamplingParams(1.0, top_k=5, seed=1), SamplingParams(1.0, top_p=0.9)):
        assert draws(params, logits, count=300)[7] == 1.0


def test_rows_do_not_feel_their_batch_mates():
    torch.manual_seed(0)
    logits = torch.randn(12, 200)
    kinds = [
        SamplingParams(0.0),
        SamplingParams(1.0, seed=1),
        SamplingParams(0.5, 20, seed=2),
        SamplingParams(2.0, 0, 0.8),
    ]
    rows = [SampledRow(kinds[index % 4], index) for index in range(12)]
    alone = [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(12)]
    assert sample(logits, rows) == alone
    order = [7, 2, 11, 0, 5, 9, 1, 3]
    assert sample(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]


def test_uniform_is_uniform_and_fixed():
    values = [uniform(seed, index) for seed in range(40) for index in range(50)]
    assert len(set(values)) == 2000
    assert min(values) >= 0 and max(values) < 1
    assert sum(values) / 2000 == pytest.approx(0.5, abs=0.02)
    assert uniform(2**64 - 1, 2**31) == uniform(2**64 - 1, 2**31)
