"""A run from start to report: locust in this process, or a master with workers that report to it. Prints nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import gevent
from locust.env import Environment
from locust.runners import MasterRunner, Runner

from ottserve.loadtest.callers import Session, caller_class, num_callers
from ottserve.loadtest.report import Circumstances, make_report
from ottserve.loadtest.service import RunFailed, Service
from ottserve.loadtest.tally import Tally
from ottserve.loadtest.workload import Workload

KEY = "ottserve"
WORKERS_TIMEOUT_S = 60.0
MARGIN_S = 30.0
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Plan:
    """A run.

    Attributes:
        arguments: of the command line, for the workers of this machine; the token is not among them.
        num_processes: 1 sends from this process; more need as many workers.
        starts_workers: whether to start them here, or to wait for some from elsewhere.
    """

    name: str
    workload: Workload
    service: Service
    arguments: list[str]
    num_processes: int = 1
    starts_workers: bool = True
    master_port: int = 5557


def run(plan: Plan) -> dict[str, Any]:
    """Send the load, wait for the last answer, and tell what was seen.

    Raises:
        RunFailed: the service does not answer, workers did not come, or requests did not end.
    """
    said, token_ids = plan.service.facts()
    session = Session(plan.workload, plan.service, token_ids, Tally())
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    here = Circumstances(plan.name, plan.service.target, started_at, plan.num_processes, said)
    measured_s = _send_alone(session) if plan.num_processes == 1 else _send_together(plan, session)
    return make_report(plan.workload, session.tally, here, max(measured_s, 1e-9))


def _send_alone(session: Session) -> float:
    environment = Environment(user_classes=[caller_class(session)])
    runner = environment.create_local_runner()
    _spawn(runner, num_callers(session.workload, 1))
    _wait(lambda: session.has_ended, session.workload)
    runner.quit()
    return session.measured_s


def _send_together(plan: Plan, session: Session) -> float:
    environment = Environment(user_classes=[caller_class(session)])
    runner = environment.create_master_runner("127.0.0.1" if plan.starts_workers else "*", plan.master_port)
    ended: dict[str, float] = {}

    def merge(client_id: str, data: dict[str, Any]) -> None:
        report = data.pop(KEY)
        session.tally.merge(report["tally"])
        if report["has_ended"]:
            ended[client_id] = report["measured_s"]

    environment.events.worker_report.add_listener(merge)
    with _workers(plan):
        _wait_for_workers(runner, plan.num_processes)
        _spawn(runner, num_callers(plan.workload, plan.num_processes))
        _wait(lambda: len(ended) == plan.num_processes, plan.workload)
        runner.quit()
    return max(ended.values())


def work(workload: Workload, service: Service, master: tuple[str, int], number: int, of: int) -> None:
    """Send a share of a load for a master, until it says that this is the end."""
    _, token_ids = service.facts()
    session = Session(workload, service, token_ids, Tally(), number, 1 / of)
    environment = Environment(user_classes=[caller_class(session)])
    runner = environment.create_worker_runner(*master)

    def report(client_id: str, data: dict[str, Any]) -> None:
        has_ended = bool(session.began_at) and session.has_ended
        data[KEY] = {"tally": session.tally.take(), "has_ended": has_ended, "measured_s": session.measured_s}

    environment.events.report_to_master.add_listener(report)
    runner.greenlet.join()


def _spawn(runner: Runner, num_users: int) -> None:
    runner.start(num_users, spawn_rate=max(num_users, 1))


def _wait(has_ended: Any, workload: Workload) -> None:
    deadline = time.monotonic() + workload.duration_s + workload.timeout_s + MARGIN_S
    while not has_ended():
        if time.monotonic() > deadline:
            raise RunFailed(f"requests were still in flight {workload.timeout_s + MARGIN_S:g} s after the last began")
        gevent.sleep(POLL_S)


def _wait_for_workers(runner: MasterRunner, num_workers: int) -> None:
    deadline = time.monotonic() + WORKERS_TIMEOUT_S
    while len(runner.clients.ready) < num_workers:
        if time.monotonic() > deadline:
            raise RunFailed(f"{len(runner.clients.ready)} of {num_workers} workers came in {WORKERS_TIMEOUT_S:g} s")
        gevent.sleep(POLL_S)


@contextmanager
def _workers(plan: Plan) -> Iterator[None]:
    """Worker processes on this machine, ended on every way out."""
    numbers = range(plan.num_processes) if plan.starts_workers else range(0)
    command = [sys.executable, "-m", "ottserve.loadtest", "worker", *plan.arguments]
    options = ["--master-port", str(plan.master_port), "--of", str(plan.num_processes)]
    token = {"OTTSERVE_TOKEN": plan.service.token} if plan.service.token else {}  # argv is everybody's to read
    processes = [
        subprocess.Popen([*command, *options, "--number", str(number)], env=os.environ | token) for number in numbers
    ]
    try:
        yield
        for process in processes:
            process.wait(MARGIN_S)
    finally:
        for process in processes:
            process.kill()
