"""A service of its own on this machine, with the toy model: the one that faults and soaks are done to.

Started as anybody starts it, by the command `ottserve serve`; its processes are found by what Ray calls them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

COMMAND = Path(sys.executable).with_name("ottserve")
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0
READY = b"Ctrl-C ends it"

REPLICA = "ray::ServeReplica:ottserve:replica"
GATEWAY = "ray::ServeReplica:ottserve:Gateway"
CONTROLLER = "ray::ServeController"

QUICK = {
    "model.path": "toy",
    "cache.num_pages": 512,
    "gateway.http_port": 0,
    "gateway.drain.probe_period_s": 0.2,
    "gateway.readiness.poll_interval_s": 0.25,
    "gateway.readiness.poll_timeout_s": 2,
    "gateway.routing.lost_after_s": 2,
    "deployment.health_timeout_s": 2,
    "deployment.num_cpus": 0.5,
}


class StartFailed(Exception):
    """The service did not get ready; the message is its log."""


@dataclass(frozen=True)
class LocalService:
    """A running service. Its processes are one session of the system's, led by `process`."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int
    metrics_port: int

    @property
    def target(self) -> str:
        """host:port for a client."""
        return f"127.0.0.1:{self.port}"

    @property
    def metrics_url(self) -> str:
        """Where the gateway answers Prometheus."""
        return f"http://127.0.0.1:{self.metrics_port}"

    def pids(self, kind: str) -> list[int]:
        """Process ids of one kind: `REPLICA`, `GATEWAY` or `CONTROLLER`."""
        return sorted(pid for pid, title in _session(self.process.pid) if title.startswith(kind))

    def send(self, kind: str, number: signal.Signals) -> None:
        """A signal to each process of a kind."""
        for pid in self.pids(kind):
            os.kill(pid, number)


@contextlib.contextmanager
def local_service(**settings: object) -> Iterator[LocalService]:
    """Starts a service and ends it, its every process included. `settings` by their names, `__` for a dot.

    Its log stays where it is when something went wrong.

    Raises:
        StartFailed: it did not get ready.
    """
    service = _start(QUICK | {name.replace("__", "."): value for name, value in settings.items()})
    try:
        _wait_until_ready(service)
        yield service
    finally:
        _end(service)
    shutil.rmtree(service.log.parent)


def _start(settings: dict[str, object]) -> LocalService:
    port, metrics_port = _free_ports(2)
    ports = {"gateway.port": port, "gateway.metrics.port": metrics_port}
    flags = [part for name, value in (settings | ports).items() for part in (f"--{name}", str(value))]
    log = Path(tempfile.mkdtemp(prefix="ottserve-")) / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [COMMAND, "serve", *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},  # as many replicas as cores, or more
        )
    return LocalService(process, log, port, metrics_port)


def _wait_until_ready(service: LocalService) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while READY not in service.log.read_bytes():
        if service.process.poll() is not None or time.monotonic() > deadline:
            raise StartFailed(service.log.read_text())
        time.sleep(0.1)


def _end(service: LocalService) -> None:
    """Ctrl-C, and what then still runs is killed: a test may have left it in any state."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(service.process.pid, signal.SIGCONT)
        os.killpg(service.process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        service.process.wait(STOP_TIMEOUT_S)
    for pid, _ in _session(service.process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    service.process.wait()


def _session(leader: int) -> Iterator[tuple[int, str]]:
    """Process ids and titles of a session."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                if os.getsid(int(folder.name)) == leader:
                    yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()


def _free_ports(count: int) -> Sequence[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
