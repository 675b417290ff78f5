"""Snapshots taken without waiting for the device: copies begin at once, and are looked at when somebody asks.

A snapshot is taken whenever a prompt or an answer ends. To wait for it would be to wait for the step that the device is
computing, and to leave the device without work afterwards. Knows no sequence and no page.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ottserve.workers.core.moves import Snapshot
from ottserve.workers.kv.snapshot import OUTLIER_ROWS, Outliers
from ottserve.workers.kv.store import KVStore


class Snapshots:
    """The outliers of slots on their way to host memory."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._on_the_way: list[_OnTheWay] = []

    def take(self, slot_id: int, snapshot: Snapshot) -> None:
        """Begin to copy the outliers of a slot as they are after all that the device was given; returns at once."""
        self._on_the_way.append(_OnTheWay(self._store, slot_id, snapshot))

    def settle(self) -> None:
        """Finish those that have arrived, so that page-locked memory is held no longer than needed."""
        self._on_the_way = [each for each in self._on_the_way if not each.is_settled()]


class _OnTheWay:
    """The outliers of one slot, every row there is room for: how many are in use is among what is copied."""

    @torch.inference_mode()
    def __init__(self, store: KVStore, slot_id: int, snapshot: Snapshot) -> None:
        slots = store.slots
        self._group = store.spec.group
        self._snapshot = snapshot
        self._rows = {name: begin_copy(getattr(slots, name)[:, slot_id]) for name in OUTLIER_ROWS}
        self._counts, self._frozen = (begin_copy(of_all[:, slot_id]) for of_all in (slots.outlier_count, slots.frozen))
        self._arrived: torch.cuda.Event | None = None
        if store.device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        snapshot.num_bytes = sum(rows.nbytes for rows in self._rows.values())
        snapshot.settle = self._settle

    def is_settled(self) -> bool:
        """Whether it was looked at, which is done if it has arrived."""
        if self._snapshot.settle is not None and (self._arrived is None or self._arrived.query()):
            self._settle()
        return self._snapshot.settle is None

    @torch.inference_mode()
    def _settle(self) -> None:
        """Wait for it, and keep what is in use, in memory that is not page-locked."""
        if self._arrived is not None:
            self._arrived.synchronize()
        width = int(self._counts.max())
        rows = {name: rows[:, :, :width].clone() for name, rows in self._rows.items()}
        outliers, snapshot = Outliers(rows, self._counts.clone(), self._frozen.clone()), self._snapshot
        snapshot.num_certain_pages = outliers.num_certain_pages(snapshot.num_pages, self._group)
        snapshot.tensors, snapshot.num_bytes = outliers, outliers.num_bytes
        snapshot.settle = None


def begin_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory, complete once the device has come so far."""
    if not tensor.is_cuda:
        return tensor.clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
