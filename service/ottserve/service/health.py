"""`grpc.health.v1`: "" is alive, the name of the service is ready, another name is unknown.

Being alive never depends on load or on replicas: a process that answers is alive. A watch that a slow reader holds up
delays nobody else, since each waits on its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ottserve.service.readiness import Phase, Readiness
from ottserve.v1 import generation_pb2

ALIVE = ""
READY = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name

Status = Any  # grpc_health has no types


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Answers from the phase of the gateway."""

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:  # noqa: N802 - named by gRPC
        status = self._status(request.service, self._readiness.phase)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service {request.service[:128]!r} is not here")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:  # noqa: N802
        """Sends the status, then each change of it. Ends when the gateway drains, so that it holds up no shutdown."""
        phase, told = self._readiness.phase, None
        while True:
            status = self._status(request.service, phase)
            if status != told:
                yield health_pb2.HealthCheckResponse(status=status)
                told = status
            if phase is Phase.DRAINING:
                return
            phase = await self._readiness.changed_from(phase)

    def _status(self, service: str, phase: Phase) -> Status:
        if service == ALIVE or (service == READY and phase is Phase.READY):
            return health_pb2.HealthCheckResponse.SERVING
        if service == READY:
            return health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
