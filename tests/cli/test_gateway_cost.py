"""The arithmetic of `ottserve bench-gateway`; what it starts is tested where services are started."""

from __future__ import annotations

import os
import time

import pytest

from ottserve.cli.gateway_cost import Cost, _cpu_s


def test_what_a_message_and_a_call_cost() -> None:
    cost = Cost(num_messages=2000, cpu_s=0.5, wall_s=3.0, bare_ms=4.0, through_ms=6.5)
    assert (cost.cpu_ms, cost.added_ms) == (0.25, 2.5)


def test_processor_time_is_that_of_all_threads() -> None:
    assert _cpu_s(os.getpid()) == pytest.approx(time.process_time(), abs=0.1)
