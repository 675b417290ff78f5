"""What a replica reports to the autoscaler."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ottserve.workers.api import LoadReport
from ottserve.workers.core.counters import EngineCounters
from ottserve.workers.demand import DemandMeter
from ottserve.workers.engine_thread import Reading

LOAD = LoadReport("r", 2, 3, 260, 4, 2, 4, 10, 2, 2, 4, num_waiting_samples=5)  # one of three waits for three slots
SERVER: Any = SimpleNamespace(group=128)


def reading(num_prompt_tokens: int, num_generated_tokens: int, load: LoadReport = LOAD) -> Reading:
    counters = EngineCounters(num_prompt_tokens_computed=num_prompt_tokens, num_generated_tokens=num_generated_tokens)
    return Reading(load, counters)


def test_used_and_waited_for_over_all_there_is() -> None:
    read = DemandMeter(lambda: 0.0).read(reading(0, 0), SERVER)
    assert read == {"kv_demand": (4 + 3) / 10, "slot_demand": (2 + 5) / 4, "queued_tokens": 260.0, "tokens_per_s": 0.0}
    assert all(type(value) is float for value in read.values()), "Serve turns the whole report off for another type"


def test_the_rate_is_of_times_with_work() -> None:
    now = 0.0
    meter = DemandMeter(lambda: now)
    idle = replace(LOAD, num_running=0)
    rates = []
    for now, report in ((2.0, reading(100, 100)), (12.0, reading(100, 100, idle)), (13.0, reading(300, 200))):  # noqa: B007
        rates.append(meter.read(report, SERVER)["tokens_per_s"])
    assert rates == [100.0, 100.0, 200.0]
