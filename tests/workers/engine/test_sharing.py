"""Prefix reuse, preemption and n samples in a real engine. Bit-exactness and its limits are in test_numerics.py."""

from __future__ import annotations

import time

import pytest
import torch

from ottserve.workers.api import FinishReason, Internal, InvalidField
from ottserve.workers.core.plan import StepPlan
from ottserve.workers.kv.snapshot import HostCopy
from ottserve.workers.kv.table import POLICIES


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [33, 64, 65, 72, 150, 200])
def test_remembers_what_lies_in_cached_pages(make_engine, make_task, run_to_end, policy, length):
    """`b` was said once, in a page that an earlier request computed: it must still be known as seen."""
    engine = make_engine(policy)
    for start in range(3):
        prompt = "b" + "z" * (length - 2) + "a"
        answers = run_to_end(engine, make_task(prompt, max_new=3))
        assert answers.text["r"] == "cde"
        cached = answers.ends["r"].finish.usage.num_cached_tokens
        assert cached == (0 if start == 0 else (length - 8) // 32 * 32)
    assert engine.counters.num_prompt_tokens_cached == 2 * cached
    assert engine.counters.num_prompt_tokens_computed == 3 * length - 2 * cached


def test_another_salt_and_a_flushed_cache_are_cold(make_engine, make_task, run_to_end):
    engine = make_engine()

    def cached(salt: str) -> int:
        return run_to_end(engine, make_task("a" * 100, max_new=2, salt=salt)).ends["r"].finish.usage.num_cached_tokens

    assert [cached("one"), cached("one"), cached("two"), cached("")] == [0, 64, 0, 0]
    load = engine.load_report()
    assert load.pages_cached == 6 and load.pages_cached + load.pages_free == load.pages_total
    assert engine.flush_cache() == 6
    assert engine.load_report().pages_cached == 0
    assert cached("one") == 0


def test_a_cold_prompt_of_four_chunks_hits_nothing(make_engine, make_task, run_to_end):
    engine = make_engine(max_tokens_per_step=32)
    answers = run_to_end(engine, make_task("ab" * 64, max_new=2))
    assert answers.ends["r"].finish.usage.num_cached_tokens == engine.counters.num_prompt_tokens_cached == 0


def test_a_cache_that_is_off_keeps_nothing(make_engine, make_task, run_to_end):
    engine = make_engine(prefix_cache=False)
    assert not engine.server_info.prefix_cache and make_engine().server_info.prefix_cache
    for _ in range(2):
        run_to_end(engine, make_task("ab" * 64, max_new=2))
    assert engine.counters.num_prompt_tokens_cached == engine.load_report().pages_cached == 0


def test_32_requests_share_a_prefix_in_a_pool_with_little_room_beside_it(make_engine, make_task, run_to_end):
    """Room for the prefix (20 pages) and 37 pages more; unshared they would need 700."""
    engine = make_engine(num_pages=57, max_running=16, max_tokens_per_step=1024)
    prefix = "bz" * 320
    tasks = [make_task(prefix + "a" * (i + 1), request_id=f"r{i}", max_new=40) for i in range(32)]
    answers = run_to_end(engine, *tasks)
    assert all(answers.text[task.request_id] == answers.text["r0"] for task in tasks)
    assert answers.text["r0"].startswith("cdef")
    assert engine.counters.num_prompt_tokens_cached >= 31 * 608


def test_an_overfull_pool_preempts_until_all_have_answered(make_random_engine, make_task, run_to_end):
    """Four answers that grow to 20 pages together in a pool of 7."""
    engine = make_random_engine(num_pages=7)
    tasks = [make_task(range(i, 60 + i), request_id=f"r{i}", max_new=110) for i in range(4)]
    answers = run_to_end(engine, *tasks)
    assert {len(ids) for ids in answers.token_ids.values()} == {110}
    assert 0 < engine.counters.num_preemptions <= 12
    assert engine.counters.num_pages_evicted > 0


def test_whoever_is_preempted_whenever_says_the_same(make_engine, make_task, run_to_end, preempt_in_turn):
    """Every step one of four moves to the host, in turn; the toy model would notice any token that was lost."""
    tasks = [make_task("q" * (20 + 7 * i) + "cdb"[i % 3] * 20 + "a", request_id=f"r{i}", max_new=30) for i in range(4)]
    undisturbed = run_to_end(make_engine(), *tasks)
    engine = make_engine(max_tokens_per_step=24)
    preempt_in_turn(engine)
    assert run_to_end(engine, *tasks).token_ids == undisturbed.token_ids
    assert engine.counters.num_preemptions > 20


def test_host_memory_is_told_as_it_comes_and_goes(make_engine, make_task):
    """A preempted sequence takes its pages and its slot; a cached prefix its outliers, until it is flushed."""
    engine = make_engine()
    engine.add(make_task("a" * 100, max_new=5))
    engine.step()
    [running] = engine._scheduler._running.values()
    engine._scheduler.preempt(running)
    engine._computer.move(engine._scheduler.take_moves())
    store = engine._store
    assert engine.load_report().preempted_bytes == 2 * store.page_bytes + store.slot_bytes
    while engine.has_work:
        engine.step()
    load = engine.load_report()
    assert load.preempted_bytes == 0 < load.snapshot_bytes < store.slot_bytes
    engine.flush_cache()
    assert engine.load_report().snapshot_bytes == 0


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("num_saved", [0, 1])
def test_a_sequence_that_can_not_be_saved_ends_at_once_and_fails_no_later_step(
    make_engine, make_task, run_to_end, monkeypatch, overlap, num_saved
):
    """Both samples of one request make room for another's, and the host has no memory for the first or the second."""
    engine = make_engine(max_running=3, overlap=overlap)
    scheduler, plan, save = engine._scheduler, engine._scheduler.plan, HostCopy.of
    saved = []

    def plan_without_samples() -> StepPlan:
        monkeypatch.setattr(scheduler, "plan", plan)
        for sequence in tuple(scheduler._running.values()):
            if sequence.request_id == "moved":
                scheduler.preempt(sequence)
        return plan()

    def save_some(*arguments: object) -> HostCopy:
        if len(saved) == num_saved:
            monkeypatch.setattr(HostCopy, "of", save)
            raise MemoryError
        saved.append(save(*arguments))
        return saved[-1]

    engine.add(make_task("a" * 100, request_id="moved", n=2))
    engine.add(make_task("b" * 100, request_id="stays"))
    while engine.load_report().num_running < 3:
        engine.step()
    engine.add(make_task("c", request_id="instead", n=2, priority=1))
    engine.add(make_task("d", request_id="waits", max_new=3, priority=-1))
    monkeypatch.setattr(scheduler, "plan", plan_without_samples)
    monkeypatch.setattr(HostCopy, "of", save_some)
    answers = run_to_end(engine)
    told = {name: end.reason for name, end in answers.ends.items() if isinstance(end, Internal)}
    assert told == dict.fromkeys(("moved", "stays", "instead"), "out_of_memory")
    assert (answers.text["waits"], len(saved)) == ("efg", num_saved)
    assert engine.load_report().preempted_bytes == 0
    scheduler.check()


def test_the_higher_priority_is_answered_first(make_engine, make_task):
    engine = make_engine(max_running=1)
    for name, priority in (("low", -1), ("high", 5), ("next", 5)):
        engine.add(make_task("a", request_id=name, max_new=1, priority=priority))
    order = [event[0] for _ in range(3) for event in engine.step()]
    assert order == ["high", "next", "low"]


def test_samples_with_a_seed_are_distinct_and_come_again(make_engine, make_task, run_to_end):
    def four(engine):
        task = make_task("abc" * 30, max_new=12, temperature=30.0, seed=7, n=4)
        answers = run_to_end(engine, task)
        seeds = [answers.ends[name].finish.seed for name in answers.ends]
        return answers.token_ids, dict(zip(answers.ends, seeds, strict=True))

    engine = make_engine()
    token_ids, seeds = four(engine)
    assert set(token_ids) == {"r", "r#1", "r#2", "r#3"} and len(set(token_ids.values())) == 4
    assert engine.counters.num_prompt_tokens_computed == 90
    assert four(make_engine())[0] == token_ids
    assert seeds["r"] == 7
    for name, seed in seeds.items():
        alone = run_to_end(make_engine(), make_task("abc" * 30, max_new=12, temperature=30.0, seed=seed))
        assert alone.token_ids["r"] == token_ids[name]


def test_greedy_samples_all_say_the_same_and_seal_pages_of_their_own(make_engine, make_task, run_to_end):
    engine = make_engine()
    answers = run_to_end(engine, make_task("b" + "z" * 68 + "a", max_new=27, n=3))
    assert len(set(answers.text.values())) == 1 and answers.text["r"].startswith("cde")
    assert engine.load_report().pages_cached >= 2


def test_a_stop_string_ends_its_sample_alone(make_engine, make_task, run_to_end):
    engine = make_engine()
    answers = run_to_end(engine, make_task("abc", max_new=30, temperature=30.0, seed=3, n=4, stop=("e", "q")))
    reasons = {name: answers.reason(name) for name in answers.ends}
    assert FinishReason.STOP_STRING in reasons.values()
    for name, reason in reasons.items():
        assert (reason is FinishReason.STOP_STRING) == (answers.ends[name].finish.matched_stop is not None)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_abort_ends_every_sample_once(make_engine, make_task, num_steps):
    engine = make_engine()
    engine.add(make_task("abc", max_new=30, n=3))
    for _ in range(num_steps):
        engine.step()
    assert engine.abort("r") and not engine.abort("r")
    assert engine.load_report().slots_used == 0
    events = engine.step()
    assert [(chunk.index, chunk.finish.reason) for _, chunk in events] == [(i, FinishReason.ABORTED) for i in range(3)]
    assert not engine.has_work


def test_more_samples_than_slots_are_refused(make_engine, make_task):
    with pytest.raises(InvalidField) as refusal:
        make_engine().add(make_task("a", n=5))
    assert refusal.value.field == "n"


def test_a_row_without_numbers_fails_alone_and_leaves_nothing_behind(make_engine, make_task, run_to_end, monkeypatch):
    engine = make_engine()
    run = engine._computer._runner.run

    @torch.inference_mode()
    def spoil_second_row(step: object) -> torch.Tensor:
        logits = run(step).clone()
        if len(logits) == 3:
            logits[1, 5] = float("nan")
        return logits

    monkeypatch.setattr(engine._computer._runner, "run", spoil_second_row)
    tasks = [make_task("z" * 50 + sign, request_id=sign, max_new=3) for sign in "abc"]
    answers = run_to_end(engine, *tasks)
    assert isinstance(answers.ends["b"], Internal) and answers.ends["b"].reason == "non_finite_logits"
    assert (answers.text["a"], answers.text["c"]) == ("bcd", "def")
    monkeypatch.undo()
    assert run_to_end(engine, make_task("z" * 50 + "b", max_new=3)).text["r"] == "cde"


@pytest.mark.parametrize("policy", POLICIES)
def test_of_a_repeated_prompt_of_2000_tokens_next_to_nothing_is_computed(
    make_random_engine, make_task, run_to_end, policy
):
    """62 of its pages are cached, so one step of 16 tokens gives the first token instead of four steps of 500."""
    engine = make_random_engine(policy, max_tokens_per_step=512)
    prompt = [(7 * i * i + 3 * i) % 128 for i in range(2000)]

    def computed() -> tuple[int, int]:
        before = engine.counters
        run_to_end(engine, make_task(prompt, max_new=1))
        after = engine.counters
        tokens = after.num_prompt_tokens_computed - before.num_prompt_tokens_computed
        return tokens, after.num_steps - before.num_steps

    assert [computed() for _ in range(3)] == [(2000, 4), (2000 - 62 * 32, 1), (2000 - 62 * 32, 1)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_of_exactly_two_pages_twice(make_random_engine, make_task, run_to_end, policy):
    """Both its pages are cached, since the first answer sealed them; the last token gives logits only if computed."""
    engine = make_random_engine(policy)
    task = make_task([(7 * i * i + 3 * i) % 128 for i in range(64)], max_new=40)
    first, second = run_to_end(engine, task), run_to_end(engine, task)
    assert engine.load_report().pages_cached == 2
    assert second.ends["r"].finish.usage.num_cached_tokens == 32
    assert engine.counters.num_prompt_tokens_computed == 64 + 32
    if policy == "fp16":
        assert second.token_ids == first.token_ids


def test_equal_prompts_that_come_together_are_computed_once(make_engine, make_task, run_to_end):
    """Each has its last token for itself, and all that its last page does not hold."""
    engine = make_engine(max_tokens_per_step=1024)
    tasks = [make_task("b" + "z" * 148 + "a", request_id=f"r{i}", max_new=3) for i in range(4)]
    answers = run_to_end(engine, *tasks)
    assert set(answers.text.values()) == {"cde"}
    assert engine.counters.num_prompt_tokens_computed == 150 + 3 * (150 - 4 * 32)


def test_all_samples_begin_or_none(make_engine, make_task):
    """Four samples where three slots are free: none of them has a token before the other request has ended."""
    engine = make_engine(max_running=4)
    engine.add(make_task("a", request_id="before", max_new=5))
    engine.step()
    engine.add(make_task("abc", request_id="four", max_new=2, n=4))
    order = []
    while engine.has_work:
        order += [(request_id, chunk.index) for request_id, chunk in engine.step()]
    assert order == [("before", 0)] * 4 + [("four", index) for index in (0, 1, 2, 3)] * 2


def test_books_are_checked_when_idle(make_engine, make_task, run_to_end):
    engine = make_engine()
    engine._now = lambda: time.time() + 3600
    run_to_end(engine, make_task("a", max_new=2))
    engine._ledger._free_pages.pop()
    engine._now = lambda: time.time() + 7200
    with pytest.raises(RuntimeError, match="page ids lost"):
        run_to_end(engine, make_task("a", max_new=2))
