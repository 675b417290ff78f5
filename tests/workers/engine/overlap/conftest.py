"""Engines without and with overlap, side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.workers.engine.overlap.engines import launched_ahead, told

from ottserve.workers.api import GenerationTask
from ottserve.workers.engine.engine import Engine


@pytest.fixture
def both(make_engine, run_to_end) -> Callable[..., tuple[Engine, Engine]]:
    """Engines without and with overlap that have answered the same tasks, twice, in the same way."""

    def compare(*tasks: GenerationTask, make: Callable[..., Engine] = make_engine, **settings: Any):
        engines = make(overlap=False, **settings), make(overlap=True, **settings)
        ahead = launched_ahead(engines[1])
        for _ in range(2):  # the second time from what the first has left in the prefix cache
            without, with_overlap = (run_to_end(engine, *tasks) for engine in engines)
            assert told(with_overlap) == told(without)
            assert with_overlap.logprobs == without.logprobs
            assert with_overlap.prompt_logprobs == without.prompt_logprobs
        assert any(ahead)
        for engine in engines:
            engine._scheduler.check()
            assert engine._pipeline._begun is None
        return engines

    return compare
