"""Requests that are aborted before any replica knows them: while they wait for their turn, or travel."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ottserve.service.departures import Departures
from ottserve.v1 import generation_pb2 as pb
from ottserve.workers import api


def request(request_id: str, max_new_tokens: int = 3, **fields: Any) -> pb.GenerateRequest:
    stops = pb.StopParams(max_new_tokens=max_new_tokens)
    return pb.GenerateRequest(text="hi", request_id=request_id, stops=stops, **fields)


@pytest.fixture
def road(replicas: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the requests that travel for ever; `home` in the id is let through."""
    travelling: list[str] = []
    generate = replicas.generate

    async def never_there(task: api.GenerationTask) -> AsyncGenerator[api.TextChunk, None]:
        if "home" not in task.request_id:
            travelling.append(task.request_id)
            try:
                await asyncio.Event().wait()
            finally:
                travelling.remove(task.request_id)
        async for chunk in generate(task):
            yield chunk

    monkeypatch.setattr(replicas, "generate", never_there)
    return travelling


async def test_a_stream_that_no_replica_knows_yet_ends_by_its_abort(gateway: Any, road: list[str], until: Any) -> None:
    call = asyncio.create_task(_all(gateway.stub.GenerateStream(request("far", n=2))))
    await until(lambda: road == ["far"])
    first, again = [await gateway.stub.Abort(pb.AbortRequest(request_id="far")) for _ in range(2)]
    finishes = [message.finish for message in await asyncio.wait_for(call, 1.0)]
    assert (first.found, again.found) == (True, False)
    assert [(finish.index, finish.reason) for finish in finishes] == [(n, pb.FINISH_REASON_ABORTED) for n in (0, 1)]
    assert [finish.usage.num_prompt_tokens for finish in finishes] == [3, 3]
    assert finishes[0].seed != finishes[1].seed
    assert not road
    ended = {"method": "GenerateStream", "outcome": "aborted"}
    await until(lambda: gateway.value("ottserve_gateway_requests_finished_total", **ended) == 1)
    assert (await gateway.stub.Generate(request("far-home"))).samples[0].text == "0 1 2 "


async def test_a_whole_answer_is_one_that_was_aborted(gateway: Any, road: list[str], until: Any) -> None:
    call = asyncio.create_task(_one(gateway.stub.Generate(request("far"))))
    await until(lambda: road == ["far"])
    assert (await gateway.stub.Abort(pb.AbortRequest(request_id="far"))).found
    [sample] = (await asyncio.wait_for(call, 1.0)).samples
    assert (sample.text, sample.finish.reason) == ("", pb.FINISH_REASON_ABORTED)


async def test_who_is_aborted_in_the_queue_gives_its_turn_to_the_next(
    start: Any, replicas: Any, until: Any, tmp_path: Path
) -> None:
    """32 of 33 are at the replicas, whose 16 slots are asked for twice."""
    file = tmp_path / "tokens.yaml"
    file.write_text(yaml.safe_dump([{"name": "a", "sha256": [hashlib.sha256(b"a").hexdigest()]}]))
    gateway = await start(tokens_file=str(file))
    replicas.pause_s = 0.05
    told = {"metadata": (("authorization", "Bearer a"),)}
    running = [asyncio.create_task(_one(gateway.stub.Generate(request(f"r{n}"), **told))) for n in range(32)]
    await until(lambda: len(replicas.live) == 32)
    waiting = asyncio.create_task(_one(gateway.stub.Generate(request("waits"), **told)))
    await asyncio.sleep(0.02)
    assert (await gateway.stub.Abort(pb.AbortRequest(request_id="waits"), **told)).found
    [sample] = (await asyncio.wait_for(waiting, 1.0)).samples
    assert sample.finish.reason == pb.FINISH_REASON_ABORTED
    assert {answer.samples[0].text for answer in await asyncio.gather(*running)} == {"0 1 2 "}
    assert "waits" not in {task.request_id for task in replicas.tasks}


async def test_one_that_reaches_a_replica_between_two_questions_is_aborted_there(
    gateway: Any, replicas: Any, road: list[str], until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replicas say once that they do not know it, and by then one has sent its first chunk."""
    replicas.pause_s = 0.05
    abort, asked = replicas.abort, []

    async def late(request_id: str) -> api.AbortResult:
        asked.append(request_id)
        if len(asked) > 1:
            return await abort(request_id)
        await until(lambda: replicas.num_chunks)
        await asyncio.sleep(0.01)
        return api.AbortResult(request_id, found=False)

    monkeypatch.setattr(replicas, "abort", late)
    call = asyncio.create_task(_all(gateway.stub.GenerateStream(request("home", 50))))
    await until(lambda: replicas.live)
    assert (await gateway.stub.Abort(pb.AbortRequest(request_id="home"))).found
    assert (await asyncio.wait_for(call, 1.0))[-1].finish.reason == pb.FINISH_REASON_ABORTED
    assert asked == ["home", "home"]


@pytest.mark.parametrize("error", [api.Unavailable("late"), api.Internal("the replica failed")])
async def test_one_on_its_way_is_aborted_although_a_replica_can_not_say_whether_it_is_there(
    gateway: Any, replicas: Any, road: list[str], until: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def fails(request_id: str) -> api.AbortResult:
        raise error

    monkeypatch.setattr(replicas, "abort", fails)
    call = asyncio.create_task(_all(gateway.stub.GenerateStream(request("far"))))
    await until(lambda: road == ["far"])
    assert (await gateway.stub.Abort(pb.AbortRequest(request_id="far"))).found
    assert (await asyncio.wait_for(call, 1.0))[-1].finish.reason == pb.FINISH_REASON_ABORTED


async def test_a_time_limit_inside_a_scope_is_no_abort() -> None:
    departures = Departures()
    with pytest.raises(TimeoutError):
        async with departures.departing("r"), asyncio.timeout(0.0):
            await asyncio.sleep(1.0)
    assert not departures.abort("r")


async def test_an_abort_as_the_scope_ends_is_known_behind_it() -> None:
    departures = Departures()
    async with departures.departing("r") as departure:
        assert departures.abort("r") and not departures.abort("r")
    assert departure.is_aborted
    await asyncio.sleep(0)  # nothing cancels who has gone on


async def _all(call: Any) -> list[Any]:
    return [message async for message in call]


async def _one(call: Any) -> Any:
    return await call
