"""Steps that are launched before the tokens of the last one are read give the same answers, and leave nothing behind.

A CPU computes a step when it is launched, so what is exercised is who is in a step and what of it counts; the order on
a device is `tests/gpu/test_overlap.py`'s.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ottserve.workers.api import Choice, DeadlineExceeded, FinishReason, GenerationTask, Internal, Regex, TextChunk
from ottserve.workers.engine.engine import Engine
from ottserve.workers.kv.table import POLICIES

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def told(answers: Any) -> dict[str, Any]:
    """All that callers hear but when."""
    ends = {
        name: replace(end.finish, timings=None) if isinstance(end, TextChunk) else (type(end), str(end))
        for name, end in answers.ends.items()
    }
    return {"text": answers.text, "token_ids": answers.token_ids, "ends": ends}


def launched_ahead(engine: Engine) -> list[bool]:
    """Of each step that an engine will launch, whether the one before is still on its way."""
    found: list[bool] = []
    launch = engine._computer.launch

    def listen(plan: Any, live: Any, before: Any = None) -> Any:
        found.append(before is not None)
        return launch(plan, live, before)

    engine._computer.launch = listen
    return found


def few_candidates(engine: Engine, number: int) -> None:
    """Have rows that draw of the likeliest only be chosen again of all tokens, where they are not among so few."""
    sampler = engine._computer._sampler
    sampler.sample = functools.partial(sampler.sample, num_candidates=number)


class Lost:
    """In the place of a flight: a step whose result can't be read."""

    chosen = torch.ones(4, dtype=torch.int64)

    def land(self) -> None:
        raise RuntimeError("a planted fault")


def overwrite_logits(engine: Engine) -> None:
    """Have each step's logits overwrite those of the one before, as a replayed graph's do."""
    run, buffer = engine._runner.run, torch.empty(8, 128)

    @torch.inference_mode()
    def run_into_buffer(step: Any) -> torch.Tensor:
        logits = run(step)
        return buffer[: len(logits)].copy_(logits)

    engine._runner.run = run_into_buffer


def cutting(task: GenerationTask, **sampling: Any) -> GenerationTask:
    """The task, with tokens drawn of the likeliest only."""
    return replace(task, sampling=replace(task.sampling, **{"temperature": 1.5} | sampling))


@pytest.fixture
def both(make_engine, run_to_end) -> Callable[..., tuple[Engine, Engine]]:
    """Engines without and with overlap that have answered the same tasks, twice, in the same way."""

    def compare(*tasks: GenerationTask, make: Callable[..., Engine] = make_engine, **settings: Any):
        engines = make(overlap=False, **settings), make(overlap=True, **settings)
        ahead = launched_ahead(engines[1])
        for _ in range(2):  # the second time from what the first has left in the prefix cache
            without, with_overlap = (run_to_end(engine, *tasks) for engine in engines)
            assert told(with_overlap) == told(without)
        assert any(ahead)
        for engine in engines:
            engine._scheduler.check()
            assert engine._pipeline._begun is None
        return engines

    return compare


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
    def answers(*, overlap: bool, number: int) -> tuple[dict[str, Any], Engine]:
        engine = make_random_engine(overlap=overlap)
        few_candidates(engine, number)
        overwrite_logits(engine)
        draws = ({"top_p": 0.6}, {"top_k": 7, "temperature": 2.0}, {"min_p": 0.05, "logit_bias": ((5, 0.5),)})
        tasks = [
            replace(cutting(make_task(range(i, 40 + i), request_id=f"r{i}", max_new=80), **draw), logprobs=2)
            for i, draw in enumerate(draws)
        ]
        return told(run_to_end(engine, *tasks)), engine

    expected, _ = answers(overlap=False, number=128)
    found, engine = answers(overlap=True, number=number)
    assert found == expected
    assert engine.counters.num_step_rows > 3 * 80 + 20  # some were computed twice


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


def test_logprobs_of_prompts_and_answers_are_the_same(both, make_task):
    tasks = [
        replace(make_task("b" + "z" * 90 + "a", request_id="r1", max_new=9), logprobs=3, prompt_logprobs=1),
        replace(make_task("a", request_id="r2", max_new=9), logprobs=0),
    ]
    both(*tasks, max_tokens_per_step=32)


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


@pytest.mark.parametrize("num_steps", range(5))
def test_an_abort_between_launch_and_commit_drops_the_token(make_engine, make_task, run_to_end, num_steps):
    """The slot and the id are used again at once, by a request that must hear nothing of the one before."""
    engine = make_engine(max_running=2, overlap=True)
    engine.add(make_task("b" + "z" * 60 + "a", request_id="r"))
    engine.add(make_task("a", request_id="other", max_new=12))
    chunks = [chunk for _ in range(num_steps) for name, chunk in engine.step() if name == "r"]
    num_known = sum(len(chunk.token_ids) for chunk in chunks)
    assert num_known == max(0, num_steps - 1)
    assert engine.abort("r") and engine.load_report().slots_used == (num_steps > 0)
    events = engine.step()
    [last] = [chunk for name, chunk in events if name == "r"]
    assert last.finish.reason is FinishReason.ABORTED and last.token_ids == ()
    assert last.finish.usage.num_completion_tokens == num_known
    answers = run_to_end(engine, make_task("d" + "z" * 60 + "a", request_id="r", max_new=4))
    assert answers.text["r"] == "bcef"
    assert answers.reason("other") is FinishReason.LENGTH
    assert run_to_end(engine, make_task("a", max_new=4)).text["r"] == "bcde"


