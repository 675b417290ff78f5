"""Decides what each step computes and who may run. Knows no tensor, no text and no thread; one caller at a time.

A step of the engine reads

    expired = scheduler.expire()
    plan = scheduler.plan()
    … carry out scheduler.take_moves() …
    … run …
    sequences = scheduler.begin(plan)
    … sample …
    events = scheduler.commit(sequences, token_ids)
    … carry out scheduler.take_moves() …

or, while `can_plan_ahead` says so, with the next plan and its `begin` between `begin` and `commit`: that plan has the
tokens of this step by their places. No more than two steps have begun at once. The same calls at the same times give
the same plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from ottserve.workers.api import (
    DeadlineExceeded,
    DuplicateRequest,
    FinishReason,
    GenerationTask,
)
from ottserve.workers.core.event import TokenEvent
from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.core.ledger import Ledger
from ottserve.workers.core.limits import Limits, refuse_contradictions
from ottserve.workers.core.moves import Move
from ottserve.workers.core.placement import Placement
from ottserve.workers.core.plan import SampleKey, SequenceStep, StepPlan
from ottserve.workers.core.prefix import PrefixCache
from ottserve.workers.core.queue import Queue, WaitReason
from ottserve.workers.core.sequence import Ending, Sequence


class Scheduler:
    """Continuous batching under a token budget: by priority, and first come, first served among equals.

    Each step computes one token of every decoding sequence, then prompt chunks in order of admission with what is left
    of the budget, then lets in who waits. A long prompt is thus computed in chunks beside the others' decoding, which
    are smaller then than when nobody decodes (`Limits.prompt_budget`).

    The first in the queue is never overtaken, however small the ones behind it, so none starves among equals. Of
    requests that come together with the same beginning, one computes it and the others wait for that
    (`placement.PATIENCE`).

    A sequence is let in with pages for its prompt only. When one that runs needs a page and neither a free nor a cached
    one is left, the lowest in rank is preempted: it moves to host memory, waits by its rank, and goes on later where it
    stopped. The highest in rank always gets its page, so work always advances. Overload does not thrash, because of
    the rule by which one is let in, new or back: `placement.PAGES_AHEAD`.
    """

    def __init__(
        self,
        spec: KVSpec,
        ledger: Ledger,
        prefix: PrefixCache,
        limits: Limits,
        eos_token_ids: Iterable[int],
        now: Callable[[], float],
    ) -> None:
        """Start empty.

        Args:
            prefix: over the same ledger.
            eos_token_ids: any of them ends a sequence.
            now: the clock, UNIX time in seconds, to which deadlines are compared.

        Raises:
            ValueError: the limits contradict each other.
        """
        refuse_contradictions(
            spec,
            ledger.max_slots,
            limits.max_tokens_per_step,
            limits.max_prompt_tokens_beside_decoding,
            aligned_chunks=limits.aligned_chunks,
        )
        self._spec = spec
        self._ledger = ledger
        self._prefix = prefix
        self._placement = Placement(spec, ledger, prefix)
        self._limits = limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self._now = now
        self._waiting = Queue(limits)
        self._running: dict[SampleKey, Sequence] = {}
        self._samples: dict[str, set[SampleKey]] = {}
        self._plan: StepPlan | None = None
        self._first_waits_for = WaitReason.QUEUE
        self._num_arrived = 0
        self.num_preemptions = 0
        self.num_cached_tokens = 0

    @property
    def num_running(self) -> int:
        """Sequences that are computed now."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet, and sequences that were preempted."""
        return len(self._waiting)

    @property
    def num_waiting_samples(self) -> int:
        """Slots that those who wait will take."""
        return self._waiting.num_samples

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of those that wait which are known and not computed."""
        return self._waiting.num_tokens

    @property
    def waiting(self) -> Counter[WaitReason]:
        """Those that wait by reason, as of the last plan. Who is not the first in rank waits for those before it."""
        if not self.num_waiting:
            return Counter()
        return Counter({WaitReason.QUEUE: self.num_waiting - 1}) + Counter([self._first_waits_for])

    @property
    def num_pages_evicted(self) -> int:
        """Cached pages given up to make room."""
        return self._prefix.num_evicted

    @property
    def snapshot_bytes(self) -> int:
        """Host memory of the snapshots beside cached prefixes."""
        return self._prefix.snapshot_bytes

    @property
    def preempted_bytes(self) -> int:
        """Host memory of those that were preempted and wait."""
        return sum(sequence.saved.num_bytes for sequence in self._waiting if sequence.saved is not None)

    @property
    def unsaved(self) -> tuple[str, ...]:
        """Preempted requests that are not in host memory: their moves are still to be carried out, or have failed."""
        unsaved = (each for each in self._waiting if each.saved is not None and each.saved.tensors is None)
        return tuple(dict.fromkeys(sequence.request_id for sequence in unsaved))

    @property
    def can_plan_ahead(self) -> bool:
        """Whether nobody needs the tokens of the step that has begun, before the next one is planned."""
        return not any(sequence.num_unknown and sequence.needs_tokens for sequence in self._running.values())

    @property
    def is_idle(self) -> bool:
        """Whether no request is live."""
        return not self._samples

    def add(self, task: GenerationTask) -> Sequence:
        """Queue a task. Nothing is kept of one that is refused.

        Returns:
            The first of its samples; it stands for all of them until the prompt is computed.

        Raises:
            DuplicateRequest: a live request has its id; that one goes on.
            InvalidField: it could not run even on an idle replica.
            QueueFull: too many requests or tokens wait.
        """
        if task.request_id in self._samples:
            raise DuplicateRequest(f"request_id: a live request already has the id {task.request_id!r}")
        self._limits.refuse_impossible(task, self._spec, self._ledger.max_pages, self._ledger.max_slots)
        self._waiting.refuse_if_full(len(task.prompt_ids))
        self._num_arrived += 1
        sequence = Sequence(task, self._num_arrived)
        self._waiting.put(sequence)
        self._samples[task.request_id] = {sequence.key}
        self._plan = None
        return sequence

    def end(self, request_id: str, ending: Ending) -> tuple[Sequence, ...]:
        """End all samples of a live request now: an abort, a failure. Slots and pages are free on return.

        Returns:
            The ended sequences; none if no live request has that id (unknown, or ended before): that changes nothing.
        """
        ended = (self.end_sample(key, ending) for key in sorted(self._samples.get(request_id, ())))
        return tuple(sequence for sequence in ended if sequence is not None)

    def end_sample(self, key: SampleKey, ending: Ending) -> Sequence | None:
        """End one sequence now, as by a stop string; None if it is not live."""
        sequence = self._waiting.take(key) or self._running.pop(key, None)
        if sequence is None:
            return None
        sequence.forget_expected()
        sequence.ending = ending
        sequence.ended_at = self._now()
        self._placement.remove(sequence)
        sequence.saved, sequence.left_behind = None, ()
        self._samples[key.request_id].remove(key)
        if not self._samples[key.request_id]:
            del self._samples[key.request_id]
        self._plan = None
        return sequence

    def abort(self, request_id: str) -> tuple[Sequence, ...]:
        """End a live request because its caller no longer wants it; see `end`."""
        return self.end(request_id, FinishReason.ABORTED)

    def expire(self) -> tuple[Sequence, ...]:
        """End every request, waiting or running, whose deadline has passed, and return its sequences."""
        now = self._now()
        late = [
            sequence.key
            for sequence in (*self._running.values(), *self._waiting)
            if sequence.task.deadline_at is not None and sequence.task.deadline_at <= now
        ]
        ended = (self.end_sample(key, DeadlineExceeded("the request's deadline passed")) for key in late)
        return tuple(sequence for sequence in ended if sequence is not None)

    def plan(self) -> StepPlan:
        """Let in who fits and say what the next step computes. Asked again before a change, it says the same."""
        if self._plan is None:
            self._plan = self._make_plan()
        return self._plan

    def take_moves(self) -> tuple[Move, ...]:
        """What must happen to stored keys and values before the next forward pass, each told once."""
        return self._placement.take_moves()

    def begin(self, plan: StepPlan) -> tuple[Sequence | None, ...]:
        """Take note of what a step stores that has been given to the device, and that its tokens are to come.

        A sequence that was ended since `plan` is left alone.

        Args:
            plan: what `plan` returned last.

        Returns:
            Who gets a token, for each of `plan.sampling`; None where it has ended.
        """
        self._plan = None
        for part in plan.parts:
            self._store(part)
        sequences = tuple(map(self._running.get, plan.sampling))
        for place, sequence in enumerate(sequences):
            if sequence is not None:
                sequence.expect(place)
        return sequences

    def commit(
        self, sequences: SequenceOf[Sequence | None], token_ids: SequenceOf[int]
    ) -> tuple[TokenEvent | None, ...]:
        """Advance the sequences of a step by the tokens that it has chosen; the only place where that happens.

        A sequence that was ended since `begin` is left alone, and its token is dropped.

        Args:
            sequences: what `begin` returned for the step; steps are committed in the order in which they began.
            token_ids: a sampled token for each of them.

        Returns:
            An event for each token that was taken, None for each that was dropped. Sequences whose event has a finish
            hold nothing any more.
        """
        self._plan = None
        now = self._now()
        taken = zip(sequences, token_ids, strict=True)
        return tuple(self._advance(sequence, token_id, now) for sequence, token_id in taken)

    def take_back(self, sequence: Sequence) -> None:
        """A step that has begun went on with another token than `commit` was told: what it does is done again.

        What it chooses for the sequence is not to be committed.
        """
        self._plan = None
        sequence.forget_expected()

    def flush_cache(self) -> int:
        """Drop the cached pages that no live request uses; how many there were."""
        self._plan = None
        return self._prefix.flush()

    def check(self) -> None:
        """Verify the books of pages, slots and cached prefixes. Raises LedgerBroken or LookupError."""
        self._ledger.check()
        self._prefix.check()

    def _store(self, part: SequenceStep) -> None:
        """Take note of what a part stores. A prompt that is complete is published, and forked into its samples."""
        sequence = self._running.get(SampleKey(part.request_id, part.index))
        if sequence is None:
            return
        sequence.num_stored, sequence.num_ahead = part.start + len(part.token_ids), 0
        if part.samples and not sequence.is_decoding:
            self._placement.publish(sequence)
            for fork in self._placement.fork(sequence):
                self._running[fork.key] = fork
                self._samples[part.request_id].add(fork.key)

    def _advance(self, sequence: Sequence | None, token_id: int, now: float) -> TokenEvent | None:
        if sequence is None or sequence.ending is not None:
            return None
        finish = sequence.advance(token_id, self._eos_token_ids, now)
        if finish is not None:
            self.end_sample(sequence.key, finish)
        return TokenEvent(sequence.request_id, token_id, finish, sequence.index)

    def _make_plan(self) -> StepPlan:
        self._grow_decoding()
        ready = (sequence for sequence in self._decoding() if not self._must_wait(sequence))
        decodes = [sequence.next_step(1, self._spec) for sequence in ready]
        chunks: list[SequenceStep] = []
        budget = self._limits.prompt_budget(len(decodes))
        self._first_waits_for = WaitReason.QUEUE
        for sequence in self._prompts_and_waiting():
            if self._chunk_length(sequence, budget) == 0 or self._must_wait(sequence):
                break
            if (reason := self._admit(sequence)) is not None:
                self._first_waits_for = reason
                break
            num_tokens = self._chunk_length(sequence, budget)  # less than before if a cached prefix was found
            kind = decodes if sequence.is_decoding else chunks
            kind.append(sequence.next_step(num_tokens, self._spec))
            budget -= num_tokens
        return StepPlan(tuple(decodes), tuple(chunks))

    def _decoding(self) -> list[Sequence]:
        """Running sequences of which a step computes one token."""
        return [sequence for sequence in self._running.values() if sequence.is_decoding and not sequence.is_complete]

    def _must_wait(self, sequence: Sequence) -> bool:
        """Whether its newest token has to be known first: it may be the last one, or a step would seal, which can't be
        taken back."""
        if sequence.is_complete or not sequence.is_unsure:
            return sequence.is_complete
        num_stored, spec = sequence.num_stored, self._spec
        return sequence.pages_at(num_stored + 1, spec) > sequence.pages_at(num_stored, spec)

    def _prompts_and_waiting(self) -> list[Sequence]:
        """Running sequences whose prompt is not computed, in order of admission, then those that wait, by rank."""
        prompts = [sequence for sequence in self._running.values() if not sequence.is_decoding]
        return [*prompts, *self._waiting]

    def _chunk_length(self, sequence: Sequence, budget: int) -> int:
        """Pending tokens that the next step computes, 0 if the budget has no room for any."""
        if not self._limits.aligned_chunks:
            return min(sequence.num_pending, budget)
        num_sealed = sequence.pages_at(sequence.num_stored, self._spec)
        wanted = min(sequence.num_pending, self._spec.seal_point(num_sealed) - sequence.num_stored)
        return wanted if wanted <= budget else 0

    def _admit(self, sequence: Sequence) -> WaitReason | None:
        """Let a waiting sequence in, or back in, or say what it has to wait for."""
        if sequence.lease is not None:
            return None
        reason = self._placement.place(sequence, self._running.values())
        if reason is not None:
            return reason
        if sequence.admitted_at is None:
            sequence.admitted_at = self._now()
            self.num_cached_tokens += sequence.num_cached_tokens
        self._waiting.take(sequence.key)
        self._running[sequence.key] = sequence
        return None

    def _grow_decoding(self) -> None:
        """See that each decoding sequence has a page to seal into, the highest in rank first."""
        short = [sequence for sequence in self._decoding() if self._placement.num_missing(sequence)]
        for sequence in sorted(short, key=lambda sequence: sequence.rank):
            while sequence.lease is not None and not self._placement.grow(sequence):
                self.preempt(max(self._running.values(), key=lambda sequence: sequence.rank))

    def preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back to wait; it holds nothing then, and goes on later where it stopped."""
        self._plan = None
        self._placement.save(sequence)
        self._waiting.put(self._running.pop(sequence.key))
        self.num_preemptions += 1
