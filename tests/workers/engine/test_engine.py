"""The engine against answers worked out by hand (the rule is in `models/toy.py`)."""

from __future__ import annotations

import random
import time

import pytest
import torch

from ottserve.workers.api import DeadlineExceeded, DuplicateRequest, FinishReason, Internal, TextChunk
from ottserve.workers.engine.live import LiveRequest
from ottserve.workers.kv.table import POLICIES

LETTERS = "abcdefghijklmnopqrstuvwxyz"
REST = " .,!?"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        pytest.param("a", LETTERS[1:] + REST, id="every sign after the first"),
        pytest.param("ba", LETTERS[2:] + REST, id="b was seen, so c follows a"),
        pytest.param("cba", LETTERS[3:] + REST, id="c and b were seen, so d follows a"),
        pytest.param("y", "z" + REST, id="near the end"),
        pytest.param("bdfa", "ceg" + LETTERS[7:] + REST, id="every other sign was seen"),
    ],
)
def test_says_what_the_rule_says(make_engine, make_task, run_to_end, policy, prompt, answer):
    answers = run_to_end(make_engine(policy), make_task(prompt))
    assert answers.text["r"] == answer
    assert answers.reason("r") is FinishReason.EOS
    assert len(answers.token_ids["r"]) == len(answer) + 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [4, 7, 64])
@pytest.mark.parametrize("length", [31, 39, 40, 41, 71, 72, 73, 150])
def test_remembers_what_lies_in_sealed_pages(make_engine, make_task, run_to_end, policy, budget, length):
    """`b` was said once, long ago, at any place of pages, window and chunk: it must still be known as seen."""
    prompt = "b" + "z" * (length - 2) + "a"
    answers = run_to_end(make_engine(policy, max_tokens_per_step=budget), make_task(prompt, max_new=3))
    assert answers.text["r"] == "cde"
    assert answers.reason("r") is FinishReason.LENGTH


def test_seals_while_decoding(make_engine, make_task, run_to_end):
    engine = make_engine()
    answers = run_to_end(engine, make_task("a" * 30 + "b", max_new=60))
    assert answers.text["r"] == LETTERS[2:] + REST
    assert engine.counters.num_pages_sealed == 1  # 31 + 29 tokens stored, a page each 32 beyond a window of 8


def test_each_of_a_batch_answers_as_if_alone(make_engine, make_task, run_to_end):
    prompts = {"r1": "a", "r2": "ba", "r3": "c" * 90 + "b", "r4": "bdfa", "r5": "w"}
    alone = {
        name: run_to_end(make_engine(), make_task(prompt, request_id=name)).token_ids[name]
        for name, prompt in prompts.items()
    }
    tasks = [make_task(prompt, request_id=name) for name, prompt in prompts.items()]
    together = run_to_end(make_engine(max_tokens_per_step=48), *tasks)
    assert together.token_ids == alone


def test_a_slot_forgets_its_last_holder(make_engine, make_task, run_to_end):
    engine = make_engine(max_running=1)
    for _ in range(3):
        assert run_to_end(engine, make_task("bdfa" * 30, max_new=2)).text["r"] == "ce"
        assert run_to_end(engine, make_task("a", max_new=4)).text["r"] == "bcde"


def test_a_stop_string_ends_the_sequence_at_once(make_engine, make_task, run_to_end):
    engine = make_engine()
    answers = run_to_end(engine, make_task("a", stop=("ef",)))
    end = answers.ends["r"]
    assert isinstance(end, TextChunk) and end.finish is not None
    assert answers.text["r"] == "bcd"
    assert (end.finish.reason, end.finish.matched_stop) == (FinishReason.STOP_STRING, "ef")
    assert end.finish.usage.num_completion_tokens == 5
    assert engine.counters.num_generated_tokens == 5


def test_eos_as_the_last_permitted_token_is_eos(make_engine, make_task, run_to_end):
    assert run_to_end(make_engine(), make_task("!", max_new=2)).reason("r") is FinishReason.EOS
    assert run_to_end(make_engine(), make_task("!", max_new=1)).reason("r") is FinishReason.LENGTH


def test_abort_frees_at_once_and_says_so_once(make_engine, make_task):
    engine = make_engine()
    engine.add(make_task("a"))
    engine.step()
    assert engine.abort("r")
    assert engine.load_report().slots_used == 0
    assert not engine.abort("r")
    with pytest.raises(DuplicateRequest):
        engine.add(make_task("a"))
    [(request_id, chunk)] = engine.step()
    assert request_id == "r" and isinstance(chunk, TextChunk) and chunk.finish is not None
    assert chunk.finish.reason is FinishReason.ABORTED
    assert not engine.has_work
    engine.add(make_task("a"))


def test_aborted_while_waiting_never_runs(make_engine, make_task):
    engine = make_engine(max_running=1)
    engine.add(make_task("a", request_id="first"))
    engine.add(make_task("a", request_id="second"))
    engine.step()
    assert engine.abort("second")
    before = engine.counters.num_prompt_tokens_computed
    while engine.has_work:
        engine.step()
    assert engine.counters.num_prompt_tokens_computed == before
    assert not engine.abort("never there")


