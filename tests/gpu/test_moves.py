"""What the scheduler decides between two steps does not make the host wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ottserve.workers.core.kvspec import KVSpec, LayerSpec
from ottserve.workers.core.moves import BeginFromSnapshot, CopySlot, Snapshot
from ottserve.workers.engine.snapshots import Snapshots
from ottserve.workers.kv.moves import carry_out
from ottserve.workers.kv.snapshot import Outliers, copy_outliers
from ottserve.workers.kv.store import KVStore

pytestmark = pytest.mark.gpu

SPEC = KVSpec("ott", (LayerSpec(pool=3),) * 2, 2, 64, group=32, window=8, evicted=5)


@pytest.fixture
def store(device: str) -> KVStore:
    """Slot 1 holds outliers; all of it is drawn."""
    store = KVStore(SPEC, 4, 3, torch.float16, torch.device(device))
    slots = store.slots
    for rows in (slots.outlier_k, slots.outlier_v, slots.outlier_score):
        rows.copy_(torch.randn_like(rows))
    slots.outlier_position.copy_(torch.arange(SPEC.places))
    slots.outlier_count[:, 1] = SPEC.places
    return store


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def the_same(one: Outliers, other: Outliers) -> bool:
    pairs = [(one.rows[name], other.rows[name]) for name in one.rows]
    return all(torch.equal(*pair) for pair in [*pairs, (one.counts, other.counts), (one.frozen, other.frozen)])


def test_a_prompt_begins_from_a_snapshot(store: KVStore) -> None:
    taken = copy_outliers(store, 1)
    snapshot = Snapshot(num_pages=1, tensors=taken, num_certain_pages=1)
    with waiting_is_an_error():
        carry_out(store, [BeginFromSnapshot(2, 1, snapshot)])
    assert the_same(copy_outliers(store, 2), taken)


def test_a_snapshot_is_taken_and_a_slot_copied(store: KVStore) -> None:
    snapshot, taken = Snapshot(num_pages=1), copy_outliers(store, 1)
    with waiting_is_an_error():
        Snapshots(store).take(1, snapshot)
        carry_out(store, [CopySlot(1, 2)])
    assert snapshot.restores(1)
    assert isinstance(snapshot.tensors, Outliers) and the_same(snapshot.tensors, taken)
    assert the_same(copy_outliers(store, 2), taken)
