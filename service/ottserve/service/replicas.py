"""What the gateway asks of the replicas behind it. Knows not how they are reached."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from ottserve.workers.api import AbortResult, GenerationTask, LoadReport, ReplicaInfo, TextChunk


class ReplicaClient(Protocol):
    """All replicas of one model, seen as one. Every method raises `OttserveError`s and nothing else of its own.

    `Unavailable` means that nothing was lost; a stream that ends with it may have sent chunks.
    """

    def generate(self, task: GenerationTask) -> AsyncGenerator[TextChunk, None]:
        """Runs a task on one replica. Closing the generator cancels the work."""
        ...

    async def abort(self, request_id: str) -> AbortResult:
        """Ends a request wherever it runs; its stream ends with `FinishReason.ABORTED`."""
        ...

    async def info(self) -> ReplicaInfo:
        """What any one of them is. They all are the same but for `replica_id`."""
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
