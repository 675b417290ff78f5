"""The slope of memory over time, and how sure it is."""

from __future__ import annotations

import asyncio
import mmap
import os
import random

import pytest

from ottserve.loadtest.memory import Growth, Memory

KIND = "ray::ServeReplica:ottserve:replica"


def sampled(mib_at: list[float]) -> Memory:
    """A memory that was seen to be so, a second after another."""
    memory = Memory({KIND: [7]})
    memory._samples = [(float(second), {"replica 7": mib}) for second, mib in enumerate(mib_at)]
    return memory


def test_a_straight_line_is_certain() -> None:
    (growth,) = sampled([200 + second / 60 for second in range(480)]).growths(warm_up_share=0.5)
    assert growth.mib_per_hour == pytest.approx(60)
    assert growth.margin == pytest.approx(0, abs=1e-6)
    assert growth.hours == pytest.approx(239 / 3600)
    assert str(growth) == "replica 7: 208 MiB, +60.0 ± 0.0 MiB an hour"


def test_noise_around_a_level_is_told_as_uncertainty() -> None:
    draw = random.Random(1)
    (growth,) = sampled([200 + draw.gauss(0, 2) for _ in range(480)]).growths(warm_up_share=0.0)
    assert abs(growth.mib_per_hour) < growth.margin < 20
    assert growth.most == pytest.approx(growth.mib_per_hour + growth.margin)


def test_samples_that_depend_on_each_other_do_not_feign_certainty() -> None:
    """A saw of 40 s: sample by sample the line through it would be sure to a tenth of this."""
    (growth,) = sampled([200 + second % 40 / 4 for second in range(470)]).growths(warm_up_share=0.0)
    assert growth.margin > abs(growth.mib_per_hour)


def test_too_few_samples_are_no_measure() -> None:
    with pytest.raises(ValueError, match="12 at least"):
        sampled([200.0] * 20).growths(warm_up_share=0.5)


async def test_a_process_that_grows_is_seen_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ottserve.loadtest.memory.PERIOD_S", 0.01)
    memory = Memory({KIND: [os.getpid()]})
    watching = asyncio.create_task(memory.watch())
    held = []
    for _ in range(30):
        held.append(mmap.mmap(-1, 2**20))  # new pages, whatever the heap has left over
        held[-1].write(b"x" * 2**20)
        await asyncio.sleep(0.01)
    watching.cancel()
    (growth,) = memory.growths(warm_up_share=0.1)
    assert isinstance(growth, Growth)
    assert growth.process == f"replica {os.getpid()}"
    assert growth.mib_per_hour * growth.hours > 5
