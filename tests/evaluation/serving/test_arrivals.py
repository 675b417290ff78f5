"""Requests that come at a rate at a real engine, whose steps take a second each by a clock of the test's own."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from ottserve.evaluation.serving import arrivals
from ottserve.evaluation.serving.arrivals import Answer, Arrival, Offer, time_offer
from ottserve.evaluation.serving.times import p50_p99
from ottserve.workers.api import Internal, QueueFull, TextChunk
from ottserve.workers.core.counters import EngineCounters
from ottserve.workers.engine.engine import Engine
from ottserve.workers.engine.loading import load_engine
from ottserve.workers.settings import EngineSettings

STEP_S = 1.0


@dataclass
class Clock:
    """Goes on while somebody sleeps, or a step is computed."""

    now: float = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def time(self) -> float:
        """The real one: the engine compares deadlines with it."""
        return time.time()


@pytest.fixture(scope="module")
def loaded(toy_settings: EngineSettings) -> Engine:
    return load_engine(toy_settings, lambda message: None)


@pytest.fixture
def engine(loaded: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    clock, step = Clock(), loaded.step

    def timed_step() -> list:
        clock.now += STEP_S
        return step()

    monkeypatch.setattr(arrivals, "time", clock)
    monkeypatch.setattr(loaded, "step", timed_step)
    return loaded


def _arrival(due_s: float, num_answer: int, *, counts: bool = True, num_prompt: int = 5) -> Arrival:
    return Arrival(due_s, tuple(1 + position % 26 for position in range(num_prompt)), num_answer, counts)


def test_times_begin_when_a_request_is_due_and_what_comes_in_the_warm_up_counts_in_no_rate(engine: Engine) -> None:
    """The first one has its tokens at 1.5, 2.5 and 3.5 s; the second one at 11, 12, 13 and 14 s; the third one, which
    comes while a step is computed and whose prompt goes beside the second one's tokens, at 12 and 13 s.

    Prompts of 60 tokens seal one page each behind the window of 16.
    """
    early, first, second = (
        _arrival(0.5, 3, counts=False),
        _arrival(10.0, 4, num_prompt=60),
        _arrival(10.5, 2, num_prompt=60),
    )
    figures = time_offer(engine, Offer([early, first, second], warm_up_s=10.0, timeout_s=60.0))
    assert figures.tokens_per_s == 6 / 4
    assert (figures.first_token_p50_s, figures.first_token_p99_s) == (1.25, pytest.approx(1.495))
    assert (figures.inter_token_p50_s, figures.inter_token_p99_s) == (1.0, 1.0)
    assert figures.made_per_s == 9 / 14
    assert (figures.completed, figures.refused, figures.failed) == (3, 0, 0)
    assert (figures.sequences, figures.pages) == (2, 2)
    server = engine.server_info
    assert figures.kv_bytes == 2 * server.page_bytes + 2 * server.slot_bytes
    assert (figures.graph_share, figures.preemptions, figures.cached_tokens) == (0.0, 0, 0)
    assert not engine.has_work


def test_what_the_engine_refuses_stops_nothing_else(engine: Engine) -> None:
    """Three may wait before the first step; one is too long for any queue; the last one comes when all is over."""
    at_once = [_arrival(0.0, 2) for _ in range(5)]
    too_long, late = _arrival(0.0, 2, num_prompt=5000), _arrival(50.0, 2)
    figures = time_offer(engine, Offer([*at_once, too_long, late], warm_up_s=0.0, timeout_s=60.0))
    assert (figures.completed, figures.refused, figures.failed) == (4, 2, 1)
    assert (figures.sequences, figures.tokens_per_s) == (2, 8 / 52)


def test_an_answer_that_ends_with_an_error_has_failed(engine: Engine) -> None:
    figures = time_offer(engine, Offer([_arrival(1.0, 4)], warm_up_s=0.0, timeout_s=0.0))
    assert (figures.completed, figures.refused, figures.failed) == (0, 0, 1)
    assert (figures.tokens_per_s, figures.first_token_p50_s, figures.inter_token_p99_s) == (0.0, None, None)
    assert not engine.has_work


def test_where_nothing_comes_nothing_is_measured(engine: Engine) -> None:
    with_nobody = time_offer(engine, Offer([_arrival(2.0, 1, counts=False)], warm_up_s=3.0, timeout_s=60.0))
    assert (with_nobody.tokens_per_s, with_nobody.completed, with_nobody.made_per_s) == (0.0, 1, 1 / 3)
    assert (with_nobody.first_token_p50_s, with_nobody.graph_share) == (None, 0.0)


def test_tokens_that_come_together_share_their_time() -> None:
    answer = Answer(due=10.0, counts=True)
    for moment, num_tokens in ((12.0, 3), (13.0, 0), (14.0, 4)):
        answer.see(TextChunk("0", "", (7,) * num_tokens), moment)
    assert (answer.num_tokens, answer.first_token_s, answer.gaps_s) == (7, 2.0, [0.5] * 4)


def test_tokens_of_a_failed_answer_were_made_but_its_times_are_left_out() -> None:
    whole = Answer(0.0, True, num_tokens=3, first_token_s=1.0, gaps_s=[2.0, 2.0], tokens_at=5.0)
    broken = Answer(0.0, True, num_tokens=2, first_token_s=9.0, gaps_s=[9.0], tokens_at=20.0, error=Internal("x"))
    refused = Answer(0.0, False, error=QueueFull("full"))
    counters = (
        EngineCounters(),
        EngineCounters(num_decode_steps=8, num_mixed_steps=2, num_mixed_graph_steps=1, num_preemptions=1),
    )
    figures = arrivals._figures([whole, broken, refused], 10.0, 40.0, *counters, arrivals._Held())
    assert figures.tokens_per_s == 5 / 10
    assert (figures.first_token_p99_s, figures.inter_token_p99_s) == (1.0, 2.0)
    assert (figures.completed, figures.refused, figures.failed) == (1, 1, 1)
    assert (figures.graph_share, figures.preemptions) == (0.1, 1)
    without_steps = arrivals._figures([refused], 10.0, 40.0, counters[0], counters[0], arrivals._Held())
    assert (without_steps.graph_share, without_steps.refused) == (None, 1)


def test_many_times_are_two_figures() -> None:
    assert p50_p99([]) == (None, None)
    assert p50_p99([3.0]) == (3.0, 3.0)
    assert p50_p99([float(number) for number in range(100, -1, -1)]) == (50.0, 99.0)
