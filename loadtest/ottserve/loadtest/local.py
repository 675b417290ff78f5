"""A service of its own on this machine, with the toy model: the one that faults and soaks are done to.

Started as anybody starts it, by the command `ottserve serve`; its processes are found by what Ray calls them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

INSTALLED = Path(sys.executable).with_name("ottserve")
COMMAND = (str(INSTALLED),) if INSTALLED.exists() else (sys.executable, "-m", "ottserve.cli")
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0
READY = b"Ctrl-C ends it"
PORTS = r"(?m)^  (?:gRPC|metrics) .*?:(\d+)(?:/metrics.*)?$"

RAY_ADDRESS = r"--gcs-address=(\S+)"

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

    @property
    def ray_address(self) -> str:
        """host:port of its own Ray, for those who look behind the gateway; there may be others on this machine."""
        return next(found[1] for title in self.processes() if (found := re.search(RAY_ADDRESS, title)))

    def processes(self) -> list[str]:
        """Command lines of what still runs of it, Ray's own included."""
        return [title for _, title in _session(self.process.pid)]

    def pids(self, kind: str) -> list[int]:
        """Process ids of one kind: `REPLICA`, `GATEWAY` or `CONTROLLER`."""
        return sorted(pid for pid, title in _session(self.process.pid) if title.startswith(kind))

    def send(self, kind: str, number: signal.Signals) -> None:
        """A signal to each process of a kind."""
        for pid in self.pids(kind):
            os.kill(pid, number)

    def interrupt(self) -> None:
        """What Ctrl-C does: a signal to every process of the terminal."""
        os.killpg(self.process.pid, signal.SIGINT)


@contextlib.contextmanager
def local_service(environment: Mapping[str, str] | None = None, /, **settings: object) -> Iterator[LocalService]:
    """Starts a quick service and ends it, its every process included.

    Its log stays where it is when something went wrong.

    Args:
        environment: variables of its own.
        settings: by their names, `__` for a dot.

    Raises:
        StartFailed: it did not get ready.
    """
    named = {name.replace("__", "."): value for name, value in settings.items()}
    service = start(QUICK | named, **{"OMP_NUM_THREADS": "1"} | dict(environment or {}))
    try:
        yield service
    finally:
        end(service.process)
    shutil.rmtree(service.log.parent)


def start(settings: dict[str, object], **environment: str) -> LocalService:
    """Starts the command `ottserve serve` on ports of its own choice, and returns when it is ready.

    Args:
        settings: by their full names.
        environment: variables of its own, beside ours.

    Raises:
        StartFailed: it did not get ready; nothing of it is left.
    """
    settings = {"gateway.port": 0, "gateway.metrics.port": 0} | settings
    log = Path(tempfile.mkdtemp(prefix="ottserve-")) / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*COMMAND, "serve", *(part for name, value in settings.items() for part in (f"--{name}", str(value)))],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Tests of kernels switch the interpreter on for themselves.
            env=os.environ | _paths() | {"TRITON_INTERPRET": "0"} | environment,
        )
    try:
        _wait_until_ready(process, log)
    except BaseException:
        end(process)
        raise
    port, metrics_port = (int(found) for found in re.findall(PORTS, log.read_text())[-2:])
    return LocalService(process, log, port, metrics_port)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C, and what then still runs is killed: a test may have left it in any state."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    for pid, _ in _session(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _paths() -> dict[str, str]:
    """Where Python looks for us if we are not installed; a process of Ray's may be elsewhere."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {"PYTHONPATH": os.pathsep.join(str(Path(path).absolute()) for path in paths if path)}


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while READY not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > deadline:
            raise StartFailed(log.read_text())
        time.sleep(0.1)


def _session(leader: int) -> Iterator[tuple[int, str]]:
    """Process ids and titles of a session."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                if os.getsid(int(folder.name)) == leader:
                    yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
