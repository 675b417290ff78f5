"""Replicas that are lost: killed, or alive and silent."""

from __future__ import annotations

import asyncio
import os
import signal

from ottserve import client as oc
from ottserve.loadtest.local import REPLICA, LocalService
from ottserve.loadtest.observe import (
    SHORT,
    Times,
    Watch,
    connect,
    open_streams,
    ready,
    require,
    serves,
    whole,
)


async def killed(service: LocalService) -> Times:
    """kill -9 of every replica with streams running."""
    return await _lost(service, signal.SIGKILL)


async def hung(service: LocalService) -> Times:
    """SIGSTOP of every replica with streams running: they live and answer nothing."""
    return await _lost(service, signal.SIGSTOP)


async def one_hung(service: LocalService) -> Times:
    """SIGSTOP of one replica of two, then requests: those that it does not begin are begun by the other."""
    stopped = service.pids(REPLICA)[0]
    async with connect(service) as client:
        watch = Watch()
        os.kill(stopped, signal.SIGSTOP)
        for answer in await asyncio.gather(*(client.generate("a", SHORT, timeout_s=30) for _ in range(8))):
            require(answer.text == "bcd", f"a wrong answer: {answer.text!r}")
        watch.stamp("all requests answered")
        await whole(client, service, but=[stopped])
        watch.stamp("replica replaced")
    return watch.times


async def _lost(service: LocalService, number: signal.Signals) -> Times:
    async with connect(service) as client:
        streams = await open_streams(client)
        before = service.pids(REPLICA)
        watch = Watch()
        service.send(REPLICA, number)
        for outcome in await asyncio.gather(*streams):
            require(isinstance(outcome, oc.StreamBroken), f"a stream of a lost replica ended with {outcome!r}")
            require("after the first token" in str(outcome), f"without its reason: {outcome}")
        watch.stamp("streams ended")
        await ready(client, False)
        watch.stamp("not ready")
        await ready(client, True)
        watch.stamp("ready again")
        await serves(client)
        watch.stamp("next request served")
        await whole(client, service, but=before)
        watch.stamp("all replicas back")
    return watch.times
