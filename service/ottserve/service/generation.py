"""One generation, from its message to its chunks: the path that every surface of the gateway shares.

Knows not how the message came nor how the answer travels.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

import structlog

from ottserve.service import validate
from ottserve.service.admission import Admission
from ottserve.service.callers import ANYONE, Caller
from ottserve.service.metrics import GatewayMetrics
from ottserve.service.readiness import Readiness
from ottserve.service.router import Router
from ottserve.service.settings import GatewaySettings
from ottserve.service.turns import Turns
from ottserve.v1 import generation_pb2 as pb
from ottserve.workers.api import GenerationTask, TextChunk

log = structlog.get_logger(__name__)


class Generations:
    """Validates, admits, routes and measures. Everything it raises is an `OttserveError`."""

    def __init__(
        self,
        settings: GatewaySettings,
        readiness: Readiness,
        admission: Admission,
        turns: Turns,
        metrics: GatewayMetrics,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._readiness = readiness
        self._admission = admission
        self._metrics = metrics
        self._turns = turns
        self._now = now

    async def chunks(
        self,
        request: pb.GenerateRequest,
        remaining_s: float | None,
        accepted: Callable[[GenerationTask], None] = lambda task: None,
        caller: Caller = ANYONE,
        traceparent: str = "",
    ) -> AsyncGenerator[TextChunk, None]:
        """What the replicas make of a request. Closing it ends the work and gives back its room.

        Args:
            request: its `request_id` is set.
            remaining_s: how long the caller waits; None for ever.
            accepted: told the task, once it is one and has room.
            caller: whose limits hold.
            traceparent: W3C trace context of the call.
        """
        arrival = validate.arrival(self._now(), remaining_s, traceparent)
        served = self._readiness.require(request.model)
        with self._admission.admit(request.request_id, caller) as permit:
            task = await validate.generation_task(request, served, self._settings.default_max_new_tokens, arrival)
            permit.claim(task)
            accepted(task)
            task = replace(task, num_streams=self._turns.num_taken + 1)
            if self._settings.log_prompts:
                log.info("prompt", request_id=task.request_id, prompt=_prompt(request))
            chunks = self._metrics.measured(Router(served.replicas).stream(task), arrival.received_at)
            async with self._turns.turn(caller.name, permit.num_tokens, task.priority), aclosing(chunks):
                async for chunk in chunks:
                    permit.count(chunk)
                    yield chunk


def _prompt(request: pb.GenerateRequest) -> object:
    """What was sent, as it was sent."""
    match request.WhichOneof("input"):
        case "chat":
            return [{"role": message.role, "content": message.content} for message in request.chat.messages]
        case "token_ids":
            return list(request.token_ids.ids)
        case _:
            return request.text
