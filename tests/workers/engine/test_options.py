"""What a request may ask for, through the whole engine, against answers worked out by hand (see `models/toy.py`).

Greedily the toy says the sign after the last one that was not seen yet, `a` is token 1, and after `?` comes EOS.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ottserve.workers.api import FinishReason, InvalidField, SamplingParams, TextChunk
from ottserve.workers.models.toy import SIGNS

A, B, C, D, E = range(1, 6)


@pytest.fixture
def ask(make_task):
    """A greedy task with changed sampling parameters, stops or output."""

    def make(prompt="a", request_id="r", max_new=4, output=None, sampling=None, **stops):
        task = make_task(prompt, request_id=request_id, max_new=max_new)
        sampling = replace(task.sampling, **(sampling or {}))
        return replace(task, sampling=sampling, stops=replace(task.stops, **stops), **(output or {}))

    return make


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        pytest.param({}, "bcde", id="nothing"),
        pytest.param({"logit_bias": ((C, -50.0),)}, "bdef", id="never c"),
        pytest.param({"logit_bias": ((E, 50.0),)}, "efgh", id="e, until it is seen"),
        pytest.param({"presence_penalty": -100.0}, "bcde", id="a reward too small for the toy, who takes off 2048"),
    ],
)
def test_bias_and_penalties_reach_the_choice(make_engine, ask, run_to_end, sampling, text):
    assert run_to_end(make_engine(), ask(sampling=sampling)).text["r"] == text


@pytest.mark.parametrize(("penalty", "text"), [(1e-4, "aaaa"), (1.0, "bcde")])
def test_a_repetition_penalty_below_1_brings_back_what_was_said(make_engine, ask, run_to_end, penalty, text):
    """A seen sign stands 2048 below the others; a ten-thousandth of that is little beside 50 that all others lose."""
    others = tuple((sign, -50.0) for sign in range(len(SIGNS)) if sign != A)
    sampling = {"repetition_penalty": penalty, "logit_bias": others}
    assert run_to_end(make_engine(), ask(sampling=sampling)).text["r"] == text


def test_penalties_follow_the_slot_from_request_to_request(make_engine, ask, run_to_end):
    """The second request has the first one's slot, but none of its counts."""
    engine = make_engine(max_running=1)
    sampling = {"frequency_penalty": 2.5, "logit_bias": tuple((sign, 0.0) for sign in (A, B))}
    alone = run_to_end(make_engine(max_running=1), ask("dcba", "second", 9, sampling=sampling)).token_ids["second"]
    tasks = ask("abcd", "first", 9, sampling=sampling), ask("dcba", "second", 9, sampling=sampling)
    assert run_to_end(engine, *tasks).token_ids["second"] == alone


def test_stop_tokens_and_eos(make_engine, ask, run_to_end):
    answers = run_to_end(make_engine(), ask(stop_token_ids=(D,), max_new=9))
    finish = answers.ends["r"].finish
    assert (answers.text["r"], answers.token_ids["r"]) == ("bc", (B, C, D))
    assert (finish.reason, finish.matched_stop_token_id) == (FinishReason.STOP_TOKEN, D)
    answers = run_to_end(make_engine(), ask("?", ignore_eos=True, max_new=3))
    assert answers.token_ids["r"][0] == 0 and len(answers.token_ids["r"]) == 3
    assert answers.reason("r") is FinishReason.LENGTH


def test_nothing_ends_an_answer_before_its_fewest_tokens(make_engine, ask, run_to_end):
    answers = run_to_end(make_engine(), ask("?", max_new=6, min_new_tokens=3, stop_token_ids=(C,)))
    assert not {0, C} & set(answers.token_ids["r"][:3])
    answers = run_to_end(make_engine(), ask(stop=("bc", "e"), max_new=9, min_new_tokens=2))
    assert answers.text["r"] == "bcd"


def test_logprobs_are_the_softmax_of_the_models_logits(make_engine, ask):
    """After "a": b, c, d have logits 3, 2, 1, a itself −2048, the other 28 signs 0; bias does not show.

    The norms before the head make that a little less exact.
    """
    chunks = chunks_of(make_engine(), ask(output={"logprobs": 2}, sampling={"logit_bias": ((D, 9.0),)}, max_new=1))
    [told] = [each for chunk in chunks for each in chunk.logprobs]
    logits = torch.tensor([3.0, 2.0, 1.0] + [0.0] * 28)
    expected = (logits - logits.logsumexp(0)).tolist()
    assert (told.token_id, told.logprob) == (D, pytest.approx(expected[2], abs=0.02))
    assert [token_id for token_id, _ in told.top] == [B, C]
    assert [value for _, value in told.top] == pytest.approx(expected[:2], abs=0.02)