def test_a_deadline_ends_running_and_waiting(make_engine, make_task, run_to_end):
    engine = make_engine(max_running=1)
    late = make_task("a", request_id="late", deadline_at=time.time() - 1)
    answers = run_to_end(engine, late, make_task("a", request_id="fine", max_new=2))
    assert isinstance(answers.ends["late"], DeadlineExceeded)
    assert answers.text["fine"] == "bc"


def test_a_step_that_raises_ends_its_requests_and_no_others(make_engine, make_task, run_to_end, monkeypatch):
    engine = make_engine(max_running=1)
    engine.add(make_task("a", request_id="unlucky"))
    engine.add(make_task("a", request_id="waiting", max_new=2))
    run = engine._runner.run

    def fail(step: object) -> torch.Tensor:
        raise RuntimeError("a planted fault")

    monkeypatch.setattr(engine._runner, "run", fail)
    [(request_id, error)] = engine.step()
    assert request_id == "unlucky" and isinstance(error, Internal) and "planted" not in str(error)
    monkeypatch.setattr(engine._runner, "run", run)
    assert run_to_end(engine).text["waiting"] == "bc"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to ..."
        ),
        MemoryError(),
    ],
)
def test_a_step_without_memory_says_so_and_frees_what_it_held(
    make_engine, make_task, run_to_end, monkeypatch, error: Exception
):
    engine = make_engine()
    for name in ("r1", "r2"):
        engine.add(make_task("a" * 100, request_id=name))
    engine.step()
    assert engine.load_report().pages_used > 0
    run = engine._runner.run

    def fail(step: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(engine._runner, "run", fail)
    ended = dict(engine.step())
    assert set(ended) == {"r1", "r2"}
    assert {(type(told), told.reason, "GiB" in str(told)) for told in ended.values()} == {
        (Internal, "out_of_memory", False)
    }
    load = engine.load_report()
    assert (load.pages_used, load.slots_used, load.num_running) == (0, 0, 0)
    monkeypatch.setattr(engine._runner, "run", run)
    assert run_to_end(engine, make_task("a", max_new=3)).text["r"] == "bcd"


def test_a_seed_fixes_the_answer_whatever_else_runs(make_engine, make_task, run_to_end):
    def seeded(name: str) -> object:
        return make_task("abc", request_id=name, temperature=30.0, seed=7, max_new=20)

    alone = run_to_end(make_engine(), seeded("r")).token_ids["r"]
    others = [make_task("abc", request_id=f"o{i}", temperature=30.0, seed=i, max_new=20) for i in range(10, 17)]
    batched = run_to_end(make_engine(max_running=8), *others[:4], seeded("r"), *others[4:]).token_ids
    assert batched["r"] == alone
    assert len(set(batched.values())) == 8


def test_seeds_and_answers_stay_together_in_any_order(make_engine, make_task, run_to_end):
    """Eight seeds, shuffled twice, four at a time; as good as all of them give different texts."""

    def texts(seeds: list[int]) -> dict[str, tuple[int, ...]]:
        tasks = [make_task("abc", request_id=str(seed), temperature=30.0, seed=seed, max_new=20) for seed in seeds]
        return run_to_end(make_engine(), *tasks).token_ids

    seeds = [2**63 + 7 * i for i in range(8)]
    shuffled = random.Random(1).sample(seeds, 8), random.Random(2).sample(seeds, 8)
    first, second = (texts(order) for order in shuffled)
    assert shuffled[0] != shuffled[1] and first == second
    assert len(set(first.values())) >= 7


def test_a_row_whose_text_cannot_be_made_fails_alone(make_engine, make_task, run_to_end, monkeypatch):
    engine, push = make_engine(), LiveRequest.push

    def push_or_fail(live: LiveRequest, *rest: object) -> object:
        if live.task.request_id == "unlucky":
            raise RuntimeError("a planted fault")
        return push(live, *rest)

    monkeypatch.setattr(LiveRequest, "push", push_or_fail)
    answers = run_to_end(engine, *[make_task("a", request_id=name, max_new=3) for name in ("fine", "unlucky", "well")])
    error = answers.ends["unlucky"]
    assert isinstance(error, Internal) and error.reason == "output_failed" and "planted" not in str(error)
    assert answers.text == {"fine": "bcd", "well": "bcd"}


def test_reports_what_lies_in_the_pools(make_engine, make_task):
    engine = make_engine()
    engine.add(make_task("a" * 100, max_new=2))
    engine.step()
    load = engine.load_report()
    assert (load.pool_places_used, load.pool_places_total) == (3, 3)
    assert load.evicted_places_used == 0  # all keys are zero, so the lowest positions keep their places
    assert (load.pages_used, load.slots_used) == (2, 1)
    assert load.last_step_at is not None
