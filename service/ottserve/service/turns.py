"""Whose turn it is to go to the replicas, so that nobody waits behind another's flood. Knows no message.

Start-time fair queueing (Goyal, Vin, Cheng 1996) with tokens as the cost: each request is due when those of its caller
before it would be through, had every caller an equal share. The earliest due goes first, higher priority before all.
Who did not call for a while gains nothing by it and loses nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

Waiting = tuple[int, float, int, "asyncio.Future[None]"]


class Turns:
    """Lets in as many as there are places. Lives on one event loop."""

    def __init__(self, num_places: Callable[[], float]) -> None:
        """`num_places` tells how many requests may be at the replicas now; it is asked whenever one comes or ends."""
        self._num_places = num_places
        self._num_taken = 0
        self._now_due = 0.0
        self._due: dict[str, float] = {}
        self._numbers = itertools.count()
        self._waiting: list[Waiting] = []

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._waiting)

    @property
    def num_taken(self) -> int:
        """Requests that are at the replicas."""
        return self._num_taken

    @asynccontextmanager
    async def turn(self, caller: str, cost: float, priority: int) -> AsyncIterator[None]:
        """Waits for a place and holds it until the scope is left. A place once given is never taken back."""
        due = max(self._now_due, self._due.get(caller, 0.0))
        self._due[caller] = due + cost
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = (-priority, due, next(self._numbers), given)
        heapq.heappush(self._waiting, waiting)
        self._give()
        try:
            await given
            yield
        finally:
            if given.cancelled():
                self._due[caller] -= cost
                self._withdraw(waiting)
            else:
                self._num_taken -= 1
            self._give()

    def _withdraw(self, waiting: Waiting) -> None:
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            heapq.heapify(self._waiting)

    def _give(self) -> None:
        while self._waiting and self._num_taken < max(1, self._num_places()):
            _, due, _, given = heapq.heappop(self._waiting)
            if not given.cancelled():  # its caller has left and did not yet get to say so
                self._now_due = max(self._now_due, due)
                self._num_taken += 1
                given.set_result(None)
