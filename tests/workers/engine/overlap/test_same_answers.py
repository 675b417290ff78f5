"""Steps that are launched before the tokens of the last one are read give the same answers, and leave nothing behind.

A CPU computes a step when it is launched, so what is exercised is who is in a step and what of it counts; the order on
a device is `tests/gpu/test_overlap.py`'s.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.workers.engine.overlap.engines import few_candidates, launched_ahead, told

from ottserve.workers.api import Choice, Regex
from ottserve.workers.kv.table import POLICIES


@pytest.mark.parametrize("policy", POLICIES)
def test_all_that_ends_an_answer_ends_it_in_the_same_place(both, make_task, policy):
    """By EOS, stop strings and tokens, lengths, with more requests than may run, prefixes in common and samples."""
    tasks = [
        make_task("b" + "z" * 90 + "a", request_id="by length", max_new=5),
        make_task("b" + "z" * 90 + "da", request_id="same beginning", max_new=40),
        make_task("a", request_id="by eos"),
        make_task("a", request_id="by text", stop=("ef", "nothing")),
        replace(make_task("a", request_id="by token"), stops=replace(make_task("a").stops, stop_token_ids=(4,))),
        make_task("abc", request_id="one", max_new=1),
        make_task("abc" * 30, request_id="samples", max_new=12, temperature=30.0, seed=7, n=4),
        make_task("?", request_id="at once"),
        make_task("bdfa" * 20, request_id="urgent", max_new=20, priority=2),
    ]
    without, with_overlap = both(*tasks, policy=policy, max_tokens_per_step=64)
    for name in ("num_generated_tokens", "num_prompt_tokens_computed", "num_prompt_tokens_cached"):
        assert getattr(with_overlap.counters, name) == getattr(without.counters, name)


@pytest.mark.parametrize("length", range(4, 18))
def test_whatever_an_answer_would_have_stored_next_is_nobodys(both, make_task, make_engine, run_to_end, length):
    """Around the length at which the row for nothing seals a page, and with it takes outliers, in a slot that is used
    again: the pages that are published are as many, and whoever begins with them remembers the same."""
    tasks = [make_task("z" * length + "b", request_id="first"), make_task("q" * length + "a", request_id="second")]
    first = run_to_end(make_engine(overlap=False), *tasks)
    texts = {name: text.replace("?", "") for name, text in first.text.items()}
    prompts = ["z" * length + "b" + texts["first"] + "qa", "q" * length + "a" + texts["second"] + "da"]
    without, with_overlap = both(*tasks, max_running=1)
    again = [make_task(prompt, request_id=str(i), max_new=9) for i, prompt in enumerate(prompts)]
    assert told(run_to_end(with_overlap, *again)) == told(run_to_end(without, *again))
    load, expected = with_overlap.load_report(), without.load_report()
    assert (load.pages_cached, load.pages_free) == (expected.pages_cached, expected.pages_free)
    assert with_overlap.counters.num_step_rows > without.counters.num_step_rows


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_that_feel_every_rounding_are_the_same(both, make_random_engine, make_task, policy):
    """Pages are sealed while four sequences decode to lengths that are known beforehand."""
    tasks = [make_task(range(i, 50 + 9 * i), request_id=f"r{i}", max_new=60 + i, temperature=0.7) for i in range(4)]
    _, engine = both(*tasks, make=make_random_engine, policy=policy)
    assert engine.counters.num_pages_sealed == 20


def test_logprobs_of_prompts_and_answers_are_the_same(both, make_task):
    tasks = [
        replace(make_task("b" + "z" * 90 + "a", request_id="r1", max_new=9), logprobs=3, prompt_logprobs=1),
        replace(make_task("a", request_id="r2", max_new=9), logprobs=0),
    ]
    both(*tasks, max_tokens_per_step=32)


def test_rows_whose_next_token_the_host_must_know_are_not_planned_ahead(both, make_task, make_engine, run_to_end):
    plain = make_task("a", request_id="plain", max_new=20)
    penalised = make_task("abc", request_id="penalised", max_new=9)
    penalised = replace(penalised, sampling=replace(penalised.sampling, frequency_penalty=2.5))
    formed = replace(make_task("a", request_id="formed"), form=Regex("[a-z]{5}"), n=2)
    chosen = replace(make_task("a", request_id="chosen"), form=Choice(("bca",)))
    both(plain, penalised, formed, chosen)
    for task in (penalised, chosen):
        engine = make_engine(overlap=True)
        ahead = launched_ahead(engine)
        run_to_end(engine, task)
        assert len(ahead) > 3 and not any(ahead)


@pytest.mark.parametrize("seed", range(4))
def test_work_drawn_at_random_is_answered_the_same(make_random_engine, make_task, seed):
    """Requests that come while others run, with few pages, rows that are chosen again, samples and aborts.

    Who is in a step with whom differs. For that to make no difference prompts are cut at seal points, and roundings are
    far too small to become another code.
    """
    draw = random.Random(seed)
    ways = [{}, {}, {"top_p": 0.8}, {"top_k": 3}, {"temperature": 0.0, "frequency_penalty": 2.0}]
    tasks = []
    for index in range(9):
        prompt = range(draw.randint(1, 9), draw.randint(20, 70))
        lengths = {"max_new": draw.choice([1, 2, 30, 60]), "n": draw.choice([1, 1, 2]), "seed": index}
        task = make_task(prompt, request_id=f"r{index}", temperature=1.0, stop=("ef",), **lengths)
        tasks.append(replace(task, sampling=replace(task.sampling, **draw.choice(ways))))
    pages, aborted_after = draw.choice([8, 12]), draw.randint(2, 20)

    def answers(*, overlap: bool) -> dict[tuple[str, int], tuple[Any, ...]]:
        engine = make_random_engine(num_pages=pages, aligned_chunks=True, overlap=overlap)
        engine._runner._model.double()
        few_candidates(engine, 1)
        found: dict[tuple[str, int], tuple[Any, ...]] = {}
        waiting, num_steps = list(tasks), 0
        while waiting or engine.has_work:
            if waiting and num_steps % 3 == 0:
                engine.add(waiting.pop())
            if num_steps == aborted_after:
                engine.abort("r8")  # the first
            for name, chunk in engine.step():
                text, token_ids = found.get((name, chunk.index), ("", ()))
                found[name, chunk.index] = text + chunk.text, token_ids + chunk.token_ids
            num_steps += 1
        engine._scheduler.check()
        assert engine.load_report().pages_used == 0
        return {key: its for key, its in found.items() if key[0] != "r8"}

    assert answers(overlap=True) == answers(overlap=False)


@pytest.mark.parametrize("overlap", [False, True])
def test_replayed_steps_are_counted_when_they_are_committed(make_engine, make_task, run_to_end, overlap):
    """A step for nobody, which comes after a stop that the host finds, is none of either count."""
    engine = make_engine(overlap=overlap)
    run_to_end(engine, make_task("a", request_id="eager", max_new=5))
    assert engine.counters.num_graph_steps == 0 < engine.counters.num_decode_steps
    before, run = engine.counters.num_decode_steps, engine._runner.run

    def replaying(step: Any) -> torch.Tensor:
        logits = run(step)
        engine._runner.replayed = step.chunks is None
        return logits

    engine._runner.run = replaying
    run_to_end(engine, make_task("a", request_id="replayed", stop=("ef",)))
    assert engine.counters.num_graph_steps == engine.counters.num_decode_steps - before > 0
