"""Carries out the scheduler's moves on the store. Decides nothing; between two forward passes, in the given order."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ottserve.workers.core.moves import (
    BeginFromSnapshot,
    CopySlot,
    Move,
    RestoreSequence,
    SavedSequence,
    SaveSequence,
    Snapshot,
    TakeSnapshot,
)
from ottserve.workers.kv.snapshot import HostCopy, Outliers, copy_outliers, copy_slot, put_outliers
from ottserve.workers.kv.store import KVStore


@torch.inference_mode()
def carry_out(store: KVStore, moves: Iterable[Move]) -> None:
    """Do what the moves say.

    Raises:
        RuntimeError: something is to be restored that was never saved.
    """
    for move in moves:
        _carry_out(store, move)


def _carry_out(store: KVStore, move: Move) -> None:
    match move:
        case TakeSnapshot(slot_id, snapshot):
            outliers = copy_outliers(store, slot_id)
            snapshot.num_certain_pages = outliers.num_certain_pages(snapshot.num_pages, store.spec.group)
            snapshot.tensors, snapshot.num_bytes = outliers, outliers.num_bytes
        case BeginFromSnapshot(slot_id, num_pages, snapshot):
            is_last = num_pages == snapshot.num_pages
            tokens = num_pages * store.spec.group
            put_outliers(store, slot_id, _outliers(snapshot), tokens, keep_frozen=is_last)
        case SaveSequence(slot_id, page_ids, saved):
            copy = HostCopy.of(store, slot_id, page_ids)
            saved.tensors, saved.num_bytes = copy, copy.num_bytes
        case RestoreSequence(slot_id, page_ids, num_present, saved):
            _host_copy(saved).put(store, slot_id, page_ids, num_present)
        case CopySlot(from_slot_id, to_slot_id):
            copy_slot(store, from_slot_id, to_slot_id)


def _outliers(snapshot: Snapshot) -> Outliers:
    if not isinstance(snapshot.tensors, Outliers):
        raise RuntimeError("a snapshot is used that was never taken")
    return snapshot.tensors


def _host_copy(saved: SavedSequence) -> HostCopy:
    if not isinstance(saved.tensors, HostCopy):
        raise RuntimeError("a sequence is restored that was never saved")
    return saved.tensors
