"""How the number of replicas follows the load, on a fleet that is simulated and a clock that is a number."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ottserve.workers.autoscaling import DEAD_BAND, Demand, Outlook, Policy, Targets, decide, load

TARGETS = Targets(1, 8, kv_pressure=0.8, slot_pressure=0.8, queue_s=2.0, up_delay_s=5.0, down_delay_s=60.0)
IDLE = Demand(0.0, 0.0, 0.0, 0.0)

Load = Callable[[float], float]


def run(load_at: Load, duration_s: int, num_replicas: int = 1, targets: Targets = TARGETS) -> list[int]:
    """The number of replicas at each second."""
    outlook, numbers = Outlook(), []
    for now in range(duration_s):
        num_replicas, outlook = decide(num_replicas, load_at(now), outlook, targets, float(now))
        numbers.append(num_replicas)
    return numbers


def changes(numbers: list[int]) -> list[int]:
    return [after - before for before, after in pairwise(numbers) if after != before]


@pytest.mark.parametrize(
    ("demands", "expected"),
    [
        ([Demand(0.8, 0.1, 0, 100)], 1.0),
        ([Demand(0.1, 2.4, 0, 100)], 3.0),
        ([Demand(0.4, 0.4, 0, 100)] * 4, 2.0),
        ([Demand(0.1, 0.1, 900, 100), Demand(0.1, 0.1, 0, 200)], 900 / (150 * 2.0)),
        ([Demand(0.1, 0.1, 900, 0.0)], 0.125),
        ([IDLE, IDLE], 0.0),
    ],
)
def test_the_tightest_target_says_the_load(demands: list[Demand], expected: float) -> None:
    assert load(demands, TARGETS) == pytest.approx(expected)


@given(st.floats(0, 10), st.integers(1, 8), st.lists(st.floats(0.95, 1.05), min_size=40, max_size=40))
def test_no_flapping_under_a_steady_load_with_noise(steady: float, at_first: int, noise: list[float]) -> None:
    """However it starts: it goes one way, perhaps a step back once, then never moves again."""
    numbers = run(lambda now: steady * noise[int(now) % len(noise)], 1200, at_first)
    directions = [change > 0 for change in changes(numbers)]
    assert sum(one != other for one, other in pairwise(directions)) <= 1
    assert len(set(numbers[600:])) == 1


@given(st.floats(0, 10), st.integers(1, 8))
def test_in_the_end_there_are_enough_and_not_many_too_many(steady: float, at_first: int) -> None:
    last = run(lambda now: steady, 600, at_first)[-1]
    assert max(1, min(8, math.ceil(steady))) <= last
    assert last <= max(1, min(8, max(math.ceil(steady / (1 - DEAD_BAND)), math.ceil(steady))))


@given(st.lists(st.floats(0, 20), min_size=100, max_size=100), st.integers(2, 4), st.integers(4, 6))
def test_it_stays_within_its_bounds_and_grows_in_steps(loads: list[float], lowest: int, highest: int) -> None:
    targets = Targets(lowest, highest, 0.8, 0.8, 2.0, up_delay_s=2.0, down_delay_s=10.0)
    numbers = run(lambda now: loads[int(now)], 100, lowest, targets)
    assert all(lowest <= number <= highest for number in numbers)
    assert all(after <= 2 * before for before, after in pairwise(numbers))


@given(st.lists(st.floats(0, 3.5), min_size=90, max_size=90))
def test_two_removals_are_a_delay_apart_and_none_follows_a_need(loads: list[float]) -> None:
    targets = Targets(1, 8, 0.8, 0.8, 2.0, up_delay_s=3.0, down_delay_s=20.0)
    numbers = run(lambda now: loads[int(now)], 90, 6, targets)
    for now, (before, after) in enumerate(pairwise(numbers), start=1):
        if after < before:
            assert now >= 20
            assert all(math.ceil(load / (1 - DEAD_BAND) - 1e-9) <= max(1, after) for load in loads[now - 20 : now + 1])
    assert any(change < 0 for change in changes(numbers))


def test_a_peak_shorter_than_the_delay_moves_nothing() -> None:
    assert changes(run(lambda now: 8.0 if now % 10 < 5 else 0.5, 300)) == []


def test_a_lull_shorter_than_the_delay_moves_nothing() -> None:
    assert changes(run(lambda now: 0.0 if now % 70 < 59 else 4.0, 600, 4)) == []


def test_up_in_steps_then_down_to_the_least() -> None:
    numbers = run(lambda now: 7.5 if now < 100 else 0.0, 300)
    assert numbers[4:6] == [1, 2]
    assert max(numbers) == 8
    assert numbers[-1] == 1
    assert numbers.index(8) <= 20
    assert numbers[159] == 8
    assert numbers[160] == 1


def test_a_slow_swing_within_the_band_moves_nothing() -> None:
    """Slower than the delays, so that only the band holds it."""
    assert changes(run(lambda now: 2.05 if now % 400 < 200 else 1.95, 4000, 3)) == []


def test_a_load_at_the_edge_between_two_numbers_settles() -> None:
    assert len(changes(run(lambda now: 2.0 + 0.02 * (-1) ** int(now), 2000))) <= 2


class TestPolicy:
    """What Serve calls."""

    def ask(self, policy: Policy, now: float, num_replicas: int, **metrics: dict[str, float]) -> int:
        context = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=num_replicas, current_time=now)
        return policy(context)[0]

    def test_it_grows_where_replicas_are_full(self) -> None:
        policy = Policy(**vars(TARGETS))
        full = {"kv_demand": {"a": 1.0}, "slot_demand": {"a": 2.0}, "queued_tokens": {"a": 0}, "tokens_per_s": {"a": 9}}
        assert [self.ask(policy, now, 1, **full) for now in (0.0, 4.9, 5.0)] == [1, 1, 2]

    def test_it_stays_while_nobody_reports(self) -> None:
        policy = Policy(**vars(TARGETS))
        assert [self.ask(policy, now, 3) for now in (0.0, 1000.0)] == [3, 3]

    def test_a_replica_that_reports_half_is_left_out(self) -> None:
        policy = Policy(**vars(TARGETS))
        metrics = {"kv_demand": {"a": 9.0, "b": 0.0}, "slot_demand": {"b": 0.0}, "queued_tokens": {"b": 0.0}}
        metrics["tokens_per_s"] = {"b": 0.0}
        assert [self.ask(policy, now, 1, **metrics) for now in (0.0, 100.0)] == [1, 1]
