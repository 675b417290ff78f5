"""What has gathered for one request until its reader takes it. Lives on one event loop; knows no thread or engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

from ottserve.workers.api import OttserveError, TextChunk

MESSAGE_S = 0.0005
"""What a message costs a gateway, from above (`ottserve bench-gateway`). With very many streams each has its turn less
often, with more tokens: else the gateway would fall behind the engine."""


class Stream:
    """One request's answer on its way out.

    Chunks are merged while nobody takes them, so a reader that sleeps holds at most the text and ids of one answer,
    and the cost of a message is paid once for all that has gathered.
    """

    def __init__(
        self,
        request_id: str,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
        num_samples: int = 1,
        num_streams: Callable[[], int] = lambda: 1,
    ) -> None:
        """Gather the answer of `num_samples` samples.

        Args:
            interval_s: the least time between two rounds of messages, each of one message for every sample of which
                something is there; the first round and the last never wait for it.
            num_streams: how many there are that send at once, this one included.
        """
        self.request_id = request_id
        self._interval_s = interval_s
        self._clock = clock
        self._num_open = num_samples
        self._num_streams = num_streams
        self._gathered: dict[int, list[TextChunk]] = {}
        self._round: list[TextChunk] = []
        self._error: OttserveError | None = None
        self._arrived = asyncio.Event()
        self._ended = asyncio.Event()
        self._next_at = 0.0

    @property
    def ended(self) -> bool:
        """Whether every sample's last chunk or an error has been put; what comes later is dropped."""
        return self._ended.is_set()

    def put(self, event: TextChunk | OttserveError) -> None:
        """Add a chunk, or the error that ends the stream. Never waits."""
        if self.ended:
            return
        if isinstance(event, OttserveError):
            self._error = event
        else:
            self._gathered.setdefault(event.index, []).append(event)
            self._num_open -= event.finish is not None
        if self._error or self._num_open == 0:
            self._ended.set()
        self._arrived.set()

    async def take(self) -> TextChunk:
        """Wait for the next message. Raises the error that ended the stream once all that came before it was taken."""
        if not self._round:
            await self._arrived.wait()
            await self._wait_for_interval()
            if self._error and not self._gathered:
                raise self._error
            self._begin_round()
        return self._round.pop(0)

    def _begin_round(self) -> None:
        self._round = [_merged(chunks) for _, chunks in sorted(self._gathered.items())]
        self._gathered = {}
        if self._error is None:
            self._arrived.clear()
        self._next_at = self._clock() + max(self._interval_s, self._num_streams() * MESSAGE_S)

    async def _wait_for_interval(self) -> None:
        remaining_s = self._next_at - self._clock()
        if remaining_s > 0 and not self.ended:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), remaining_s)


def _merged(chunks: list[TextChunk]) -> TextChunk:
    """Successive chunks of one sample as one."""
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(chain.from_iterable(chunk.token_ids for chunk in chunks)),
        logprobs=tuple(chain.from_iterable(chunk.logprobs for chunk in chunks)),
        prompt_logprobs=tuple(chain.from_iterable(chunk.prompt_logprobs for chunk in chunks)),
    )
