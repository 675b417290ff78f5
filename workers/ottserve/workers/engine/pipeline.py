"""Steps on their way: launched, and committed when the device has computed them. Knows no tensor and no text.

With overlap a step is launched before the tokens of the one before are read, so that a device computes the one while
the host commits the other. Such a step takes its tokens from where the device has them. A sequence that has ended
meanwhile is a row for nothing: what the row chooses is dropped, and what it stored lies in a slot and in pages that may
be another's by now, which writes there in a later step or move, that is after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from ottserve.workers.api import TextChunk
from ottserve.workers.core.plan import StepPlan
from ottserve.workers.core.scheduler import Scheduler
from ottserve.workers.core.sequence import Sequence
from ottserve.workers.engine.compute import Computed, Computer, Flight, fault_of
from ottserve.workers.engine.live import LiveRequest
from ottserve.workers.engine.requests import Event, Requests
from ottserve.workers.engine.tally import Tally

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Step:
    """A step that has begun.

    Attributes:
        sequences: who gets a token, for each of `plan.sampling`; None for nobody.
        requests: whose the parts of the plan are. Another request may have the id of one of them by now.
    """

    plan: StepPlan
    flight: Flight
    sequences: list[Sequence | None]
    requests: dict[str, LiveRequest]


class Pipeline:
    """Launches steps and commits them, in their order; two are on their way at most.

    Attributes:
        overlaps: whether a step is launched before the one before is read; may be set between steps.
        tally: what has been counted.
        last_step_at: UNIX time when a step was last committed; None before.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        requests: Requests,
        computer: Computer,
        *,
        overlaps: bool,
        now: Callable[[], float],
    ) -> None:
        self.overlaps = overlaps and not computer.needs_tokens
        self.tally = Tally()
        self.last_step_at: float | None = None
        self._scheduler = scheduler
        self._requests = requests
        self._computer = computer
        self._now = now
        self._begun: _Step | None = None

    def advance(self) -> list[Event]:
        """Commit one step, or with overlap give the first one to the device; what came of it."""
        before = self._take_begun()
        events: list[Event] = []
        if before is None or self._scheduler.can_plan_ahead:
            events += self._launch(before)
        if before is not None:
            events += self._land(before)
            if self._begun is None:
                events += self._launch(None)
        if not self.overlaps and (step := self._take_begun()) is not None:
            events += self._land(step)
        if self._scheduler.is_idle:
            self._begun = None  # whatever the device still computes is nobody's
        if self._begun is None:
            self._move()
        return events

    def _take_begun(self) -> _Step | None:
        begun, self._begun = self._begun, None
        return begun

    def _launch(self, before: _Step | None) -> list[Event]:
        """Give the next step to the device, if there is anything to compute; who failed if that did.

        Args:
            before: the step that has begun, some of whose tokens this one may take.
        """
        self._move()
        plan = self._scheduler.plan()
        if plan.is_empty:
            return []
        requests = {part.request_id: self._requests.live[part.request_id] for part in plan.parts}
        try:
            self._move()
            flight = self._computer.launch(plan, requests, None if before is None else before.flight)
            self._begun = _Step(plan, flight, list(self._scheduler.begin(plan)), requests)
        except Exception as error:
            log.exception("launch_failed", num_sequences=len(plan.parts), num_tokens=plan.num_tokens)
            self._begun = None
            return self._fail(requests, error) + self._fail_unsaved(error)
        return []

    def _move(self) -> None:
        """Carry out what has been decided since. Some of it waits for the step that has begun, and so must not keep
        back what came of the one before: it is done when that has been told, before the next plan."""
        self._computer.move(self._scheduler.take_moves())

    def _land(self, step: _Step) -> list[Event]:
        """Wait for a step, and put plan and tokens together."""
        try:
            computed = self._computer.land(step.flight)
        except Exception as error:
            log.exception("step_failed", num_sequences=len(step.plan.parts), num_tokens=step.plan.num_tokens)
            return self._fail(step.requests, error)
        return self._commit(step, computed)

    def _commit(self, step: _Step, computed: Computed) -> list[Event]:
        """Advance the sequences of a step, and tell what came of it."""
        failed = {
            sequence.request_id: error
            for sequence, error in zip(step.sequences, computed.errors, strict=True)
            if error is not None and sequence is not None and sequence.ending is None
        }
        events = [self._requests.fail(request_id, error) for request_id, error in failed.items()]
        told = {name: piece for name, piece in computed.pieces.items() if self._is_live(step, name)}
        events += [(name, TextChunk(name, "", (), prompt_logprobs=piece)) for name, piece in told.items()]
        committed = self._scheduler.commit(step.sequences, [token.token_id for token in computed.tokens])
        self.last_step_at = self._now()
        self.tally.record(
            step.plan, len(committed) - committed.count(None), self.last_step_at, replayed=step.flight.replayed
        )
        for sequence, token in zip(step.sequences, computed.tokens, strict=True):
            if sequence is not None and not token.is_on_device:
                self._take_back(sequence)
        for event, token in zip(committed, computed.tokens, strict=True):
            if event is not None and event.request_id in self._requests.live:
                events.append(self._requests.advance(event, token.logprob))
        return events

    def _take_back(self, sequence: Sequence) -> None:
        """The step that has begun went on with a token that was not the right one."""
        if self._begun is None or sequence not in self._begun.sequences:
            return
        self._begun.sequences[self._begun.sequences.index(sequence)] = None
        if sequence.ending is None:
            self._scheduler.take_back(sequence)

    def _fail(self, requests: dict[str, LiveRequest], error: Exception) -> list[Event]:
        """End all that a step was for."""
        ended = [name for name, request in requests.items() if self._requests.live.get(name) is request]
        return [self._requests.fail(name, fault_of(error)) for name in ended]

    def _fail_unsaved(self, error: Exception) -> list[Event]:
        """End those that were to move to the host before the step and did not, since a move failed.

        The step was not for them, but what they had stored is others' to overwrite now. They would come back with
        nothing to restore, and fail all others of the step in which they did.
        """
        return [self._requests.fail(name, fault_of(error)) for name in self._scheduler.unsaved]

    def _is_live(self, step: _Step, request_id: str) -> bool:
        return self._requests.live.get(request_id) is step.requests[request_id]
