"""The replica as Ray Serve sees it: a shim over `EngineLoop`. Decides nothing, and imports neither Ray nor torch.

How to load an engine and where this is are handed in, as functions to call where the replica really runs.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from ottserve.workers.api import AbortResult, GenerationTask, LoadReport, ReplicaInfo, TextChunk, Unavailable
from ottserve.workers.demand import DemandMeter
from ottserve.workers.engine_thread import EngineLike
from ottserve.workers.loop import EngineLoop
from ottserve.workers.metrics import ReplicaMetrics
from ottserve.workers.progress import Progress
from ottserve.workers.request_log import noted
from ottserve.workers.settings import EngineSettings

log = structlog.get_logger("ottserve.replica")

LoadEngine = Callable[[EngineSettings, Progress], EngineLike]

SWITCH_INTERVAL_S = 0.001
"""For how long one thread may keep the interpreter while another wants it. A step gives it up at each of its some forty
calls of torch, and by default may have to wait 5 ms for it each time while messages are written."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Which replica this is, and the address that others in the cluster reach it by."""

    replica_id: str
    address: str


class Unhealthy(RuntimeError):
    """Raised to Serve, which then replaces the replica."""


class Replica:
    """One engine. Serve constructs it, asks for its health, and calls the rest for the gateway."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it, and sends no request before it has returned
        self,
        settings: EngineSettings,
        load_engine: LoadEngine,
        find_whereabouts: Callable[[], Whereabouts],
        configure_logs: Callable[[], None],
        stall_s: float,
    ) -> None:
        """`load_engine` runs on the engine thread. Work pending and no step for `stall_s` is a fault."""
        configure_logs()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        here = find_whereabouts()
        self._replica_id = here.replica_id
        self._stall_s = stall_s
        self._demand = DemandMeter(time.monotonic)
        self._metrics = ReplicaMetrics(self._replica_id, lambda: self._engine.reading)
        port = self._metrics.serve(settings.metrics.host, settings.metrics.port)
        host = here.address if settings.metrics.host in ("0.0.0.0", "::") else settings.metrics.host
        self._metrics_address = f"{host}:{port}"
        self._engine = EngineLoop(
            lambda progress: load_engine(settings, progress),
            message_interval_s=settings.output.message_interval_ms / 1000,
            progress=_say,
            on_step=self._metrics.record_step,
        )
        self._facts = await self._engine.ready()
        self._metrics.describe(self._facts)

    async def generate(self, task: GenerationTask) -> AsyncGenerator[TextChunk, None]:
        """The chunks of a task. Cancelling the stream aborts the task."""
        with noted(task) as note:
            async with aclosing(self._engine.generate(task)) as chunks:
                async for chunk in chunks:
                    note.saw(chunk)
                    yield chunk

    async def abort(self, request_id: str) -> AbortResult:
        """End a request with finish reason ABORTED."""
        return AbortResult(request_id, await self._engine.abort(request_id))

    async def flush_cache(self) -> int:
        """Drop the cached pages that no live request uses, and tell how many."""
        return await self._engine.flush_cache()

    async def info(self) -> ReplicaInfo:
        """What runs here."""
        facts = self._facts
        return ReplicaInfo(self._replica_id, facts.model, facts.server, facts.tokenizer)

    async def load(self) -> LoadReport:
        """The state when the last step ended, or a tenth of a second before.

        Whoever has come since is counted as waiting: whoever places requests would else take their room for free.
        """
        reading = self._engine.reading
        if reading is None:
            raise Unavailable("the replica has not computed anything to report yet")
        return dataclasses.replace(reading.load, replica_id=self._replica_id)

    async def metrics_address(self) -> str:
        """`host:port` that Prometheus scrapes."""
        return self._metrics_address

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve where it scales: how much of this replica is in demand."""
        return self._demand.read(self._engine.reading, self._facts.server) if self._engine.reading else {}

    async def check_health(self) -> None:
        """Asked by Serve again and again. Load never makes it unhealthy. Raises `Unhealthy`."""
        if self._engine.broken:
            raise Unhealthy("the engine has failed")
        stalled_for_s = self._engine.stalled_for_s()
        if stalled_for_s > self._stall_s:
            raise Unhealthy(f"work is pending and no step has finished for {stalled_for_s:.0f} s")

    def __del__(self) -> None:
        """Called by Serve at the end, when running requests have had their time."""
        self._engine.close()
        self._metrics.close()


def _say(message: str) -> None:
    log.info(message)
