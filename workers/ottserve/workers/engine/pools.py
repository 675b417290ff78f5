"""The state of the pools for whoever asks now and then, told without waiting for the device. Knows no sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.workers.engine.snapshots import begin_copy
from ottserve.workers.kv.store import KVStore, PoolState


@dataclass(frozen=True, slots=True)
class _OnTheWay:
    """Counts and frozen heads of all slots, being copied, and the slots that were in use when the copy began."""

    slot_ids: Sequence[int]
    counts: Tensor
    frozen: Tensor
    arrived: torch.cuda.Event


class PoolWatch:
    """Tells what the last copy that has arrived said, and begins the next.

    Somebody asks ten times a second while steps are made. To wait for an answer would be to wait for the step that the
    device is computing, with its tokens not told yet, and to leave the device without work afterwards.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._known = store.pool_state([])
        self._on_the_way: _OnTheWay | None = None

    @torch.inference_mode()
    def state(self, slot_ids: Sequence[int], *, may_wait: bool) -> PoolState:
        """Of these slots, which are in use.

        Args:
            slot_ids: of all that are.
            may_wait: for the device, to tell of now; else of some time before.
        """
        if may_wait or self._store.device.type != "cuda":
            self._on_the_way = None
            self._known = self._store.pool_state(list(slot_ids))
            return self._known
        if self._on_the_way is None:
            self._on_the_way = self._begin(slot_ids)
        elif self._on_the_way.arrived.query():
            there, self._on_the_way = self._on_the_way, self._begin(slot_ids)
            ids = list(there.slot_ids)
            self._known = self._store.state_of_pools(there.counts[:, ids], there.frozen[:, ids])
        return self._known

    def _begin(self, slot_ids: Sequence[int]) -> _OnTheWay:
        slots = self._store.slots
        counts, frozen = begin_copy(slots.outlier_count), begin_copy(slots.frozen)
        arrived = torch.cuda.Event()
        arrived.record()
        return _OnTheWay(tuple(slot_ids), counts, frozen, arrived)
