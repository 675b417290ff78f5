"""The slope of memory over time."""

from __future__ import annotations

import asyncio
import mmap
import os

import pytest

from ottserve.loadtest.memory import Growth, Memory


def test_the_share_is_of_the_memory_over_the_time_watched() -> None:
    growth = Growth("replica 1", mib=200.0, mib_per_hour=40.0, hours=0.25)
    assert growth.share == pytest.approx(0.05)
    assert str(growth) == "replica 1: 200 MiB, +40.0 MiB an hour (+5.00% here)"


async def test_a_process_that_grows_is_seen_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ottserve.loadtest.memory.PERIOD_S", 0.01)
    memory = Memory({"ray::ServeReplica:ottserve:replica": [os.getpid()]})
    watching = asyncio.create_task(memory.watch())
    held = []
    for _ in range(20):
        held.append(mmap.mmap(-1, 2**20))  # new pages, whatever the heap has left over
        held[-1].write(b"x" * 2**20)
        await asyncio.sleep(0.01)
    watching.cancel()
    (growth,) = memory.growths(warm_up_share=0.1)
    assert growth.process == f"replica {os.getpid()}"
    assert growth.mib_per_hour * growth.hours > 5
