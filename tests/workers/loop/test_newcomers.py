"""The engine's reading, with those in it whom the engine has not told of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ottserve.workers.api import GenerationTask, LoadReport
from ottserve.workers.core.counters import EngineCounters
from ottserve.workers.engine_thread import Reading, Ticket
from ottserve.workers.newcomers import Newcomers

MakeTask = Callable[..., GenerationTask]
LOAD = LoadReport("", 1, 3, 70, 1, 0, 7, 8, 1, 3, 4, waiting={"pages": 1, "queue": 2}, num_waiting_samples=5)
TOLD = Reading(LOAD, EngineCounters(num_decode_steps=9))


def tickets(make_task: MakeTask) -> tuple[Ticket, Ticket]:
    """One of a sample and a prompt token, and one of three and ten."""
    return Ticket(make_task("a")), Ticket(replace(make_task("b"), n=3, prompt_ids=(1,) * 10))


def load_of(newcomers: Newcomers) -> LoadReport:
    assert newcomers.reading is not None
    return newcomers.reading.load


def test_nothing_is_told_before_the_engine_has_told_anything(make_task: MakeTask) -> None:
    newcomers = Newcomers()
    newcomers.come(Ticket(make_task()))
    assert newcomers.reading is None
    newcomers.hear(TOLD)
    assert load_of(newcomers).num_waiting == 4


def test_they_wait_in_the_queue_and_nothing_else_changes(make_task: MakeTask) -> None:
    newcomers = Newcomers()
    newcomers.hear(TOLD)
    for ticket in tickets(make_task):
        newcomers.come(ticket)
    waiting = {"pages": 1, "queue": 4}
    load = replace(LOAD, num_waiting=5, num_waiting_samples=9, num_waiting_tokens=81, waiting=waiting)
    assert newcomers.reading == replace(TOLD, load=load)
    assert load.num_waiting == sum(load.waiting.values())
    assert LOAD.waiting == {"pages": 1, "queue": 2}, "a scrape may be reading what was told before"


def test_they_are_new_until_the_engine_has_told_of_them_or_they_have_left(make_task: MakeTask) -> None:
    newcomers = Newcomers()
    first, second = tickets(make_task)
    newcomers.hear(TOLD)
    newcomers.come(first)
    newcomers.come(second)
    newcomers.hear(TOLD)
    assert load_of(newcomers).num_waiting == 5, "a step that gave no new reading"
    newcomers.hear(replace(TOLD, tickets=frozenset({first})))
    assert load_of(newcomers).num_waiting_samples == 8
    newcomers.leave(first)
    assert load_of(newcomers).num_waiting_samples == 8, "the engine still has it in what it told"
    newcomers.leave(second)
    assert load_of(newcomers) == LOAD


def test_one_that_left_makes_up_for_none_that_came(make_task: MakeTask) -> None:
    """While a step hangs its caller leaves and another comes: both are in the engine's hands."""
    newcomers = Newcomers()
    first, second = tickets(make_task)
    newcomers.hear(replace(TOLD, tickets=frozenset({first})))
    newcomers.leave(first)
    newcomers.come(second)
    assert load_of(newcomers).num_waiting == 4
