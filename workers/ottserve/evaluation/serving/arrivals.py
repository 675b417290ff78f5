"""Requests that come at a rate, at an engine alone, whether or not it keeps up. Draws none, and loads no engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ottserve.evaluation.serving.results import Figures
from ottserve.evaluation.serving.times import p50_p99
from ottserve.workers.api import GenerationTask, OttserveError, QueueFull, SamplingParams, StopParams, TextChunk
from ottserve.workers.core.counters import EngineCounters
from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine_thread import READING_INTERVAL_S


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Attributes:
        due_s: seconds from the beginning until it comes.
        num_answer: tokens that it asks for, and gets: the end token is ignored.
        counts: whether rates and times are of it, since it comes after the warm-up.
    """

    due_s: float
    prompt_ids: tuple[int, ...]
    num_answer: int
    counts: bool


@dataclass(frozen=True, slots=True)
class Offer:
    """All requests of a point, in the order in which they come.

    Attributes:
        warm_up_s: from the beginning to when requests begin to count.
        timeout_s: that a request may take.
    """

    arrivals: Sequence[Arrival]
    warm_up_s: float
    timeout_s: float


def time_offer(engine: Engine, offer: Offer) -> Figures:
    """Add each request when it is due, and read every answer to its end. Nothing runs in the engine before or after.

    Rates and times are of the requests that count; refusals and failures of all. The time to a first token begins when
    the request is due: as in a replica, it waits until the step that is being computed has ended.
    """
    answers: list[Answer] = []
    coming, held = deque(offer.arrivals), _Held()
    before, began = engine.counters, time.perf_counter()
    while coming or engine.has_work:
        while coming and began + coming[0].due_s <= time.perf_counter():
            answers.append(_add(engine, str(len(answers)), coming.popleft(), began, offer.timeout_s))
        if engine.has_work:
            events, moment = engine.step(), time.perf_counter()
            for request_id, event in events:
                answers[int(request_id)].see(event, moment)
            held.look(engine, moment)
        elif coming:
            time.sleep(max(0.0, began + coming[0].due_s - time.perf_counter()))
    took_s = time.perf_counter() - began
    return _figures(answers, began + offer.warm_up_s, took_s, before, engine.counters, held)


@dataclass(slots=True)
class Answer:
    """What became of one request.

    Attributes:
        due: when it was to come; as all moments by `time.perf_counter`.
        gaps_s: before each token but the first ones; those that come together share the time in equal parts.
        tokens_at: when the last ones came.
        error: what it was refused with, or ended by.
    """

    due: float
    counts: bool
    num_tokens: int = 0
    first_token_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    tokens_at: float = 0.0
    error: OttserveError | None = None

    def see(self, event: TextChunk | OttserveError, moment: float) -> None:
        """Take in what a step, which ended at this moment, brought forth."""
        if isinstance(event, OttserveError):
            self.error = event
        elif event.token_ids:
            num_tokens = len(event.token_ids)
            if self.first_token_s is None:
                self.first_token_s = moment - self.due
            else:
                self.gaps_s += [(moment - self.tokens_at) / num_tokens] * num_tokens
            self.num_tokens += num_tokens
            self.tokens_at = moment


@dataclass(slots=True)
class _Held:
    """The most that an engine was seen to hold; looked at as often as the service's replica looks."""

    running: int = 0
    pages: int = 0
    kv_bytes: int = 0
    look_at: float = 0.0

    def look(self, engine: Engine, moment: float) -> None:
        """Look now, if it is time."""
        if moment < self.look_at:
            return
        load, server = engine.load_report(), engine.server_info
        self.running, self.pages = max(self.running, load.num_running), max(self.pages, load.pages_used)
        self.kv_bytes = max(self.kv_bytes, load.pages_used * server.page_bytes + load.slots_used * server.slot_bytes)
        self.look_at = moment + READING_INTERVAL_S


def _add(engine: Engine, request_id: str, arrival: Arrival, began: float, timeout_s: float) -> Answer:
    answer, now = Answer(began + arrival.due_s, arrival.counts), time.time()
    stops = StopParams(arrival.num_answer, ignore_eos=True)
    greedy = SamplingParams(temperature=0.0)
    try:
        engine.add(GenerationTask(request_id, arrival.prompt_ids, greedy, stops, now, deadline_at=now + timeout_s))
    except OttserveError as error:
        answer.error = error
    return answer


def _figures(
    answers: Sequence[Answer], begin: float, took_s: float, before: EngineCounters, after: EngineCounters, held: _Held
) -> Figures:
    """`begin`: when requests began to count; `took_s`, `before` and `after` are of the whole time."""
    counted = [answer for answer in answers if answer.counts]
    completed = [answer for answer in counted if answer.error is None]
    end = max((answer.tokens_at for answer in counted), default=begin)
    first = p50_p99([answer.first_token_s for answer in completed if answer.first_token_s is not None])
    between = p50_p99([gap_s for answer in completed for gap_s in answer.gaps_s])
    num_steps = after.num_steps - before.num_steps
    num_graph_steps = after.num_graph_steps - before.num_graph_steps
    num_refused = sum(isinstance(answer.error, QueueFull) for answer in answers)
    num_completed = sum(answer.error is None for answer in answers)
    return Figures(
        tokens_per_s=sum(answer.num_tokens for answer in counted) / (end - begin) if end > begin else 0.0,
        made_per_s=(after.num_generated_tokens - before.num_generated_tokens) / took_s,
        first_token_p50_s=first[0],
        first_token_p99_s=first[1],
        inter_token_p50_s=between[0],
        inter_token_p99_s=between[1],
        sequences=held.running,
        pages=held.pages,
        kv_bytes=held.kv_bytes,
        graph_share=num_graph_steps / num_steps if num_steps else None,
        preemptions=after.num_preemptions - before.num_preemptions,
        cached_tokens=after.num_prompt_tokens_cached - before.num_prompt_tokens_cached,
        completed=num_completed,
        refused=num_refused,
        failed=len(answers) - num_completed - num_refused,
    )
