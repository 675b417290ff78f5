"""One generation, from its message to its chunks: the path that every surface of the gateway shares.

Knows not how the message came nor how the answer travels.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import structlog

from ottserve.service import validate
from ottserve.service.admission import Admission, Permit
from ottserve.service.callers import ANYONE, Caller
from ottserve.service.departures import Departures
from ottserve.service.metrics import GatewayMetrics
from ottserve.service.readiness import Readiness
from ottserve.service.replicas import Replicas
from ottserve.service.router import Router
from ottserve.service.settings import GatewaySettings
from ottserve.service.turns import Turns
from ottserve.v1 import generation_pb2 as pb
from ottserve.workers.api import (
    Finish,
    FinishReason,
    GenerationTask,
    OttserveError,
    TextChunk,
    Timings,
    Usage,
    sample_seed,
)

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
        self._departures = Departures()
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
            answer = self._answer(task, Router(served.replicas).stream(task), caller, permit)
            async with aclosing(self._metrics.measured(answer, arrival.received_at)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def abort(self, request_id: str, replicas: Replicas) -> bool:
        """End a live request with finish reason ABORTED, be it at one of these replicas or still on its way to one.

        False if none is live here under this id. Raises what `Replicas.abort` does, where it is not on its way.
        """
        is_under_way = self._departures.is_under_way(request_id)
        try:
            found = (await replicas.abort(request_id)).found
        except OttserveError:
            if self._departures.abort(request_id):
                return True
            raise
        if found or self._departures.abort(request_id):
            return True
        return is_under_way and (await replicas.abort(request_id)).found  # one may have taken it up meanwhile

    async def _answer(
        self, task: GenerationTask, chunks: AsyncGenerator[TextChunk, None], caller: Caller, permit: Permit
    ) -> AsyncGenerator[TextChunk, None]:
        """A task's chunks once it has had its turn, or its end where it was aborted before a replica spoke."""
        async with AsyncExitStack() as held:
            async with self._departures.departing(task.request_id) as departure:
                await held.enter_async_context(self._turns.turn(caller.name, permit.num_tokens, task.priority))
                await held.enter_async_context(aclosing(chunks))
                first = await anext(chunks)
            if departure.is_aborted:
                for index in range(task.n):
                    yield _aborted(task, index, self._now())
                return
            permit.count(first)
            yield first
            async for chunk in chunks:
                permit.count(chunk)
                yield chunk


def _aborted(task: GenerationTask, index: int, now: float) -> TextChunk:
    """The end of a sample that no replica has begun."""
    return TextChunk(
        task.request_id,
        "",
        (),
        Finish(
            FinishReason.ABORTED,
            Usage(len(task.prompt_ids), 0, 0),
            Timings(max(0.0, now - task.received_at), 0.0, 0.0, 0.0),
            sample_seed(task.sampling.seed, index),
            index=index,
        ),
        index,
    )


def _prompt(request: pb.GenerateRequest) -> object:
    """What was sent, as it was sent."""
    match request.WhichOneof("input"):
        case "chat":
            return [{"role": message.role, "content": message.content} for message in request.chat.messages]
        case "token_ids":
            return list(request.token_ids.ids)
        case _:
            return request.text
