"""The order of operations on a row, logprobs, and that no row feels another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ottserve.workers.api import SamplingParams, StopParams, TokenLogprob
from ottserve.workers.engine.pack import Pack
from ottserve.workers.engine.penalties import History, TokenCounts
from ottserve.workers.engine.readout import Readout
from ottserve.workers.engine.sampler import SampledRow, SampledToken, Sampler, Sampling

VOCAB = 40
EOS = 0
GREEDY = SamplingParams(temperature=0.0)


def sampler(num_slots: int = 8, vocab_size: int = VOCAB) -> Sampler:
    return Sampler(TokenCounts(num_slots, vocab_size, torch.device("cpu")), {EOS})


def row(
    params: SamplingParams = GREEDY,
    stops: StopParams | None = None,
    history: History | None = None,
    num_logprobs: int | None = None,
    permitted: torch.Tensor | None = None,
) -> SampledRow:
    sampling = Sampling.by(params, stops or StopParams(10), params.seed, num_logprobs)
    return SampledRow(sampling, history or History([3], 1, 0), permitted)


def run(logits: torch.Tensor, *rows: SampledRow, num_candidates: int = 8) -> list[SampledToken]:
    pack, readout, own = Pack(), Readout(), sampler()
    prepared = own.prepare(pack, rows)
    sampled = own.sample(logits, prepared, pack.send(logits.device), readout, num_candidates)
    return sampled.read(readout.send().fetch())


def falling(*likeliest: int) -> torch.Tensor:
    """Logits in which these tokens are likeliest, in this order, by 1 each."""
    logits = torch.full((1, VOCAB), -10.0)
    for rank, token_id in enumerate(likeliest):
        logits[0, token_id] = 5.0 - rank
    return logits


def bits(*token_ids: int) -> torch.Tensor:
    """A mask that permits these tokens."""
    words = [0] * 2
    for token_id in token_ids:
        words[token_id // 32] |= 1 << token_id % 32
    return torch.tensor([word - (1 << 32) if word >= 1 << 31 else word for word in words], dtype=torch.int32)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        pytest.param({}, 7, id="nothing"),
        pytest.param({"params": replace(GREEDY, logit_bias=((9, 1.5), (11, 0.5)))}, 9, id="bias"),
        pytest.param({"params": replace(GREEDY, logit_bias=((7, -100.0),))}, 9, id="bias against"),
        pytest.param({"params": replace(GREEDY, repetition_penalty=2.0), "history": History([7], 1, 0)}, 9, id="said"),
        pytest.param({"params": replace(GREEDY, presence_penalty=1.5), "history": History([7], 1, 0)}, 7, id="prompt"),
        pytest.param({"params": replace(GREEDY, presence_penalty=1.5), "history": History([1, 7], 1, 0)}, 9, id="once"),
        pytest.param({"permitted": bits(31, 11, 39)}, 11, id="form"),
        pytest.param({"permitted": bits(31)}, 31, id="form with the highest bit of a word"),
        pytest.param({"stops": StopParams(9, min_new_tokens=1, stop_token_ids=(7,))}, 9, id="stop token too early"),
        pytest.param({"stops": StopParams(9, min_new_tokens=0, stop_token_ids=(7,))}, 7, id="stop token in time"),
        pytest.param(
            {"params": replace(GREEDY, logit_bias=((9, 1.5),)), "permitted": bits(7)}, 7, id="no bias beats a form"
        ),
    ],
)
def test_each_option_by_itself(asked, expected):
    [token] = run(falling(7, 9, 11), row(**asked))
    assert token.token_id == expected


DRAWN = SamplingParams(temperature=1.0, seed=3)
CUT = replace(DRAWN, top_p=0.5)


@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, logit_bias=((9, 1.0),)), DRAWN, CUT])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_numbers_are_told_of_for_their_row_alone(params, value):
    spoilt, sound = falling(7, 9), falling(7, 9)
    if value == -torch.inf:
        spoilt[:] = value  # one among others is none that can be chosen
        sound[0, 11] = value
    else:
        spoilt[0, 11] = value
    tokens = run(torch.cat([sound, spoilt, sound]), row(params), row(params), row(params), num_candidates=2)
    assert [token.has_numbers for token in tokens] == [True, False, True]


def test_the_first_of_equal_logits_is_the_likeliest():
    [token] = run(falling(31, 9).clamp(max=4.0), row())
    assert token.token_id == 9


def test_penalties_see_what_the_bias_made():
    """Repetition divides what is positive: 5 − 5.5 is not, so it is multiplied and falls behind token 9 at −0.6."""
    params = replace(GREEDY, logit_bias=((7, -5.5), (9, -4.6)), repetition_penalty=2.0)
    [token] = run(falling(7, 9), row(params, history=History([7], 1, 0)))
    assert token.token_id == 9


def test_min_new_tokens_holds_back_eos_until_then():
    logits = falling(EOS, 4)
    stops = StopParams(9, min_new_tokens=2)
    early = [run(logits, row(stops=stops, history=History([3] * n, 1, 0)))[0].token_id for n in (1, 2, 3)]
    assert early == [4, 4, EOS]
    ignoring = replace(stops, ignore_eos=True)
    assert run(logits, row(stops=ignoring))[0].token_id == EOS


def test_logprobs_are_the_models_own():
    """Bias and temperature move the choice, but not what is told of it; top tokens come likeliest first, ties by id."""
    logits = falling(7, 9)
    logits[0, 11] = 4.0
    params = replace(GREEDY, logit_bias=((9, 9.0),))
    [token] = run(logits.bfloat16(), row(params, num_logprobs=3))
    expected = logits.log_softmax(-1)[0]
    assert token.logprob is not None
    assert (token.token_id, token.logprob.token_id) == (9, 9)
    assert token.logprob.logprob == pytest.approx(expected[9].item(), abs=1e-5)
    assert [token_id for token_id, _ in token.logprob.top] == [7, 9, 11]
    assert [value for _, value in token.logprob.top] == pytest.approx(expected[[7, 9, 11]].tolist(), abs=1e-5)


def test_logprobs_are_told_to_whom_they_were_promised():
    tokens = run(falling(7, 9).expand(3, -1), row(), row(num_logprobs=0), row(num_logprobs=1))
    assert tokens[0].logprob is None
    assert tokens[1].logprob == TokenLogprob(7, pytest.approx(tokens[2].logprob.logprob), ())
    assert len(tokens[2].logprob.top) == 1


def test_a_wide_row_is_chosen_again_of_the_whole_vocabulary():
    params = SamplingParams(temperature=100.0, top_p=0.99)
    rows = [row(replace(params, seed=seed), num_logprobs=1) for seed in range(200)]
    logits = torch.linspace(0, 1, VOCAB).expand(200, -1)
    few, all_ = run(logits, *rows, num_candidates=4), run(logits, *rows, num_candidates=VOCAB)
    assert [token._replace(is_on_device=True) for token in few] == all_
    assert len({token.token_id for token in few}) > 30
    assert 150 < sum(not token.is_on_device for token in few) < 200  # of 4 tokens, some draws give the right one


def test_what_is_chosen_again_is_drawn_with_the_same_number_though_the_text_has_grown_meanwhile():
    """With what had been adjusted, too: a barred token, and one counted, are so as of the step."""
    params = SamplingParams(temperature=100.0, top_p=0.99, frequency_penalty=1.0, logit_bias=((VOCAB - 1, -1000.0),))
    logits = torch.linspace(0, 1, VOCAB).expand(50, -1)

    def tokens(grows: bool) -> list[int]:
        rows = [row(replace(params, seed=seed), StopParams(9, min_new_tokens=1)) for seed in range(50)]
        rows = [each._replace(history=History([3], 1, slot)) for slot, each in enumerate(rows)]
        pack, readout, own = Pack(), Readout(), sampler(num_slots=50)
        prepared = own.prepare(pack, rows)
        sampled = own.sample(logits, prepared, pack.send(logits.device), readout, 4)
        for each in rows if grows else []:
            each.history.token_ids.append(-1)
        return [token.token_id for token in sampled.read(readout.send().fetch())]

    assert tokens(grows=True) == tokens(grows=False)
    assert not {EOS, VOCAB - 1} & set(tokens(grows=True))


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 3.0]),
    top_k=st.sampled_from([0, 3, 30]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 2**64 - 1),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, -0.3]),
    logit_bias=st.sampled_from([(), ((2, 1.0), (5, -3.0))]),
)
STOPS = st.builds(
    StopParams,
    max_new_tokens=st.just(50),
    min_new_tokens=st.sampled_from([0, 4]),
    stop_token_ids=st.sampled_from([(), (1, 2)]),
    ignore_eos=st.booleans(),
)
ASKED = st.tuples(
    PARAMS,
    STOPS,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
    st.none() | st.integers(0, 20),
    st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=5),
)


@settings(deadline=None)
@given(asked=st.lists(ASKED, min_size=2, max_size=6), noise=st.integers(0, 5), order=st.randoms())
def test_rows_do_not_feel_their_batch_mates(asked, noise, order):
    """Whatever options the mates have: alone, together and in another order each row gets the same token."""
    logits = torch.randn(len(asked), VOCAB, generator=torch.Generator().manual_seed(noise)).mul(2).round(decimals=1)
    rows = [
        row(params, stops, History(ids, 1, slot), num_logprobs=num, permitted=None if form is None else bits(*form))
        for slot, (params, stops, ids, num, form) in enumerate(asked)
    ]
    alone = [run(logits[i : i + 1], rows[i])[0] for i in range(len(rows))]
    index = list(range(len(rows)))
    order.shuffle(index)
    assert run(logits[index], *[rows[i] for i in index]) == [alone[i] for i in index]
