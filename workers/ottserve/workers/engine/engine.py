"""One replica's generation: schedule, run, sample, commit, collect. Called by one thread; knows no thread itself."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from ottserve.workers.api import (
    DeadlineExceeded,
    DuplicateRequest,
    FinishReason,
    GenerationTask,
    Internal,
    LoadReport,
    ModelInfo,
    OttserveError,
    ServerInfo,
    TextChunk,
    TokenizerFiles,
    TokenLogprob,
    invalid,
)
from ottserve.workers.core.counters import EngineCounters
from ottserve.workers.core.event import TokenEvent
from ottserve.workers.core.ledger import Ledger
from ottserve.workers.core.plan import SampleKey, StepPlan
from ottserve.workers.core.scheduler import Scheduler
from ottserve.workers.core.sequence import Sequence
from ottserve.workers.engine.compute import FAULT, Computer
from ottserve.workers.engine.forms import FormQueue
from ottserve.workers.engine.live import LiveRequest
from ottserve.workers.engine.penalties import TokenCounts
from ottserve.workers.engine.prompts import Piece
from ottserve.workers.engine.report import all_counters, load_report
from ottserve.workers.engine.runner import Runner
from ottserve.workers.engine.sampler import Sampler
from ottserve.workers.engine.structured import Compilation, FormCompiler
from ottserve.workers.engine.tally import Tally
from ottserve.workers.kv.store import KVStore, PoolState
from ottserve.workers.text.detokenizer import Vocabulary

log = structlog.get_logger(__name__)

Event = tuple[str, TextChunk | OttserveError]

CHECK_INTERVAL_S = 10.0
FORM_WAIT_S = 0.005  # with nothing else to do, wait so long for a form and then look at the inbox again
TOO_LATE = "the deadline passed before the answer was complete"


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
        counts = TokenCounts(store.num_slots, model_info.vocab_size, store.device)
        self._computer = Computer(store, runner, Sampler(counts, model_info.eos_token_ids))
        self._forms = FormQueue(
            FormCompiler(tokenizer_files.tokenizer_json, model_info.vocab_size, model_info.eos_token_ids)
        )
        self._now = now
        self._tally = Tally()
        self._live: dict[str, LiveRequest] = {}
        self._aborted: list[str] = []
        self._pools: PoolState | None = None
        self._last_step_at: float | None = None
        self._checked_at = now()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._aborted) or len(self._forms) > 0 or not self._scheduler.is_idle

    @property
    def counters(self) -> EngineCounters:
        """Cumulative numbers."""
        return all_counters(self._tally.counters, self._scheduler, self._runner.num_replays)

    def add(self, task: GenerationTask) -> None:
        """Queue a task; one whose answer has a form waits until that is compiled, and is queued then.

        Raises:
            OttserveError: it can't be taken (duplicate, impossible, queue full); nothing is kept of it.
        """
        if task.request_id in self._live:  # an aborted request is live until its last chunk is out
            raise DuplicateRequest(f"request_id: a live request already has the id {task.request_id!r}")
        if task.prompt_logprobs is not None and not self._runner.has_plain_head:
            raise invalid("output.prompt_logprobs", task.prompt_logprobs, "unset for a model that rescales its logits")
        if task.form is not None:
            self._forms.add(task)
            self._live[task.request_id] = LiveRequest(Sequence(task), self._vocabulary)
        else:
            self._live[task.request_id] = LiveRequest(self._scheduler.add(task), self._vocabulary)

    def abort(self, request_id: str) -> bool:
        """Free what a live request holds, at once; its last chunks, ABORTED, come out of the next step.

        Returns:
            False if no live request has this id, which changes nothing.
        """
        if not self._forms.remove(request_id) and not self._scheduler.abort(request_id):
            return False
        self._pools = None
        self._aborted.append(request_id)
        return True

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
        aborted, self._aborted = self._aborted, []
        events = [event for request_id in aborted for event in self._close(request_id)]
        late = dict.fromkeys(sequence.request_id for sequence in self._scheduler.expire())
        events += [self._drop(request_id, DeadlineExceeded(TOO_LATE)) for request_id in late]
        wait_s = FORM_WAIT_S if self._scheduler.is_idle and not events else 0.0
        entered = [self._enter(task, form) for task, form in self._forms.take_settled(wait_s)]
        events += [event for event in entered if event is not None]
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
        num_compiling = len(self._forms)
        return load_report(self._scheduler, self._ledger, self._pools, num_compiling, rate, self._last_step_at)

    def _enter(self, task: GenerationTask, form: Compilation) -> Event | None:
        """Queue a task whose form has been compiled, or tell its caller why it can't be."""
        try:
            followers = [form.follower() for _ in range(task.n)]
            self._live[task.request_id] = LiveRequest(self._scheduler.add(task), self._vocabulary, followers)
        except OttserveError as error:
            return self._drop(task.request_id, error)
        return None

    def _run(self, plan: StepPlan) -> list[Event]:
        try:
            self._computer.move(self._scheduler.take_moves())
            computed = self._computer.compute(plan, self._live)
        except Exception:
            log.exception("step_failed", num_sequences=len(plan.parts), num_tokens=plan.num_tokens)
            return [self._fail(request_id, Internal(FAULT, "step_failed")) for request_id in _request_ids(plan)]
        events = [self._fail(request_id, error) for request_id, error in computed.errors.items()]
        events += [_told_of_prompt(*entry) for entry in computed.pieces.items() if entry[0] in self._live]
        committed = self._scheduler.commit(plan, [token.token_id for token in computed.tokens])
        self._last_step_at = self._now()
        self._tally.record(plan, len(committed), self._last_step_at)
        tokens = dict(zip(plan.sampling, computed.tokens, strict=True))
        events += [
            self._advance(event, tokens[SampleKey(event.request_id, event.index)].logprob)
            for event in committed
            if event.request_id in self._live
        ]
        self._computer.move(self._scheduler.take_moves())
        return events

    def _advance(self, event: TokenEvent, logprob: TokenLogprob | None) -> Event:
        """Turn a token into text; the one place where text may end a sequence."""
        live = self._live[event.request_id]
        try:
            chunk, must_stop = live.push(event, logprob, self._now())
        except Exception:
            log.exception("output_failed", request_id=event.request_id)
            return self._fail(event.request_id, Internal(FAULT, "output_failed"))
        if must_stop:
            self._scheduler.end_sample(SampleKey(event.request_id, event.index), FinishReason.STOP_STRING)
        if live.is_over:
            del self._live[event.request_id]
        return event.request_id, chunk

    def _close(self, request_id: str) -> list[Event]:
        """The last chunks of a request that was aborted."""
        return [(request_id, chunk) for chunk in self._live.pop(request_id).close(self._now())]

    def _fail(self, request_id: str, error: OttserveError) -> Event:
        """End a request by an error."""
        self._scheduler.end(request_id, error)
        return self._drop(request_id, error)

    def _drop(self, request_id: str, error: OttserveError) -> Event:
        """Forget a request that the scheduler has ended, and tell its caller why."""
        del self._live[request_id]
        return request_id, error

    def _check_when_idle(self) -> None:
        now = self._now()
        if self._scheduler.is_idle and now - self._checked_at >= CHECK_INTERVAL_S:
            self._checked_at = now
            self._scheduler.check()


def _request_ids(plan: StepPlan) -> list[str]:
    return list(dict.fromkeys(part.request_id for part in plan.parts))


def _told_of_prompt(request_id: str, piece: Piece) -> Event:
    return request_id, TextChunk(request_id, "", (), prompt_logprobs=piece)
