"""Outliers that are looked at late are those of the moment at which they were taken."""

from __future__ import annotations

import torch

from ottserve.workers.core.moves import Snapshot
from ottserve.workers.engine.snapshots import Snapshots
from ottserve.workers.kv.snapshot import OUTLIER_ROWS, copy_outliers
from ottserve.workers.kv.store import KVStore


def spoil(store: KVStore, slot_id: int) -> None:
    """What another sequence may leave in the slot."""
    for name in (*OUTLIER_ROWS, "outlier_count", "frozen"):
        getattr(store.slots, name)[:, slot_id] = 1


def sealed_store(make_random_engine, make_task, run_to_end) -> tuple[KVStore, int]:
    """A store in which some slot has the outliers of two pages."""
    engine = make_random_engine(max_running=1)
    run_to_end(engine, make_task(range(80), max_new=2))
    store = engine._store
    [slot_id] = store.slots.outlier_count.amax((0, 2)).nonzero().flatten().tolist()
    return store, slot_id


def test_a_snapshot_is_of_when_it_was_taken(make_random_engine, make_task, run_to_end):
    store, slot_id = sealed_store(make_random_engine, make_task, run_to_end)
    store.slots.frozen[1, slot_id] = True
    expected, snapshot, snapshots = copy_outliers(store, slot_id), Snapshot(num_pages=2), Snapshots(store)
    snapshots.take(slot_id, snapshot)
    spoil(store, slot_id)
    assert snapshot.tensors is None and snapshot.num_bytes >= expected.num_bytes - 100
    assert snapshot.restores(2)  # whoever asks waits for it
    found = snapshot.tensors
    assert snapshot.num_certain_pages == expected.num_certain_pages(2, store.spec.group)
    assert snapshot.num_bytes == expected.num_bytes
    assert torch.equal(found.counts, expected.counts) and torch.equal(found.frozen, expected.frozen)
    for name in OUTLIER_ROWS:
        assert torch.equal(found.rows[name], expected.rows[name])
    assert int(found.counts.max()) == found.rows["outlier_k"].shape[2] > 0


def test_one_that_nobody_asks_for_is_looked_at_when_it_has_arrived(make_random_engine, make_task, run_to_end):
    store, slot_id = sealed_store(make_random_engine, make_task, run_to_end)
    snapshots, late, early = Snapshots(store), Snapshot(num_pages=2), Snapshot(num_pages=2)
    snapshots.take(slot_id, late)
    snapshots.take(slot_id, early)

    class NotYet:
        has_come = False

        def query(self) -> bool:
            return self.has_come

        def synchronize(self) -> None:
            self.has_come = True

    waiting = snapshots._on_the_way[0]._arrived = NotYet()
    snapshots.settle()
    assert late.tensors is None and early.tensors is not None
    assert len(snapshots._on_the_way) == 1
    waiting.has_come = True
    snapshots.settle()
    assert late.tensors is not None and snapshots._on_the_way == []
