"""What is watched while something is done to a service: streams, times, and what must be so in the end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace

from ottserve import client as oc
from ottserve.loadtest.local import REPLICA, LocalService
from ottserve.loadtest.scrape import in_hand, scrape

NUM_REPLICAS = 2
NUM_STREAMS = 4
LONG = oc.Options(temperature=0, max_new_tokens=1900, ignore_eos=True)
SHORT = oc.Options(temperature=0, max_new_tokens=3)
ONE_TRY = oc.RetryPolicy(max_attempts=1)
RECOVERY_S = 60.0
PERIOD_S = 0.02

Times = dict[str, float]
Outcome = oc.Chunk | oc.ClientError


class ContractBroken(Exception):
    """A caller saw what must never be seen."""


class Watch:
    """Seconds since it was made, by what happened."""

    def __init__(self) -> None:
        self.times: Times = {}
        self._began_at = time.monotonic()

    def stamp(self, event: str) -> None:
        """This has just happened."""
        self.times[event] = time.monotonic() - self._began_at


def require(holds: bool, otherwise: str) -> None:
    """Raises `ContractBroken`."""
    if not holds:
        raise ContractBroken(otherwise)


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Asks again and again. Raises `ContractBroken` when it never holds, whatever else went wrong meanwhile."""
    deadline = time.monotonic() + RECOVERY_S
    while not await holds():
        require(time.monotonic() < deadline, f"not so after {RECOVERY_S:g} s: {what}")
        await asyncio.sleep(PERIOD_S)


def connect(service: LocalService) -> oc.AsyncClient:
    """A client that shows every failure."""
    return oc.AsyncClient(service.target, retry=ONE_TRY)


async def open_streams(client: oc.AsyncClient, num: int = NUM_STREAMS, prefix: str = "") -> list[asyncio.Task[Outcome]]:
    """Long streams that have all begun; each task gives the last chunk or the error. `prefix` of their request ids."""
    begun = [asyncio.Event() for _ in range(num)]

    async def read(i: int) -> Outcome:
        options = replace(LONG, request_id=f"{prefix}{i}" if prefix else "")
        try:
            async for chunk in client.stream("a", options):
                begun[i].set()
                last = chunk
        except oc.ClientError as error:
            begun[i].set()
            return error
        return last

    tasks = [asyncio.create_task(read(i)) for i in range(num)]
    await asyncio.gather(*(event.wait() for event in begun))
    return tasks


async def abort(client: oc.AsyncClient, request_id: str) -> bool:
    """Whether it was found; asks again where a replica that may have it was too slow to say so."""
    answers: list[bool] = []

    async def is_told() -> bool:
        with contextlib.suppress(oc.Unavailable):
            answers.append(await client.abort(request_id))
        return bool(answers)

    await until(is_told, f"an abort of {request_id} is answered")
    return answers[0]


async def serves(client: oc.AsyncClient) -> None:
    """A request is answered, and right. Tries again as a caller may."""

    async def answers() -> bool:
        try:
            answer = await client.generate("a", SHORT, timeout_s=5)
        except (oc.Unavailable, oc.DeadlineExceeded, oc.ResourceExhausted):
            return False
        require(answer.text == "bcd", f"a wrong answer: {answer.text!r}")
        return True

    await until(answers, "a request is answered")


async def ready(client: oc.AsyncClient, wanted: bool) -> None:
    """Health says so, or that it does not."""

    async def is_so() -> bool:
        try:
            return await client.ready(timeout_s=1) is wanted
        except (oc.Unavailable, oc.DeadlineExceeded):
            return not wanted

    await until(is_so, f"ready is {wanted}")


async def idle(service: LocalService) -> None:
    """Every gauge of what is in hand is at 0."""

    async def is_idle() -> bool:
        try:
            return not in_hand(await asyncio.to_thread(scrape, service.metrics_url))
        except OSError:
            return False

    await until(is_idle, "every gauge at 0")


async def whole(client: oc.AsyncClient, service: LocalService, but: Collection[int] = ()) -> None:
    """Ready, with all replicas there and answering, none of them one of these processes."""
    await ready(client, True)

    async def are_there() -> bool:
        pids = set(service.pids(REPLICA))
        try:
            return len(await client.load()) == len(pids) == NUM_REPLICAS and not pids & set(but)
        except (oc.Unavailable, oc.DeadlineExceeded):
            return False

    await until(are_there, f"{NUM_REPLICAS} replicas")


def finished(outcome: Outcome, reason: oc.FinishReason) -> bool:
    """Whether a stream ended as it should, for this reason."""
    return isinstance(outcome, oc.Chunk) and outcome.finish is not None and outcome.finish.reason is reason
