"""The loop against an engine that counts: gathering, aborts, deadlines, failing steps, health and the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from ottserve.workers.api import (
    DeadlineExceeded,
    DuplicateRequest,
    FinishReason,
    GenerationTask,
    Internal,
    TextChunk,
    Unavailable,
)
from ottserve.workers.loop import MAX_FAILED_STEPS, EngineLoop, Phase
from ottserve.workers.stream import MESSAGE_S

MakeTask = Callable[..., GenerationTask]
LONG = 100_000


@pytest.fixture
async def make_loop(counting_engine: type) -> AsyncIterator[Callable[..., Any]]:
    """Starts loops over a counting engine and stops them at the end."""
    loops: list[EngineLoop] = []

    async def make(engine: Any = None, **options: Any) -> tuple[EngineLoop, Any]:
        engine = engine or counting_engine()
        loop = EngineLoop(lambda progress: engine, **{"message_interval_s": 0.0, **options})
        loops.append(loop)
        await loop.ready()
        return loop, engine

    yield make
    for loop in loops:
        await loop.stop(0)


async def collect(loop: EngineLoop, task: GenerationTask) -> list[TextChunk]:
    return [chunk async for chunk in loop.generate(task)]


async def eventually(condition: Callable[[], bool], within_s: float = 2.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.005)


async def test_concatenated_chunks_are_the_answer(make_loop: Any, make_task: MakeTask) -> None:
    loop, _ = await make_loop()
    chunks = await collect(loop, make_task(num_tokens=50))
    assert "".join(chunk.text for chunk in chunks) == "".join(f"<{i}>" for i in range(1, 51))
    assert [i for chunk in chunks for i in chunk.token_ids] == list(range(1, 51))
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


async def test_streams_of_other_replicas_make_messages_rarer(make_loop: Any, make_task: MakeTask) -> None:
    """One gateway carries them all. What the newest task tells counts, in proportion to the streams that are left."""
    loop, _ = await make_loop()
    one = loop.generate(replace(make_task("one", num_tokens=LONG), num_streams=1))
    await anext(one)
    assert loop._num_carried() == 1
    other = loop.generate(replace(make_task("other", num_tokens=LONG), num_streams=100))
    await anext(other)
    assert loop._num_carried() == 100
    told = [time.monotonic() for _ in range(3) if await anext(other)]
    assert min(later - earlier for earlier, later in pairwise(told)) > 0.9 * 100 * MESSAGE_S
    await one.aclose()
    assert loop._num_carried() == 50
    await other.aclose()


async def test_messages_are_rarer_than_tokens(make_loop: Any, make_task: MakeTask) -> None:
    loop, _ = await make_loop(message_interval_s=0.05)
    chunks = await collect(loop, make_task(num_tokens=50))
    assert chunks[0].token_ids == (1,)
    assert len(chunks) < 10


async def test_a_reader_that_sleeps_holds_nobody_up(make_loop: Any, make_task: MakeTask) -> None:
    loop, _ = await make_loop()
    sleeper = loop.generate(make_task("sleeper", num_tokens=300))
    await anext(sleeper)
    await asyncio.wait_for(collect(loop, make_task("quick", num_tokens=300)), 5)
    await eventually(lambda: loop.reading.load.num_running == 0)
    rest = [chunk async for chunk in sleeper]
    assert len(rest) == 1
    assert rest[0].token_ids[-1] == 300


async def test_leaving_the_generator_frees_the_slot(make_loop: Any, make_task: MakeTask) -> None:
    loop, engine = await make_loop()
    generator = loop.generate(make_task(num_tokens=LONG))
    await anext(generator)
    await generator.aclose()
    await eventually(lambda: engine.aborted == ["a"] and loop.reading.load.num_running == 0)


async def test_cancelling_the_reader_frees_the_slot(make_loop: Any, make_task: MakeTask) -> None:
    loop, engine = await make_loop()
    reader = asyncio.create_task(collect(loop, make_task(num_tokens=LONG)))
    await eventually(lambda: bool(engine.live))
    reader.cancel()
    await eventually(lambda: not engine.live)


async def test_abort_ends_the_stream_with_aborted_once(make_loop: Any, make_task: MakeTask) -> None:
    loop, engine = await make_loop()
    reader = asyncio.create_task(collect(loop, make_task(num_tokens=LONG)))
    await eventually(lambda: bool(engine.live))
    assert await loop.abort("a") is True
    assert await loop.abort("a") is False
    assert await loop.abort("unknown") is False
    assert (await reader)[-1].finish.reason is FinishReason.ABORTED


async def test_a_live_id_is_refused_and_the_first_goes_on(make_loop: Any, make_task: MakeTask) -> None:
    loop, engine = await make_loop()
    first = asyncio.create_task(collect(loop, make_task(num_tokens=200)))
    await eventually(lambda: bool(engine.live))
    with pytest.raises(DuplicateRequest):
        await collect(loop, make_task())
    assert (await first)[-1].finish.usage.num_completion_tokens == 200


async def test_an_id_can_be_used_again_right_after_a_cancel(make_loop: Any, make_task: MakeTask) -> None:
    loop, _ = await make_loop()
    for _ in range(20):
        generator = loop.generate(make_task(num_tokens=LONG))
        await anext(generator)
        await generator.aclose()
    assert (await collect(loop, make_task(num_tokens=3)))[0].text.startswith("<1>")


async def test_deadline(make_loop: Any, make_task: MakeTask) -> None:
    loop, engine = await make_loop()
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await collect(loop, make_task(num_tokens=LONG, deadline_at=time.time() + 0.2))
    assert time.monotonic() - began < 1
    await eventually(lambda: not engine.live)


async def test_a_deadline_frees_the_slot_though_nobody_takes_the_error(make_loop: Any, make_task: MakeTask) -> None:
    loop, engine = await make_loop()
    generator = loop.generate(make_task(num_tokens=LONG, deadline_at=time.time() + 0.1))
    await anext(generator)
    await eventually(lambda: engine.aborted == ["a"] and loop.reading.load.num_running == 0)
    with pytest.raises(DeadlineExceeded):
        [chunk async for chunk in generator]
    assert engine.aborted == ["a"]


async def test_a_step_that_raises_ends_what_was_live_and_nothing_later(
    make_loop: Any, make_task: MakeTask, counting_engine: type
) -> None:
    def raise_once(engine: Any) -> None:
        if engine.made.get("bad") == 2:
            engine.made["bad"] = 0
            raise RuntimeError("secret path /tmp/x")

    loop, _ = await make_loop(counting_engine(raise_once))
    with pytest.raises(Internal) as caught:
        await collect(loop, make_task("bad", num_tokens=LONG))
    assert "secret" not in str(caught.value)
    assert not loop.broken
    assert (await collect(loop, make_task("good")))[-1].finish


async def test_steps_that_keep_raising_break_the_loop(
    make_loop: Any, make_task: MakeTask, counting_engine: type
) -> None:
    def always_raise(engine: Any) -> None:
        if engine.live:
            raise RuntimeError("device lost")

    loop, engine = await make_loop(counting_engine(always_raise))
    for number in range(MAX_FAILED_STEPS):
        assert not loop.broken
        with pytest.raises(Internal):
            await collect(loop, make_task(str(number)))
        engine.ended.clear()
    assert loop.broken


async def test_a_metric_that_raises_fails_no_request_and_is_called_once(make_loop: Any, make_task: MakeTask) -> None:
    calls = []

    def sink(duration_s: float, counters: object) -> None:
        calls.append(duration_s)
        raise ValueError("no registry")

    loop, _ = await make_loop(on_step=sink)
    assert (await collect(loop, make_task()))[-1].finish
    assert len(calls) == 1


async def test_stalled_only_with_pending_work_and_no_step(
    make_loop: Any, make_task: MakeTask, counting_engine: type
) -> None:
    now = [0.0]
    gate = threading.Event()
    loop, engine = await make_loop(counting_engine(lambda engine: gate.wait(5) and None), clock=lambda: now[0])
    now[0] = 10_000.0
    assert loop.stalled_for_s() == 0.0, "idle for hours is no stall"
    reader = asyncio.create_task(collect(loop, make_task(num_tokens=3)))
    await eventually(lambda: bool(engine.live))
    assert loop.stalled_for_s() == 0.0, "just begun"
    now[0] += 60.0
    assert loop.stalled_for_s() == 60.0
    gate.set()
    await reader
    assert loop.stalled_for_s() == 0.0


async def test_stop_lets_running_requests_finish_and_refuses_new_ones(make_loop: Any, make_task: MakeTask) -> None:
    loop, engine = await make_loop()
    readers = [asyncio.create_task(collect(loop, make_task(str(i), num_tokens=100))) for i in range(4)]
    await eventually(lambda: len(engine.live) == 4)
    stopping = asyncio.create_task(loop.stop(grace_s=5))
    await eventually(lambda: loop.phase is Phase.DRAINING)
    with pytest.raises(Unavailable):
        await collect(loop, make_task("late"))
    assert all(chunks[-1].finish for chunks in await asyncio.gather(*readers))
    assert not engine.is_closed
    await stopping
    assert loop.phase is Phase.STOPPED and engine.is_closed


async def test_stop_ends_what_outlives_the_grace_time(make_loop: Any, make_task: MakeTask) -> None:
    loop, engine = await make_loop()
    reader = asyncio.create_task(collect(loop, make_task(num_tokens=LONG)))
    await eventually(lambda: bool(engine.live))
    await asyncio.wait_for(loop.stop(grace_s=0.05), 2)
    assert engine.is_closed
    with pytest.raises(Unavailable):
        await reader


async def test_an_engine_that_does_not_load_says_why() -> None:
    def load(progress: Callable[[str], None]) -> Any:
        progress("reading weights")
        raise ValueError("model.path: no such folder")

    heard: list[str] = []
    loop = EngineLoop(load, progress=heard.append)
    with pytest.raises(ValueError, match="no such folder"):
        await loop.ready()
    assert heard == ["reading weights"]
    with pytest.raises(Unavailable):
        await anext(loop.generate(None))  # type: ignore[arg-type]  # refused before it is looked at
    await loop.stop(0)


async def test_flush_cache_tells_what_was_dropped(make_loop: Any) -> None:
    loop, _ = await make_loop()
    assert await loop.flush_cache() == 3
