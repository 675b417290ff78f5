"""The gateway's HTTP port with the fake replica behind it, and the real `openai` client before it.

Beside counting, the fake scores: token i of an answer has -i/8, token i of a prompt -i/4, and id 7 is likelier by 1/16.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import openai
import pytest
from tests.service.conftest import FakeReplicas

from ottserve.cli.ports import free_port
from ottserve.service.server import GatewayServer
from ottserve.workers import api


def scored(token_id: int, logprob: float, num_top: int) -> api.TokenLogprob:
    return api.TokenLogprob(token_id, logprob, ((7, logprob + 1 / 16), (token_id, logprob))[:num_top])


class ScoringReplicas(FakeReplicas):
    async def generate(self, task: api.GenerationTask) -> AsyncGenerator[api.TextChunk, None]:
        async with aclosing(super().generate(task)) as chunks:
            if task.prompt_logprobs is not None:
                prompt = [None, *(scored(t, -i / 4, task.prompt_logprobs) for i, t in enumerate(task.prompt_ids) if i)]
                for piece in (prompt[:2], prompt[2:]):
                    yield api.TextChunk(task.request_id, "", (), prompt_logprobs=tuple(piece))
            async for chunk in chunks:
                if task.logprobs is not None:
                    [i] = chunk.token_ids
                    chunk = replace(chunk, logprobs=(scored(i, -i / 8, task.logprobs),))  # noqa: PLW2901
                yield chunk


@dataclass
class Surface:
    """A running gateway, the client that everybody uses, and a bare one."""

    server: GatewayServer
    client: openai.AsyncOpenAI
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.http_port}"

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        """Status, JSON and headers of what comes back; bytes go as they are."""
        sent = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.session.post(self.url + path, headers=headers, **sent) as response:
            return response.status, await response.json(), response.headers

    def value(self, name: str, **labels: str) -> float:
        """The value of a series, 0 where there is none."""
        return self.server.metrics.registry.get_sample_value(name, labels) or 0.0


IN_TIME = aiohttp.ClientTimeout(total=30)

Open = Callable[..., Awaitable[Surface]]


@pytest.fixture
def replicas() -> ScoringReplicas:
    return ScoringReplicas()


@pytest.fixture
async def open_surface(start: Any) -> AsyncIterator[Open]:
    """Starts gateways with changed settings; all end with the test."""
    opened: list[Surface] = []

    async def open_one(**changes: Any) -> Surface:
        gateway = await start(**({"http_host": "127.0.0.1", "http_port": free_port()} | changes))
        url = f"http://127.0.0.1:{gateway.server.http_port}/v1"
        plain = openai.DefaultAsyncHttpxClient(verify=False)  # reading the machine's certificates takes its time
        client = openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, http_client=plain)
        opened.append(Surface(gateway.server, client, aiohttp.ClientSession(timeout=IN_TIME)))
        return opened[-1]

    yield open_one
    for surface in opened:
        await surface.client.close()
        await surface.session.close()


@pytest.fixture
async def surface(open_surface: Open) -> Surface:
    return await open_surface()
