"""The real service, started as `make serve` starts it: the default model, Ray, gateway and replica, on free ports."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ottserve import client as oc

COMMAND = Path(sys.executable).with_name("ottserve")
START_TIMEOUT_S = 240.0  # two cores that others use too
STOP_TIMEOUT_S = 60.0


@dataclass
class Service:
    """A running service."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int
    metrics_port: int

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def interrupt(self) -> None:
        """What Ctrl-C does: a signal to every process of the terminal."""
        os.killpg(self.process.pid, signal.SIGINT)

    def processes(self) -> list[str]:
        """Command lines of what still runs of it, Ray's own included."""
        return [line for pid, line in _command_lines() if _session(pid) == self.process.pid]


@pytest.fixture(scope="module")
def start_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Service]]:
    """Starts services; whatever still runs when the module ends is ended, so that two never compete for the cores."""
    started: list[Service] = []

    def start(*flags: str) -> Service:
        port, metrics_port = _free_port(), _free_port()
        log = tmp_path_factory.mktemp("service") / "log"
        ports = ("--gateway.port", str(port), "--gateway.metrics.port", str(metrics_port), "--gateway.http_port", "0")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [COMMAND, "serve", *ports, "--gateway.drain.probe_period_s", "0.2", *flags],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"TRITON_INTERPRET": "0"},  # the tests of kernels switch it on for this process
            )
        started.append(Service(process, log, port, metrics_port))
        _wait_until_ready(started[-1])
        return started[-1]

    yield start
    for service in started:
        if service.process.poll() is None:
            service.interrupt()
            with contextlib.suppress(subprocess.TimeoutExpired):
                service.process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(service.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def service(start_service: Callable[..., Service]) -> Service:
    """One service for all tests that only call it."""
    return start_service()


@pytest.fixture
def client(service: Service) -> Iterator[oc.Client]:
    with oc.Client(service.target) as connected:
        yield connected


@pytest.fixture
def run_command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command `ottserve` to its end."""

    def run(*arguments: str, stdin: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=120, check=check
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


def _wait_until_ready(service: Service) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while b"Ctrl-C ends it" not in service.log.read_bytes():
        assert service.process.poll() is None, service.log.read_text()
        assert time.monotonic() < deadline, service.log.read_text()
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _command_lines() -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1
