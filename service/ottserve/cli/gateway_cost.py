"""`ottserve bench-gateway`: what the gateway costs, over the replica behind it. Starts a service of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ottserve.cli.tables import print_table

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from ottserve.client import AsyncClient

PROMPT = "Once upon a time"
MAX_CPU_MS, MAX_ADDED_MS = 0.5, 8.0
ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time of the gateway's process, and what it adds to the time of a call.

    Attributes:
        bare_ms, through_ms: p50 of a call of one token, to the replica by Serve and to the gateway by gRPC.
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

    Status 1 where it is over 0.5 ms or 8 ms. Meant for an otherwise idle machine.
    """
    from ottserve.loadtest.local import GATEWAY, local_service

    with local_service() as service, _connected() as find_replica:
        cost = asyncio.run(_measure(service.target, find_replica, service.pids(GATEWAY)[0], streams, tokens, calls))
    rows = [
        (f"CPU of a message, ms ({cost.num_messages:,} in {cost.wall_s:.1f} s)", f"{cost.cpu_ms:.3f}", f"{MAX_CPU_MS}"),
        ("p50 of a call at the replica, ms", f"{cost.bare_ms:.2f}", ""),
        ("p50 of a call at the gateway, ms", f"{cost.through_ms:.2f}", ""),
        ("added by the gateway, ms", f"{cost.added_ms:.2f}", f"{MAX_ADDED_MS}"),
    ]
    print_table(f"the gateway: {streams} streams of {tokens} tokens, {calls} calls", ("what", "is", "at most"), rows)
    if cost.cpu_ms > MAX_CPU_MS or cost.added_ms > MAX_ADDED_MS:
        raise typer.Exit(1)


async def _measure(
    target: str,
    find_replica: Callable[[], DeploymentHandle],
    gateway_pid: int,
    num_streams: int,
    num_tokens: int,
    num_calls: int,
) -> Cost:
    from ottserve import client as oc

    replica = find_replica()
    async with oc.AsyncClient(target) as client:
        prompt_ids = (await client.tokenize(PROMPT)).token_ids
        await _stream(client, num_tokens)
        began, cpu_before = time.perf_counter(), _cpu_s(gateway_pid)
        counts = await asyncio.gather(*(_stream(client, num_tokens) for _ in range(num_streams)))
        wall_s, cpu_s = time.perf_counter() - began, _cpu_s(gateway_pid) - cpu_before
        bare, through = [], []
        for number in range(ROUNDS):  # in turn, so that whatever else the machine does meets both
            for i in range(num_calls // ROUNDS):
                bare.append(await _bare_call_s(replica, prompt_ids, f"bare-{number}-{i}"))
            for _ in range(num_calls // ROUNDS):
                through.append(await _call_s(client))
    return Cost(sum(counts), cpu_s, wall_s, 1000 * statistics.median(bare), 1000 * statistics.median(through))


@contextmanager
def _connected() -> Iterator[Callable[[], DeploymentHandle]]:
    """Gives what finds the replica; call it where it is to be used. Leaves the service's Ray before that ends."""
    from ottserve.cli.running import APPLICATION, LOCAL_RAY_ENVIRONMENT

    os.environ.update(LOCAL_RAY_ENVIRONMENT)
    import ray
    from ray import serve

    from ottserve.workers.app import NAME

    ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
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


async def _call_s(client: AsyncClient) -> float:
    from ottserve.client import Options

    began = time.perf_counter()
    await client.generate(PROMPT, Options(max_new_tokens=1, temperature=0))
    return time.perf_counter() - began


async def _bare_call_s(replica: DeploymentHandle, prompt_ids: tuple[int, ...], request_id: str) -> float:
    from ottserve.workers.api import GenerationTask, SamplingParams, StopParams

    task = GenerationTask(request_id, prompt_ids, SamplingParams(temperature=0), StopParams(1), time.time())
    began = time.perf_counter()
    async for _ in replica.options(stream=True).generate.remote(task):
        pass
    return time.perf_counter() - began


def _cpu_s(pid: int) -> float:
    """Processor time that a process has used, in all of its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
