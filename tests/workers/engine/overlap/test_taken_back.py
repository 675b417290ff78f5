"""What is preempted, and what was made of a token that another took the place of, while a step is on its way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.workers.engine.conftest import Answers
from tests.workers.engine.overlap.engines import cutting, few_candidates, overwrite_logits, told

from ottserve.workers.engine.engine import Engine


def test_an_overfull_pool_preempts_with_tokens_still_to_come(both, make_random_engine, make_task):
    """Four answers that grow to 20 pages together in a pool of 7."""
    tasks = [make_task(range(i, 60 + i), request_id=f"r{i}", max_new=110) for i in range(4)]
    for engine in both(*tasks, make=make_random_engine, num_pages=7):
        assert 0 < engine.counters.num_preemptions <= 24


def test_whoever_is_preempted_whenever_says_the_same(make_engine, make_task, run_to_end, preempt_in_turn):
    tasks = [make_task("q" * (20 + 7 * i) + "cdb"[i % 3] * 20 + "a", request_id=f"r{i}", max_new=30) for i in range(4)]
    undisturbed = run_to_end(make_engine(overlap=False), *tasks)
    engine = make_engine(max_tokens_per_step=24, overlap=True)
    preempt_in_turn(engine)
    assert run_to_end(engine, *tasks).token_ids == undisturbed.token_ids
    assert engine.counters.num_preemptions > 20


def test_whoever_is_preempted_while_a_seal_waits_for_its_token_says_the_same(
    make_random_engine, make_task, run_to_end, preempt_in_turn
):
    """As good as every token is chosen again, so a sealing step that did not wait would seal a wrong one's sequel."""
    tasks = [cutting(make_task(range(i, 40 + i), request_id=f"r{i}", max_new=70), top_p=0.6) for i in range(3)]
    undisturbed = run_to_end(make_random_engine(overlap=False), *tasks)
    engine = make_random_engine(overlap=True)
    few_candidates(engine, 1)
    preempt_in_turn(engine)
    assert run_to_end(engine, *tasks).token_ids == undisturbed.token_ids


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_token_that_is_chosen_again_takes_back_what_was_made_of_the_first(
    make_random_engine, make_task, run_to_end, number
):
    def answers(*, overlap: bool, number: int) -> tuple[Answers, Engine]:
        engine = make_random_engine(overlap=overlap)
        few_candidates(engine, number)
        overwrite_logits(engine)
        draws = ({"top_p": 0.6}, {"top_k": 7, "temperature": 2.0}, {"min_p": 0.05, "logit_bias": ((5, 0.5),)})
        tasks = [
            replace(cutting(make_task(range(i, 40 + i), request_id=f"r{i}", max_new=80), **draw), logprobs=2)
            for i, draw in enumerate(draws)
        ]
        return run_to_end(engine, *tasks), engine

    expected, _ = answers(overlap=False, number=128)
    found, engine = answers(overlap=True, number=number)
    assert told(found) == told(expected)
    assert {name: tuple(each.token_id for each in all_) for name, all_ in found.logprobs.items()} == found.token_ids
    assert logprobs(found) == pytest.approx(logprobs(expected), abs=1e-3)  # rounded otherwise: batches are other ones
    assert engine.counters.num_step_rows > 3 * 80 + 20  # some were computed twice


def logprobs(answers: Answers) -> list[float]:
    """Of all chosen tokens, request after request."""
    return [token.logprob for name in sorted(answers.logprobs) for token in answers.logprobs[name]]
