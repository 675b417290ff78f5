"""One replica's generation, as its thread sees it: add, abort, step. Called by one thread; knows no thread itself."""

from __future__ import annotations

import time
from collections.abc import Callable

from ottserve.workers.api import (
    GenerationTask,
    LoadReport,
    ModelInfo,
    ServerInfo,
    TokenizerFiles,
    invalid,
)
from ottserve.workers.core.counters import EngineCounters
from ottserve.workers.core.ledger import Ledger
from ottserve.workers.core.scheduler import Scheduler
from ottserve.workers.engine.compute import Computer
from ottserve.workers.engine.dgap.correction import Correction, CorrectionCounts
from ottserve.workers.engine.forms import FormQueue
from ottserve.workers.engine.penalties import TokenCounts
from ottserve.workers.engine.pipeline import Pipeline
from ottserve.workers.engine.pools import PoolWatch
from ottserve.workers.engine.report import all_counters, load_report
from ottserve.workers.engine.requests import Event, Requests
from ottserve.workers.engine.runner import Runner
from ottserve.workers.engine.sampler import Sampler
from ottserve.workers.engine.structured import FormCompiler
from ottserve.workers.engine.watcher import Watcher
from ottserve.workers.kv.store import KVStore, PoolState
from ottserve.workers.text.detokenizer import Vocabulary

CHECK_INTERVAL_S = 10.0


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
        overlaps: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.model_info = model_info
        self.server_info = server_info
        self.tokenizer_files = tokenizer_files
        self._scheduler = scheduler
        self._ledger = ledger
        self._store = store
        self._runner = runner
        vocab_size, eos_token_ids = model_info.vocab_size, model_info.eos_token_ids
        most_pages = store.most_pages(model_info.context_length)
        counts = TokenCounts(store.num_slots, vocab_size, store.device)
        self._computer = Computer(store, runner, Sampler(counts, eos_token_ids), correction, most_pages)
        self._corrected = CorrectionCounts() if correction is None else correction.counts
        forms = FormQueue(FormCompiler(tokenizer_files.tokenizer_json, vocab_size, eos_token_ids))
        self._requests = Requests(scheduler, forms, vocabulary, now)
        self._pipeline = Pipeline(scheduler, self._requests, self._computer, overlaps=overlaps, now=now)
        self._now = now
        self._pool_watch = PoolWatch(store)
        self._pools: PoolState | None = None
        self._checked_at = now()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._requests.has_news or not self._scheduler.is_idle

    @property
    def counters(self) -> EngineCounters:
        """Cumulative numbers."""
        return all_counters(self._pipeline.tally.counters, self._scheduler, self._corrected)

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

    def watch(self, watcher: Watcher) -> None:
        """Tell a watcher of steps from now on, and no longer the one before."""
        self._computer.watcher = watcher

    def step(self) -> list[Event]:
        """Advance every sequence that runs by what one forward pass computes; with overlap, by the one before.

        Returns:
            New text by request id, or the error that ended a request. One of n samples ends with the chunk of its index
            that carries `finish`, and the request with the last of them.

        Raises:
            LedgerBroken, LookupError: the books of pages and slots don't balance; looked at now and then when idle.
        """
        self._pools = None
        events = self._requests.end_aborted() + self._requests.end_late()
        events += self._requests.enter_compiled(may_wait=self._scheduler.is_idle and not events)
        events += self._pipeline.advance()
        self._check_when_idle()
        return events

    def load_report(self) -> LoadReport:
        """The state now, but of the pools some steps ago; `replica_id` is for the replica to fill in."""
        if self._pools is None:
            self._pools = self._pool_watch.state(self._ledger.used_slot_ids, may_wait=self._scheduler.is_idle)
        rate = self._pipeline.tally.tokens_per_s(self._now())
        forms, last_step_at = self._requests.forms, self._pipeline.last_step_at
        return load_report(self._scheduler, self._ledger, self._pools, forms, rate, last_step_at)

    def close(self) -> None:
        """Nothing else will be asked: other ranks may end, if there are any."""
        self._runner.close()

    def _check_when_idle(self) -> None:
        now = self._now()
        if self._scheduler.is_idle and now - self._checked_at >= CHECK_INTERVAL_S:
            self._checked_at = now
            self._scheduler.check()
