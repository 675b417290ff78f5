"""The other processes of the service that are lost or told to end."""

from __future__ import annotations

import asyncio
import signal

from ottserve import client as oc
from ottserve.loadtest.faults import replicas
from ottserve.loadtest.local import CONTROLLER, GATEWAY, LocalService
from ottserve.loadtest.observe import (
    RECOVERY_S,
    Times,
    Watch,
    connect,
    finished,
    idle,
    open_streams,
    ready,
    require,
    serves,
    until,
)


async def gateway_killed(service: LocalService) -> Times:
    """kill -9 of the gateway with streams running: the replicas must notice and stop."""
    async with connect(service) as client:
        streams = await open_streams(client)
        watch = Watch()
        service.send(GATEWAY, signal.SIGKILL)
        for outcome in await asyncio.gather(*streams):
            require(isinstance(outcome, oc.StreamBroken), f"a stream of a lost gateway ended with {outcome!r}")
        watch.stamp("streams ended")
    async with connect(service) as client:
        await ready(client, True)
        watch.stamp("ready again")
        await serves(client)
        watch.stamp("next request served")
        await idle(service)
        watch.stamp("gauges at 0")
    return watch.times


async def controller_killed(service: LocalService) -> Times:
    """kill -9 of Serve's controller: no caller notices, and the new one replaces replicas that are lost later."""
    async with connect(service) as client:
        streams = await open_streams(client)
        before = set(service.pids(CONTROLLER))
        watch = Watch()
        service.send(CONTROLLER, signal.SIGKILL)
        await serves(client)
        watch.stamp("next request served")

        async def is_back() -> bool:
            return bool(set(service.pids(CONTROLLER)) - before)

        await until(is_back, "a controller")
        watch.stamp("controller back")
        for outcome in await asyncio.gather(*streams):
            require(finished(outcome, oc.FinishReason.LENGTH), f"a stream ended with {outcome!r}")
    return watch.times | {
        f"replicas killed then: {event}": at for event, at in (await replicas.killed(service)).items()
    }


async def terminated(service: LocalService) -> Times:
    """SIGTERM with streams running: they finish, nobody new is let in. The end of the service."""
    async with connect(service) as client:
        streams = await open_streams(client)
        watch = Watch()
        service.process.send_signal(signal.SIGTERM)
        await until(lambda: _refuses(client), "new calls are refused")
        watch.stamp("new calls refused")
        for outcome in await asyncio.gather(*streams):
            require(finished(outcome, oc.FinishReason.LENGTH), f"a stream ended with {outcome!r}")
        watch.stamp("streams finished")
    status = await asyncio.to_thread(service.process.wait, RECOVERY_S)
    require(status == 0, f"exit status {status}")
    watch.stamp("exit with status 0")
    return watch.times


async def _refuses(client: oc.AsyncClient) -> bool:
    try:
        await client.generate("a", oc.Options(max_new_tokens=1))
    except oc.Unavailable:
        return True
    return False
