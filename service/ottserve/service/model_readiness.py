"""Whether requests for one model can be served now. Follows its replicas; knows no gRPC and no other model.

Not ready: loading, draining, no replica, or work pending while no step finishes. Being busy never makes it unready.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from ottserve.service.replicas import ReplicaClient
from ottserve.service.settings import GatewaySettings
from ottserve.service.tokenizer import Tokenizer
from ottserve.workers.api import LoadReport, OttserveError, ReplicaInfo, Unavailable

log = structlog.get_logger(__name__)


class Phase(enum.Enum):
    """The life of a gateway, or of a model in it. Draining is for good."""

    LOADING = "the model is loading"
    READY = "ready"
    STALLED = "work is pending and no step has finished"
    NO_REPLICA = "no replica answers"
    DRAINING = "the gateway is draining"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model, its tokenizer, and the replicas that serve it."""

    info: ReplicaInfo
    tokenizer: Tokenizer
    replicas: ReplicaClient


class Progress:
    """Tells for each replica since when work has been pending without a finished step.

    The time counts from the later of the last step and the first report of pending work, so that neither an idle
    night nor a long queue looks like a stall.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._pending_since: dict[str, float] = {}

    def is_stalled(self, load: LoadReport, now: float) -> bool:
        """Takes in a report and judges it. `now` is on the clock of `last_step_at`."""
        if not (load.num_running or load.num_waiting):
            self._pending_since.pop(load.replica_id, None)
            return False
        since = max(self._pending_since.setdefault(load.replica_id, now), load.last_step_at or 0.0)
        return now - since > self._stall_s


class ModelReadiness:
    """The phase of one model, and whoever waits for it to change."""

    def __init__(
        self, replicas: ReplicaClient, settings: GatewaySettings, now: Callable[[], float] = time.time
    ) -> None:
        self._replicas = replicas
        self._settings = settings.readiness
        self._progress = Progress(settings.readiness.stall_s)
        self._executor = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")
        self._now = now
        self._phase = Phase.LOADING
        self._changed = asyncio.Event()
        self._served: ServedModel | None = None
        self._num_slots = 0

    @property
    def phase(self) -> Phase:
        """Where the model stands."""
        return self._phase

    @property
    def name(self) -> str | None:
        """Of the model; None before a replica told it."""
        return self._served.info.model.name if self._served else None

    @property
    def num_slots(self) -> int:
        """Sequences that the replicas which answer compute together."""
        return self._num_slots

    def require(self) -> ServedModel:
        """The model, or `Unavailable` with the reason why nobody can serve it now."""
        if self._phase is not Phase.READY or self._served is None:
            raise Unavailable(self._phase.value)
        return self._served

    def known(self) -> ServedModel:
        """The model as last seen, also while nobody can serve it; `Unavailable` before that."""
        if self._served is None:
            raise Unavailable(self._phase.value)
        return self._served

    def drain(self) -> None:
        """From now on nothing new is served."""
        self._enter(Phase.DRAINING)

    async def changed_from(self, phase: Phase) -> Phase:
        """Waits until the phase is another than the one given."""
        while self._phase is phase:
            await self._changed.wait()
        return self._phase

    async def follow(self) -> None:
        """Asks the replicas again and again, until cancelled or draining."""
        while self._phase is not Phase.DRAINING:
            self._enter(await self._observe())
            await asyncio.sleep(self._settings.poll_interval_s)

    def close(self) -> None:
        """Lets go of the tokenizer threads."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _observe(self) -> Phase:
        try:
            async with asyncio.timeout(self._settings.poll_timeout_s):
                loads = await self._replicas.load()
                if loads and self._phase is not Phase.READY:
                    await self._learn(await self._replicas.info())
        except (OttserveError, TimeoutError) as error:
            log.debug("replicas do not answer", error=str(error) or type(error).__name__)
            loads = ()
        self._num_slots = sum(load.slots_total for load in loads)
        if not loads:
            return Phase.NO_REPLICA if self._served else Phase.LOADING
        stalled = [self._progress.is_stalled(load, self._now()) for load in loads]
        return Phase.STALLED if all(stalled) else Phase.READY

    async def _learn(self, info: ReplicaInfo) -> None:
        if self._served is None or self._served.info.tokenizer != info.tokenizer:
            tokenizer = await asyncio.to_thread(Tokenizer, info.tokenizer, self._executor)
        else:
            tokenizer = self._served.tokenizer
        self._served = ServedModel(info, tokenizer, self._replicas)

    def _enter(self, phase: Phase) -> None:
        if phase is self._phase or self._phase is Phase.DRAINING:
            return
        log.info("phase", model=self.name, before=self._phase.name, after=phase.name, reason=phase.value)
        self._phase = phase
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
