"""Replicas reached through a Ray Serve handle. The one file that knows Ray's errors.

The deployment behind the handle has the methods `generate` (streaming), `abort`, `info`, `load`,
`flush_cache` and `metrics_address`. Set `ray_environment.RAY_ENVIRONMENT` before importing this.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import structlog
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle

from ottserve.service.fleet import Fleet
from ottserve.service.named_replica import ask_leaving, roster
from ottserve.service.settings import RoutingSettings
from ottserve.workers.api import (
    AbortResult,
    GenerationTask,
    Internal,
    LoadReport,
    OttserveError,
    QueueFull,
    ReplicaInfo,
    TextChunk,
    Unavailable,
)

log = structlog.get_logger(__name__)

# The last one: the fleet gave the replica up, since what a caller cancels raises CancelledError.
LOST = (
    RayActorError,
    OutOfMemoryError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)


class RayReplicas:
    """A `ReplicaClient` over one deployment. The fleet names the replica of a task; all are asked the rest."""

    def __init__(self, handle: DeploymentHandle, routing: RoutingSettings, answer_timeout_s: float) -> None:
        """A replica that does not answer a question within `answer_timeout_s` is left out of the answer."""
        self._handle = handle
        self._streaming = handle.options(stream=True)
        self._fleet = Fleet(routing)
        self._answer_timeout_s = answer_timeout_s

    async def generate(self, task: GenerationTask) -> AsyncGenerator[TextChunk, None]:
        with self._fleet.place(task, lambda: _cancel(response), roster(self._handle)) as replica_id:
            response = self._streaming.generate.remote(replace(task, replica_id=replica_id or ""))
            try:
                async with aclosing(_read(response)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except asyncio.CancelledError:
                if _is_being_cancelled():
                    raise
                self._fleet.lose(replica_id)
                raise Unavailable("the replica ended the request") from None
            except Exception as error:
                told = as_ottserve_error(error)
                if isinstance(told, Unavailable):
                    self._fleet.lose(replica_id)
                raise told from error

    async def abort(self, request_id: str) -> AbortResult:
        """Asks all replicas, and where none has it, those that only finish what they have; one at most has it.

        Raises what kept one from an answer that may have it.
        """
        results, refusal = await self._ask_each("abort", request_id)
        if not any(result.found for result in results):
            left = await ask_leaving(self._handle, "abort", request_id, timeout_s=self._answer_timeout_s)
            also, late = _sorted(left)
            results, refusal = results + also, refusal or late
        found = any(result.found for result in results)
        if refusal and not found:
            raise refusal
        return AbortResult(request_id, found)

    async def info(self) -> ReplicaInfo:
        """Of the first that answers. Raises Unavailable."""
        infos: list[ReplicaInfo] = await self._ask_all("info")
        self._fleet.block_tokens = infos[0].server.group
        return infos[0]

    async def load(self) -> tuple[LoadReport, ...]:
        """Of each that answers. What they say, and who does not, decides where tasks go until they are asked again."""
        asked_at = time.monotonic()
        reports: list[LoadReport] = []
        try:
            reports = await self._ask_all("load")
        finally:
            self._fleet.observe(reports, roster(self._handle), asked_at)
        return tuple(reports)

    async def flush_cache(self) -> int:
        """Of each that answers, added up."""
        return sum(await self._ask_all("flush_cache"))

    async def metrics_addresses(self) -> tuple[str, ...]:
        """Of each that answers."""
        return tuple(await self._ask_all("metrics_address"))

    async def _ask_all(self, method: str, *args: str) -> list[Any]:
        """The answers of the replicas that gave one in time, one at least. Raises what kept the first from it."""
        answers, refusal = await self._ask_each(method, *args)
        if not answers:
            raise refusal or Unavailable("no replica answers")
        return answers

    async def _ask_each(self, method: str, *args: str) -> tuple[list[Any], OttserveError | None]:
        """The answers of the replicas that gave one in time, and what kept the first of the others from it."""
        try:
            return _sorted(await self._broadcast(method, *args))
        except DeploymentUnavailableError as error:
            is_nobody_there = roster(self._handle) == frozenset()
            return [], None if is_nobody_there else as_ottserve_error(error)
        except Exception as error:  # noqa: BLE001  whatever it is, it has an answer
            return [], as_ottserve_error(error)

    async def _broadcast(self, method: str, *args: str) -> list[Any]:
        """What each replica answered or failed with. Serve's own way to collect gives up all for one that is late."""
        response = self._handle.broadcast(method, *args)
        async with asyncio.timeout(self._answer_timeout_s):
            results = await response._fetch_replica_results_async()
        waits = (asyncio.wait_for(result.get_async(), self._answer_timeout_s) for result in results)
        return list(await asyncio.gather(*waits, return_exceptions=True))


def _sorted(results: list[Any]) -> tuple[list[Any], OttserveError | None]:
    """The answers among results, and the first error."""
    answers = [result for result in results if not isinstance(result, BaseException)]
    errors = [as_ottserve_error(result) for result in results if isinstance(result, BaseException)]
    return answers, errors[0] if errors else None


def as_ottserve_error(error: BaseException) -> OttserveError:
    """What a caller may be told of an error that came through Ray. Its text may hold paths, so none of it is kept."""
    match error:
        case OttserveError() if not isinstance(error, RayTaskError):
            return error
        case RayTaskError() if isinstance(error.cause, BaseException) and error.cause is not error:
            return as_ottserve_error(error.cause)
        case BackPressureError():
            return QueueFull("the replicas' queues are full")
        case TimeoutError():
            return Unavailable("no replica answered in time")
        case _ if isinstance(error, LOST):
            return Unavailable("the replica was lost")
        case _:
            log.error("unexpected error from Ray", exc_info=error)
            return Internal("the replica failed", reason=type(error).__name__)


def _is_being_cancelled() -> bool:
    """Whether a CancelledError is ours: Ray raises one too when something else ended the request."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _read(response: Any) -> AsyncGenerator[TextChunk, None]:
    """What a call brings. Cancels the work on every way out; Serve alone would let it run on.

    Whoever leaves ends the call, and by that the wait for its next chunk. Were the wait itself cancelled, gRPC would
    never give back what it holds for it.
    """
    waiting: asyncio.Task[TextChunk] | None = None
    try:
        while True:
            waiting = asyncio.create_task(anext(response))
            try:
                chunk = await asyncio.shield(waiting)
            except StopAsyncIteration:
                return
            yield chunk
    finally:
        _cancel(response)
        if waiting is not None:
            await asyncio.gather(waiting, return_exceptions=True)


def _cancel(response: Any) -> None:
    """Ends a call wherever it stands.

    Serve's own cancel passes over one that has just been assigned and of which nobody has read: it would run to its
    end on the replica, and here it would stay open for ever.
    """
    try:
        response.cancel()
        assigned = response._replica_result_future
        if assigned.done() and not assigned.cancelled() and assigned.exception() is None:
            assigned.result().cancel()
    except Exception:
        log.debug("cancel of an ended stream", exc_info=True)
