"""The gateway as a process of its own, for development and for use without Serve. Knows not what the replicas are.

The first signal drains; the second means now.
"""

from __future__ import annotations

import asyncio
import signal

from ottserve.service.logs import configure_logs
from ottserve.service.replicas import ReplicaClient
from ottserve.service.server import GatewayServer
from ottserve.service.settings import GatewaySettings

SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def run(settings: GatewaySettings, replicas: ReplicaClient) -> None:
    """Serves until SIGTERM or SIGINT, then drains and returns. Needs the main thread, for the signals."""
    configure_logs()
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, signals.put_nowait, number)
    server = GatewayServer(settings, replicas)
    await server.start()
    await signals.get()
    await _drain_unless_signalled(server, signals)
    for number in SIGNALS:
        loop.remove_signal_handler(number)


async def _drain_unless_signalled(server: GatewayServer, signals: asyncio.Queue[int]) -> None:
    draining, again = asyncio.create_task(server.drain()), asyncio.create_task(signals.get())
    await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        draining.cancel()
        await server.close()
    again.cancel()
