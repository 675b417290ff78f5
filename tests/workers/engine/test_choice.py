"""Choosing a token against the definition, written in plain Python over the whole vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ottserve.workers.api import SamplingParams
from ottserve.workers.engine.choice import Draw, pack_draws
from ottserve.workers.engine.choice import choose as choose_by
from ottserve.workers.engine.pack import Pack
from ottserve.workers.engine.uniforms import mixed, uniforms

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5])

Row = tuple[SamplingParams, float]


def choose(logits: torch.Tensor, rows: list[Row], num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and whether each is right; a row is its parameters and its number in [0, 1)."""
    pack = Pack()
    draws = pack_draws(pack, [Draw.by(params) for params, _ in rows], [number for _, number in rows])
    tokens, is_right = choose_by(logits, logits.argmax(-1), draws, pack.send(logits.device), num_candidates)
    right = torch.ones(len(rows), dtype=torch.bool)
    if is_right is not None:
        right[draws.of_some.index] = is_right
    return tokens, right


def uniform(seed: int, index: int) -> float:
    return uniforms(mixed([seed]), [index]).item()


def chosen(logits: list[float], params: SamplingParams, draw: float) -> int:
    """The token by definition: sort, cut with ties, renormalise, walk along the ids."""
    if params.temperature == 0:
        return max(range(len(logits)), key=logits.__getitem__)
    largest = max(logits)
    weights = [math.exp((logit - largest) / params.temperature) for logit in logits]
    kept = set(range(len(logits)))
    if params.top_k:
        least = sorted(logits, reverse=True)[min(params.top_k, len(logits)) - 1]
        kept = {i for i in kept if logits[i] >= least}
    if params.top_p < 1:
        mass, before, least = sum(weights[i] for i in kept), 0.0, largest
        for i in sorted(kept, key=lambda i: -logits[i]):
            if before < params.top_p * mass:
                least = logits[i]
            before += weights[i]
        kept = {i for i in kept if logits[i] >= least}
    kept = {i for i in kept if weights[i] >= params.min_p}
    target, running = draw * sum(weights[i] for i in kept), 0.0
    for i in sorted(kept):
        running += weights[i]
        if running > target:
            return i
    return max(kept)


# Quarters are exact in float32 and make ties; the draw and the cuts are odd, so that no sum falls on a border.
ROW = st.lists(st.integers(-40, 40).map(lambda i: i / 4), min_size=1, max_size=40)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 50]),
    top_p=st.sampled_from([1.0, 0.9137, 0.5003, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0317, 0.4321, 1.0]),
)


@settings(deadline=None)
@given(logits=ROW, params=PARAMS, draw=st.integers(0, 999).map(lambda i: (i + 0.1234) / 1000))
def test_follows_the_definition(logits, params, draw):
    token, is_right = choose(torch.tensor([logits]), [(params, draw)], len(logits))
    assert bool(is_right)
    assert logits[int(token)] == logits[chosen(logits, params, draw)]
    if params.temperature > 0:
        assert int(token) == chosen(logits, params, draw)


@settings(deadline=None)
@given(logits=ROW, params=PARAMS, num_candidates=st.integers(1, 45), draw=st.sampled_from([0.0123, 0.5123, 0.9877]))
def test_few_candidates_either_give_the_same_token_or_say_so(logits, params, num_candidates, draw):
    row, draws = torch.tensor([logits]), [(params, draw)]
    few, is_right = choose(row, draws, num_candidates)
    if bool(is_right):
        assert int(few) == int(choose(row, draws, len(logits))[0])


def test_candidates_that_hold_all_that_is_kept_are_enough():
    logits = torch.arange(100.0).flip(0).unsqueeze(0)
    assert bool(choose(logits, [(SamplingParams(top_p=0.99), 0.5)], 20)[1])
    assert bool(choose(logits, [(SamplingParams(top_k=19), 0.5)], 20)[1])
    assert not bool(choose(logits, [(SamplingParams(top_k=21), 0.5)], 20)[1])
    assert not bool(choose(torch.zeros(1, 100), [(SamplingParams(min_p=0.5), 0.5)], 20)[1])


@settings(deadline=None)
@given(rows=st.lists(st.tuples(ROW, PARAMS, st.floats(0, 0.999)), min_size=2, max_size=6), order=st.randoms())
def test_rows_do_not_feel_their_batch_mates(rows, order):
    """The same token in any batch and any order, however the mates are cut."""
    width = max(len(row) for row, _, _ in rows)
    logits = torch.tensor([row + [-50.0] * (width - len(row)) for row, _, _ in rows])
    draws = [(params, draw) for _, params, draw in rows]
    alone = [int(choose(logits[i : i + 1], draws[i : i + 1], 8)[0]) for i in range(len(rows))]
    index = list(range(len(rows)))
    order.shuffle(index)
    together, _ = choose(logits[index], [draws[i] for i in index], 8)
    assert together.tolist() == [alone[i] for i in index]


def test_shares_follow_the_probabilities():
    params = SamplingParams(temperature=0.7)
    draws = [(params, uniform(3, index)) for index in range(4000)]
    tokens, _ = choose(LOGITS.expand(4000, -1), draws, 8)
    shares = (torch.bincount(tokens, minlength=5) / 4000).tolist()
    assert shares == pytest.approx((LOGITS / 0.7).softmax(-1).tolist(), abs=0.03)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-10),
        SamplingParams(temperature=1e-45),
        SamplingParams(temperature=100.0, top_k=1),
        SamplingParams(temperature=100.0, top_p=1e-6),
        SamplingParams(temperature=100.0, min_p=1.0),
    ],
)
def test_the_narrowest_settings_are_greedy(params):
    tokens, _ = choose(LOGITS.expand(50, -1), [(params, i / 50) for i in range(50)], 8)
    assert set(tokens.tolist()) == {1}


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.9)])
def test_no_token_of_probability_zero_is_ever_chosen(params):
    logits = torch.full((1, 300), -torch.inf)
    logits[0, 7] = 0.0
    for draw in (0.0, 0.5, math.nextafter(1, 0)):
        assert int(choose(logits, [(params, draw)], 300)[0]) == 7


def test_uniform_is_uniform_and_fixed():
    values = [uniform(seed, index) for seed in range(40) for index in range(50)]
    assert len(set(values)) == 2000
    assert min(values) >= 0 and max(values) < 1
    assert sum(values) / 2000 == pytest.approx(0.5, abs=0.02)
    assert uniform(2**64 - 1, 2**31) == uniform(2**64 - 1, 2**31)


@pytest.mark.parametrize("num_candidates", [3, len(LOGITS)])
@pytest.mark.parametrize(
    "params", [SamplingParams(1.0, top_p=0.5), SamplingParams(1.0, top_k=2), SamplingParams(1.0, min_p=0.3)]
)
def test_a_row_that_is_no_number_spoils_no_other(params, num_candidates):
    rows = torch.stack([LOGITS, torch.full_like(LOGITS, torch.nan), LOGITS])
    tokens, _ = choose(rows, [(params, 0.3)] * 3, num_candidates)
    assert tokens[0] == tokens[2] == chosen(LOGITS.tolist(), params, 0.3)
    assert 0 <= tokens[1] < len(LOGITS)
