"""Task → stream of chunks. Tries once more where nothing was lost; knows no message and no Ray.

Which replica gets a task is the replica client's affair. The deadline travels in the task; cancelling or closing the
stream cancels the work.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from ottserve.service.replicas import ReplicaClient
from ottserve.workers.api import GenerationTask, StreamBroken, TextChunk, Unavailable


class Router:
    """Runs tasks on the replicas."""

    def __init__(self, replicas: ReplicaClient) -> None:
        self._replicas = replicas

    async def stream(self, task: GenerationTask) -> AsyncGenerator[TextChunk, None]:
        """The chunks of a task, the last with its finish.

        Raises:
            Unavailable: a replica was lost before the first chunk, twice in a row.
            StreamBroken: a replica was lost after it.
        """
        try:
            async with aclosing(self._attempt(task)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except Unavailable:
            async with aclosing(self._attempt(task)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _attempt(self, task: GenerationTask) -> AsyncGenerator[TextChunk, None]:
        """One try. Once a chunk came, a loss is `StreamBroken`, and so is a stream that ends without a finish."""
        chunk = None
        try:
            async with aclosing(self._replicas.generate(task)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except Unavailable as error:
            if chunk is None:
                raise
            raise StreamBroken(f"the replica was lost after the first token: {error.message}") from error
        if chunk is None:
            raise Unavailable("the replica ended the stream without an answer")
        if chunk.finish is None:
            raise StreamBroken("the replica ended the stream without a finish")
