"""A real engine over the toy model, small enough that a page seals every few dozen tokens."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from ottserve.workers.api import FinishReason, GenerationTask, OttserveError, SamplingParams, StopParams, TextChunk
from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.loading import load_engine
from ottserve.workers.models.toy import toy_tokenizer
from ottserve.workers.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings

SIGNS = Tokenizer.from_str(toy_tokenizer().tokenizer_json)


def encode(text: str) -> tuple[int, ...]:
    """Token ids of a text in the toy model's signs."""
    return tuple(SIGNS.encode(text).ids)


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    def make(policy: str = "ott", *, num_pages: int | None = None, **scheduler: int | bool) -> Engine:
        return load_engine(
            EngineSettings(
                model=ModelSettings(path="toy"),
                cache=CacheSettings(policy=policy, group=32, window=8, plain_layers=(), num_pages=num_pages),
                scheduler=SchedulerSettings(**{"max_running": 4, "max_tokens_per_step": 256} | scheduler),
            ),
            progress=lambda message: None,
        )

    return make


@pytest.fixture
def make_task() -> Callable[..., GenerationTask]:
    def make(
        prompt: str, *, request_id: str = "r", max_new: int = 100, stop: tuple[str, ...] = (), seed: int = 0,
        temperature: float = 0.0, deadline_at: float | None = None,
    ) -> GenerationTask:  # fmt: skip
        return GenerationTask(
            request_id,
            encode(prompt),
            SamplingParams(temperature=temperature, seed=seed),
            StopParams(max_new, stop),
            time.time(),
            deadline_at,
        )

    return make


class Answers:
    """What an engine said, by request."""

    def __init__(self) -> None:
        self.text: dict[str, str] = {}
        self.token_ids: dict[str, tuple[int, ...]] = {}
        self.ends: dict[str, TextChunk | OttserveError] = {}

    def take(self, events: list[tuple[str, TextChunk | OttserveError]]) -> None:
        for request_id, event in events:
            assert request_id not in self.ends, "nothing comes after the end"
            if isinstance(event, OttserveError):
                self.ends[request_id] = event
                continue
            self.text[request_id] = self.text.get(request_id, "") + event.text
            self.token_ids[request_id] = self.token_ids.get(request_id, ()) + event.token_ids
            if event.finish is not None:
                self.ends[request_id] = event

    def reason(self, request_id: str) -> FinishReason:
        end = self.ends[request_id]
        assert isinstance(end, TextChunk) and end.finish is not None
        return end.finish.reason


@pytest.fixture
def run_to_end() -> Callable[..., Answers]:
    """Add tasks and step until all have ended; the ledger must then be whole and free."""

    def run(engine: Engine, *tasks: GenerationTask) -> Answers:
        answers = Answers()
        for task in tasks:
            engine.add(task)
        while engine.has_work:
            answers.take(engine.step())
        load = engine.load_report()
        assert (load.pages_used, load.slots_used, load.num_running, load.num_waiting) == (0, 0, 0, 0)
        return answers

    return run
