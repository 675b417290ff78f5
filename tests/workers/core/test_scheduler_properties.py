"""Whatever callers do in whatever order: who computes finds stored what was stored, every request ends once, and
everything comes back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
from ottserve.workers.core.kvspec import KVSpec, LayerSpec
from ottserve.workers.core.ledger import Ledger
from ottserve.workers.core.limits import Limits
from ottserve.workers.core.moves import (
    BeginFromSnapshot,
    CopySlot,
    Move,
    RestoreSequence,
    SaveSequence,
    TakeSnapshot,
)
from ottserve.workers.core.plan import SampleKey, SequenceStep, StepPlan
from ottserve.workers.core.prefix import PrefixCache
from ottserve.workers.core.queue import WaitReason
from ottserve.workers.core.scheduler import Scheduler
from ottserve.workers.core.sequence import Sequence

EOS = 0
SPEC = KVSpec("ott", (LayerSpec(),) * 2, num_kv_heads=1, head_size=8, group=4, window=2)
NUM_PAGES, NUM_SLOTS = 10, 6
CONTEXT, MAX_WAITING, MAX_WAITING_TOKENS = 50, 6, 60
request_ids = st.sampled_from("abcdefghij")
tokens = st.lists(st.integers(EOS, 9), min_size=NUM_SLOTS, max_size=NUM_SLOTS)


class FakeStore:
    """A cache that remembers which tokens were stored instead of their keys and values."""

    def __init__(self, certain_share: float) -> None:
        self.pages: dict[int, tuple[int, ...]] = {}
        self.slots: dict[int, tuple[tuple[int, ...], int]] = {}
        self.certain_share = certain_share

    def carry_out(self, moves: Iterable[Move]) -> None:
        for move in moves:
            match move:
                case TakeSnapshot(slot_id, snapshot):
                    assert snapshot.num_pages == self.slots[slot_id][1]
                    snapshot.tensors = self.slots[slot_id][0]
                    snapshot.num_certain_pages = int(snapshot.num_pages * self.certain_share)
                case BeginFromSnapshot(slot_id, num_pages, snapshot):
                    assert snapshot.restores(num_pages)
                    self.slots[slot_id] = snapshot.tensors[: num_pages * 4], num_pages
                case SaveSequence(slot_id, page_ids, saved):
                    saved.tensors = self.slots.pop(slot_id), [self.pages[page_id] for page_id in page_ids]
                case RestoreSequence(slot_id, page_ids, num_present, saved):
                    self.slots[slot_id], pages = saved.tensors
                    assert [self.pages[page_id] for page_id in page_ids[:num_present]] == pages[:num_present]
                    self.pages |= dict(zip(page_ids[num_present:], pages[num_present:], strict=True))
                case CopySlot(from_slot_id, to_slot_id):
                    self.slots[to_slot_id] = self.slots[from_slot_id]

    def run(self, plan: StepPlan, chosen: list[int]) -> None:
        """Compute a plan; `chosen` are the tokens that a device has of the step before."""
        for part in plan.parts:
            if part.start == 0:
                self.slots[part.slot_id] = (), 0
            stored, num_sealed = self.slots[part.slot_id]
            assert (len(stored), num_sealed) == (part.start, part.num_sealed)
            self.check_history(part, stored)
            stored += known(part.token_ids, chosen)
            while len(stored) >= SPEC.seal_point(num_sealed):
                num_sealed += 1
                self.pages[part.page_ids[num_sealed - 1]] = stored[: num_sealed * 4]
            assert len(part.page_ids) == num_sealed
            self.slots[part.slot_id] = stored, num_sealed

    def take_back(self, slot_id: int) -> None:
        """The newest token will be written over."""
        stored, num_sealed = self.slots[slot_id]
        self.slots[slot_id] = stored[:-1], num_sealed

    def check_history(self, part: SequenceStep, stored: tuple[int, ...]) -> None:
        for number, page_id in enumerate(part.page_ids[: part.num_sealed], start=1):
            assert self.pages[page_id] == stored[: number * 4]


def known(token_ids: tuple[int, ...], chosen: list[int]) -> tuple[int, ...]:
    return tuple(chosen[-1 - token_id] if token_id < 0 else token_id for token_id in token_ids)


@dataclass
class Begun:
    """A step of both schedulers whose tokens are to come; `chosen` is what the device takes for them."""

    plan: StepPlan
    sequences: list[Sequence | None]
    twins: list[Sequence | None]
    chosen: list[int]


class Requests(RuleBasedStateMachine):
    """Two schedulers that are told the same; the first is checked against a model, the second must agree with it."""

    @initialize(
        aligned=st.booleans(),
        spare=st.integers(0, 20),
        beside=st.none() | st.integers(0, 9),
        certain=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def start(self, aligned: bool, spare: int, beside: int | None, certain: float) -> None:
        self.now = 100.0
        self.aligned = aligned
        first_chunk = SPEC.tail_capacity if aligned else 1
        self.budget = NUM_SLOTS - 2 + first_chunk + spare
        self.beside = self.budget if beside is None else first_chunk + beside
        limits = Limits(self.budget, MAX_WAITING, MAX_WAITING_TOKENS, CONTEXT, aligned, self.beside)
        self.store, self.twin_store = FakeStore(certain), FakeStore(certain)
        self.ledger, twin_ledger = (Ledger(NUM_PAGES, NUM_SLOTS) for _ in range(2))
        self.scheduler, self.twin = (
            Scheduler(SPEC, ledger, PrefixCache(ledger, 4, ""), limits, {EOS}, lambda: self.now)
            for ledger in (self.ledger, twin_ledger)
        )
        self.live: dict[str, GenerationTask] = {}
        self.tokens: dict[SampleKey, list[int]] = {}
        self.begun: Begun | None = None
        self.num_steps = self.let_in_at = 0

    @rule(
        request_id=request_ids,
        family=st.integers(0, 1),
        salt=st.sampled_from(["", "salt"]),
        num_prompt=st.integers(1, 24),
        num_new=st.integers(1, 30),
        n=st.sampled_from([1, 1, 1, 2, 3, 6]),
        priority=st.integers(-1, 1),
        patience=st.none() | st.integers(1, 20),
        sampling=st.sampled_from([SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(presence_penalty=1.0)]),
    )
    def add(
        self, request_id: str, family: int, salt: str, num_prompt: int, num_new: int, n: int, priority: int,
        patience: int | None, sampling: SamplingParams,
    ) -> None:  # fmt: skip
        deadline_at = None if patience is None else self.now + patience
        prompt = tuple(range(10 + family, 10 + family + num_prompt))
        task = GenerationTask(
            request_id, prompt, sampling, StopParams(num_new), self.now, deadline_at,
            priority=priority, cache_salt=salt, n=n,
        )  # fmt: skip
        waiting = self.scheduler.num_waiting, self.scheduler.num_waiting_tokens
        try:
            self.scheduler.add(task)
        except DuplicateRequest:
            assert request_id in self.live
        except InvalidField:
            assert n >= NUM_SLOTS or num_prompt + num_new > CONTEXT or self.pages_wanted(task) > NUM_PAGES - 1
        except QueueFull:
            assert waiting[0] >= MAX_WAITING or waiting[1] + num_prompt > MAX_WAITING_TOKENS
        else:
            assert request_id not in self.live
            self.live[request_id] = task
            self.tokens[SampleKey(request_id, 0)] = list(prompt)
            self.twin.add(task)

    def pages_wanted(self, task: GenerationTask) -> int:
        shared = max(0, (len(task.prompt_ids) - 2) // 4)
        last = max(0, (len(task.prompt_ids) + task.stops.max_new_tokens - 3) // 4)
        return shared + task.n * (last - shared)

    @rule(request_id=request_ids)
    def abort(self, request_id: str) -> None:
        ended = self.scheduler.abort(request_id)
        assert bool(ended) == (request_id in self.live)
        assert len(self.twin.abort(request_id)) == len(ended)
        self.retire(ended, FinishReason.ABORTED)

    @rule(seconds=st.integers(0, 10))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        late = {name for name, t in self.live.items() if t.deadline_at is not None and t.deadline_at <= self.now}
        ended = self.scheduler.expire()
        self.twin.expire()
        assert {sequence.request_id for sequence in ended} == late
        self.retire(ended)

    @rule()
    def flush(self) -> None:
        num_cached = self.ledger.pages.cached
        assert self.scheduler.flush_cache() == self.twin.flush_cache() == num_cached
        assert self.ledger.pages.cached == 0

    @rule(sampled=tokens, aborted=st.none() | request_ids, ahead=st.booleans(), wrong=st.none() | request_ids)
    def step(self, sampled: list[int], aborted: str | None, ahead: bool, wrong: str | None) -> None:
        """One step, with an abort between launch and result if `aborted` names someone.

        Its tokens are committed when the next step has begun, if that may be `ahead`. What a device holds of `wrong`'s,
        if that draws of the likeliest only, is not what is chosen.
        """
        before = self.begun
        if before is not None and not self.scheduler.can_plan_ahead:
            self.begun = None
            self.commit(before, wrong)
            before = None
        self.begun = begun = self.launch(sampled)
        if aborted is not None:
            self.abort(aborted)
        if before is not None:
            self.commit(before, wrong)
        if not ahead:
            self.begun = None
            self.commit(begun, wrong)
        self.num_steps += 1

    @rule(count=st.integers(1, 12), ahead=st.booleans())
    def go_on(self, count: int, ahead: bool) -> None:
        for _ in range(count):
            self.step([1] * NUM_SLOTS, None, ahead, None)

    def launch(self, sampled: list[int]) -> Begun:
        plan = self.plan()
        begun = Begun(
            plan, list(self.scheduler.begin(plan)), list(self.twin.begin(plan)), sampled[: len(plan.sampling)]
        )
        for key in plan.sampling:
            self.tokens.setdefault(key, list(self.live[key.request_id].prompt_ids))
        return begun

    def commit(self, begun: Begun, wrong: str | None) -> None:
        token_ids = list(begun.chosen)
        for place, sequence in enumerate(begun.sequences):
            if sequence is not None and sequence.request_id == wrong and sequence.task.sampling.cuts:
                token_ids[place] += 1
        dropped = [sequence is None or sequence.ending is not None for sequence in begun.sequences]
        events = self.scheduler.commit(begun.sequences, token_ids)
        assert self.twin.commit(begun.twins, token_ids) == events
        assert [event is None for event in events] == dropped
        for place, (token_id, event) in enumerate(zip(token_ids, events, strict=True)):
            if event is not None:
                assert (event.request_id, event.index, event.token_id) == (*begun.plan.sampling[place], token_id)
                self.take(SampleKey(event.request_id, event.index), token_id, event.finish)
            if token_id != begun.chosen[place]:
                self.take_back(begun.sequences[place], begun.twins[place])

    def take_back(self, sequence: Sequence | None, twin: Sequence | None) -> None:
        begun = self.begun
        if sequence is None or twin is None or begun is None or sequence not in begun.sequences:
            return
        place = begun.sequences.index(sequence)
        begun.sequences[place] = begun.twins[place] = None
        if sequence.ending is None and twin.ending is None:
            self.scheduler.take_back(sequence)
            self.twin.take_back(twin)
            assert sequence.lease is not None
            self.store.take_back(sequence.lease.slot_id)
            self.twin_store.take_back(sequence.lease.slot_id)

    def plan(self) -> StepPlan:
        self.carry_out()
        before = set(self.scheduler._running), self.scheduler.num_preemptions
        others_decode = any(s.is_decoding and not self.pauses(s) for s in self.scheduler._running.values())
        plan = self.scheduler.plan()
        assert self.scheduler.plan() == self.twin.plan() == plan
        self.check_order(*before)
        self.check_plan(plan)
        self.check_hold(plan)
        if others_decode:
            assert sum(len(part.token_ids) for part in plan.chunks) <= self.beside
        self.carry_out()
        chosen = [] if self.begun is None else self.begun.chosen
        self.store.run(plan, chosen)
        self.twin_store.run(plan, chosen)
        return plan

    def carry_out(self) -> None:
        moves, twin_moves = self.scheduler.take_moves(), self.twin.take_moves()
        assert moves == twin_moves
        self.store.carry_out(moves)
        self.twin_store.carry_out(twin_moves)

    def take(self, key: SampleKey, token_id: int, finish: FinishReason | None) -> None:
        task = self.live[key.request_id]
        self.tokens[key].append(token_id)
        is_last = len(self.tokens[key]) == len(task.prompt_ids) + task.stops.max_new_tokens
        assert finish == (FinishReason.EOS if token_id == EOS else FinishReason.LENGTH if is_last else None)
        if finish is not None:
            del self.tokens[key]
            self.forget_if_over(key.request_id)

    def retire(self, ended: tuple[Sequence, ...], ending: object = None) -> None:
        for sequence in ended:
            assert sequence.ending is not None and ending in (None, sequence.ending)
            assert sequence.token_ids == self.tokens.pop(sequence.key)
        for request_id in {sequence.request_id for sequence in ended}:
            self.forget_if_over(request_id)
            assert request_id not in self.live

    def forget_if_over(self, request_id: str) -> None:
        if not any(key.request_id == request_id for key in self.tokens):
            del self.live[request_id]

    def check_order(self, running: set[SampleKey], num_preemptions: int) -> None:
        """Whoever was let in goes before whoever still waits, and nobody is put out right after someone was let in."""
        if self.scheduler.num_preemptions > num_preemptions:
            assert self.num_steps - self.let_in_at > SPEC.group
        let_in = [s for key, s in self.scheduler._running.items() if key not in running]
        if let_in:
            self.let_in_at = self.num_steps
            waiting = list(self.scheduler._waiting)
            assert max(s.rank for s in let_in) < min((s.rank for s in waiting), default=(2, 0, 0))

    def check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.budget
        assert self.begun or plan.is_empty == (not self.live)
        decoding = {key for key, s in self.scheduler._running.items() if s.is_decoding and not self.pauses(s)}
        assert {SampleKey(part.request_id, part.index) for part in plan.decodes} == decoding
        slot_ids = [part.slot_id for part in plan.parts]
        assert len(set(slot_ids)) == len(slot_ids) and 0 not in slot_ids
        written = [page_id for part in plan.parts for page_id in part.page_ids[part.num_sealed :]]
        read = [page_id for part in plan.parts for page_id in part.page_ids[: part.num_sealed]]
        assert len(set(written)) == len(written) and not {0, *read} & set(written)
        for part in plan.parts:
            self.check_part(part)

    def pauses(self, sequence: Sequence) -> bool:
        """Whether its last token is to come, or one on which a seal depends."""
        seals = len(sequence.token_ids) == SPEC.seal_point(sequence.pages_at(sequence.num_stored, SPEC))
        return sequence.is_complete or (sequence.num_unknown > 0 and sequence.task.sampling.cuts and seals)

    def check_part(self, part: SequenceStep) -> None:
        key = SampleKey(part.request_id, part.index)
        so_far, chosen = self.tokens[key], []
        if self.begun is not None and self.scheduler._running[key] in self.begun.sequences:
            chosen = self.begun.chosen
            so_far = [*so_far, chosen[self.begun.plan.sampling.index(key)]]
        end = part.start + len(part.token_ids)
        assert known(part.token_ids, chosen) == tuple(so_far[part.start : end]) != ()
        assert part.samples == (end == len(so_far))
        is_prompt = len(so_far) == len(self.live[part.request_id].prompt_ids)
        assert part.num_samples == (self.live[part.request_id].n if is_prompt else 1)
        if self.aligned:
            seal = SPEC.seal_point(part.num_sealed)
            assert end == seal or (end < seal and part.samples)

    @invariant()
    def reasons_hold(self) -> None:
        """Each that waits has one reason; the first waits for a prefix only beside somebody who is computing it."""
        waiting = self.scheduler.waiting
        assert sum(waiting.values()) == self.scheduler.num_waiting
        assert sum(count for reason, count in waiting.items() if reason is not WaitReason.QUEUE) <= 1

    def check_hold(self, plan: StepPlan) -> None:
        if not self.scheduler.waiting.get(WaitReason.PREFIX):
            return
        first = next(iter(self.scheduler._waiting))
        beginning = first.token_ids[: SPEC.group]
        leaders = [s for s in self.scheduler._running.values() if s.token_ids[: SPEC.group] == beginning]
        assert any(not s.is_decoding and s.task.cache_salt == first.task.cache_salt for s in leaders)
        assert plan.chunks

    @invariant()
    def books_balance(self) -> None:
        self.scheduler.check()
        pages, slots = self.ledger.pages, self.ledger.slots
        assert (pages.total, slots.total) == (NUM_PAGES - 1, NUM_SLOTS - 1)
        assert slots.used == sum(sequence.num_samples for sequence in self.scheduler._running.values())
        assert set(self.ledger.holders) == set(self.scheduler._running)
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.tokens)

    def teardown(self) -> None:
        """Left alone, everyone gets to the end and nothing stays held."""
        steps_left = 2 * sum(t.n * (len(t.prompt_ids) + t.stops.max_new_tokens) for t in self.live.values())
        while self.live:
            assert steps_left > 0, f"{list(self.live)} never end"
            steps_left -= 1
            self.step([1] * NUM_SLOTS, None, steps_left % 3 > 0, None)
        assert self.scheduler.is_idle
        assert self.ledger.pages.used == self.ledger.slots.used == 0
        assert self.scheduler.flush_cache() == NUM_PAGES - 1 - self.ledger.pages.free or self.ledger.pages.cached == 0
        self.ledger.check()


Requests.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestRequests = Requests.TestCase
