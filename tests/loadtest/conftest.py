"""A service whose answers, and the times at which they come, are written down beforehand. No locust, no network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from ottserve import client as oc
from ottserve.loadtest.workload import Workload


@dataclass
class Script:
    """A client whose stream sends messages of so many tokens at so many seconds, then ends or fails."""

    messages: list[tuple[float, int]]
    error: oc.ClientError | None = None
    now: float = 100.0
    asked: list[tuple[Any, oc.Options | None]] = field(default_factory=list)
    closed: bool = False

    def clock(self) -> float:
        return self.now

    def stream(
        self, prompt: oc.Prompt, options: oc.Options | None = None, timeout_s: float | None = None
    ) -> Iterator[oc.Chunk]:
        self.asked.append((prompt, options))
        num_tokens = 0
        try:
            for at_s, num in self.messages:
                self.now = 100.0 + at_s
                num_tokens += num
                yield oc.Chunk("r", text="x" * num, token_ids=(7,) * num, finish=None)
            if self.error:
                raise self.error
            usage = oc.Usage(len(prompt), 0, num_tokens)  # type: ignore[arg-type]
            timings = oc.Timings(0, 0, 0, 0)
            yield oc.Chunk("r", text="", token_ids=(), finish=oc.Finish(oc.FinishReason.LENGTH, usage, timings, 0))
        finally:
            self.closed = True


@pytest.fixture
def script() -> type[Script]:
    return Script


@pytest.fixture
def make_workload() -> Callable[..., Workload]:
    """A small workload, some fields replaced."""

    def make(**fields: Any) -> Workload:
        kind = {"name": "chat", "prompt_tokens": {"least": 5, "most": 9}, "answer_tokens": {"least": 2, "most": 4}}
        base = {"about": "a test", "arrivals": {"loop": "closed", "num_callers": 2}, "requests": [kind]}
        return Workload.model_validate(base | fields)

    return make
