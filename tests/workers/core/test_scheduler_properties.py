"""Whatever callers do in whatever order: no page is held by two, every request ends once, everything comes back."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ottserve.workers.api import (
    DuplicateRequest,
    FinishReason,
    GenerationTask,
    InvalidField,
    QueueFull,
    SamplingParams,
    StopParams,
)
from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.core.ledger import Ledger
from ottserve.workers.core.limits import Limits
from ottserve.workers.core.plan import SequenceStep, StepPlan
from ottserve.workers.core.scheduler import Scheduler
from ottserve.workers.core.sequence import Sequence

EOS = 0
SPEC = KVSpec("ott", num_layers=2, num_kv_heads=1, head_size=8, group=4, window=2)
NUM_PAGES, NUM_SLOTS = 13, 4
CONTEXT, MAX_WAITING, MAX_WAITING_TOKENS = 50, 6, 60
request_ids = st.sampled_from("abcdefghij")
tokens = st.lists(st.integers(EOS, 9), min_size=NUM_SLOTS, max_size=NUM_SLOTS)


class Requests(RuleBasedStateMachine):
    """Two schedulers that are told the same; the first is checked against a model, the second must agree with it."""

    @initialize(aligned=st.booleans(), spare=st.integers(0, 20))
    def start(self, aligned: bool, spare: int) -> None:
        self.now = 100.0
        self.aligned = aligned
        self.budget = NUM_SLOTS - 2 + (SPEC.tail_capacity if aligned else 1) + spare
        limits = Limits(self.budget, MAX_WAITING, MAX_WAITING_TOKENS, CONTEXT, aligned)
        self.ledger, twin_ledger = (Ledger(NUM_PAGES, NUM_SLOTS) for _ in range(2))
        self.scheduler, self.twin = (
            Scheduler(SPEC, ledger, limits, {EOS}, lambda: self.now) for ledger in (self.ledger, twin_ledger)
        )
        self.live: dict[str, Sequence] = {}
        self.pages_seen: dict[str, tuple[int, ...]] = {}

    @rule(
        request_id=request_ids,
        num_prompt=st.integers(1, 30),
        num_new=st.integers(1, 24),
        patience=st.none() | st.integers(1, 20),
    )
    def add(self, request_id: str, num_prompt: int, num_new: int, patience: int | None) -> None:
        deadline_at = None if patience is None else self.now + patience
        prompt = tuple(range(10, 10 + num_prompt))
        task = GenerationTask(request_id, prompt, SamplingParams(), StopParams(num_new), self.now, deadline_at)
        waiting = self.scheduler.num_waiting, self.scheduler.num_waiting_tokens
        try:
            sequence = self.scheduler.add(task)
        except DuplicateRequest:
            assert request_id in self.live
        except InvalidField:
            num_stored = num_prompt + num_new - 1
            assert num_stored >= CONTEXT or SPEC.sealed_pages(num_stored) > NUM_PAGES - 1
        except QueueFull:
            assert waiting[0] == MAX_WAITING or waiting[1] + num_prompt > MAX_WAITING_TOKENS
        else:
            assert request_id not in self.live
            self.live[request_id] = sequence
            self.twin.add(task)

    @rule(request_id=request_ids)
    def abort(self, request_id: str) -> None:
        ended = self.scheduler.abort(request_id)
        assert (ended is not None) == (request_id in self.live)
        assert (self.twin.abort(request_id) is not None) == (ended is not None)
        if ended is not None:
            self.retire(request_id, FinishReason.ABORTED)

    @rule(seconds=st.integers(0, 10))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        late = {
            name for name, s in self.live.items() if s.task.deadline_at is not None and s.task.deadline_at <= self.now
        }
        assert {sequence.request_id for sequence in self.scheduler.expire()} == late
        self.twin.expire()
        for request_id in late:
            self.retire(request_id, self.live[request_id].ending)

    @rule(sampled=tokens, aborted=st.none() | request_ids)
    def step(self, sampled: list[int], aborted: str | None) -> None:
        """One step, with an abort between launch and result if `aborted` names someone."""
        plan = self.scheduler.plan()
        assert self.twin.plan() == plan
        self.check_plan(plan)
        if aborted is not None:
            self.abort(aborted)
        token_ids = sampled[: len(plan.sampling)]
        events = self.scheduler.commit(plan, token_ids)
        assert self.twin.commit(plan, token_ids) == events
        assert [event.request_id for event in events] == [
            part.request_id for part in plan.sampling if part.request_id != aborted
        ]
        for event in events:
            sequence = self.live[event.request_id]
            assert sequence.token_ids[-1] == event.token_id
            assert (event.finish is FinishReason.EOS) == (event.token_id == EOS)
            if event.finish is not None:
                self.retire(event.request_id, event.finish)

    def retire(self, request_id: str, ending: object) -> None:
        sequence = self.live.pop(request_id)
        assert sequence.ending is ending and ending is not None
        self.pages_seen.pop(request_id, None)
        assert request_id not in self.ledger.holders

    def check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.budget
        assert plan.is_empty == (not self.live)
        decoding = [name for name, s in self.live.items() if s.num_generated]
        assert {part.request_id for part in plan.decodes} == set(decoding)
        self.check_first_come_first_served()
        for part in plan.parts:
            self.check_part(part)
        for part in plan.chunks:
            self.check_chunk(part)
        self.check_disjoint(plan)

    def check_first_come_first_served(self) -> None:
        """`live` is in order of arrival: no one who waits stands before one who was admitted."""
        waiting = [sequence.admitted_at is None for sequence in self.live.values()]
        assert waiting == sorted(waiting)

    def check_part(self, part: SequenceStep) -> None:
        sequence = self.live[part.request_id]
        end = part.start + len(part.token_ids)
        assert part.start == sequence.num_stored < end
        assert part.token_ids == tuple(sequence.token_ids[part.start : end])
        assert part.num_sealed == SPEC.sealed_pages(part.start)
        assert len(part.page_ids) == SPEC.sealed_pages(end)
        assert part.samples == (end == len(sequence.token_ids))
        seen = self.pages_seen.get(part.request_id, ())
        assert part.page_ids[: len(seen)] == seen
        self.pages_seen[part.request_id] = part.page_ids

    def check_chunk(self, part: SequenceStep) -> None:
        end = part.start + len(part.token_ids)
        num_prompt = self.live[part.request_id].num_prompt
        assert end <= num_prompt
        if self.aligned:
            seals = [stored for stored in range(part.start + 1, end + 1) if stored >= 6 and (stored - 6) % 4 == 0]
            assert seals == [end] or (seals == [] and end == num_prompt)

    def check_disjoint(self, plan: StepPlan) -> None:
        slot_ids = [part.slot_id for part in plan.parts]
        page_ids = [page_id for part in plan.parts for page_id in part.page_ids]
        for ids in (slot_ids, page_ids):
            assert len(set(ids)) == len(ids) and 0 not in ids

    @invariant()
    def books_balance(self) -> None:
        self.ledger.check()
        pages, slots = self.ledger.pages, self.ledger.slots
        assert (pages.total, slots.total) == (NUM_PAGES - 1, NUM_SLOTS - 1)
        assert slots.used == self.scheduler.num_running
        assert set(self.ledger.holders) <= set(self.live)
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)

    def teardown(self) -> None:
        """Left alone, everyone gets to the end and nothing stays held."""
        steps_left = sum(s.num_pending + s.task.stops.max_new_tokens for s in self.live.values())
        while self.live:
            assert steps_left > 0, f"{list(self.live)} never end"
            steps_left -= 1
            self.step([1] * NUM_SLOTS, None)
        assert self.scheduler.is_idle
        assert self.ledger.pages.used == self.ledger.slots.used == 0
        self.ledger.check()


Requests.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestRequests = Requests.TestCase
