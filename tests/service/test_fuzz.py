"""The gateway withstands malformed requests, and the fuzzer finds one that does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ottserve.loadtest import fuzz as fuzzer
from ottserve.loadtest.fuzz import Fuzzing, fuzz
from ottserve.loadtest.malformed import SERVICE, attempt
from ottserve.workers import api


@pytest.fixture(autouse=True)
def idle(replicas: Any) -> None:
    """Replicas that hold nothing."""
    replicas.loads = tuple(replace(load, pages_used=0) for load in replicas.loads)


async def test_it_withstands_malformed_requests(gateway: Any) -> None:
    outcome = await fuzz(Fuzzing(f"127.0.0.1:{gateway.server.port}", range(500), timeout_s=2.0))
    assert outcome.problems == []
    assert sum(outcome.codes.values()) == 500
    seen = {code for _, code in outcome.codes}
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND"} <= seen
    assert {method for method, _ in outcome.codes} == {method.name for method in SERVICE.methods}


async def test_a_fault_is_found_and_can_be_sent_again(gateway: Any, replicas: Any) -> None:
    replicas.failures = [(0, RuntimeError("broken"))] * 10_000
    outcome = await fuzz(Fuzzing(f"127.0.0.1:{gateway.server.port}", range(40)))
    [first, *_, last] = outcome.problems
    assert "INTERNAL" in first
    assert "a sound call failed" in last
    number = int(first.split()[1])
    assert attempt(0, number) == attempt(0, number)
    again = await fuzz(Fuzzing(f"127.0.0.1:{gateway.server.port}", (number,)))
    assert again.problems[0].startswith(f"attempt {number} of seed 0")


async def test_what_is_still_held_is_found(gateway: Any, replicas: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzer, "IDLE_WITHIN_S", 0.1)
    replicas.loads = tuple(replace(load, slots_used=1) for load in replicas.loads)
    outcome = await fuzz(Fuzzing(f"127.0.0.1:{gateway.server.port}", ()))
    assert "slots_used=1 at replica-0" in outcome.problems[0]


async def test_a_lost_replica_is_a_fault(gateway: Any, replicas: Any) -> None:
    replicas.failures = [(0, api.Unavailable("gone"))] * 10_000
    outcome = await fuzz(Fuzzing(f"127.0.0.1:{gateway.server.port}", range(40)))
    assert any("UNAVAILABLE" in problem for problem in outcome.problems)
