"""Requests that come at a rate, whether or not the service keeps up (an open loop with Poisson arrivals)."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

from ottserve import client as oc
from ottserve.loadtest.bench.arrivals import arrivals_of
from ottserve.loadtest.bench.decode import ONE_TRY, Seen
from ottserve.loadtest.bench.watch import Watch
from ottserve.loadtest.draw import Drawn
from ottserve.loadtest.stream import Timed, send_async
from ottserve.loadtest.tally import Tally
from ottserve.loadtest.workload import Workload

NUM_CHANNELS = 8


async def offer(target: str, metrics_url: str, workload: Workload, token_ids: tuple[int, ...]) -> Seen:
    """Send a workload's requests for as long as it says, and read every answer to its end.

    Rates and times are of the requests that were sent after the warm-up; refusals and failures of all.

    Args:
        target, metrics_url: of the service.
        workload: what is sent, in an open loop.
        token_ids: what prompts are made of.

    Raises:
        ValueError: the workload is a closed loop.
    """
    watch, tally = Watch(metrics_url), Tally()
    measured: list[Timed] = []
    in_flight: set[asyncio.Task[None]] = set()

    async def call(client: oc.AsyncClient, drawn: Drawn, counts: bool) -> None:
        timed = Timed(drawn.kind)
        await send_async(client, drawn, workload.timeout_s, time.perf_counter, timed)
        tally.add(timed, workload.limits, counts)
        if counts:
            measured.append(timed)

    async with AsyncExitStack() as stack:
        channels = [oc.AsyncClient(target, retry=ONE_TRY) for _ in range(NUM_CHANNELS)]
        clients = [await stack.enter_async_context(channel) for channel in channels]
        await stack.enter_async_context(watch.watching())
        before, began = await watch.look(), time.perf_counter()
        for turn, (due_s, drawn, counts) in enumerate(arrivals_of(workload, token_ids)):
            await asyncio.sleep(max(0.0, began + due_s - time.perf_counter()))
            task = asyncio.create_task(call(clients[turn % NUM_CHANNELS], drawn, counts))
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)
        await asyncio.gather(*in_flight)
        growth, counted_s = (await watch.look()).since(before), time.perf_counter() - began
    return Seen(
        tokens_per_s=_tokens_per_s(measured, began + workload.warm_up_s),
        first_token=tally.times["first_token_s"],
        inter_token=tally.times["inter_token_s"],
        outcomes=tally.outcomes,
        watched=watch.seen,
        counters=growth,
        counted_s=counted_s,
    )


def _tokens_per_s(measured: list[Timed], begin: float) -> float:
    """From the end of the warm-up to the last token."""
    end = max((timed.tokens_at for timed in measured), default=begin)
    return sum(timed.num_tokens for timed in measured) / (end - begin) if end > begin else 0.0
