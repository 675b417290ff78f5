"""Prefixes, priorities, preemption and samples, one situation a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ottserve.workers.api import FinishReason, GenerationTask, InvalidField, sample_seed
from ottserve.workers.core.ledger import Ledger
from ottserve.workers.core.moves import (
    BeginFromSnapshot,
    CopySlot,
    RestoreSequence,
    SaveSequence,
    Snapshot,
    TakeSnapshot,
)
from ottserve.workers.core.plan import SampleKey, StepPlan
from ottserve.workers.core.queue import WaitReason
from ottserve.workers.core.scheduler import Scheduler

EOS, OTHER = 0, 7
MakeTask = Callable[..., GenerationTask]
MakeScheduler = Callable[..., Scheduler]


def lengths(plan: StepPlan) -> list[tuple[str, int]]:
    return [(part.request_id, len(part.token_ids)) for part in plan.parts]


def step(scheduler: Scheduler, token_id: int = OTHER) -> list[tuple[str, int]]:
    """One step whose moves are carried out by an executor that only says so."""
    plan = scheduler.plan()
    moves = list(scheduler.take_moves())
    scheduler.commit(scheduler.begin(plan), [token_id] * len(plan.sampling))
    for move in (*moves, *scheduler.take_moves()):
        if isinstance(move, TakeSnapshot):
            move.snapshot.tensors, move.snapshot.num_certain_pages = "taken", move.snapshot.num_pages
    return lengths(plan)


def test_a_prompt_seen_before_is_computed_from_where_its_pages_end(
    make_scheduler: MakeScheduler, task: MakeTask
) -> None:
    """14 tokens seal 3 pages, and the next sequence needs the last two tokens only; its tail begins empty."""
    scheduler = make_scheduler()
    scheduler.add(task("a", 14, 1, salt=""))
    assert step(scheduler) == [("a", 14)]
    sequence = scheduler.add(task("b", 14, 8, salt=""))
    plan = scheduler.plan()
    [begin] = scheduler.take_moves()
    assert lengths(plan) == [("b", 2)]
    assert plan.chunks[0].num_sealed == 3 and plan.chunks[0].start == 12
    assert isinstance(begin, BeginFromSnapshot) and begin.num_pages == 3
    assert sequence.usage().num_cached_tokens == scheduler.num_cached_tokens == 12
    scheduler.commit(scheduler.begin(plan), [OTHER])
    sealed = []
    while not scheduler.is_idle:
        plan = scheduler.plan()
        sealed += [part.start + 1 for part in plan.parts if len(part.page_ids) > part.num_sealed]
        scheduler.commit(scheduler.begin(plan), [OTHER])
    assert sealed == [18]  # (3 + 1)·G + R


def test_the_last_token_is_computed_though_its_page_is_cached(make_scheduler: MakeScheduler, task: MakeTask) -> None:
    """A prompt of exactly k pages, twice."""
    scheduler = make_scheduler()
    scheduler.add(task("a", 8, 8, salt=""))
    while not scheduler.is_idle:
        step(scheduler)
    scheduler.add(task("b", 8, 1, salt=""))
    assert step(scheduler) == [("b", 4)]


def test_an_answer_can_be_continued(make_scheduler: MakeScheduler, task: MakeTask) -> None:
    """The next turn of a chat finds the pages of prompt and answer: 5 + 9 stored tokens, 3 pages."""
    scheduler = make_scheduler()
    scheduler.add(task("a", 5, 10, salt=""))
    while not scheduler.is_idle:
        step(scheduler)
    scheduler.add(task("b", 20, 1, salt=""))
    assert step(scheduler) == [("b", 8)]


@pytest.mark.parametrize("salt", ["", "other"])
def test_no_hit_from_what_was_cold_or_failed_or_salted(
    make_scheduler: MakeScheduler, task: MakeTask, salt: str
) -> None:
    scheduler = make_scheduler(max_tokens_per_step=4)
    cold = scheduler.add(task("a", 14, 9, salt="mine"))
    for _ in range(4):
        step(scheduler)
    assert cold.usage().num_cached_tokens == 0
    scheduler.add(task("b", 14, 1, salt=salt))
    assert step(scheduler)[1] == ("b", 3)


def test_pages_of_a_failed_request_are_not_kept(make_scheduler: MakeScheduler, task: MakeTask, ledger: Ledger) -> None:
    scheduler = make_scheduler()
    scheduler.add(task("a", 14, 9))
    scheduler.plan()
    scheduler.end("a", FinishReason.ABORTED)
    assert ledger.pages.cached == 0 and ledger.pages.free == 8


def test_the_higher_priority_goes_first_and_equals_by_arrival(make_scheduler: MakeScheduler, task: MakeTask) -> None:
    scheduler = make_scheduler(max_tokens_per_step=64)
    for name, priority in (("a", 0), ("b", -(2**31)), ("c", 0), ("d", 2**31 - 1)):
        scheduler.add(task(name, 2, 2, priority=priority))
    assert step(scheduler) == [("d", 2), ("a", 2), ("c", 2)]
    step(scheduler)
    assert step(scheduler) == [("b", 2)]


def fill_pool(make_scheduler: MakeScheduler, task: MakeTask, priority: int = 0) -> Scheduler:
    """Two answers that grow until 8 pages are not enough for both, `b` being the newer."""
    scheduler = make_scheduler(max_tokens_per_step=64)
    scheduler.add(task("a", 2, 30))
    scheduler.add(task("b", 2, 30, priority=priority))
    while scheduler.num_preemptions == 0:
        step(scheduler)
        scheduler.plan()
    return scheduler


@pytest.mark.parametrize(("priority", "victim"), [(0, "b"), (1, "a")])
def test_the_lowest_and_then_the_newest_makes_room(
    make_scheduler: MakeScheduler, task: MakeTask, ledger: Ledger, priority: int, victim: str
) -> None:
    scheduler = fill_pool(make_scheduler, task, priority)
    assert ledger.holders == (SampleKey("a" if victim == "b" else "b", 0),)
    [move] = scheduler.take_moves()
    assert isinstance(move, SaveSequence) and len(move.page_ids) == 4
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_waiting_samples) == (1, 1, 1)


@pytest.mark.parametrize("n", [1, 3])
def test_who_waits_is_told_of_with_the_slots_that_it_takes(
    make_scheduler: MakeScheduler, task: MakeTask, ledger: Ledger, n: int
) -> None:
    scheduler = make_scheduler()
    scheduler.add(task("a", 2, 3, n=n))
    assert (scheduler.num_waiting, scheduler.num_waiting_samples, ledger.slots.used) == (1, n, 0)
    step(scheduler)
    assert (scheduler.num_waiting, scheduler.num_waiting_samples, ledger.slots.used) == (0, 0, n)


def test_a_preempted_sequence_goes_on_where_it_stopped(
    make_scheduler: MakeScheduler, task: MakeTask, ledger: Ledger
) -> None:
    scheduler = fill_pool(make_scheduler, task)
    waiting = next(iter(scheduler._waiting))
    before = list(waiting.token_ids)
    while waiting.lease is None:
        plan = scheduler.plan()
        scheduler.commit(scheduler.begin(plan), [OTHER] * len(plan.sampling))
        moves = scheduler.take_moves()
        scheduler.plan()
    assert waiting.token_ids == before and waiting.num_pending == 1
    assert isinstance((*moves, *scheduler.take_moves())[-1], RestoreSequence)
    while not scheduler.is_idle:
        step(scheduler)
    assert waiting.ending is FinishReason.LENGTH and waiting.num_generated == 30
    assert scheduler.num_preemptions == 1
    ledger.check()


def test_coming_back_takes_what_still_lies_in_the_prefix_cache(make_scheduler: MakeScheduler, task: MakeTask) -> None:
    scheduler = make_scheduler(max_tokens_per_step=64)
    sequence = scheduler.add(task("a", 14, 9))
    step(scheduler)
    page_ids = sequence.lease.page_ids if sequence.lease else ()
    scheduler.preempt(sequence)
    scheduler.plan()
    _, restore = scheduler.take_moves()
    assert isinstance(restore, RestoreSequence)
    assert restore.num_present == 3 and restore.page_ids == page_ids


def test_overload_does_not_thrash(make_scheduler: MakeScheduler, task: MakeTask) -> None:
    """Ten answers of 7 pages in a pool of 8: each is put out at most once for each page that it fills."""
    scheduler = make_scheduler(max_tokens_per_step=64, max_waiting=20)
    for index in range(10):
        scheduler.add(task(f"r{index}", 2, 28))
    num_steps = 0
    while not scheduler.is_idle:
        step(scheduler)
        num_steps += 1
    assert scheduler.num_preemptions <= num_steps / 4
    assert num_steps < 10 * 28


def test_one_long_prefix_shared_by_32_in_a_pool_that_holds_it_once(
    make_scheduler: MakeScheduler, task: MakeTask, ledger: Ledger
) -> None:
    """26 prompt tokens are 6 of 8 pages; each request needs one more of its own."""
    scheduler = make_scheduler(max_tokens_per_step=64, max_waiting=40, max_waiting_tokens=2000)
    sequences = [scheduler.add(task(f"r{index}", 26, 4, salt="")) for index in range(32)]
    num_steps = 0
    while not scheduler.is_idle:
        step(scheduler)
        num_steps += 1
    assert all(sequence.ending is FinishReason.LENGTH for sequence in sequences)
    assert sum(sequence.num_cached_tokens == 24 for sequence in sequences) == 31
    assert num_steps < 32 * 4
    ledger.check()


def test_of_equal_cold_prompts_one_is_computed_and_the_others_wait_for_it(
    make_scheduler: MakeScheduler, task: MakeTask
) -> None:
    """All three would fit in the first step; one after it they need the last two tokens each."""
    scheduler = make_scheduler(max_tokens_per_step=64)
    for name in "abc":
        scheduler.add(task(name, 14, 3, salt=""))
    assert step(scheduler) == [("a", 14)]
    assert scheduler.waiting == {WaitReason.PREFIX: 1, WaitReason.QUEUE: 1}
    assert step(scheduler) == [("a", 1), ("b", 2), ("c", 2)]


@pytest.mark.parametrize(
    ("leader", "newcomer", "held"),
    [
        pytest.param({"num_prompt": 14}, {"num_prompt": 9}, True, id="two of its pages"),
        pytest.param({"num_prompt": 14}, {"num_prompt": 8}, False, id="one page for fourteen tokens"),
        pytest.param({"num_prompt": 8}, {"num_prompt": 8}, True, id="one page for eight tokens"),
        pytest.param({"num_prompt": 14}, {"num_prompt": 4}, False, id="no page: the last token is computed"),
        pytest.param({"num_prompt": 5}, {"num_prompt": 14}, False, id="no page: the leader seals none"),
        pytest.param({"num_prompt": 14}, {"num_prompt": 14, "salt": "other"}, False, id="another salt"),
    ],
)
def test_one_waits_for_a_prefix_only_if_that_spares_it_enough(
    make_scheduler: MakeScheduler, task: MakeTask, leader: dict[str, Any], newcomer: dict[str, Any], held: bool
) -> None:
    scheduler = make_scheduler(max_tokens_per_step=64)
    scheduler.add(task("leader", **{"salt": "", **leader}))
    scheduler.add(task("newcomer", **{"salt": "", **newcomer}))
    assert [name for name, _ in step(scheduler)] == ["leader"] + ["newcomer"] * (not held)


def test_who_waited_for_a_prefix_computes_it_when_the_other_is_gone(
    make_scheduler: MakeScheduler, task: MakeTask
) -> None:
    scheduler = make_scheduler(max_tokens_per_step=8)
    scheduler.add(task("a", 14, 3, salt=""))
    scheduler.add(task("b", 14, 3, salt=""))
    assert step(scheduler) == [("a", 8)]
    scheduler.abort("a")
    assert step(scheduler) == [("b", 8)]
    assert step(scheduler) == [("b", 6)]


def test_samples_share_the_prompt_and_end_each_for_itself(
    make_scheduler: MakeScheduler, task: MakeTask, ledger: Ledger
) -> None:
    scheduler = make_scheduler()
    first = scheduler.add(task("a", 14, 6, n=3))
    plan = scheduler.plan()
    assert plan.sampling == tuple(SampleKey("a", index) for index in range(3))
    assert (ledger.pages.used, ledger.slots.used) == (3, 3)
    events = scheduler.commit(scheduler.begin(plan), [OTHER, EOS, OTHER])
    assert [(event.index, event.finish) for event in events] == [(0, None), (1, FinishReason.EOS), (2, None)]
    copies = [move for move in scheduler.take_moves() if isinstance(move, CopySlot)]
    assert len({move.to_slot_id for move in copies}) == 2 and len({move.from_slot_id for move in copies}) == 1
    assert (ledger.pages.used, ledger.slots.used) == (3, 2)
    for _ in range(4):
        step(scheduler)
    assert ledger.pages.used == 5
    assert [event.index for event in scheduler.commit(scheduler.begin(scheduler.plan()), [OTHER, OTHER])] == [0, 2]
    assert scheduler.is_idle and [sequence.num_generated for sequence in (first, *first.forks)] == [6, 1, 6]
    ledger.check()


def test_all_samples_are_let_in_or_none(make_scheduler: MakeScheduler, task: MakeTask, ledger: Ledger) -> None:
    """Three slots, one in use: three samples wait for it, and nobody passes them."""
    scheduler = make_scheduler()
    scheduler.add(task("a", 2, 3))
    step(scheduler)
    scheduler.add(task("many", 2, 2, n=3))
    assert step(scheduler) == [("a", 1)] and ledger.slots.used == 1
    step(scheduler)
    assert step(scheduler) == [("many", 2)] and ledger.slots.used == 3


@pytest.mark.parametrize(("n", "num_new", "field"), [(4, 2, "n"), (0, 2, "n"), (3, 14, "max_new_tokens")])
def test_samples_that_never_fit_are_refused(
    make_scheduler: MakeScheduler, task: MakeTask, n: int, num_new: int, field: str
) -> None:
    """Three slots; two prompt pages and 3 · 3 more are over 8."""
    scheduler = make_scheduler()
    with pytest.raises(InvalidField) as refusal:
        scheduler.add(task("a", 10, num_new, n=n))
    assert refusal.value.field == field and scheduler.is_idle


def test_an_abort_ends_every_sample(make_scheduler: MakeScheduler, task: MakeTask, ledger: Ledger) -> None:
    scheduler = make_scheduler()
    scheduler.add(task("a", 14, 6, n=3))
    step(scheduler)
    assert {sequence.index for sequence in scheduler.abort("a")} == {0, 1, 2}
    assert scheduler.is_idle and ledger.slots.used == ledger.pages.used == 0


def test_seeds_of_samples_are_distinct_and_fixed() -> None:
    seeds = [sample_seed(7, index) for index in range(128)]
    assert seeds[0] == 7 and len(set(seeds)) == 128 and max(seeds) < 2**64
    assert seeds == [sample_seed(7, index) for index in range(128)]
    assert not set(seeds[1:]) & {sample_seed(8, index) for index in range(1, 128)}


def test_a_snapshot_restores_what_it_knows() -> None:
    snapshot = Snapshot(num_pages=5, num_certain_pages=3)
    assert not snapshot.restores(5)
    snapshot.tensors = "taken"
    assert [n for n in range(1, 7) if snapshot.restores(n)] == [1, 2, 3, 5]
