"""Several streams as one. Knows nothing of what they carry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


async def merged(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Items as they come, at most one of them held. All streams are closed when one fails or this one is closed."""
    queue: asyncio.Queue[Item | _Ended] = asyncio.Queue(maxsize=1)

    async def pump(stream: AsyncGenerator[Item, None]) -> None:
        error = None
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put(item)
        except Exception as raised:  # noqa: BLE001 - raised again by whoever reads
            error = raised
        await queue.put(_Ended(error))

    pumps = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        num_running = len(pumps)
        while num_running:
            item = await queue.get()
            if not isinstance(item, _Ended):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                num_running -= 1
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


class _Ended:
    def __init__(self, error: Exception | None) -> None:
        self.error = error
