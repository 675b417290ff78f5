"""A small cache shape and tasks for it: G 4 and R 2, so pages are sealed at 6, 10, 14 … stored tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ottserve.workers.api import GenerationTask, SamplingParams, StopParams
from ottserve.workers.core.kvspec import KVSpec, LayerSpec
from ottserve.workers.core.ledger import Ledger
from ottserve.workers.core.limits import Limits
from ottserve.workers.core.prefix import PrefixCache
from ottserve.workers.core.scheduler import Scheduler

EOS = 0
OTHER = 7


class Clock:
    """Time that moves when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def spec() -> KVSpec:
    return KVSpec("ott", (LayerSpec(),) * 2, num_kv_heads=1, head_size=8, group=4, window=2)


@pytest.fixture
def task() -> Callable[..., GenerationTask]:
    """A task by the lengths of its prompt and of its answer. It shares no prefix unless it is given a salt."""

    def make(
        request_id: str, num_prompt: int = 5, num_new: int = 3, deadline_at: float | None = None, *,
        salt: str | None = None, n: int = 1, priority: int = 0,
    ) -> GenerationTask:  # fmt: skip
        return GenerationTask(
            request_id,
            (OTHER,) * num_prompt,
            SamplingParams(),
            StopParams(max_new_tokens=num_new),
            99.0,
            deadline_at,
            priority=priority,
            cache_salt=request_id if salt is None else salt,
            n=n,
        )

    return make


@pytest.fixture
def ledger() -> Ledger:
    """8 pages and 3 slots that can be leased."""
    return Ledger(num_pages=9, num_slots=4)


@pytest.fixture
def make_scheduler(spec: KVSpec, ledger: Ledger, clock: Clock) -> Callable[..., Scheduler]:
    """A scheduler over the ledger of the same test, with limits as named."""

    def make(
        max_tokens_per_step: int = 16,
        max_waiting: int = 8,
        max_waiting_tokens: int = 100,
        context_length: int = 40,
        aligned_chunks: bool = False,
        beside: int | None = None,
    ) -> Scheduler:
        limits = Limits(max_tokens_per_step, max_waiting, max_waiting_tokens, context_length, aligned_chunks, beside)
        prefix = PrefixCache(ledger, spec.group, spec.fingerprint)
        return Scheduler(spec, ledger, prefix, limits, {EOS, 1}, clock)

    return make
