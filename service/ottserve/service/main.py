"""The gateway as a process of its own, for development and for use without Serve. Knows not what the replicas are.

The first signal drains; the second means now.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

from ottserve.service import tracing
from ottserve.service.replicas import ReplicaClient
from ottserve.service.server import GatewayServer
from ottserve.service.settings import GatewaySettings

SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def run(settings: GatewaySettings, replicas: ReplicaClient) -> None:
    """Serves until SIGTERM or SIGINT, then drains and returns. Needs the main thread, for the signals.

    Raises RuntimeError or OSError if a port is taken, and what makes a model unusable, such as a broken tokenizer.
    """
    tracing.configure("gateway")
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, signals.put_nowait, number)
    server = GatewayServer(settings, replicas)
    await server.start()
    try:
        if await _came_first(signals.get(), server.follow()):
            await _came_first(server.drain(), signals.get())
    finally:
        await server.close()
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def _came_first(one: Coroutine[Any, Any, Any], other: Coroutine[Any, Any, Any]) -> bool:
    """Runs two until one ends, and cancels the other. Whether it was the first of them; raises what it raised."""
    tasks = [asyncio.create_task(one), asyncio.create_task(other)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()
    return tasks[0] in done
