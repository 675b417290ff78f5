"""A real engine behind its thread and loop: what the replica gets of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from ottserve.workers.api import FinishReason, Internal, OttserveError
from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.live import LiveRequest
from ottserve.workers.loop import MAX_FAILED_STEPS, EngineLoop


@pytest.fixture
def overlap() -> bool:
    return False


@pytest.fixture
def engine(make_engine, overlap) -> Engine:
    return make_engine(overlap=overlap)


@pytest.fixture
async def loop(engine) -> AsyncIterator[EngineLoop]:
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


@pytest.fixture
def end_of(loop, make_task):
    """Asks for two tokens, and says by which internal error that ended; None if it has not."""

    async def ask(request_id: str) -> str | None:
        try:
            async for _ in loop.generate(make_task("a", request_id=request_id, max_new=2)):
                pass
        except OttserveError as error:
            assert isinstance(error, Internal)
            return error.reason
        return None

    return ask


def fails(error: Exception):
    """Stands for a method that raises."""

    def fail(*arguments: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("part", ["launch", "land"])
@pytest.mark.parametrize(("error", "reason"), [(RuntimeError(), "step_failed"), (MemoryError(), "out_of_memory")])
async def test_an_engine_that_computes_nothing_any_more_breaks_the_loop(
    loop, engine, end_of, monkeypatch, part, error, reason
):
    """The engine raises nothing: it ends the requests of a step that fails."""
    monkeypatch.setattr(engine._computer, part, fails(error))
    for number in range(MAX_FAILED_STEPS):
        assert not loop.broken
        assert await end_of(f"r{number}") == reason
    assert loop.broken


async def test_failed_steps_with_tokens_between_break_nothing(loop, engine, end_of, monkeypatch):
    for number in range(2 * MAX_FAILED_STEPS):
        with monkeypatch.context() as planted:
            if number % MAX_FAILED_STEPS:
                planted.setattr(engine._computer, "launch", fails(RuntimeError()))
            assert await end_of(f"r{number}") == ("step_failed" if number % MAX_FAILED_STEPS else None)
        assert not loop.broken


async def test_requests_that_fail_alone_break_nothing(loop, end_of, monkeypatch):
    monkeypatch.setattr(LiveRequest, "push", fails(RuntimeError()))
    for number in range(MAX_FAILED_STEPS):
        assert await end_of(f"r{number}") == "output_failed"
    assert not loop.broken
