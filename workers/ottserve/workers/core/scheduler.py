"""Decides what each step computes and who may run. Knows no tensor, no text and no thread; one caller at a time.

A step of the engine reads

    expired = scheduler.expire()
    plan = scheduler.plan()
    … run, sample …
    events = scheduler.commit(plan, token_ids)

The same calls at the same times give the same plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from ottserve.workers.api import (
    DeadlineExceeded,
    DuplicateRequest,
    FinishReason,
    GenerationTask,
    QueueFull,
)
from ottserve.workers.core.event import TokenEvent
from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.core.ledger import Ledger
from ottserve.workers.core.limits import Limits, pages_to_reserve
from ottserve.workers.core.plan import SequenceStep, StepPlan
from ottserve.workers.core.sequence import Ending, Sequence


class Scheduler:
    """First come, first served; continuous batching under a token budget.

    Nothing is preempted, so admission reserves the pages of the whole prompt and of every token that may follow it:
    a sequence that runs can never fail for want of a page. The oldest waiting request is never overtaken, however
    small the ones behind it, so none starves.

    Each step computes one token of every decoding sequence, then prompt chunks in order of admission with what is left
    of the budget, then admits. A long prompt is thus computed in chunks beside the others' decoding.
    """

    def __init__(
        self,
        spec: KVSpec,
        ledger: Ledger,
        limits: Limits,
        eos_token_ids: Iterable[int],
        now: Callable[[], float],
    ) -> None:
        """Start empty.

        Args:
            eos_token_ids: any of them ends a sequence.
            now: the clock, UNIX time in seconds, to which deadlines are compared.

        Raises:
            ValueError: the limits contradict each other.
        """
        limits.refuse_contradictions(ledger.max_slots, spec)
        self._spec = spec
        self._ledger = ledger
        self._limits = limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self._now = now
        self._waiting: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the requests not admitted yet."""
        return sum(sequence.num_prompt for sequence in self._waiting.values())

    @property
    def is_idle(self) -> bool:
        """Whether no request is live."""
        return not self._waiting and not self._running

    def add(self, task: GenerationTask) -> Sequence:
        """Queue a task. Nothing is kept of one that is refused.

        Raises:
            DuplicateRequest: a live request has its id; that one goes on.
            InvalidField: it could not run even on an idle replica.
            QueueFull: too many requests or tokens wait.
        """
        if task.request_id in self._waiting or task.request_id in self._running:
            raise DuplicateRequest(f"request_id: a live request already has the id {task.request_id!r}")
        self._limits.refuse_impossible(task, self._spec, self._ledger.max_pages)
        self._refuse_if_full(len(task.prompt_ids))
        sequence = self._waiting[task.request_id] = Sequence(task)
        return sequence

    def end(self, request_id: str, ending: Ending) -> Sequence | None:
        """End a live request now: an abort, a stop string, a failure. Its slot and pages are free on return.

        Returns:
            The ended sequence; None if no live request has that id (unknown, or ended before), which changes nothing.
        """
        sequence = self._waiting.pop(request_id, None) or self._running.pop(request_id, None)
        if sequence is None:
            return None
        if sequence.lease is not None:
            self._ledger.release(request_id)
            sequence.lease = None
        sequence.ending = ending
        sequence.ended_at = self._now()
        return sequence

    def abort(self, request_id: str) -> Sequence | None:
        """End a live request because its caller no longer wants it; see `end`."""
        return self.end(request_id, FinishReason.ABORTED)

    def expire(self) -> tuple[Sequence, ...]:
        """End every request, waiting or running, whose deadline has passed, and return them."""
        now = self._now()
        late = [
            sequence.request_id
            for sequence in self._live()
            if sequence.task.deadline_at is not None and sequence.task.deadline_at <= now
        ]
        ended = (self.end(request_id, DeadlineExceeded("the request's deadline passed")) for request_id in late)
        return tuple(sequence for sequence in ended if sequence is not None)

    def plan(self) -> StepPlan:
        """Admit what fits and say what the next step computes. Asked again before `commit`, it says the same."""
        decodes = tuple(s.next_step(1, self._spec) for s in self._running.values() if s.is_decoding)
        budget = self._limits.max_tokens_per_step - len(decodes)
        chunks: list[SequenceStep] = []
        for sequence in self._prompts_in_order():
            num_tokens = self._chunk_length(sequence, budget)
            if num_tokens == 0 or not self._admit(sequence):
                break
            chunks.append(sequence.next_step(num_tokens, self._spec))
            budget -= num_tokens
        return StepPlan(decodes, tuple(chunks))

    def commit(self, plan: StepPlan, token_ids: SequenceOf[int]) -> tuple[TokenEvent, ...]:
        """Advance the sequences of a step that has run; the only place where that happens.

        A sequence that was ended between `plan` and `commit` is left alone, and its token is dropped.

        Args:
            plan: what `plan` returned last.
            token_ids: a sampled token for each part of the plan that samples, in the order of `plan.sampling`.

        Returns:
            An event for each of these tokens. Sequences whose event has a finish hold nothing any more.
        """
        sampled = {part.request_id: token for part, token in zip(plan.sampling, token_ids, strict=True)}
        events = (self._commit_part(part, sampled.get(part.request_id)) for part in plan.parts)
        return tuple(event for event in events if event is not None)

    def _commit_part(self, part: SequenceStep, token_id: int | None) -> TokenEvent | None:
        sequence = self._running.get(part.request_id)
        if sequence is None:
            return None
        sequence.num_stored = part.start + len(part.token_ids)
        if token_id is None:
            return None
        finish = sequence.advance(token_id, self._eos_token_ids, self._now())
        if finish is not None:
            self.end(part.request_id, finish)
        return TokenEvent(part.request_id, token_id, finish)

    def _live(self) -> Iterator[Sequence]:
        yield from self._running.values()
        yield from self._waiting.values()

    def _prompts_in_order(self) -> list[Sequence]:
        """Sequences whose prompt is not computed: those admitted first, then those that wait."""
        return [sequence for sequence in self._live() if not sequence.is_decoding]

    def _chunk_length(self, sequence: Sequence, budget: int) -> int:
        """Prompt tokens that the next step computes, 0 if the budget has no room for any."""
        if not self._limits.aligned_chunks:
            return min(sequence.num_pending, budget)
        to_seal = self._spec.next_seal(sequence.num_stored) - sequence.num_stored
        wanted = min(sequence.num_pending, to_seal)
        return wanted if wanted <= budget else 0

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its slot and pages; whether it runs now."""
        if sequence.lease is not None:
            return True
        num_pages = pages_to_reserve(sequence.task, self._spec)
        if not self._ledger.can_lease(num_pages):
            return False
        sequence.lease = self._ledger.lease(sequence.request_id, num_pages)
        sequence.admitted_at = self._now()
        self._running[sequence.request_id] = self._waiting.pop(sequence.request_id)
        return True

    def _refuse_if_full(self, num_tokens: int) -> None:
        limits, waiting_tokens = self._limits, self.num_waiting_tokens
        if self.num_waiting >= limits.max_waiting:
            raise QueueFull(f"{self.num_waiting} requests wait, at most {limits.max_waiting} may")
        if self._waiting and waiting_tokens + num_tokens > limits.max_waiting_tokens:
            raise QueueFull(
                f"{waiting_tokens} prompt tokens wait, with {num_tokens} more they would exceed "
                f"{limits.max_waiting_tokens}"
            )
