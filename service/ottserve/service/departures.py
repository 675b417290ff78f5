"""Requests of which no replica has said anything yet: here they can be aborted, where no replica may know them.

They wait for their turn, or travel to a replica. Lives on one event loop; knows no message and no replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Departure:
    """One of them. `is_aborted` once somebody has aborted it; its scope ends then, if it has not."""

    scope: asyncio.Timeout
    is_aborted: bool = False


class Departures:
    """Those there are now, by request id."""

    def __init__(self) -> None:
        self._under_way: dict[str, Departure] = {}

    @asynccontextmanager
    async def departing(self, request_id: str) -> AsyncIterator[Departure]:
        """A scope that ends early, without an error, where the request is aborted; ask `is_aborted` behind it."""
        departure = self._under_way[request_id] = Departure(asyncio.timeout(None))
        try:
            async with departure.scope:
                yield departure
        except TimeoutError:
            if not departure.is_aborted:
                raise
        finally:
            del self._under_way[request_id]

    def is_under_way(self, request_id: str) -> bool:
        """Whether a request has a scope, and could be aborted."""
        departure = self._under_way.get(request_id)
        return departure is not None and not departure.is_aborted

    def abort(self, request_id: str) -> bool:
        """End the scope of a request. False if it has none, or has been aborted before."""
        if not self.is_under_way(request_id):
            return False
        departure = self._under_way[request_id]
        departure.is_aborted = True
        departure.scope.reschedule(asyncio.get_running_loop().time())
        return True
