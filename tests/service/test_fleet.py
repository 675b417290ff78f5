"""What a gateway makes of reports and of silence, by a clock of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ottserve.service.fleet import Fleet
from ottserve.service.settings import RoutingSettings
from ottserve.workers import api

REPORT = api.LoadReport("a", 0, 0, 0, 0, 0, 8, 8, 0, 4, 4)
TASK = api.GenerationTask("r", (1, 2, 3), api.SamplingParams(), api.StopParams(3), 0.0)
LONG = replace(TASK, prompt_ids=(1,) * 9, stops=api.StopParams(16))  # 6 pages of 4 tokens


class Clock:
    """A time that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet(clock: Clock) -> Fleet:
    fleet = Fleet(RoutingSettings(lost_after_s=10.0), clock)
    fleet.block_tokens = 4
    return fleet


@pytest.fixture
def observe(fleet: Fleet, clock: Clock) -> Callable[..., None]:
    """Reports of replicas by id with the number they run; `silent` are asked too."""

    def observe(silent: str = "", **running: int) -> None:
        reports = [running_on(name, count) for name, count in running.items()]
        fleet.observe(reports, set(silent) | running.keys(), clock.now)

    return observe


def running_on(name: str, count: int) -> api.LoadReport:
    """By the report, slots are used and none is missing: what these tests are about is who counts them."""
    return replace(REPORT, replica_id=name, num_running=count, slots_used=count)


def nobody() -> None:
    pytest.fail("no stream was to be ended")


def test_nobody_is_named_before_anybody_reported(fleet: Fleet) -> None:
    with fleet.place(TASK, nobody) as replica_id:
        assert replica_id is None


def test_no_replica_is_unavailable(fleet: Fleet, observe: Any) -> None:
    observe()
    with pytest.raises(api.Unavailable), fleet.place(TASK, nobody):
        pass


def test_slots_that_others_wait_for_are_not_free(fleet: Fleet) -> None:
    """A request of three samples has not been begun on one replica, which has three slots left."""
    one, other = replace(REPORT, num_waiting=1, num_waiting_samples=3, slots_free=3), running_on("b", 3)
    fleet.observe([one, other], {"a", "b"}, 100.0)
    for number in range(8):  # whatever their prompts would draw
        with fleet.place(replace(LONG, prompt_ids=(number,) * 9), nobody) as replica_id:
            assert replica_id == "b"


def test_what_was_placed_counts_at_once_and_until_it_ends(fleet: Fleet, observe: Any) -> None:
    observe(a=0, b=1)
    with fleet.place(TASK, nobody) as first, fleet.place(TASK, nobody):
        assert first == "a"
        with fleet.place(TASK, nobody) as third:
            assert third is not None
    with fleet.place(TASK, nobody) as again:
        assert again == "a"


@pytest.mark.parametrize("task", [LONG, replace(TASK, n=3)])
def test_room_that_was_given_away_is_not_given_twice(fleet: Fleet, observe: Any, task: api.GenerationTask) -> None:
    """Of 8 pages and 4 slots, neither in the same moment nor when a report came that does not know of it yet."""
    observe(a=0, b=2)
    with fleet.place(task, nobody) as first, fleet.place(task, nobody) as second:
        assert {first, second} == {"a", "b"}
    with fleet.place(task, nobody) as first:
        observe(a=0, b=2)
        with fleet.place(task, nobody) as second:
            assert {first, second} == {"a", "b"}


def test_what_a_report_counts_is_not_counted_twice(fleet: Fleet, observe: Any, clock: Clock) -> None:
    observe(a=0)
    with fleet.place(TASK, nobody):
        clock.now += 1
        observe(a=1, b=2)
        with fleet.place(TASK, nobody) as second, fleet.place(TASK, nobody):
            assert second == "a"
            clock.now += 1
            observe(a=3, b=3)
            with fleet.place(TASK, nobody) as other:
                assert other in ("a", "b")


def test_who_came_just_before_a_report_is_not_counted_twice(fleet: Fleet, observe: Any, clock: Clock) -> None:
    """A report counts all that have come by then, its pages are older."""
    observe(a=0)
    with fleet.place(TASK, nobody), fleet.place(TASK, nobody):
        clock.now += 0.05
        waiting, busy = replace(REPORT, num_waiting=2, num_waiting_samples=2), running_on("b", 3)
        fleet.observe([waiting, busy], {"a", "b"}, clock.now)
        with fleet.place(TASK, nobody) as third:
            assert third == "a"


def test_a_request_is_as_many_as_its_samples(fleet: Fleet, observe: Any, clock: Clock) -> None:
    """Four samples of one's own weigh more than two of another's, before a report has them, while they wait and run."""
    four, of_four = replace(TASK, n=4), {"num_waiting": 1, "num_waiting_samples": 4}
    observe(a=0, b=2)
    with fleet.place(replace(four, request_id="four"), nobody) as first:
        assert first == "a"
        for report in (None, replace(REPORT, slots_free=8, **of_four), running_on("a", 4)):
            if report is not None:
                clock.now += 1
                fleet.observe([report, running_on("b", 2)], {"a", "b"}, clock.now)
            with fleet.place(TASK, nobody) as second, fleet.place(TASK, nobody) as third:
                assert (second, third) == ("b", "b")


def test_a_lost_replica_gets_nothing_until_it_reports(fleet: Fleet, observe: Any) -> None:
    observe(a=0, b=9)
    fleet.lose("a")
    with fleet.place(TASK, nobody) as replica_id:
        assert replica_id == "b"
    fleet.lose("b")
    with pytest.raises(api.Unavailable), fleet.place(TASK, nobody):
        pass
    observe(a=0, b=9)
    with fleet.place(TASK, nobody) as replica_id:
        assert replica_id == "a"


def test_who_left_the_roster_gets_nothing(fleet: Fleet, observe: Any) -> None:
    observe(a=0, b=9)
    with fleet.place(TASK, nobody, roster={"b"}) as replica_id:
        assert replica_id == "b"


def test_streams_of_a_silent_replica_end_and_no_others(fleet: Fleet, observe: Any, clock: Clock) -> None:
    observe(a=0)
    ended: list[str] = []
    with fleet.place(TASK, lambda: ended.append("a")):
        observe(a=1, b=0)
        with fleet.place(TASK, lambda: ended.append("b")):
            for _ in range(10):
                clock.now += 1
                observe(silent="a", b=1)
            assert ended == []
            clock.now += 1
            observe(silent="a", b=1)
            assert ended == ["a"]


def test_one_that_drains_is_not_silent(fleet: Fleet, observe: Any, clock: Clock) -> None:
    """Serve no longer lists it, and it finishes what it has."""
    observe(a=0)
    with fleet.place(TASK, nobody):
        for _ in range(30):
            clock.now += 1
            observe(b=0)


def test_silence_that_ends_is_forgotten(fleet: Fleet, observe: Any, clock: Clock) -> None:
    observe(a=0)
    with fleet.place(TASK, nobody):
        for turn in range(40):
            clock.now += 1
            observe(a=1) if turn % 9 == 8 else observe(silent="a")


def test_a_prompt_goes_where_its_beginning_is(fleet: Fleet, observe: Any) -> None:
    observe(a=0, b=0, c=0)
    chosen = set()
    for length in (9, 12, 30):
        with fleet.place(replace(TASK, prompt_ids=tuple(range(length))), nobody) as replica_id:
            chosen.add(replica_id)
    assert len(chosen) == 1
