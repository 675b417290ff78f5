"""The HTTP port: uvicorn on the event loop that is running. Knows no path and no call.

uvicorn's own `serve` takes over signals and exits the process where it can't listen; here the gateway does both.
"""

from __future__ import annotations

import asyncio
import socket
import ssl

import uvicorn
from starlette.types import ASGIApp

KEEP_ALIVE_S = 75  # over a minute, which load balancers in front tend to take


class HttpServer:
    """Start it and stop it on one event loop."""

    def __init__(self, app: ASGIApp, host: str, port: int, context: ssl.SSLContext | None = None) -> None:
        """`context`: for TLS; without one it is plain text."""
        self._address = host, port
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        config.load()
        config.ssl = context
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listens, and returns the port. Raises OSError if it is taken."""
        listener = _listen(*self._address)
        await self._server.startup(sockets=[listener])
        self._ticking = asyncio.create_task(self._server.main_loop())
        return int(listener.getsockname()[1])

    async def stop(self, grace_s: float) -> None:
        """Takes no more connections; calls that run may end within the grace time, then they are cancelled."""
        if self._ticking is None:
            return
        self._ticking.cancel()
        state = self._server.server_state
        for listener in self._server.servers:
            listener.close()
        for connection in list(state.connections):
            connection.shutdown()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=grace_s)
        for task in list(state.tasks):
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)
