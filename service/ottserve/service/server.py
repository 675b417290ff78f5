"""The gateway as one thing that starts and drains: gRPC service, health, reflection, and the pages for Prometheus.

Knows not where the replicas are: whoever makes it hands over a `ReplicaClient`.
"""

from __future__ import annotations

import asyncio
import math
import time

import grpc
import structlog
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ottserve.service.accounts import Accounts
from ottserve.service.admission import Admission
from ottserve.service.callers import Callers
from ottserve.service.exposition import Exposition
from ottserve.service.generation import Generations
from ottserve.service.health import HealthServicer
from ottserve.service.http.surface import http_server
from ottserve.service.interceptors import CallInterceptor
from ottserve.service.metrics import SERVICE, GatewayMetrics
from ottserve.service.readiness import Phase, Readiness
from ottserve.service.replicas import AllReplicas, ReplicaClient
from ottserve.service.servicer import GenerationServicer
from ottserve.service.settings import GatewaySettings
from ottserve.service.tls import server_credentials
from ottserve.service.turns import Turns
from ottserve.v1 import generation_pb2_grpc

log = structlog.get_logger(__name__)


class GatewayServer:
    """Make it, `start`, and `drain` on one event loop.

    Attributes:
        metrics: what it counts.
        port, http_port, health_port, metrics_port: where it listens, known once it has started; None for a port that
            it has not.
    """

    def __init__(self, settings: GatewaySettings, *models: ReplicaClient) -> None:
        """`models` are the replicas of each; the first is the one meant by requests that name none."""
        self.metrics = GatewayMetrics()
        self.port = settings.port
        self.http_port = settings.http_port or None
        self.health_port = settings.tls.health_port
        self.metrics_port = settings.metrics.port
        self._settings = settings
        self._following: asyncio.Task[None] | None = None
        self._readiness = Readiness(models, settings)
        replicas = AllReplicas(models)
        accounts = Accounts(self.metrics)
        callers = Callers(settings.tokens_file)
        admission = Admission(settings.admission)
        turns = Turns(lambda: 2 * self._readiness.num_slots if callers.are_told_apart else math.inf)
        generations = Generations(settings, self._readiness, admission, turns, self.metrics)
        self._http = http_server(
            settings, generations, self._readiness, accounts, self.metrics.registry, callers.identify
        )
        self._exposition = Exposition(settings.metrics, self.metrics.registry, replicas, self._readiness)
        self._server = grpc.aio.server(interceptors=[CallInterceptor(accounts, callers)], options=_options(settings))
        servicer = GenerationServicer(settings, replicas, self._readiness, generations)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, self._server)
        checks = HealthServicer(self._readiness)
        health_pb2_grpc.add_HealthServicer_to_server(checks, self._server)
        self._plain_health = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(checks, self._plain_health)
        if settings.reflection:
            names = (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)

    async def start(self) -> None:
        """Listens, alive at once and ready when a replica is.

        Raises:
            RuntimeError, OSError: a port is taken, or a certificate can't be read.
            ValueError: a certificate and its key can't be used.
        """
        self.port = self._listen()
        self.metrics_port = await self._exposition.start()
        if self._http is not None:
            self.http_port = await self._http.start()
        await self._server.start()
        await self._plain_health.start()
        self._following = asyncio.create_task(self._readiness.follow())
        log.info(
            "gateway listens",
            host=self._settings.host,
            port=self.port,
            http_port=self.http_port,
            metrics_port=self.metrics_port,
        )

    def _listen(self) -> int:
        """Opens the ports of gRPC, and returns that of the service."""
        settings, tls = self._settings, self._settings.tls
        credentials = server_credentials(tls)
        if tls.health_port is not None:
            self.health_port = self._plain_health.add_insecure_port(f"{settings.host}:{tls.health_port}")
        address = f"{settings.host}:{settings.port}"
        if credentials is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, credentials)

    @property
    def phase(self) -> Phase:
        """Where the gateway stands."""
        return self._readiness.phase

    @property
    def is_following(self) -> bool:
        """Whether the readiness still follows the replicas; a gateway for which it does not must be replaced."""
        return self._following is not None and not self._following.done()

    async def follow(self) -> None:
        """Returns when it is drained or closed. Raises what kept it from following, such as an unreadable tokenizer."""
        assert self._following is not None, "it has not started"
        await asyncio.wait((self._following,))
        if not self._following.cancelled():
            self._following.result()

    async def drain(self) -> None:
        """Health flips first; new calls are refused; running ones finish within the grace time; then all is closed."""
        drain = self._settings.drain
        ends_at = time.monotonic() + drain.probe_period_s + drain.grace_s
        self._readiness.drain()
        await asyncio.sleep(drain.probe_period_s)
        grace_s = max(0.0, ends_at - time.monotonic())
        await asyncio.gather(self._server.stop(grace_s), self._stop_http(grace_s))
        await self.close()

    async def close(self) -> None:
        """Ends everything now. Running calls are cancelled."""
        await asyncio.gather(self._server.stop(None), self._stop_http(0.0))
        await self._plain_health.stop(None)
        if self._following is not None:
            self._following.cancel()
        await self._exposition.stop()
        self._readiness.close()

    async def _stop_http(self, grace_s: float) -> None:
        if self._http is not None:
            await self._http.stop(grace_s)


def _options(settings: GatewaySettings) -> list[tuple[str, int]]:
    keepalive = settings.keepalive
    return [
        ("grpc.max_receive_message_length", settings.messages.max_request_bytes),
        ("grpc.max_send_message_length", settings.messages.max_response_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", _ms(keepalive.ping_after_idle_s)),
        ("grpc.keepalive_timeout_ms", _ms(keepalive.ping_timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(keepalive.min_ping_interval_s)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _ms(keepalive.min_ping_interval_s)),
    ]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
