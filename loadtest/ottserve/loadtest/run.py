"""A run from start to report: locust in this process, or a master with workers that report to it. Prints nothing."""

from __future__ import annotations

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

from ottserve import client as oc
from ottserve.loadtest.callers import Session, caller_class, num_callers
from ottserve.loadtest.report import Circumstances, make_report
from ottserve.loadtest.tally import Tally
from ottserve.loadtest.workload import Workload

KEY = "ottserve"
WORKERS_TIMEOUT_S = 60.0
MARGIN_S = 30.0
POLL_S = 0.2


class RunFailed(Exception):
    """The run could not be made; the message says why."""


class ServiceUnreachable(RunFailed):
    """Nobody answers at the target, or not as a service does."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run.

    Attributes:
        arguments: of the command line, for the workers of this machine.
        num_processes: 1 sends from this process; more need as many workers.
        starts_workers: whether to start them here, or to wait for some from elsewhere.
    """

    name: str
    workload: Workload
    target: str
    token: str | None
    arguments: list[str]
    num_processes: int = 1
    starts_workers: bool = True
    master_port: int = 5557


def run(plan: Plan) -> dict[str, Any]:
    """Send the load, wait for the last answer, and tell what was seen.

    Raises:
        RunFailed: the service does not answer, workers did not come, or requests did not end.
    """
    session, server = open_session(plan.workload, plan.target, plan.token)
    here = Circumstances(
        plan.name, plan.target, datetime.now(UTC).isoformat(timespec="seconds"), plan.num_processes, server
    )
    measured_s = _send_alone(session) if plan.num_processes == 1 else _send_together(plan, session)
    return make_report(plan.workload, session.tally, here, max(measured_s, 1e-9))


def open_session(workload: Workload, target: str, token: str | None) -> tuple[Session, dict[str, Any]]:
    """What callers share, and what the service says of itself."""
    try:
        with oc.Client(target, token=token) as client:
            model, server = client.model_info(), client.server_info()
    except oc.ClientError as error:
        raise ServiceUnreachable(f"{target}: {error.message}") from error
    facts = {
        "model": model.model,
        "version": server.version,
        "policy": server.cache.policy,
        "device": server.engine.device,
    }
    ids = tuple(token_id for token_id in range(model.vocab_size) if token_id not in model.eos_token_ids)
    return Session(workload, target, token, ids, Tally()), facts


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


def work(workload: Workload, target: str, token: str | None, master: tuple[str, int], number: int, of: int) -> None:
    """Send a share of a load for a master, until it says that this is the end."""
    session, _ = open_session(workload, target, token)
    session.process, session.share = number, 1 / of
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
    processes = [subprocess.Popen([*command, *options, "--number", str(number)]) for number in numbers]
    try:
        yield
        for process in processes:
            process.wait(MARGIN_S)
    finally:
        for process in processes:
            process.kill()
