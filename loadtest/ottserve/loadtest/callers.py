"""locust's users: callers of a closed loop, or one that opens requests at their times. The one file with greenlets.

Import it first thing: locust replaces parts of the standard library, and gRPC must learn of gevent before any channel.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from typing import Any

import gevent
import grpc.experimental.gevent as grpc_gevent
from gevent.pool import Pool
from locust import User, task

from ottserve import client as oc
from ottserve.loadtest.draw import Drawn, Requests, gaps_s
from ottserve.loadtest.service import Service
from ottserve.loadtest.stream import CANCELLED, COMPLETED, Timed, send
from ottserve.loadtest.tally import Tally
from ottserve.loadtest.workload import ClosedLoop, OpenLoop, Workload

grpc_gevent.init_gevent()

NUM_CHANNELS = 8  # of an open loop; a connection has a limit of streams


@dataclass
class Session:
    """What all callers of a process share.

    Attributes:
        share: of the rate of an open loop that this process sends.
        token_ids: what prompts are made of.
        process: number of this process.
        began_at, last_end_at: on the monotonic clock; 0 before the first request.
    """

    workload: Workload
    service: Service
    token_ids: tuple[int, ...]
    tally: Tally
    process: int = 0
    share: float = 1.0
    began_at: float = 0.0
    last_end_at: float = 0.0
    num_in_flight: int = 0

    def elapsed_s(self) -> float:
        """Seconds since the process began to send."""
        if not self.began_at:
            self.began_at = time.monotonic()
        return time.monotonic() - self.began_at

    @property
    def is_over(self) -> bool:
        """Whether no request may start any more."""
        return self.elapsed_s() >= self.workload.duration_s

    @property
    def has_ended(self) -> bool:
        """Whether every request has its answer, and no other will start."""
        return self.is_over and not self.num_in_flight

    @property
    def measured_s(self) -> float:
        """Time from the end of the warm-up to the last answer."""
        return max(0.0, self.last_end_at - self.began_at - self.workload.warm_up_s)


class Caller(User):
    """Sends requests and hands what became of them to the tally, and to locust's own table."""

    abstract = True
    session: Session
    num_made = 0

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        Caller.num_made += 1
        self.number = Caller.num_made
        name = f"{self.session.process}/{self.number}"
        self.random = Random(f"{self.session.workload.seed}/{name}/pauses")
        self.requests = Requests(self.session.workload, self.session.token_ids, name)

    def call(self, client: oc.Client, drawn: Drawn) -> None:
        """Send one request and account for it."""
        session = self.session
        measured = session.elapsed_s() >= session.workload.warm_up_s
        session.num_in_flight += 1
        try:
            timed = send(client, drawn, session.workload.timeout_s, time.perf_counter)
        finally:
            session.num_in_flight -= 1
        session.tally.add(timed, session.workload.limits, measured)
        session.last_end_at = time.monotonic()
        self._tell_locust(timed)

    def _tell_locust(self, timed: Timed) -> None:
        failed = timed.outcome not in (COMPLETED, CANCELLED)
        self.environment.events.request.fire(
            request_type="GenerateStream",
            name=timed.kind,
            response_time=timed.e2e_s * 1000,
            response_length=timed.num_tokens,
            exception=timed.error if failed else None,
            context={},
        )


class ClosedLoopCaller(Caller):
    """Asks, waits for the end of the answer, thinks, asks again."""

    abstract = True

    def on_start(self) -> None:
        """Connect once."""
        self.client = self.session.service.connect()

    def on_stop(self) -> None:
        """Let go of the connection."""
        self.client.close()

    @task
    def ask(self) -> None:
        """One turn."""
        arrivals = self.session.workload.arrivals
        if self.session.is_over:
            gevent.sleep(0.1)
            return
        self.call(self.client, self.requests.draw())
        if isinstance(arrivals, ClosedLoop) and arrivals.think_s:
            gevent.sleep(self.random.expovariate(1 / arrivals.think_s))


class OpenLoopCaller(Caller):
    """Starts each request at its time, on a greenlet of its own, whatever became of those before."""

    abstract = True

    @task
    def open(self) -> None:
        """The whole run."""
        session, arrivals = self.session, self.session.workload.arrivals
        if not isinstance(arrivals, OpenLoop) or session.is_over:
            gevent.sleep(0.1)
            return
        with ExitStack() as stack:
            clients = [stack.enter_context(session.service.connect()) for _ in range(NUM_CHANNELS)]
            self._send_all(arrivals, clients)

    def _send_all(self, arrivals: OpenLoop, clients: list[oc.Client]) -> None:
        session, in_flight, due = self.session, Pool(arrivals.max_in_flight), time.monotonic()
        for turn, gap_s in enumerate(gaps_s(arrivals, f"{session.workload.seed}/{session.process}", session.share)):
            due += gap_s
            gevent.sleep(max(0.0, due - time.monotonic()))
            if session.is_over:
                break
            if in_flight.full():
                session.tally.drop()
            else:
                in_flight.spawn(self.call, clients[turn % len(clients)], self.requests.draw())
        in_flight.join()


def caller_class(session: Session) -> type[Caller]:
    """The class of users for a session."""
    base: type[Caller] = ClosedLoopCaller if isinstance(session.workload.arrivals, ClosedLoop) else OpenLoopCaller
    return type("GenerateStream", (base,), {"session": session, "abstract": False})


def num_callers(workload: Workload, num_processes: int) -> int:
    """Users that locust must spawn over all processes."""
    arrivals = workload.arrivals
    return arrivals.num_callers if isinstance(arrivals, ClosedLoop) else num_processes
