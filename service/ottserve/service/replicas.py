"""What the gateway asks of the replicas behind it. Knows not how they are reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from ottserve.workers.api import (
    AbortResult,
    GenerationTask,
    LoadReport,
    OttserveError,
    ReplicaInfo,
    TextChunk,
    Unavailable,
)

Answer = TypeVar("Answer")


class Replicas(Protocol):
    """Replicas that are all asked the same. Every method raises `OttserveError`s and nothing else of its own."""

    async def abort(self, request_id: str) -> AbortResult:
        """Ends a request wherever it runs; its stream ends with `FinishReason.ABORTED`.

        Raises what kept a replica from its answer, Unavailable as a rule, where it was not found and may be there.
        """
        ...

    async def load(self) -> tuple[LoadReport, ...]:
        """The state of each that answers; empty when none does."""
        ...

    async def flush_cache(self) -> int:
        """Drops the cached pages that no live request uses; how many, over all replicas that answer."""
        ...

    async def metrics_addresses(self) -> tuple[str, ...]:
        """`host:port` of the Prometheus endpoint of each that answers."""
        ...


class ReplicaClient(Replicas, Protocol):
    """All replicas of one model, seen as one.

    `Unavailable` means that nothing was lost; a stream that ends with it may have sent chunks.
    """

    def generate(self, task: GenerationTask) -> AsyncGenerator[TextChunk, None]:
        """Runs a task on one replica. Closing the generator cancels the work."""
        ...

    async def info(self) -> ReplicaInfo:
        """What any one of them is. They all are the same but for `replica_id`."""
        ...


class AllReplicas:
    """The replicas of all models. A model of which none answers is left out, unless no other does."""

    def __init__(self, models: Sequence[Replicas]) -> None:
        """The replicas of each, at least one."""
        self._models = models

    async def abort(self, request_id: str) -> AbortResult:
        """As `Replicas` has it; one model at most has the request."""
        results = await self._of_each(lambda model: model.abort(request_id))
        is_found = any(answer and answer.found for answer, _ in results)
        for _, refusal in results:
            if refusal and not is_found:
                raise refusal
        return AbortResult(request_id, is_found)

    async def load(self) -> tuple[LoadReport, ...]:
        """As `Replicas` has it."""
        return tuple(report for reports in await self._of_all(lambda model: model.load()) for report in reports)

    async def flush_cache(self) -> int:
        """As `Replicas` has it."""
        return sum(await self._of_all(lambda model: model.flush_cache()))

    async def metrics_addresses(self) -> tuple[str, ...]:
        """As `Replicas` has it."""
        answers = await self._of_all(lambda model: model.metrics_addresses())
        return tuple(address for addresses in answers for address in addresses)

    async def _of_all(self, ask: Callable[[Replicas], Awaitable[Answer]]) -> list[Answer]:
        """What each model's replicas answer. Raises what the first refused with, if none answers."""
        results = await self._of_each(ask)
        answers = [answer for answer, _ in results if answer is not None]
        if not answers:
            raise results[0][1] or Unavailable("no replica answers")
        return answers

    async def _of_each(
        self, ask: Callable[[Replicas], Awaitable[Answer]]
    ) -> list[tuple[Answer | None, OttserveError | None]]:
        """Each model's replicas' answer, or what they refused with."""
        return await asyncio.gather(*(_or_refusal(ask(model)) for model in self._models))


async def _or_refusal(answer: Awaitable[Answer]) -> tuple[Answer | None, OttserveError | None]:
    try:
        return await answer, None
    except OttserveError as error:
        return None, error
