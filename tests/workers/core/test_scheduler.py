"""What runs when: one situation a test. Sequences of random calls are in test_scheduler_properties.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pytest

from ottserve.workers.api import (
    DeadlineExceeded,
    DuplicateRequest,
    FinishReason,
    GenerationTask,
    Internal,
    InvalidField,
    QueueFull,
)
from ottserve.workers.core.ledger import Ledger
from ottserve.workers.core.plan import SampleKey, StepPlan
from ottserve.workers.core.queue import WaitReason
from ottserve.workers.core.scheduler import Scheduler

EOS, OTHER = 0, 7
MakeTask = Callable[..., GenerationTask]
MakeScheduler = Callable[..., Scheduler]


def lengths(plan: StepPlan) -> list[tuple[str, int]]:
    return [(part.request_id, len(part.token_ids)) for part in plan.parts]


def step(scheduler: Scheduler, token_id: int = OTHER) -> list[tuple[str, int]]:
    plan = scheduler.plan()
    scheduler.commit(scheduler.begin(plan), [token_id] * len(plan.sampling))
    return lengths(plan)


def test_a_long_prompt_is_computed_in_chunks_beside_decoding(make_scheduler: MakeScheduler, task: MakeTask) -> None:
    """Others get their token in every step while a maximal prompt comes in."""
    scheduler = make_scheduler(max_tokens_per_step=10)
    scheduler.add(task("a", 3, 9))
    scheduler.add(task("b", 4, 9))
    step(scheduler)
    scheduler.add(task("long", 18, 3))
    assert [step(scheduler) for _ in range(4)] == [
        [("a", 1), ("b", 1), ("long", 8)],
        [("a", 1), ("b", 1), ("long", 8)],
        [("a", 1), ("b", 1), ("long", 2)],
        [("a", 1), ("b", 1), ("long", 1)],
    ]


@pytest.mark.parametrize("beside", [3, 5, 18])
def test_a_long_prompt_costs_those_who_decode_no_step_and_each_step_little(
    make_scheduler: MakeScheduler, task: MakeTask, beside: int
) -> None:
    """Its 18 tokens fit into one step, and are one when nobody decodes; beside others it takes `beside` a step."""
    scheduler = make_scheduler(max_tokens_per_step=64, beside=beside)
    scheduler.add(task("long", 18, 3))
    assert step(scheduler) == [("long", 18)]
    scheduler.abort("long")
    scheduler.add(task("a", 3, 9))
    scheduler.add(task("b", 4, 9))
    step(scheduler)
    scheduler.add(task("long", 18, 3))
    steps = [step(scheduler) for _ in range(math.ceil(18 / beside))]
    assert [parts[:2] for parts in steps] == [[("a", 1), ("b", 1)]] * len(steps)
    assert sum(num_tokens for _, num_tokens in map(itemgetter(2), steps)) == 18
    assert max(num_tokens for _, num_tokens in map(itemgetter(2), steps)) <= beside


def test_aligned_chunks_end_where_the_tail_is_full(make_scheduler: MakeScheduler, task: MakeTask) -> None:
    """One chunk a step and sequence: a token after a seal must see what was sealed."""
    scheduler = make_scheduler(max_tokens_per_step=16, aligned_chunks=True)
    scheduler.add(task("a", 15, 3))
    assert [step(scheduler) for _ in range(4)] == [[("a", 6)], [("a", 4)], [("a", 4)], [("a", 1)]]


def test_an_aligned_chunk_waits_for_room_rather_than_being_cut(make_scheduler: MakeScheduler, task: MakeTask) -> None:
    scheduler = make_scheduler(max_tokens_per_step=8, aligned_chunks=True)
    scheduler.add(task("a", 9, 3))
    scheduler.add(task("b", 9, 3))
    assert [step(scheduler) for _ in range(4)] == [[("a", 6)], [("a", 3)], [("a", 1), ("b", 6)], [("a", 1), ("b", 3)]]


def test_the_oldest_is_never_overtaken(make_scheduler: MakeScheduler, task: MakeTask, ledger: Ledger) -> None:
    """A small request that would fit waits behind a large one that does not yet."""
    scheduler = make_scheduler(max_tokens_per_step=32)
    scheduler.add(task("first", 23, 12))
    step(scheduler)
    assert ledger.pages.free == 3
    scheduler.add(task("large", 18, 1))
    scheduler.add(task("small", 2, 1))
    assert step(scheduler) == [("first", 1)]
    assert scheduler.waiting == {WaitReason.PAGES: 1, WaitReason.QUEUE: 1}
    scheduler.abort("first")
    assert step(scheduler) == [("large", 18), ("small", 2)]


def test_slots_bound_what_runs(make_scheduler: MakeScheduler, task: MakeTask) -> None:
    scheduler = make_scheduler()
    for name in "abcd":
        scheduler.add(task(name, 2, 2))
    assert step(scheduler) == [("a", 2), ("b", 2), ("c", 2)]
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_waiting_tokens) == (3, 1, 2)
    assert scheduler.waiting == {WaitReason.SLOTS: 1}
    step(scheduler)
    assert step(scheduler) == [("d", 2)]


def test_asking_for_the_plan_twice_gives_the_same(make_scheduler: MakeScheduler, task: MakeTask) -> None:
    scheduler = make_scheduler(max_tokens_per_step=9)
    for name in "abcd":
        scheduler.add(task(name, 6, 2))
    for _ in range(8):
        plan = scheduler.plan()
        assert scheduler.plan() == plan
        scheduler.commit(scheduler.begin(plan), [OTHER] * len(plan.sampling))


def test_a_live_id_is_refused_and_the_first_goes_on(make_scheduler: MakeScheduler, task: MakeTask) -> None:
    scheduler = make_scheduler()
    scheduler.add(task("a", 5, 1))
    for _ in range(2):
        with pytest.raises(DuplicateRequest, match="'a'"):
            scheduler.add(task("a", 2, 1))
        plan = scheduler.plan()
    assert lengths(plan) == [("a", 5)]
    scheduler.commit(scheduler.begin(plan), [OTHER])
    scheduler.add(task("a"))


def test_aborting_is_defined_for_every_id(make_scheduler: MakeScheduler, task: MakeTask, ledger: Ledger) -> None:
    """Running, waiting, again, just finished, unknown, empty: exactly one free each."""
    scheduler = make_scheduler()
    running, done, waiting = (scheduler.add(task(name, 5, num_new)) for name, num_new in (("r", 9), ("d", 1), ("w", 9)))
    plan = scheduler.plan()
    scheduler.commit(scheduler.begin(plan), [OTHER] * 3)
    assert scheduler.abort("r") == (running,) and running.ending is FinishReason.ABORTED
    assert scheduler.abort("w") == (waiting,)
    assert done.ending is FinishReason.LENGTH
    assert [scheduler.abort(name) for name in ("r", "d", "unknown", "")] == [()] * 4
    assert scheduler.is_idle and ledger.pages.used == ledger.slots.used == 0
    ledger.check()


def test_a_request_cancelled_while_queued_never_runs(make_scheduler: MakeScheduler, task: MakeTask) -> None:
    scheduler = make_scheduler()
    scheduler.add(task("a"))
    [sequence] = scheduler.abort("a")
    assert scheduler.plan().is_empty
    assert sequence.admitted_at is None


def test_an_abort_between_launch_and_result_drops_the_token(
    make_scheduler: MakeScheduler, task: MakeTask, ledger: Ledger
) -> None:
    """Even when the id is used again at once: the new request starts from its own prompt."""
    scheduler = make_scheduler()
    scheduler.add(task("a"))
    scheduler.add(task("b"))
    sequences = scheduler.begin(scheduler.plan())
    [old] = scheduler.abort("a")
    new = scheduler.add(task("a", 4))
    dropped, taken = scheduler.commit(sequences, [OTHER, OTHER])
    assert dropped is None and taken is not None and taken.request_id == "b"
    assert old.num_generated == new.num_generated == new.num_stored == 0
    ledger.check()


def test_a_last_token_that_is_to_come_lends_nobody_a_page(
    make_scheduler: MakeScheduler, task: MakeTask, ledger: Ledger
) -> None:
    """Its place would end a page if it were stored, which it never is. 6 pages are free, and the newcomer needs 7."""
    scheduler = make_scheduler(max_tokens_per_step=64)
    scheduler.add(task("holds two pages", 10, 3))
    step(scheduler)
    scheduler.add(task("last", 5, 1))
    begun = scheduler.begin(scheduler.plan())
    scheduler.add(task("newcomer", 30, 1))
    assert scheduler.can_plan_ahead
    assert {part.request_id for part in scheduler.plan().parts} == {"holds two pages"}
    assert ledger.pages.free == 6 and scheduler.num_waiting == 1
    scheduler.commit(begun, [OTHER, OTHER])
    ledger.check()


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_deadline_ends_a_request_waiting_or_running(
    make_scheduler: MakeScheduler, task: MakeTask, ledger: Ledger, clock: Any, num_steps: int
) -> None:
    scheduler = make_scheduler()
    late = scheduler.add(task("late", 5, 9, deadline_at=100.2))
    scheduler.add(task("other", 5, 9))
    for _ in range(num_steps):
        assert scheduler.expire() == ()
        step(scheduler)
    clock.now = 100.2
    assert scheduler.expire() == (late,)
    assert isinstance(late.ending, DeadlineExceeded) and late.ended_at == 100.2
    assert scheduler.expire() == ()
    assert [name for name, _ in step(scheduler)] == ["other"]
    assert ledger.holders == (SampleKey("other", 0),)


def test_a_failed_row_ends_alone(make_scheduler: MakeScheduler, task: MakeTask, ledger: Ledger) -> None:
    scheduler = make_scheduler()
    bad, good = scheduler.add(task("bad")), scheduler.add(task("good"))
    step(scheduler)
    error = Internal("the row failed")
    assert scheduler.end("bad", error) == (bad,) and bad.ending is error
    assert step(scheduler) == [("good", 1)] and good.ending is None
    assert ledger.holders == (SampleKey("good", 0),)


def test_queue_full_by_requests_keeps_nothing(make_scheduler: MakeScheduler, task: MakeTask) -> None:
    scheduler = make_scheduler(max_waiting=2)
    scheduler.add(task("a"))
    scheduler.add(task("b"))
    with pytest.raises(QueueFull, match="2 requests wait, at most 2") as refusal:
        scheduler.add(task("c"))
    assert refusal.value.retry_after_ms > 0
    assert scheduler.num_waiting == 2 and scheduler.abort("c") == ()


def test_queue_full_by_tokens_but_one_request_may_always_wait(make_scheduler: MakeScheduler, task: MakeTask) -> None:
    """Else a prompt longer than the bound could never be served, though it was told to try again."""
    scheduler = make_scheduler(max_waiting_tokens=10)
    scheduler.add(task("long", 20))
    with pytest.raises(QueueFull, match="20 prompt tokens wait, with 1 more they would exceed 10"):
        scheduler.add(task("short", 1))
    step(scheduler)
    scheduler.add(task("short", 1))


def test_what_can_never_fit_is_refused_before_the_queue(make_scheduler: MakeScheduler, task: MakeTask) -> None:
    scheduler = make_scheduler(max_waiting=1)
    scheduler.add(task("a"))
    with pytest.raises(InvalidField):
        scheduler.add(task("b", 39, 1))
    assert scheduler.num_waiting == 1


def test_commit_wants_one_token_for_each_part_that_samples(make_scheduler: MakeScheduler, task: MakeTask) -> None:
    scheduler = make_scheduler()
    scheduler.add(task("a"))
    plan = scheduler.plan()
    with pytest.raises(ValueError, match="zip"):
        scheduler.commit(scheduler.begin(plan), [OTHER, OTHER])
