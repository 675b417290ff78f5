"""Calls of every kind and every bad habit, again and again: the gateway holds no more after them than before.

Memory itself can't be compared here: the callers are in the same process, with timers and caches of their own.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from tests.service.conftest import FakeReplicas, Gateway, Start

from ottserve import client as oc
from ottserve.cli.ports import free_port
from ottserve.service.metrics import METHODS
from ottserve.workers import api

WARM_UP_ROUNDS, ROUNDS = 3, 16
CONTAINERS = (dict, set, list, deque)
OURS = ("ottserve.service", "ottserve.workers")
IN_FLIGHT = "ottserve_gateway_requests_in_flight"
LONG = oc.Options(max_new_tokens=90)
SHORT = oc.Options(max_new_tokens=3, n=2)


@dataclass
class ForgetfulReplicas(FakeReplicas):
    """The fake without its notes, which grow with every call."""

    async def generate(self, task: api.GenerationTask) -> AsyncGenerator[api.TextChunk, None]:
        try:
            async with aclosing(super().generate(task)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self.tasks.clear()
            self.cancelled.clear()
            self.num_chunks.pop(task.request_id, None)
            self.to_abort.discard(task.request_id)


@pytest.fixture
def replicas() -> ForgetfulReplicas:
    return ForgetfulReplicas(pause_s=0.001)


async def one_round(gateway: Gateway, number: int) -> int:
    """Each kind of call once, on connections of its own; how many there were."""
    server = gateway.server
    base = f"http://127.0.0.1:{server.http_port}"
    target, no_retry = f"127.0.0.1:{server.port}", oc.RetryPolicy(max_attempts=1)
    async with oc.AsyncClient(target, retry=no_retry) as client, aiohttp.ClientSession(base) as session:
        calls = [
            client.generate("a", SHORT),
            client.generate((number, 2, 3) * 20, SHORT),
            client.generate("a", oc.Options(temperature=-1)),
            client.generate("a", LONG, timeout_s=0.02),
            leave_the_stream(client),
            cancel(client),
            abort(client, f"abort-{number}"),
            client.tokenize("a text"),
            client.load(),
            post(session, "/v1/completions", {"prompt": "a", "max_tokens": 3}),
            post(session, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
            post(session, "/v1/completions", {"prompt": 7, f"unknown{number}": 1}),
            post(session, f"/nowhere/{number}", {}),
            hang_up(session),
        ]
        for ended in await asyncio.gather(*calls, return_exceptions=True):
            assert not isinstance(ended, BaseException) or isinstance(ended, oc.ClientError), ended
    return len(calls)


async def leave_the_stream(client: oc.AsyncClient) -> None:
    async with aclosing(client.stream("a", LONG)) as chunks:
        await anext(chunks)


async def cancel(client: oc.AsyncClient) -> None:
    call = asyncio.create_task(client.generate("a", LONG))
    await asyncio.sleep(0.02)
    call.cancel()
    await asyncio.wait([call])


async def abort(client: oc.AsyncClient, request_id: str) -> None:
    call = asyncio.create_task(client.generate("a", oc.Options(max_new_tokens=90, request_id=request_id)))
    await asyncio.sleep(0.02)
    await client.abort(request_id)
    await client.abort(request_id)
    await call


async def post(session: aiohttp.ClientSession, path: str, body: Any) -> None:
    async with session.post(path, json=body) as response:
        await response.read()


async def hang_up(session: aiohttp.ClientSession) -> None:
    async with session.post("/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 90}) as response:
        await response.content.readany()
        response.close()


async def held(gateway: Gateway, until: Any) -> int:
    """Objects of the service's own types, entries of their containers, and tasks, once nothing is in flight."""
    await until(lambda: not any(gateway.value(IN_FLIGHT, method=method) for method in METHODS))
    await asyncio.sleep(0.1)
    gc.collect()
    ours = [o for o in gc.get_objects() if str(type(o).__module__).startswith(OURS)]
    parts = [part for o in ours if hasattr(o, "__dict__") for part in vars(o).values()]
    return len(ours) + sum(len(p) for p in parts if isinstance(p, CONTAINERS)) + len(asyncio.all_tasks())


async def test_calls_leave_nothing_behind(start: Start, until: Any) -> None:
    gateway = await start(http_host="127.0.0.1", http_port=free_port())
    for number in range(WARM_UP_ROUNDS):
        await one_round(gateway, number)
    before = await held(gateway, until)
    num_calls = sum([await one_round(gateway, number) for number in range(ROUNDS)])
    left = await held(gateway, until) - before
    assert left < ROUNDS / 2, f"{num_calls} calls left {left} objects"
