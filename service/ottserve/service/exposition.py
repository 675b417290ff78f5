"""The gateway's HTTP pages for operators: /metrics, /sd, which names the gateway and every replica, and /ready.

Runs on the gateway's event loop, so that a page shows one moment. Knows no request.
"""

from __future__ import annotations

from dataclasses import asdict

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from ottserve.service.readiness import Readiness
from ottserve.service.replicas import Replicas
from ottserve.service.settings import GatewayMetricsSettings
from ottserve.workers.api import OttserveError, Unavailable


class Exposition:
    """A small HTTP server. Replicas are asked for their addresses whenever /sd is read."""

    def __init__(
        self,
        settings: GatewayMetricsSettings,
        registry: CollectorRegistry,
        replicas: Replicas,
        readiness: Readiness,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._replicas = replicas
        self._readiness = readiness
        app = web.Application()
        app.add_routes(
            [web.get("/metrics", self._metrics), web.get("/sd", self._targets), web.get("/ready", self._ready)]
        )
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self) -> int:
        """Listens, and returns the port."""
        await self._runner.setup()
        await web.TCPSite(self._runner, self._settings.host, self._settings.port).start()
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        """Closes the pages."""
        await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def _ready(self, request: web.Request) -> web.Response:
        """What serves requests that name no model; 503 while nothing does. `models` tells how each of them stands.

        Needs neither certificate nor token.
        """
        models = {name: phase.value for name, phase in self._readiness.phases.items()}
        try:
            served = self._readiness.require().info
        except Unavailable as error:
            return web.json_response({"reason": error.message, "models": models}, status=503)
        return web.json_response({"model": served.model.name, "models": models, **asdict(served.server)})

    async def _targets(self, request: web.Request) -> web.Response:
        """Prometheus `http_sd`. The gateway is named as the reader reached it: that address works from there."""
        try:
            replicas = list(await self._replicas.metrics_addresses())
        except OttserveError:
            replicas = []
        groups = [{"targets": [request.host], "labels": {"part": "gateway"}}]
        if replicas:
            groups.append({"targets": replicas, "labels": {"part": "replica"}})
        return web.json_response(groups)
