"""When pending work counts as stalled, by a clock of our own."""

from dataclasses import replace
from typing import Any

import pytest

from ottserve.service.model_readiness import Progress
from ottserve.workers.api import LoadReport

STALL_S = 60.0
IDLE = LoadReport("r", 0, 0, 0, 0, 0, 6, 6, 0, 4, 4, last_step_at=1000.0)
BUSY = replace(IDLE, num_running=1)
QUEUED = replace(IDLE, num_waiting=1)


@pytest.mark.parametrize("pending", [BUSY, QUEUED])
def test_no_step_for_the_stall_time(pending: LoadReport) -> None:
    progress = Progress(STALL_S)
    assert not progress.is_stalled(pending, 1000.0)
    assert not progress.is_stalled(pending, 1060.0)
    assert progress.is_stalled(pending, 1060.5)


def test_idle_for_hours_and_then_a_request() -> None:
    progress = Progress(STALL_S)
    assert not progress.is_stalled(IDLE, 1000.0)
    assert not progress.is_stalled(IDLE, 20_000.0)
    assert not progress.is_stalled(QUEUED, 20_001.0)
    assert progress.is_stalled(QUEUED, 20_062.0)


def test_busy_for_hours_with_steps() -> None:
    progress = Progress(STALL_S)
    stalled = [
        progress.is_stalled(replace(BUSY, last_step_at=float(now)), now + 50.0) for now in range(1000, 20_000, 50)
    ]
    assert not any(stalled)


def test_replicas_are_judged_apart() -> None:
    progress = Progress(STALL_S)
    other: dict[str, Any] = {"replica_id": "other"}
    assert not progress.is_stalled(BUSY, 1000.0)
    assert not progress.is_stalled(replace(BUSY, **other), 1050.0)
    assert progress.is_stalled(BUSY, 1061.0)
    assert not progress.is_stalled(replace(BUSY, **other), 1061.0)


def test_a_replica_that_never_stepped() -> None:
    progress = Progress(STALL_S)
    first = replace(QUEUED, last_step_at=None)
    assert not progress.is_stalled(first, 1000.0)
    assert progress.is_stalled(first, 1061.0)
