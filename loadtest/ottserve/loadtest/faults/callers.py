"""Callers that leave all at once, and everything that must then be free."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ottserve import client as oc
from ottserve.loadtest.local import LocalService
from ottserve.loadtest.observe import (
    LONG,
    NUM_STREAMS,
    Times,
    Watch,
    abort,
    connect,
    finished,
    idle,
    open_streams,
    require,
    serves,
    until,
)


async def all_cancelled(service: LocalService) -> Times:
    """As many calls as may wait, some of them running, cancelled at the same moment."""
    async with connect(service) as client:
        num_calls = (await client.server_info()).engine.max_waiting * len(await client.load())
        calls = [asyncio.create_task(client.generate("a", LONG)) for _ in range(num_calls)]
        await until(lambda: _all_live(client, calls), f"{num_calls} requests run and wait")
        failed = [call.exception() for call in calls if call.done() and call.exception()]
        require(not failed, f"{len(failed)} of {num_calls} calls failed, the first with {failed[:1]}")
        require(not all(call.done() for call in calls), "every answer was there before its caller left")
        watch = Watch()
        for call in calls:
            call.cancel()
        await serves(client)
        watch.stamp("next request served")
        await asyncio.gather(*calls, return_exceptions=True)
        await idle(service)
        watch.stamp("gauges at 0")
    return watch.times


async def all_aborted(service: LocalService) -> Times:
    """Every live request aborted by its id."""
    async with connect(service) as client:
        streams = await open_streams(client, prefix="abort-")
        watch = Watch()
        found = await asyncio.gather(*(abort(client, f"abort-{i}") for i in range(NUM_STREAMS)))
        require(all(found), f"aborts found {found}")
        for outcome in await asyncio.gather(*streams):
            require(finished(outcome, oc.FinishReason.ABORTED), f"an aborted stream ended with {outcome!r}")
        watch.stamp("streams ended")
        await idle(service)
        watch.stamp("gauges at 0")
        await serves(client)
        watch.stamp("next request served")
    return watch.times


async def _all_live(client: oc.AsyncClient, calls: Sequence[asyncio.Task[oc.Answer]]) -> bool:
    """Whether all have come to the replicas; a quick replica has answered some by then."""
    num_live = sum(load.num_running + load.num_waiting for load in await client.load())
    return num_live == sum(not call.done() for call in calls)
