"""The thread that owns the engine, and its inbox.

Between steps it reads the inbox (new tasks, aborts); after each step it posts all that came out in one call.
Knows neither Ray nor asyncio's streams, nor what a step computes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from ottserve.workers.api import (
    STEP_REASONS,
    DuplicateRequest,
    GenerationTask,
    Internal,
    LoadReport,
    ModelInfo,
    OttserveError,
    ServerInfo,
    TextChunk,
    TokenizerFiles,
)
from ottserve.workers.core.counters import EngineCounters
from ottserve.workers.progress import Progress

log = structlog.get_logger("ottserve.engine_thread")

READING_INTERVAL_S = 0.1
"""While steps are made, the reading that listeners are given is at most so old."""

Event = TextChunk | OttserveError
OnStep = Callable[[float, EngineCounters], None]


class EngineLike(Protocol):
    """What the thread needs of an engine. Only that thread calls it."""

    @property
    def model_info(self) -> ModelInfo: ...
    @property
    def server_info(self) -> ServerInfo: ...
    @property
    def tokenizer_files(self) -> TokenizerFiles: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def counters(self) -> EngineCounters: ...

    def add(self, task: GenerationTask) -> None:
        """Queue a task. Raises `OttserveError` and queues nothing when it can't be taken."""
        ...

    def abort(self, request_id: str) -> bool:
        """Free what a request holds. Its last chunk, ABORTED, comes out of the next step. False if it isn't live."""
        ...

    def flush_cache(self) -> int:
        """Drop cached pages that no live request uses; how many there were."""
        ...

    def step(self) -> list[tuple[str, Event]]:
        """Advance. A request ends with the last of n chunks that carry `finish`, or with an error of its own."""
        ...

    def load_report(self) -> LoadReport: ...

    def close(self) -> None:
        """Be told that nothing else will be asked. Returns at once."""
        ...


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine tells once, when it has loaded."""

    model: ModelInfo
    server: ServerInfo
    tokenizer: TokenizerFiles


@dataclass(frozen=True, slots=True)
class Reading:
    """Load and counters of one moment, taken by the engine thread and read by anyone.

    Attributes:
        tickets: of the requests that the engine had.
    """

    load: LoadReport
    counters: EngineCounters
    tickets: frozenset[Ticket] = frozenset()


class Listener(Protocol):
    """Who hears of the thread's events. Called on the thread, so each must hand over and return at once."""

    def loaded(self, facts: EngineFacts) -> None: ...
    def failed_to_load(self, error: Exception) -> None: ...
    def advanced(self, events: list[tuple[Ticket, Event]], reading: Reading) -> None: ...
    def broke_down(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """One submission. Two submissions of one request id are two tickets, so a late event finds its own reader."""

    task: GenerationTask


@dataclass(frozen=True, slots=True)
class _Withdraw:
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str
    answer: Callable[[int], object]


@dataclass(frozen=True, slots=True)
class _Flush:
    answer: Callable[[int], object]


class _Stop:
    """The last message of an inbox."""


class EngineThread:
    """An engine on a thread of its own. The methods may be called from any thread and return at once.

    Attributes:
        num_failed_steps: steps that failed since one last gave a token.
    """

    def __init__(self, load: Callable[[Progress], EngineLike], listener: Listener, progress: Progress, on_step: OnStep):
        """`load`, `progress` and `on_step` run on the thread; an `on_step` that raises is not called again."""
        self.num_failed_steps = 0
        self._load = load
        self._listener = listener
        self._progress = progress
        self._on_step: OnStep | None = on_step
        self._inbox: queue.SimpleQueue[Ticket | _Withdraw | _Abort | _Flush | _Stop] = queue.SimpleQueue()
        self._tickets: dict[str, Ticket] = {}
        self._num_open: dict[Ticket, int] = {}
        self._withdrawn: set[str] = set()
        self._reading: Reading | None = None
        self._reading_at = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, ticket: Ticket) -> None:
        """Run a task; its events come with this very ticket."""
        self._inbox.put(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """Abort a submission that nobody reads any more. No further event of it comes."""
        self._inbox.put(_Withdraw(ticket))

    def abort(self, request_id: str, answer: Callable[[int], object]) -> None:
        """Abort whatever has this id; `answer` hears whether something had."""
        self._inbox.put(_Abort(request_id, answer))

    def flush_cache(self, answer: Callable[[int], object]) -> None:
        """Drop unused cached pages; `answer` hears how many."""
        self._inbox.put(_Flush(answer))

    def stop(self) -> None:
        """End the thread after what was asked before. Work still running is left where it is."""
        self._inbox.put(_Stop())

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    def _run(self) -> None:
        try:
            engine = self._load(self._progress)
            self._report(engine, [])
            self._listener.loaded(EngineFacts(engine.model_info, engine.server_info, engine.tokenizer_files))
        except Exception as error:  # noqa: BLE001  whoever waits for the engine has to hear of it, whatever it is
            self._listener.failed_to_load(error)
            return
        try:
            while self._read_inbox(engine):
                if engine.has_work:
                    self._step(engine)
        except Exception:
            log.exception("the engine thread ends")
            self._listener.broke_down()
        finally:
            engine.close()

    def _read_inbox(self, engine: EngineLike) -> bool:
        """Do what has been asked since the last step; wait for something when there is no work. False at the end."""
        while not (self._inbox.empty() and engine.has_work):
            match self._inbox.get():
                case Ticket() as ticket:
                    self._add(engine, ticket)
                case _Withdraw(ticket):
                    self._withdraw(engine, ticket)
                case _Abort(request_id, answer):
                    answer(engine.abort(request_id))
                case _Flush(answer):
                    answer(engine.flush_cache())
                case _Stop():
                    return False
            if not engine.has_work:
                self._report(engine, [])
        return True

    def _add(self, engine: EngineLike, ticket: Ticket) -> None:
        request_id = ticket.task.request_id
        if request_id in self._withdrawn and engine.has_work:
            self._step(engine)  # fetches the last chunk of the one before, or it would be taken for this one's
        try:
            if request_id in self._tickets:
                raise DuplicateRequest(f"request_id: {request_id!r} is in use by a live request")
            engine.add(ticket.task)
        except OttserveError as error:
            self._report(engine, [(ticket, error)])
        else:
            self._tickets[request_id] = ticket
            self._num_open[ticket] = ticket.task.n

    def _withdraw(self, engine: EngineLike, ticket: Ticket) -> None:
        request_id = ticket.task.request_id
        if self._tickets.get(request_id) is ticket:
            self._forget(ticket)
            self._withdrawn.add(request_id)
            engine.abort(request_id)

    def _step(self, engine: EngineLike) -> None:
        self._withdrawn.clear()
        began = time.perf_counter()
        try:
            results = engine.step()
        except Exception:
            log.exception("a step failed", num_requests=len(self._tickets))
            self.num_failed_steps += 1
            results = self._give_up_all(engine)
        else:
            self._judge([event for _, event in results])
        self._observe(time.perf_counter() - began, engine.counters)
        self._report(engine, [entry for result in results if (entry := self._addressed(*result))])

    def _judge(self, events: list[Event]) -> None:
        """A step that raised nothing has failed all the same if it ended those it was for and gave nobody a token.

        They have ended, so each failed step was for others than the one before.
        """
        if any(isinstance(event, TextChunk) and event.token_ids for event in events):
            self.num_failed_steps = 0
        elif any(isinstance(event, Internal) and event.reason in STEP_REASONS for event in events):
            self.num_failed_steps += 1

    def _give_up_all(self, engine: EngineLike) -> list[tuple[str, Event]]:
        """A step that raised as a whole tells not whose fault it was: all that were live end, later ones go on."""
        error = Internal("a step of the engine failed", "step_failed")
        for request_id in self._tickets:
            engine.abort(request_id)
        return [(request_id, error) for request_id in self._tickets]

    def _addressed(self, request_id: str, event: Event) -> tuple[Ticket, Event] | None:
        """The event with its ticket; None where nobody reads it any more."""
        ticket = self._tickets.get(request_id)
        if ticket is None:
            return None
        if isinstance(event, TextChunk) and event.finish:
            self._num_open[ticket] -= 1
        if isinstance(event, OttserveError) or self._num_open[ticket] == 0:
            self._forget(ticket)
        return ticket, event

    def _forget(self, ticket: Ticket) -> None:
        del self._tickets[ticket.task.request_id], self._num_open[ticket]

    def _observe(self, duration_s: float, counters: EngineCounters) -> None:
        if self._on_step is None:
            return
        try:
            self._on_step(duration_s, counters)
        except Exception:
            log.exception("step metrics are off from here on")
            self._on_step = None

    def _report(self, engine: EngineLike, events: list[tuple[Ticket, Event]]) -> None:
        now = time.monotonic()
        if self._reading is None or not engine.has_work or now - self._reading_at >= READING_INTERVAL_S:
            self._reading = Reading(engine.load_report(), engine.counters, frozenset(self._tickets.values()))
            self._reading_at = now
        self._listener.advanced(events, self._reading)
