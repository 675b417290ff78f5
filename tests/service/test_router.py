"""The second try of a task, and its limits."""

from contextlib import aclosing
from typing import Any

import pytest

from ottserve.service.router import Router
from ottserve.workers import api

TASK = api.GenerationTask("r", (1,), api.SamplingParams(), api.StopParams(3), 0.0)


class Silent:
    """A replica whose stream ends without a finish."""

    def __init__(self, *chunks: api.TextChunk) -> None:
        self._chunks = chunks
        self.num_tries = 0

    async def generate(self, task: api.GenerationTask) -> Any:
        self.num_tries += 1
        for chunk in self._chunks:
            yield chunk


async def test_a_stream_without_any_chunk_is_no_answer() -> None:
    replicas: Any = Silent()
    with pytest.raises(api.Unavailable):
        [chunk async for chunk in Router(replicas).stream(TASK)]
    assert replicas.num_tries == 2


async def test_a_stream_without_an_end_is_broken() -> None:
    replicas: Any = Silent(api.TextChunk("r", "0 ", (0,)))
    with pytest.raises(api.StreamBroken):
        [chunk async for chunk in Router(replicas).stream(TASK)]
    assert replicas.num_tries == 1


async def test_closing_the_stream_closes_the_replicas(replicas: Any) -> None:
    async with aclosing(Router(replicas).stream(TASK)) as chunks:
        await anext(chunks)
    assert replicas.cancelled == ["r"]