@pytest.mark.parametrize("budget", [8, 64])
@pytest.mark.parametrize("length", [1, 2, 33, 100])
def test_prompt_logprobs_come_whole_and_before_the_first_token(make_engine, ask, length, budget):
    """However the prompt is cut into steps, and although its pages are cached from the round before."""
    engine = make_engine(max_tokens_per_step=budget)
    prompt = ("abcdefg" * length)[:length]
    for _ in range(2):
        chunks = chunks_of(engine, ask(prompt, output={"prompt_logprobs": 1}, max_new=2))
        first = next(i for i, chunk in enumerate(chunks) if chunk.token_ids)
        assert not any(chunk.prompt_logprobs for chunk in chunks[first:])
        told = [each for chunk in chunks for each in chunk.prompt_logprobs]
        assert told[0] is None
        assert [SIGNS[each.token_id] for each in told[1:]] == list(prompt[1:])
        if length > 1:
            assert told[1].logprob == pytest.approx(told[1].top[0][1]), "b is what the toy says after a"
        assert chunks[-1].finish.usage.num_cached_tokens == 0


@pytest.mark.parametrize("budget", [256, 2048])
def test_logprobs_of_the_longest_prompt_come_in_pieces(make_random_engine, ask, run_to_end, budget):
    """All but one of the context's tokens; the engine goes on afterwards."""
    engine = make_random_engine(max_tokens_per_step=budget)
    longest = [i % 128 for i in range(engine.model_info.context_length - 1)]
    task = replace(ask("a", max_new=1, output={"prompt_logprobs": 0}), prompt_ids=tuple(longest))
    pieces = [chunk.prompt_logprobs for chunk in chunks_of(engine, task) if chunk.prompt_logprobs]
    assert len(pieces) == -(-len(longest) // budget)
    first, *told = [each for piece in pieces for each in piece]
    assert first is None and [each.token_id for each in told] == longest[1:]
    assert all(each.logprob <= 0 for each in told)
    assert run_to_end(engine, ask("b")).reason("r") is FinishReason.LENGTH


def test_an_answer_that_fills_the_context_ends_by_length(make_random_engine, make_task, run_to_end):
    engine = make_random_engine(max_tokens_per_step=2048)
    context = engine.model_info.context_length
    answers = run_to_end(engine, make_task([i % 128 for i in range(context - 9)], max_new=9))
    assert len(answers.token_ids["r"]) == 9 and answers.reason("r") is FinishReason.LENGTH
    with pytest.raises(InvalidField, match="max_new_tokens"):
        engine.add(make_task([1] * (context - 9), max_new=10))


def test_prompt_logprobs_are_refused_where_the_model_rescales_its_logits(make_engine, ask, monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(engine._runner._model.config, "logit_scale", 0.5, raising=False)
    with pytest.raises(InvalidField, match=r"output\.prompt_logprobs"):
        engine.add(ask(output={"prompt_logprobs": 0}))


def test_everything_at_once_is_as_everything_alone(make_engine, make_task, run_to_end):
    """Rows with every kind of option share steps, and each gets what it gets alone.

    Greedy ones beside sampled ones, temperatures next to nothing and 100, a top_k over the vocabulary, a tiny top_p.
    """
    kinds = [
        {},
        {"top_p": 0.9, "temperature": 5.0},
        {"temperature": 3.0, "min_p": 0.05, "repetition_penalty": 1.2},
        {"temperature": 2.0, "top_k": 5, "logit_bias": ((C, 2.0),)},
        {"temperature": 1.5, "presence_penalty": 1.0, "frequency_penalty": -0.5},
        {"temperature": 100.0},
        {"temperature": 1e-10},
        {"temperature": 1.0, "top_k": len(SIGNS) + 1},
        {"temperature": 100.0, "top_p": 1e-6},
    ]
    tasks = [
        replace(
            make_task("abcd"[: 1 + i % 4] * 9, request_id=f"r{i}", max_new=12),
            sampling=SamplingParams(**({"temperature": 0.0, "seed": i} | kind)),
            logprobs=i % 3 or None,
        )
        for i, kind in enumerate(kinds)
    ]
    alone = {task.request_id: run_to_end(make_engine(), task).token_ids[task.request_id] for task in tasks}
    assert run_to_end(make_engine(max_running=9, max_tokens_per_step=48), *tasks).token_ids == alone
    assert all(0 <= token_id < len(SIGNS) for ids in alone.values() for token_id in ids)


def chunks_of(engine, task) -> list[TextChunk]:
    engine.add(task)
    chunks = []
    while engine.has_work:
        chunks += [event for _, event in engine.step()]
    return chunks
