"""Two gateways in front of the same replicas. They share nothing; what they have in common is at the replicas."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from ottserve.v1 import generation_pb2 as pb

SHORT = pb.GenerateRequest(text="hi", stops=pb.StopParams(max_new_tokens=9))
LONG = pb.GenerateRequest(text="hi", request_id="r1", stops=pb.StopParams(max_new_tokens=90))


@pytest.fixture
async def two(start: Any, replicas: Any) -> tuple[Any, Any]:
    replicas.pause_s = 0.02
    return await start(), await start()


async def test_one_ends_what_came_by_the_other(two: Any, replicas: Any, until: Any) -> None:
    one, other = two
    call = asyncio.ensure_future(one.stub.Generate(LONG))
    await until(lambda: replicas.live)
    assert (await other.stub.Abort(pb.AbortRequest(request_id="r1"))).found
    [sample] = (await call).samples
    assert sample.finish.reason == pb.FINISH_REASON_ABORTED


async def test_when_one_is_lost_the_other_serves(two: Any, replicas: Any, until: Any) -> None:
    one, other = two
    here = asyncio.ensure_future(one.stub.Generate(LONG))
    there = asyncio.ensure_future(other.stub.Generate(SHORT))
    await until(lambda: len(replicas.live) == 2)
    await one.server.close()
    with pytest.raises(grpc.aio.AioRpcError) as lost:
        await here
    assert lost.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    await until(lambda: "r1" in replicas.cancelled)
    assert len((await there).samples[0].token_ids) == 9
    assert len((await other.stub.Generate(SHORT)).samples[0].token_ids) == 9
