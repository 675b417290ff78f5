"""The asyncio face of the engine: one `Stream` a request, so that a slow reader holds nobody up.

Knows neither Ray nor gRPC. The thread itself is in `engine_thread.py`.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import time
from collections.abc import AsyncGenerator, Callable

import structlog

from ottserve.workers.api import (
    DeadlineExceeded,
    GenerationTask,
    Internal,
    OttserveError,
    TextChunk,
    Unavailable,
)
from ottserve.workers.core.counters import EngineCounters
from ottserve.workers.engine_thread import (
    EngineFacts,
    EngineLike,
    EngineThread,
    Event,
    OnStep,
    Reading,
    Ticket,
)
from ottserve.workers.newcomers import Newcomers
from ottserve.workers.progress import Progress
from ottserve.workers.stream import Stream

log = structlog.get_logger("ottserve.loop")

MAX_FAILED_STEPS = 3


class Phase(enum.Enum):
    """Where the life of a loop stands. It only ever moves down this list."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


def _say_nothing(message: str) -> None:
    """Progress that nobody wants to hear."""


def _record_nothing(duration_s: float, counters: EngineCounters) -> None:
    """A step that nobody measures."""


class EngineLoop:
    """An engine that coroutines can use. Make and use it on one event loop.

    Attributes:
        phase: what may be asked of it now.
    """

    def __init__(
        self,
        load: Callable[[Progress], EngineLike],
        *,
        message_interval_s: float = 0.02,
        progress: Progress = _say_nothing,
        on_step: OnStep = _record_nothing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start to load. `load`, `progress` and `on_step` are called on the engine thread."""
        self.phase = Phase.LOADING
        self._interval_s = message_interval_s
        self._clock = clock
        self._events = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineFacts] = self._events.create_future()
        self._streams: dict[Ticket, Stream] = {}
        self._newcomers = Newcomers()
        self._share = 1.0
        self._idle = asyncio.Event()
        self._idle.set()
        self._advanced_at = clock()
        self._thread = EngineThread(load, _Bridge(self, self._events), progress, on_step)
        self._thread.start()

    async def ready(self) -> EngineFacts:
        """Wait until the engine has loaded. Raises what loading raised."""
        return await asyncio.shield(self._ready)

    async def generate(self, task: GenerationTask) -> AsyncGenerator[TextChunk, None]:
        """Run a task and yield what it makes, at most one chunk a sample per message interval.

        Leaving the generator early aborts the task. Raises `OttserveError`: the engine's own, `Unavailable` when not
        ready, `DeadlineExceeded`.
        """
        if self.phase is not Phase.READY:
            raise Unavailable(f"the replica is {self.phase.value}")
        ticket = Ticket(task)
        stream = self._open(ticket)
        limit = self._end_at_deadline(ticket)
        num_open = task.n
        try:
            while num_open:
                chunk = await stream.take()
                num_open -= chunk.finish is not None
                yield chunk
        finally:
            if limit is not None:
                limit.cancel()
            self._close(ticket)

    async def abort(self, request_id: str) -> bool:
        """End a request with finish reason ABORTED. False when no live request has this id."""
        return bool(await self._ask(functools.partial(self._thread.abort, request_id)))

    async def flush_cache(self) -> int:
        """Drop the cached pages that no live request uses, and tell how many."""
        return await self._ask(self._thread.flush_cache)

    @property
    def reading(self) -> Reading | None:
        """What the engine thread last reported, with whoever came since as waiting; None until it first did.

        The same for all who tell of the replica. Any thread may ask.
        """
        return self._newcomers.reading

    def stalled_for_s(self) -> float:
        """Seconds since the last step while work is pending; 0 when nothing is pending, however long that has been."""
        return self._clock() - self._advanced_at if self._streams else 0.0

    @property
    def broken(self) -> bool:
        """Whether the engine thread has died, or its last steps have failed and none of them gave a token."""
        died = self.phase is not Phase.STOPPED and not self._thread.is_alive
        return died or self._thread.num_failed_steps >= MAX_FAILED_STEPS

    def close(self) -> None:
        """End every task and the thread, without waiting for the step that is being computed. Twice is once."""
        self.phase = Phase.STOPPED
        self._thread.stop()
        self.end_all(Unavailable("the replica has stopped"))

    async def stop(self, grace_s: float) -> None:
        """Refuse new tasks, let running ones finish for at most `grace_s` seconds, then close and wait for the end."""
        self.phase = Phase.DRAINING
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except TimeoutError:
            log.warning("grace time is over", num_ended=len(self._streams), grace_s=grace_s)
        self.close()
        await asyncio.to_thread(self._thread.join)

    def loaded(self, facts: EngineFacts) -> None:
        """The engine is ready."""
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY
        self._ready.set_result(facts)

    def failed_to_load(self, error: Exception) -> None:
        """There will be no engine."""
        self._ready.set_exception(error)
        self._ready.exception()  # retrieved here, so that a loop nobody waits for does not warn

    def advanced(self, events: list[tuple[Ticket, Event]], reading: Reading) -> None:
        """The engine did something; hand out what came of it."""
        self._advanced_at = self._clock()
        self._newcomers.hear(reading)
        for ticket, event in events:
            stream = self._streams.get(ticket)
            if stream is None:
                continue
            stream.put(event)
            if stream.ended:
                self._forget(ticket)

    def end_all(self, error: OttserveError) -> None:
        """End every live stream with an error."""
        for ticket, stream in tuple(self._streams.items()):
            stream.put(error)
            self._forget(ticket)

    def _open(self, ticket: Ticket) -> Stream:
        if not self._streams:
            self._advanced_at = self._clock()
        stream = self._streams[ticket] = Stream(
            ticket.task.request_id, self._interval_s, self._clock, ticket.task.n, self._num_carried
        )
        self._newcomers.come(ticket)
        self._share = max(1.0, ticket.task.num_streams / len(self._streams))
        self._idle.clear()
        self._thread.submit(ticket)
        return stream

    def _num_carried(self) -> float:
        """Streams that the gateway carries, other replicas' included: as the newest task told, in proportion since."""
        return len(self._streams) * self._share

    def _end_at_deadline(self, ticket: Ticket) -> asyncio.TimerHandle | None:
        if ticket.task.deadline_at is None:
            return None
        return self._events.call_later(ticket.task.deadline_at - time.time(), self._end_late, ticket)

    def _end_late(self, ticket: Ticket) -> None:
        """End a stream at its deadline. What it holds is free at once, even if its reader takes nothing any more."""
        if stream := self._streams.get(ticket):
            stream.put(DeadlineExceeded("the deadline passed before the answer was complete"))
            self._close(ticket)

    def _close(self, ticket: Ticket) -> None:
        if ticket in self._streams:
            self._thread.withdraw(ticket)
            self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        del self._streams[ticket]
        self._newcomers.leave(ticket)
        if not self._streams:
            self._idle.set()

    async def _ask(self, question: Callable[[Callable[[int], object]], None]) -> int:
        """Put a question to the thread and wait for its answer. Raises `Unavailable` when there is none to ask."""
        if self.phase in (Phase.LOADING, Phase.STOPPED) or not self._thread.is_alive:
            raise Unavailable(f"the replica is {self.phase.value}")
        answer: asyncio.Future[int] = self._events.create_future()

        def hear(value: int) -> None:
            if not answer.done():
                answer.set_result(value)

        question(lambda value: self._events.call_soon_threadsafe(hear, value))
        return await answer


class _Bridge:
    """Carries the thread's events over to the event loop."""

    def __init__(self, inside: EngineLoop, events: asyncio.AbstractEventLoop) -> None:
        self._inside = inside
        self._post = events.call_soon_threadsafe

    def loaded(self, facts: EngineFacts) -> None:
        self._post(self._inside.loaded, facts)

    def failed_to_load(self, error: Exception) -> None:
        self._post(self._inside.failed_to_load, error)

    def advanced(self, events: list[tuple[Ticket, Event]], reading: Reading) -> None:
        self._post(self._inside.advanced, events, reading)

    def broke_down(self) -> None:
        self._post(self._inside.end_all, Internal("the engine has failed", "engine_failed"))
