"""Faults done to the real service. `python -m ottserve.loadtest.faults` does these and those that take longer."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ottserve import client as oc
from ottserve.cli.ports import free_port
from ottserve.loadtest.faults import ENVIRONMENT, SETTINGS, do
from ottserve.loadtest.local import GATEWAY, LocalService, local_service
from ottserve.loadtest.observe import (
    NUM_REPLICAS,
    ONE_TRY,
    SHORT,
    abort,
    connect,
    finished,
    open_streams,
    ready,
    serves,
    until,
    whole,
)
from ottserve.loadtest.scrape import scrape

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

# Most seconds from the fault to each event that a caller waits for; recovery itself depends on the machine.
BOUNDS = {
    "all-cancelled": {"next request served": 2, "gauges at 0": 2},
    "all-aborted": {"streams ended": 2, "gauges at 0": 2},
    "out-of-memory": {"next request served": 5, "gauges at 0": 5},
    "replicas-killed": {"streams ended": 5, "not ready": 5},
    "replicas-hung": {"streams ended": 10, "not ready": 10},
    "one-replica-hung": {"all requests answered": 10},
    "load-rises-and-goes": {},
}


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    """One service for all faults."""
    with local_service(ENVIRONMENT, **SETTINGS) as running:
        yield running


@pytest.mark.parametrize("fault", BOUNDS)
async def test_callers_see_what_they_were_promised(fault: str, service: LocalService) -> None:
    times = await do(fault, service)
    late = {event: times[event] for event, most in BOUNDS[fault].items() if times[event] > most}
    assert not late, f"{late}, bounds {BOUNDS[fault]}"


async def test_two_replicas_are_told_apart(service: LocalService) -> None:
    """Each has a page of its own, and says there which it is."""
    async with connect(service) as client:
        await whole(client, service)
        names = {load.replica_id for load in await client.load()}
    told = [labels["replica_id"] for name, labels, _ in scrape(service.metrics_url) if name == "ottserve_replica_info"]
    assert set(told) == names
    assert len(told) == len(names) == NUM_REPLICAS


@pytest.fixture(scope="module")
def second(service: LocalService) -> str:
    """host:port of a second gateway in front of the same replicas."""
    port = free_port()
    settings = {
        "host": "127.0.0.1",
        "port": port,
        "http_port": 0,
        "metrics": {"port": 0},
        "readiness": {"poll_interval_s": 0.25, "poll_timeout_s": 10},  # no replica hangs where it is there
    }
    script = Path(__file__).with_name("second_gateway.py")
    subprocess.run([sys.executable, script, service.ray_address, json.dumps(settings)], check=True, timeout=120)
    return f"127.0.0.1:{port}"


async def test_two_gateways_in_front_of_the_same_replicas(service: LocalService, second: str) -> None:
    """They agree on where a prompt goes, see each other's requests, and one goes on where the other is killed."""
    async with connect(service) as one, oc.AsyncClient(second, retry=ONE_TRY) as other:
        await whole(one, service)
        await ready(other, True)
        for seed in range(4):
            prompt = tuple(random.Random(seed).choices(range(1, 27), k=600))
            await one.generate(prompt, SHORT)
            assert (await other.generate(prompt, SHORT)).finish.usage.num_cached_tokens == 512, "where its pages are"

        by_one = await open_streams(one, 2, prefix="one-")
        await until(lambda: _running(other, [1, 1]), "the requests of one gateway are seen by the other")
        by_other = await open_streams(other, 2, prefix="other-")
        await until(lambda: _running(one, [2, 2]), "requests of both gateways are spread over the replicas")
        assert await abort(other, "one-0")
        assert finished(await by_one[0], oc.FinishReason.ABORTED)

        service.send(GATEWAY, signal.SIGKILL)
        assert isinstance(await by_one[1], oc.StreamBroken)
        assert (await other.generate("a", SHORT, timeout_s=5)).text == "bcd"
        assert all(finished(outcome, oc.FinishReason.LENGTH) for outcome in await asyncio.gather(*by_other))
    async with connect(service) as one:
        await ready(one, True)
        await serves(one)


async def _running(client: oc.AsyncClient, wanted: list[int]) -> bool:
    return [load.num_running for load in await client.load()] == wanted
