"""The real service, started as `make serve` starts it: the default model, Ray, gateway and replica, on free ports."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from ottserve import client as oc
from ottserve.loadtest import local
from ottserve.loadtest.local import LocalService


@pytest.fixture(scope="module")
def start_service() -> Iterator[Callable[..., LocalService]]:
    """Starts services; whatever still runs when the module ends is ended, so that two never compete for the cores."""
    started: list[LocalService] = []

    def start(**settings: object) -> LocalService:
        quick = {"gateway.http_port": 0, "gateway.drain.probe_period_s": 0.2}
        started.append(local.start(quick | {name.replace("__", "."): value for name, value in settings.items()}))
        return started[-1]

    yield start
    for service in started:
        local.end(service.process)


@pytest.fixture(scope="module")
def service(start_service: Callable[..., LocalService]) -> LocalService:
    """One service for all tests that only call it."""
    return start_service()


@pytest.fixture
def client(service: LocalService) -> Iterator[oc.Client]:
    with oc.Client(service.target) as connected:
        yield connected


@pytest.fixture
def run_command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command `ottserve` to its end."""

    def run(*arguments: str, stdin: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*local.COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=120, check=check
        )

    return run


@pytest.fixture
def idle_within(client: oc.Client) -> Callable[[float], None]:
    """Fails unless every page and slot is free again within some seconds."""

    def check(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(load.num_running or load.num_waiting or load.slots_used or load.pages_used for load in client.load()):
            assert time.monotonic() < deadline, f"still busy: {client.load()}"
            time.sleep(0.05)

    return check
