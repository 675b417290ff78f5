"""A real engine behind its thread and loop: what the replica gets of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from ottserve.workers.api import FinishReason
from ottserve.workers.loop import EngineLoop


@pytest.fixture
async def loop(make_engine) -> AsyncIterator[EngineLoop]:
    engine = make_engine()
    loop = EngineLoop(lambda progress: engine, message_interval_s=0.0)
    await loop.ready()
    yield loop
    await loop.stop(0)


async def test_flushing_frees_what_no_live_request_uses(loop, make_task):
    """100 tokens seal two pages. Cached they are found again, flushed they are not, and one that runs keeps its own."""

    async def cached_tokens(request_id: str) -> int:
        chunks = [chunk async for chunk in loop.generate(make_task("a" * 100, request_id=request_id, max_new=2))]
        return chunks[-1].finish.usage.num_cached_tokens

    assert [await cached_tokens("first"), await cached_tokens("second")] == [0, 64]
    assert await loop.flush_cache() == 2
    assert await loop.flush_cache() == 0
    assert loop.reading.load.pages_cached == loop.reading.load.snapshot_bytes == 0
    assert await cached_tokens("third") == 0

    running = loop.generate(make_task("a" * 100, request_id="running", max_new=800))
    await anext(running)
    assert await loop.flush_cache() == 0, "its pages are in use"
    assert await cached_tokens("fourth") == 64
    assert await loop.abort("running")
    assert [chunk async for chunk in running][-1].finish.reason is FinishReason.ABORTED
    assert await loop.flush_cache() >= 2