def test_an_abort_of_all_leaves_nothing_on_its_way(make_engine, make_task):
    engine = make_engine(overlap=True)
    engine.add(make_task("a"))
    for _ in range(3):
        engine.step()
    assert engine._pipeline._begun is not None
    engine.abort("r")
    [(_, chunk)] = engine.step()
    assert chunk.finish.reason is FinishReason.ABORTED
    assert not engine.has_work and engine._pipeline._begun is None


def test_a_deadline_passes_while_a_step_is_on_its_way(make_engine, make_task, run_to_end):
    engine, clock = make_engine(overlap=True), [0.0]
    engine._scheduler._now = lambda: clock[0]
    engine.add(make_task("a", request_id="late", deadline_at=10.0))
    engine.add(make_task("a", request_id="fine", max_new=6))
    texts = [chunk.text for _ in range(3) for name, chunk in engine.step() if name == "late"]
    assert texts == ["b", "c"]
    clock[0] = 10.0
    answers = run_to_end(engine)
    assert isinstance(answers.ends["late"], DeadlineExceeded) and "late" not in answers.text
    assert answers.text["fine"] == "defg"


def test_a_launch_that_raises_ends_its_requests_and_no_others(make_engine, make_task, run_to_end, monkeypatch):
    """The step before had been launched: what it chose for a request that the second one was not for is told."""
    engine = make_engine(max_running=2, overlap=True)
    engine.add(make_task("a", request_id="over", max_new=1))
    engine.add(make_task("a", request_id="unlucky"))
    engine.add(make_task("a", request_id="waiting", max_new=3))
    assert engine.step() == []
    run = engine._runner.run

    def fail(step: object) -> torch.Tensor:
        monkeypatch.setattr(engine._runner, "run", run)
        raise RuntimeError("a planted fault")

    monkeypatch.setattr(engine._runner, "run", fail)
    answers = run_to_end(engine)
    assert isinstance(answers.ends["unlucky"], Internal) and "unlucky" not in answers.text
    assert (answers.text["over"], answers.text["waiting"]) == ("b", "bcd")


def test_a_step_whose_result_cannot_be_read_ends_who_was_in_it(make_engine, make_task, run_to_end):
    engine = make_engine(max_running=1, overlap=True)
    engine.add(make_task("a", request_id="unlucky"))
    engine.add(make_task("a", request_id="waiting", max_new=3))
    engine.step()
    engine._pipeline._begun.flight = Lost()
    answers = run_to_end(engine)
    assert isinstance(answers.ends["unlucky"], Internal)
    assert answers.text["waiting"] == "bcd"


def test_a_step_that_is_lost_ends_nobody_who_came_with_an_id_that_was_in_it(make_engine, make_task, run_to_end):
    """The first of the id has ended by EOS, and its row for nothing is in the step that is lost."""
    engine = make_engine(overlap=True)
    engine.add(make_task("!", request_id="r"))
    engine.add(make_task("a", request_id="unlucky"))
    while "r" in engine._requests.live:
        engine.step()
    engine._pipeline._begun.flight = Lost()
    answers = run_to_end(engine, make_task("a", request_id="r", max_new=3))
    assert isinstance(answers.ends["unlucky"], Internal)
    assert answers.text == {"r": "bcd"}
    assert engine._pipeline._begun is None


def test_a_step_that_is_lost_ends_nobody_who_was_aborted(make_engine, make_task):
    engine = make_engine(overlap=True)
    engine.add(make_task("a"))
    engine.step()
    engine._pipeline._begun.flight = Lost()
    engine.abort("r")
    [(_, chunk)] = engine.step()
    assert isinstance(chunk, TextChunk) and chunk.finish.reason is FinishReason.ABORTED


def test_a_row_for_nothing_without_numbers_fails_nobody(make_engine, make_task, run_to_end, monkeypatch):
    """The row after EOS gives logits that are no numbers; one sample has ended, and the other goes on."""
    engine = make_engine(overlap=True)
    run = engine._runner.run

    @torch.inference_mode()
    def spoil_row_after_eos(step: Any) -> torch.Tensor:
        logits = run(step).clone()
        logits[step.token_ids[0][step.sampled_rows] == 0] = float("nan")
        return logits

    monkeypatch.setattr(engine._runner, "run", spoil_row_after_eos)
    answers = run_to_end(engine, make_task("x", request_id="r"), make_task("a", request_id="longer", max_new=12))
    assert answers.text == {"r": "yz .,!?", "longer": LETTERS[1:13]}
    assert engine._pipeline._begun is None
    assert answers.reason("r") is FinishReason.EOS


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
