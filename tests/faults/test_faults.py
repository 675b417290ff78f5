"""Faults done to the real service. `python -m ottserve.loadtest.faults` does these and those that take longer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ottserve.loadtest.faults import SETTINGS, do
from ottserve.loadtest.local import LocalService, local_service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

# Most seconds from the fault to each event that a caller waits for; recovery itself depends on the machine.
BOUNDS = {
    "all-cancelled": {"next request served": 2, "gauges at 0": 2},
    "all-aborted": {"streams ended": 2, "gauges at 0": 2},
    "replicas-killed": {"streams ended": 5, "not ready": 5},
    "replicas-hung": {"streams ended": 10, "not ready": 10},
    "one-replica-hung": {"all requests answered": 10},
    "load-rises-and-goes": {},
}


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    """One service for all faults."""
    with local_service(**SETTINGS) as running:
        yield running


@pytest.mark.parametrize("fault", BOUNDS)
async def test_callers_see_what_they_were_promised(fault: str, service: LocalService) -> None:
    times = await do(fault, service)
    late = {event: times[event] for event, most in BOUNDS[fault].items() if times[event] > most}
    assert not late, f"{late}, bounds {BOUNDS[fault]}"
