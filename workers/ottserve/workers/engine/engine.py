"""One replica's generation: schedule, run, sample, commit, collect. Called by one thread; knows no thread itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from ottserve.workers.api import (
    DeadlineExceeded,
    DuplicateRequest,
    Finish,
    FinishReason,
    GenerationTask,
    Internal,
    LoadReport,
    ModelInfo,
    OttserveError,
    ServerInfo,
    TextChunk,
    TokenizerFiles,
)
from ottserve.workers.core.counters import EngineCounters
from ottserve.workers.core.event import TokenEvent
from ottserve.workers.core.ledger import Ledger
from ottserve.workers.core.plan import StepPlan
from ottserve.workers.core.scheduler import Scheduler
from ottserve.workers.core.sequence import Sequence
from ottserve.workers.engine.inputs import build_step
from ottserve.workers.engine.runner import Runner
from ottserve.workers.engine.sampler import SampledRow, sample
from ottserve.workers.engine.tally import Tally
from ottserve.workers.kv.moves import carry_out
from ottserve.workers.kv.store import KVStore, PoolState
from ottserve.workers.text.detokenizer import Vocabulary
from ottserve.workers.text.output import Delta, OutputStream

log = structlog.get_logger(__name__)

Event = tuple[str, TextChunk | OttserveError]


@dataclass(slots=True)
class _Live:
    """A live request: its sequence and its text."""

    sequence: Sequence
    output: OutputStream


class Engine:
    """Continuous batching over one model and one cache; `engine/loading.py` makes one."""

    def __init__(
        self,
        *,
        model_info: ModelInfo,
        server_info: ServerInfo,
        tokenizer_files: TokenizerFiles,
        vocabulary: Vocabulary,
        scheduler: Scheduler,
        ledger: Ledger,
        store: KVStore,
        runner: Runner,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.model_info = model_info
        self.server_info = server_info
        self.tokenizer_files = tokenizer_files
        self._vocabulary = vocabulary
        self._scheduler = scheduler
        self._ledger = ledger
        self._store = store
        self._runner = runner
        self._now = now
        self._tally = Tally()
        self._live: dict[str, _Live] = {}
        self._aborted: list[str] = []
        self._pools: PoolState | None = None
        self._last_step_at: float | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._aborted) or not self._scheduler.is_idle

    @property
    def counters(self) -> EngineCounters:
        """Cumulative numbers."""
        return self._tally.counters

    def add(self, task: GenerationTask) -> None:
        """Queue a task.

        Raises:
            OttserveError: it can't be taken (duplicate, impossible, queue full); nothing is kept of it.
        """
        if task.request_id in self._live:  # an aborted request is live until its last chunk is out
            raise DuplicateRequest(f"request_id: a live request already has the id {task.request_id!r}")
        sequence = self._scheduler.add(task)
        self._live[task.request_id] = _Live(sequence, OutputStream(self._vocabulary, task))

    def abort(self, request_id: str) -> bool:
        """Free what a live request holds, at once; its last chunk, ABORTED, comes out of the next step.

        Returns:
            False if no live request has this id, which changes nothing.
        """
        if not self._scheduler.abort(request_id):
            return False
        self._aborted.append(request_id)
        return True

    def flush_cache(self) -> int:
        """Drop the cached pages that no live request uses; how many there were."""
        return self._scheduler.flush_cache()

    def step(self) -> list[Event]:
        """Advance every sequence that runs by what one forward pass computes.

        Returns:
            New text by request id, or the error that ended a request. Those whose chunk carries `finish` have ended.
        """
        aborted, self._aborted = self._aborted, []
        events = [self._close(request_id) for request_id in aborted]
        events += [self._expire(sequence) for sequence in self._scheduler.expire()]
        plan = self._scheduler.plan()
        if not plan.is_empty:
            events += self._run(plan)
        return events

    def load_report(self) -> LoadReport:
        """The state now; `replica_id` is for the replica to fill in."""
        pages, slots, pools = self._ledger.pages, self._ledger.slots, self._pool_state()
        return LoadReport(
            replica_id="",
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_waiting_tokens=self._scheduler.num_waiting_tokens,
            pages_used=pages.used,
            pages_cached=pages.cached,
            pages_free=pages.free,
            pages_total=pages.total,
            slots_used=slots.used,
            slots_free=slots.free,
            slots_total=slots.total,
            pool_places_used=pools.pool_places_used,
            pool_places_total=pools.pool_places_total,
            evicted_places_used=pools.evicted_places_used,
            evicted_places_total=pools.evicted_places_total,
            frozen_heads=pools.frozen_heads,
            decode_tokens_per_s=self._tally.tokens_per_s(self._now()),
            last_step_at=self._last_step_at,
        )

    def _run(self, plan: StepPlan) -> list[Event]:
        try:
            token_ids = self._compute(plan)
        except Exception:
            log.exception("step_failed", num_sequences=len(plan.parts), num_tokens=plan.num_tokens)
            return [self._fail(part.request_id) for part in plan.parts]
        committed = self._scheduler.commit(plan, token_ids)
        self._last_step_at = self._now()
        self._tally.record(plan, len(committed), self._last_step_at)
        self._pools = None
        return [self._advance(event) for event in committed]

    def _compute(self, plan: StepPlan) -> list[int]:
        carry_out(self._store, self._scheduler.take_moves())
        logits = self._runner.run(build_step(plan, self._store.spec, self._store.device))
        rows = [self._live[part.request_id].sequence for part in plan.sampling]
        return sample(logits, [SampledRow(row.task.sampling, row.num_generated) for row in rows]) if rows else []

    def _advance(self, event: TokenEvent) -> Event:
        """Turn a token into text; the one place where text may end a sequence."""
        delta = self._live[event.request_id].output.push(event)
        if delta.must_stop:
            self._scheduler.end(event.request_id, FinishReason.STOP_STRING)
        return event.request_id, self._chunk(event.request_id, delta)

    def _chunk(self, request_id: str, delta: Delta) -> TextChunk:
        if delta.finish is None:
            return TextChunk(request_id, delta.text, delta.token_ids)
        sequence = self._live.pop(request_id).sequence
        finish = Finish(
            reason=delta.finish,
            usage=sequence.usage(),
            timings=sequence.timings(self._now()),
            seed=sequence.task.sampling.seed,
            matched_stop=delta.matched_stop,
        )
        return TextChunk(request_id, delta.text, delta.token_ids, finish)

    def _close(self, request_id: str) -> Event:
        """The last chunk of a request that was aborted."""
        return request_id, self._chunk(request_id, self._live[request_id].output.close(FinishReason.ABORTED))

    def _expire(self, sequence: Sequence) -> Event:
        """Tell the caller of a request that the scheduler has ended for being late."""
        del self._live[sequence.request_id]
        return sequence.request_id, DeadlineExceeded("the deadline passed before the answer was complete")

    def _fail(self, request_id: str) -> Event:
        error = Internal("the step that computed this request failed", "step_failed")
        self._scheduler.end(request_id, error)
        del self._live[request_id]
        return request_id, error

    def _pool_state(self) -> PoolState:
        if self._pools is None:
            self._pools = self._store.pool_state(list(self._ledger.used_slot_ids))
        return self._pools
