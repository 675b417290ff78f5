"""`ottserve bench-gateway`: what the gateway costs, over the replica behind it. Starts a service of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ottserve.cli.tables import print_table

if TYPE_CHECKING:
    from aiohttp import ClientSession
    from ray.serve.handle import DeploymentHandle

    from ottserve.client import AsyncClient

PROMPT = "Once upon a time"
GRPC, HTTP = "gRPC", "HTTP"
MAX_CPU_MS, MAX_ADDED_MS = 0.5, 8.0  # by gRPC
ROUNDS = 10

Stream = Callable[[int], Awaitable[int]]
Call = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Load:
    """How much is asked: streams at once of so many tokens, then so many calls of one token."""

    num_streams: int
    num_tokens: int
    num_calls: int


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time of the gateway's process, and what it adds to the time of a call, one way in.

    Attributes:
        bare_ms, through_ms: p50 of a call of one token, to the replica by Serve and to the gateway.
    """

    num_messages: int
    cpu_s: float
    wall_s: float
    bare_ms: float
    through_ms: float

    @property
    def cpu_ms(self) -> float:
        """Of a message to a caller."""
        return 1000 * self.cpu_s / self.num_messages

    @property
    def added_ms(self) -> float:
        """By the gateway, to the p50 of a call."""
        return self.through_ms - self.bare_ms


def bench_gateway(
    streams: Annotated[int, typer.Option(help="Streams at once.", min=1)] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens of each stream.", min=1)] = 200,
    calls: Annotated[int, typer.Option(help="Calls of one token, each way.", min=ROUNDS)] = 300,
) -> None:
    """Time the gateway in front of the toy model: CPU of a message, and what it adds to a call's median.

    Status 1 where it is over 0.5 ms or 8 ms by gRPC. Meant for an otherwise idle machine.
    """
    from ottserve.cli.ports import free_port
    from ottserve.loadtest.local import GATEWAY, local_service

    load, http_port = Load(streams, tokens, calls), free_port()
    with local_service(gateway__http_port=http_port) as service, _connected(service.ray_address) as find_replica:
        addresses = service.target, f"http://127.0.0.1:{http_port}"
        costs = asyncio.run(_measure(*addresses, find_replica, service.pids(GATEWAY)[0], load))
    rows = [
        ("messages", *(f"{cost.num_messages:,} in {cost.wall_s:.1f} s" for cost in costs), ""),
        ("CPU of a message, ms", *(f"{cost.cpu_ms:.3f}" for cost in costs), f"{MAX_CPU_MS}"),
        ("p50 of a call at the replica, ms", *(f"{cost.bare_ms:.2f}" for cost in costs), ""),
        ("p50 of a call at the gateway, ms", *(f"{cost.through_ms:.2f}" for cost in costs), ""),
        ("added by the gateway, ms", *(f"{cost.added_ms:.2f}" for cost in costs), f"{MAX_ADDED_MS}"),
    ]
    title = f"the gateway: {streams} streams of {tokens} tokens, {calls} calls"
    print_table(title, ("what", GRPC, HTTP, f"at most, {GRPC}"), rows)
    if costs[0].cpu_ms > MAX_CPU_MS or costs[0].added_ms > MAX_ADDED_MS:
        raise typer.Exit(1)


async def _measure(
    target: str, http_url: str, find_replica: Callable[[], DeploymentHandle], gateway_pid: int, load: Load
) -> tuple[Cost, Cost]:
    """What it costs by gRPC and by HTTP."""
    import aiohttp

    from ottserve import client as oc

    replica = find_replica()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(oc.AsyncClient(target))
        session = await stack.enter_async_context(aiohttp.ClientSession(http_url))
        prompt_ids = (await client.tokenize(PROMPT)).token_ids
        ways: list[tuple[Stream, Call]] = [
            (lambda num_tokens: _stream(client, num_tokens), lambda: _call(client)),
            (lambda num_tokens: _stream_http(session, num_tokens), lambda: _call_http(session)),
        ]
        streamed = [await _messages(stream, gateway_pid, load) for stream, _ in ways]
        bare: list[float] = []
        through: list[list[float]] = [[] for _ in ways]
        for number in range(ROUNDS):  # in turn, so that whatever else the machine does meets all
            for i in range(load.num_calls // ROUNDS):
                bare.append(await _timed_ms(_bare_call(replica, prompt_ids, f"bare-{number}-{i}")))
            for (_, call), times in zip(ways, through, strict=True):
                times += [await _timed_ms(call()) for _ in range(load.num_calls // ROUNDS)]
    by_grpc, by_http = (
        Cost(*messages, statistics.median(bare), statistics.median(times))
        for messages, times in zip(streamed, through, strict=True)
    )
    return by_grpc, by_http


async def _messages(stream: Stream, gateway_pid: int, load: Load) -> tuple[int, float, float]:
    """How many messages all streams came in, with seconds of the gateway's processor time and of the clock."""
    await stream(load.num_tokens)
    began, cpu_before = time.perf_counter(), _cpu_s(gateway_pid)
    counts = await asyncio.gather(*(stream(load.num_tokens) for _ in range(load.num_streams)))
    return sum(counts), _cpu_s(gateway_pid) - cpu_before, time.perf_counter() - began


@contextmanager
def _connected(ray_address: str) -> Iterator[Callable[[], DeploymentHandle]]:
    """Gives what finds the replica; call it where it is to be used. Leaves the service's Ray before that ends."""
    from ottserve.cli.running import APPLICATION, LOCAL_RAY_ENVIRONMENT

    os.environ.update(LOCAL_RAY_ENVIRONMENT)
    import ray
    from ray import serve

    from ottserve.workers.app import NAME

    ray.init(address=ray_address, logging_level="ERROR", log_to_driver=False)
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)  # it regrets the end of our event loop
    try:
        yield lambda: serve.get_deployment_handle(NAME, APPLICATION)
    finally:
        ray.shutdown()


async def _stream(client: AsyncClient, num_tokens: int) -> int:
    """How many messages an answer came in."""
    from ottserve.client import Options

    options = Options(max_new_tokens=num_tokens, ignore_eos=True, temperature=0)
    return len([chunk async for chunk in client.stream(PROMPT, options)])


async def _stream_http(session: ClientSession, num_tokens: int) -> int:
    """How many events an answer came in."""
    body = _body(num_tokens) | {"ignore_eos": True, "stream": True}
    async with session.post("/v1/completions", json=body) as response:
        return len([line async for line in response.content if line.startswith(b"data: {")])


async def _call(client: AsyncClient) -> None:
    from ottserve.client import Options

    await client.generate(PROMPT, Options(max_new_tokens=1, temperature=0))


async def _call_http(session: ClientSession) -> None:
    async with session.post("/v1/completions", json=_body(1)) as response:
        await response.read()


def _body(num_tokens: int) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0}


async def _bare_call(replica: DeploymentHandle, prompt_ids: tuple[int, ...], request_id: str) -> None:
    from ottserve.workers.api import GenerationTask, SamplingParams, StopParams

    task = GenerationTask(request_id, prompt_ids, SamplingParams(temperature=0), StopParams(1), time.time())
    async for _ in replica.options(stream=True).generate.remote(task):
        pass


async def _timed_ms(call: Awaitable[None]) -> float:
    began = time.perf_counter()
    await call
    return 1000 * (time.perf_counter() - began)


def _cpu_s(pid: int) -> float:
    """Processor time that a process has used, in all of its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
