"""What has gathered for one request until its reader takes it. Lives on one event loop; knows no thread or engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from ottserve.workers.api import Finish, OttserveError, TextChunk


class Stream:
    """One request's answer on its way out.

    Chunks are merged while nobody takes them, so a reader that sleeps holds at most the text and ids of one answer,
    and the cost of a message is paid once for all that has gathered.
    """

    def __init__(self, request_id: str, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`interval_s` is the least time between two messages; the first and the last never wait for it."""
        self.request_id = request_id
        self._interval_s = interval_s
        self._clock = clock
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._finish: Finish | None = None
        self._error: OttserveError | None = None
        self._arrived = asyncio.Event()
        self._ended = asyncio.Event()
        self._next_at = 0.0

    @property
    def ended(self) -> bool:
        """Whether the last chunk or an error has been put; later ones are dropped."""
        return self._ended.is_set()

    def put(self, event: TextChunk | OttserveError) -> None:
        """Add a chunk, or the error that ends the stream. Never waits."""
        if self.ended:
            return
        if isinstance(event, OttserveError):
            self._error = event
        else:
            self._text.append(event.text)
            self._token_ids.extend(event.token_ids)
            self._finish = event.finish
        if self._error or self._finish:
            self._ended.set()
        self._arrived.set()

    async def take(self) -> TextChunk:
        """Wait for the next message. Raises the error that ended the stream once all text before it was taken."""
        await self._arrived.wait()
        await self._wait_for_interval()
        if self._error and not self._text:
            raise self._error
        chunk = TextChunk(self.request_id, "".join(self._text), tuple(self._token_ids), self._finish)
        self._text.clear()
        self._token_ids.clear()
        if self._error is None:
            self._arrived.clear()
        self._next_at = self._clock() + self._interval_s
        return chunk

    async def _wait_for_interval(self) -> None:
        remaining_s = self._next_at - self._clock()
        if remaining_s > 0 and not self.ended:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), remaining_s)
