"""The state of the pools is told without waiting for a device: here one that is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ottserve.workers.engine import pools
from ottserve.workers.engine.pools import PoolWatch


class Store:
    """Of one layer, three slots and one head. Its state is how many places are in use; to wait for it is noted."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.slots = SimpleNamespace(outlier_count=torch.tensor([[[0], [0], [0]]]), frozen=torch.zeros(1, 3, 1))
        self.num_waits = 0

    def pool_state(self, slot_ids: list[int]) -> Any:
        self.num_waits += 1
        return self.state_of_pools(self.slots.outlier_count[:, slot_ids], self.slots.frozen[:, slot_ids])

    def state_of_pools(self, counts: torch.Tensor, frozen: torch.Tensor) -> Any:
        return int(counts.sum())

    def count(self, *numbers: int) -> None:
        self.slots.outlier_count = torch.tensor([[[number] for number in numbers]])


class Arrival:
    """Of a copy."""

    def __init__(self) -> None:
        self.has_come = False

    def query(self) -> bool:
        return self.has_come


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> list[Arrival]:
    """Of the copies that were begun."""
    begun: list[Arrival] = []

    def begin(watch: PoolWatch, slot_ids: Any) -> Any:
        begun.append(Arrival())
        slots = watch._store.slots
        return pools._OnTheWay(tuple(slot_ids), slots.outlier_count.clone(), slots.frozen.clone(), begun[-1])  # type: ignore[arg-type]

    monkeypatch.setattr(PoolWatch, "_begin", begin)
    return begun


def test_what_was_copied_is_told_once_it_is_there(arrivals: list[Arrival]) -> None:
    store: Any = Store("cuda")
    watch = PoolWatch(store)
    store.num_waits = 0
    store.count(9, 1, 2)
    assert watch.state([1, 2], may_wait=False) == 0
    store.count(9, 3, 4)
    assert watch.state([1], may_wait=False) == 0 and len(arrivals) == 1
    arrivals[0].has_come = True
    assert watch.state([1], may_wait=False) == 3, "of the slots in use when it began"
    arrivals[1].has_come = True
    assert watch.state([1], may_wait=False) == 3 and len(arrivals) == 3
    assert store.num_waits == 0


def test_who_may_wait_hears_of_now_and_nothing_older_later(arrivals: list[Arrival]) -> None:
    store: Any = Store("cuda")
    watch = PoolWatch(store)
    watch.state([1], may_wait=False)
    store.count(0, 5, 0)
    assert watch.state([1], may_wait=True) == 5
    arrivals[0].has_come = True
    assert watch.state([1], may_wait=False) == 5


def test_a_cpu_has_nothing_to_wait_for(arrivals: list[Arrival]) -> None:
    store: Any = Store("cpu")
    watch = PoolWatch(store)
    store.count(0, 5, 6)
    assert watch.state([1, 2], may_wait=False) == 11 and not arrivals
