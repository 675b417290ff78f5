"""What has gathered for one request until its reader takes it. Lives on one event loop; knows no thread or engine."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from itertools import chain

from ottserve.workers.api import OttserveError, TextChunk

MESSAGE_S = 0.0005
"""What a message costs a gateway, from above (`ottserve bench-gateway`). With very many streams each has its turn less
often, with more tokens: else the gateway would fall behind the engine."""

TICK_S = 0.005
"""Turns come at multiples of this, where there is as much time between them: of streams that wake together a message
costs a quarter less, here and in the gateway."""


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
        num_streams: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """Gather the answer of `num_samples` samples.

        Args:
            interval_s: the least time between two rounds of messages, each of one message for every sample of which
                something is there; the first round and the last never wait for it.
            num_streams: how many send at once to the same gateway, this one included.
        """
        self.request_id = request_id
        self._interval_s = interval_s
        self._clock = clock
        self._num_open = num_samples
        self._num_streams = num_streams
        self._gathered: dict[int, list[TextChunk]] = {}
        self._round: list[TextChunk] = []
        self._error: OttserveError | None = None
        self._ended = False
        self._ready = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._next_at = 0.0

    @property
    def ended(self) -> bool:
        """Whether every sample's last chunk or an error has been put; what comes later is dropped."""
        return self._ended

    def put(self, event: TextChunk | OttserveError) -> None:
        """Add a chunk, or the error that ends the stream. Never waits."""
        if self._ended:
            return
        if isinstance(event, OttserveError):
            self._error = event
        else:
            self._gathered.setdefault(event.index, []).append(event)
            self._num_open -= event.finish is not None
        self._ended = self._error is not None or self._num_open == 0
        self._make_ready()

    async def take(self) -> TextChunk:
        """Wait for the next message. Raises the error that ended the stream once all that came before it was taken."""
        if not self._round:
            await self._ready.wait()
            if self._error and not self._gathered:
                raise self._error
            self._begin_round()
        return self._round.pop(0)

    def _make_ready(self) -> None:
        """Wake the reader, now or when its turn comes. One timer for a message costs a third of a wait with a limit."""
        if self._ready.is_set():
            return
        remaining_s = self._next_at - self._clock()
        if self._ended or remaining_s <= 0:
            self._wake()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(remaining_s, self._wake)

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._ready.set()

    def _begin_round(self) -> None:
        self._round = [_merged(chunks) for _, chunks in sorted(self._gathered.items())]
        self._gathered = {}
        if self._error is None:
            self._ready.clear()
        wait_s = max(self._interval_s, self._num_streams() * MESSAGE_S)
        self._next_at = self._clock() + wait_s
        if wait_s > TICK_S:
            self._next_at = math.ceil(self._next_at / TICK_S) * TICK_S


def _merged(chunks: list[TextChunk]) -> TextChunk:
    """Successive chunks of one sample as one."""
    last = chunks[-1]
    if len(chunks) == 1:
        return last
    return TextChunk(
        last.request_id,
        "".join([chunk.text for chunk in chunks]),
        tuple(chain.from_iterable([chunk.token_ids for chunk in chunks])),
        last.finish,
        last.index,
        tuple(chain.from_iterable([chunk.logprobs for chunk in chunks])),
        tuple(chain.from_iterable([chunk.prompt_logprobs for chunk in chunks])),
    )
