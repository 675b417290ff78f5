"""Sends malformed requests to a running service and tells whether it withstood them. Knows not how they are made.

It did when every call ended with a status of the contract that is not the service's own fault, everything is given back
afterwards, and a sound call is served.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

import grpc

from ottserve import client as oc
from ottserve.client.connection import async_channel, call_metadata
from ottserve.loadtest.malformed import SERVICE, Attempt, attempt

CODE = grpc.StatusCode
# A replica that dies of a request would show as UNAVAILABLE.
EXPECTED = frozenset(
    {CODE.OK, CODE.INVALID_ARGUMENT, CODE.NOT_FOUND, CODE.ALREADY_EXISTS, CODE.RESOURCE_EXHAUSTED}
    | {CODE.DEADLINE_EXCEEDED, CODE.CANCELLED}
)
IDLE_WITHIN_S = 10.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Fuzzing:
    """What to send, and where. Attempt `number` of a `seed` is the same each time."""

    target: str
    numbers: Iterable[int]
    seed: int = 0
    num_at_once: int = 16
    timeout_s: float = 5.0
    token: str | None = None
    tls: oc.Tls | None = None


@dataclass(slots=True)
class Outcome:
    """What became of it. `problems` is empty for a service that withstood.

    Attributes:
        codes: how many calls of a method ended with a status.
    """

    codes: Counter[tuple[str, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


async def fuzz(plan: Fuzzing, progress: Callable[[], object] = lambda: None) -> Outcome:
    """Send everything, then look whether the service is as before. `progress` is called after each attempt."""
    outcome = Outcome()
    numbers = iter(plan.numbers)

    async def send_all() -> None:
        for number in numbers:
            tried = attempt(plan.seed, number)
            code, details = await _send(channel, tried, plan)
            outcome.codes[tried.method, code.name] += 1
            if code not in EXPECTED:
                outcome.problems.append(f"attempt {number} of seed {plan.seed}, {tried.method}: {code.name}, {details}")
            progress()

    async with async_channel(plan.target, plan.tls) as channel:
        await asyncio.gather(*(send_all() for _ in range(plan.num_at_once)))
    async with oc.AsyncClient(plan.target, token=plan.token, tls=plan.tls) as client:
        async for problem in _aftermath(client):
            outcome.problems.append(problem)
    return outcome


async def _send(channel: grpc.aio.Channel, tried: Attempt, plan: Fuzzing) -> tuple[grpc.StatusCode, str]:
    path = f"/{SERVICE.full_name}/{tried.method}"
    unary: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
    streaming: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(path)
    metadata = (*tried.metadata, *call_metadata(plan.token))
    try:
        if not tried.is_stream:
            await unary(tried.raw, timeout=plan.timeout_s, metadata=metadata)
        else:
            stream = streaming(tried.raw, timeout=plan.timeout_s, metadata=metadata)
            async for _ in stream:
                if tried.leaves:
                    stream.cancel()
                    return CODE.CANCELLED, ""
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return CODE.OK, ""


async def _aftermath(client: oc.AsyncClient) -> AsyncIterator[str]:
    """What is not as it should be once all calls have ended."""
    try:
        deadline = time.monotonic() + IDLE_WITHIN_S
        while held := _held(await client.load()):
            if time.monotonic() > deadline:
                yield f"{IDLE_WITHIN_S:g} s after the last call there still are {held}"
                break
            await asyncio.sleep(POLL_S)
        answer = await client.generate("Once upon a time", oc.Options(max_new_tokens=4, ignore_eos=True))
        if answer.finish.usage.num_completion_tokens != 4:
            yield f"a sound call got {answer.finish.usage.num_completion_tokens} tokens, not 4"
    except oc.ClientError as error:
        yield f"a sound call failed: {error.code.name}, {error.message}"


def _held(loads: Iterable[oc.ReplicaLoad]) -> str:
    """What replicas hold though nothing is asked of them."""
    names = ("num_running", "num_waiting", "num_waiting_tokens", "slots_used", "pages_used")
    return ", ".join(
        f"{name}={value} at {load.replica_id}" for load in loads for name in names if (value := getattr(load, name))
    )
