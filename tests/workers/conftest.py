"""A fake engine whose answers can be computed by hand: token i of a request is i, its text is `<i>`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import pytest

from ottserve.workers.api import (
    DuplicateRequest,
    Finish,
    FinishReason,
    GenerationTask,
    LoadReport,
    ModelInfo,
    OttserveError,
    SamplingParams,
    ServerInfo,
    StopParams,
    TextChunk,
    Timings,
    TokenizerFiles,
    Usage,
)
from ottserve.workers.core.counters import EngineCounters

MODEL = ModelInfo("counting", "Counting", 1, 4096, 256, (0,), 1.0, 0, 1.0)
SERVER = ServerInfo(
    version="0", backend="torch", device="cpu", dtype="float32", policy="ott", k_bits=2, v_bits=2, group=32, window=4,
    pool=3, evicted=8, num_pages=8, num_slots=4, page_bytes=100, slot_bytes=1000, bytes_per_token=3.125,
    bits_per_element=2.5, token_capacity=256, prefix_cache=False, graphs=False, max_running=4, max_waiting=4,
    max_waiting_tokens=100, max_tokens_per_step=16, tail_bytes=800,
)  # fmt: skip


class CountingEngine:
    """Counts; one token a step for every live request. `before_step` lets a test raise, wait or look on."""

    model_info = MODEL
    server_info = SERVER
    tokenizer_files = TokenizerFiles("{}", None, {})

    def __init__(self, before_step: Callable[[CountingEngine], None] = lambda engine: None) -> None:
        self.before_step = before_step
        self.live: dict[str, GenerationTask] = {}
        self.made: dict[str, int] = {}
        self.aborted: list[str] = []
        self.ended: list[tuple[str, TextChunk | OttserveError]] = []
        self.counters = EngineCounters()
        self.is_closed = False

    @property
    def has_work(self) -> bool:
        return bool(self.live or self.ended)

    def add(self, task: GenerationTask) -> None:
        if task.request_id in self.live:
            raise DuplicateRequest(f"request_id: {task.request_id!r} is live")
        self.live[task.request_id] = task
        self.made[task.request_id] = 0

    def abort(self, request_id: str) -> bool:
        if request_id not in self.live:
            return False
        self.ended.append((request_id, self._chunk(request_id, FinishReason.ABORTED)))
        self.aborted.append(request_id)
        del self.live[request_id]
        return True

    def flush_cache(self) -> int:
        return 3

    def step(self) -> list[tuple[str, TextChunk | OttserveError]]:
        time.sleep(0.001)
        self.before_step(self)
        ended, self.ended = self.ended, []
        self.counters = dataclasses.replace(
            self.counters,
            num_generated_tokens=self.counters.num_generated_tokens + len(self.live),
            num_decode_steps=self.counters.num_decode_steps + 1,
            num_step_rows=self.counters.num_step_rows + len(self.live),
        )
        return ended + [(request_id, self._next(request_id)) for request_id in tuple(self.live)]

    def load_report(self) -> LoadReport:
        used = sum(task.n for task in self.live.values())
        return LoadReport("", used, 0, 0, used, 0, 8 - used, 8, used, 4 - used, 4)

    def close(self) -> None:
        self.is_closed = True

    def _next(self, request_id: str) -> TextChunk:
        self.made[request_id] += 1
        if self.made[request_id] < self.live[request_id].stops.max_new_tokens:
            return self._chunk(request_id, None)
        chunk = self._chunk(request_id, FinishReason.LENGTH)
        del self.live[request_id]
        return chunk

    def _chunk(self, request_id: str, reason: FinishReason | None) -> TextChunk:
        num_made = self.made[request_id]
        if reason is FinishReason.ABORTED:
            return TextChunk(request_id, "", (), self._finish(request_id, reason))
        finish = self._finish(request_id, reason) if reason else None
        return TextChunk(request_id, f"<{num_made}>", (num_made,), finish)

    def _finish(self, request_id: str, reason: FinishReason) -> Finish:
        return Finish(reason, Usage(1, 0, self.made[request_id]), Timings(0.0, 0.0, 0.0, 0.0), 7)


@pytest.fixture
def counting_engine() -> type[CountingEngine]:
    """The class, so that a test can make its own."""
    return CountingEngine


@pytest.fixture
def make_task() -> Callable[..., GenerationTask]:
    """A task of `num_tokens` tokens."""

    def make(request_id: str = "a", num_tokens: int = 5, deadline_at: float | None = None) -> GenerationTask:
        return GenerationTask(request_id, (1,), SamplingParams(), StopParams(num_tokens), time.time(), deadline_at)

    return make
