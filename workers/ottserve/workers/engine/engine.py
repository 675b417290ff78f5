"""One replica's generation: schedule, run, sample, commit, collect. Called by one thread; knows no thread itself."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from ottserve.workers.api import (
    GenerationTask,
    LoadReport,
    ModelInfo,
    ServerInfo,
    TextChunk,
    TokenizerFiles,
    invalid,
)
from ottserve.workers.core.counters import EngineCounters
from ottserve.workers.core.ledger import Ledger
from ottserve.workers.core.plan import StepPlan
from ottserve.workers.core.scheduler import Scheduler
from ottserve.workers.core.sequence import Sequence
from ottserve.workers.engine.compute import Computed, Computer, fault_of
from ottserve.workers.engine.dgap.correction import Correction, CorrectionCounts
from ottserve.workers.engine.forms import FormQueue
from ottserve.workers.engine.penalties import TokenCounts
from ottserve.workers.engine.report import all_counters, load_report
from ottserve.workers.engine.requests import Event, Requests
from ottserve.workers.engine.runner import Runner
from ottserve.workers.engine.sampler import Sampler
from ottserve.workers.engine.structured import FormCompiler
from ottserve.workers.engine.tally import Tally
from ottserve.workers.kv.store import KVStore, PoolState
from ottserve.workers.text.detokenizer import Vocabulary

log = structlog.get_logger(__name__)

CHECK_INTERVAL_S = 10.0

Sequences = tuple[Sequence | None, ...]


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
        correction: Correction | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.model_info = model_info
        self.server_info = server_info
        self.tokenizer_files = tokenizer_files
        self._scheduler = scheduler
        self._ledger = ledger
        self._store = store
        self._runner = runner
        max_pages = max(1, min(model_info.context_length // store.spec.group, store.num_pages - 1))
        vocab_size, eos_token_ids = model_info.vocab_size, model_info.eos_token_ids
        counts = TokenCounts(store.num_slots, vocab_size, store.device)
        self._computer = Computer(store, runner, Sampler(counts, eos_token_ids), correction, max_pages)
        self._corrected = CorrectionCounts() if correction is None else correction.counts
        forms = FormQueue(FormCompiler(tokenizer_files.tokenizer_json, vocab_size, eos_token_ids))
        self._requests = Requests(scheduler, forms, vocabulary, now)
        self._now = now
        self._tally = Tally()
        self._pools: PoolState | None = None
        self._last_step_at: float | None = None
        self._checked_at = now()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._requests.has_news or not self._scheduler.is_idle

    @property
    def counters(self) -> EngineCounters:
        """Cumulative numbers."""
        return all_counters(self._tally.counters, self._scheduler, self._runner.num_replays, self._corrected)

    def add(self, task: GenerationTask) -> None:
        """Queue a task; one whose answer has a form waits until that is compiled, and is queued then.

        Raises:
            OttserveError: it can't be taken (duplicate, impossible, queue full); nothing is kept of it.
        """
        if task.prompt_logprobs is not None and not self._runner.has_plain_head:
            limit = "unset for a model that rescales its logits"
            raise invalid("output.prompt_logprobs", task.prompt_logprobs, limit)
        self._requests.add(task)

    def abort(self, request_id: str) -> bool:
        """Free what a live request holds, at once; its last chunks, ABORTED, come out of the next step.

        Returns:
            False if no live request has this id, which changes nothing.
        """
        self._pools = None
        return self._requests.abort(request_id)

    def flush_cache(self) -> int:
        """Drop the cached pages that no live request uses; how many there were."""
        return self._scheduler.flush_cache()

    def step(self) -> list[Event]:
        """Advance every sequence that runs by what one forward pass computes.

        Returns:
            New text by request id, or the error that ended a request. One of n samples ends with the chunk of its index
            that carries `finish`, and the request with the last of them.

        Raises:
            LedgerBroken, LookupError: the books of pages and slots don't balance; looked at now and then when idle.
        """
        self._pools = None
        events = self._requests.end_aborted() + self._requests.end_late()
        events += self._requests.enter_compiled(may_wait=self._scheduler.is_idle and not events)
        plan = self._scheduler.plan()
        if not plan.is_empty:
            events += self._run(plan)
        self._check_when_idle()
        return events

    def load_report(self) -> LoadReport:
        """The state now; `replica_id` is for the replica to fill in."""
        if self._pools is None:
            self._pools = self._store.pool_state(list(self._ledger.used_slot_ids))
        rate = self._tally.tokens_per_s(self._now())
        num_compiling = self._requests.num_compiling
        return load_report(self._scheduler, self._ledger, self._pools, num_compiling, rate, self._last_step_at)

    def _run(self, plan: StepPlan) -> list[Event]:
        try:
            self._computer.move(self._scheduler.take_moves())
            flight = self._computer.launch(plan, self._requests.live)
            sequences = self._scheduler.begin(plan)
            self._computer.move(self._scheduler.take_moves())
            computed = flight.land()
        except Exception as error:
            log.exception("step_failed", num_sequences=len(plan.parts), num_tokens=plan.num_tokens)
            failed = dict.fromkeys(part.request_id for part in plan.parts)
            return [self._requests.fail(request_id, fault_of(error)) for request_id in failed]
        events = self._commit(plan, sequences, computed)
        self._computer.move(self._scheduler.take_moves())
        return events

    def _commit(self, plan: StepPlan, sequences: Sequences, computed: Computed) -> list[Event]:
        """Put plan and tokens together, and tell what came of it."""
        requests, live = self._requests, self._requests.live
        failed = {key.request_id: error for key, error in zip(plan.sampling, computed.errors, strict=True) if error}
        events = [requests.fail(request_id, error) for request_id, error in failed.items()]
        told = {name: piece for name, piece in computed.pieces.items() if name in live}
        events += [(name, TextChunk(name, "", (), prompt_logprobs=piece)) for name, piece in told.items()]
        committed = self._scheduler.commit(sequences, [token.token_id for token in computed.tokens])
        self._last_step_at = self._now()
        self._tally.record(plan, len(committed) - committed.count(None), self._last_step_at)
        for event, token in zip(committed, computed.tokens, strict=True):
            if event is not None and event.request_id in live:
                events.append(requests.advance(event, token.logprob))
        return events

    def _check_when_idle(self) -> None:
        now = self._now()
        if self._scheduler.is_idle and now - self._checked_at >= CHECK_INTERVAL_S:
            self._checked_at = now
            self._scheduler.check()
