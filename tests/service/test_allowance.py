"""Tokens a minute, on a clock that moves when told."""

from __future__ import annotations

import pytest

from ottserve.service.allowance import Allowance


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_minutes_worth_at_once_and_then_evenly(clock: Clock) -> None:
    allowance = Allowance(clock)
    assert allowance.wait_s(600, 600) == 0
    allowance.spend(600)
    assert allowance.wait_s(50, 600) == pytest.approx(5.0)
    clock.now += 4.0
    assert allowance.wait_s(50, 600) == pytest.approx(1.0)
    clock.now += 1.0
    assert allowance.wait_s(50, 600) == 0


def test_what_was_not_used_is_there_again(clock: Clock) -> None:
    allowance = Allowance(clock)
    allowance.wait_s(1, 600)
    allowance.spend(600)
    allowance.spend(-550)
    assert allowance.wait_s(550, 600) == 0
    assert allowance.wait_s(551, 600) > 0


def test_nobody_saves_for_more_than_a_minute(clock: Clock) -> None:
    allowance = Allowance(clock)
    clock.now += 3600
    assert allowance.wait_s(600, 600) == 0
    allowance.spend(600)
    assert allowance.wait_s(1, 600) > 0


def test_a_rate_may_change(clock: Clock) -> None:
    allowance = Allowance(clock)
    allowance.spend(600)
    assert allowance.wait_s(60, 600) == pytest.approx(6.0)
    assert allowance.wait_s(60, 1200) == 0
