"""Outliers and whole slots, copied out of the store and back. Knows no request and no reason.

Outlier rows are appended in order of position and never moved or rewritten (kernels/README.md). So the outliers as of
any page are the leading rows below its end, and one copy of a slot's rows serves every page that was sealed before it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ottserve.kernels.slots import Slots
from ottserve.workers.kv.store import KVStore

OUTLIER_ROWS = ("outlier_k", "outlier_v", "outlier_score", "outlier_position")


@dataclass(frozen=True, slots=True)
class Outliers:
    """The outliers of one slot, in host memory.

    Attributes:
        rows: by name (`OUTLIER_ROWS`), `[L, J, X, …]`; X is the most rows that a head has in use.
        counts: int32 `[L, J]`, rows in use.
        frozen: bool `[L, J]`.
    """

    rows: dict[str, Tensor]
    counts: Tensor
    frozen: Tensor

    @property
    def num_bytes(self) -> int:
        """Host memory."""
        return sum(tensor.nbytes for tensor in (*self.rows.values(), self.counts, self.frozen))

    def num_certain_pages(self, num_pages: int, group: int) -> int:
        """Leading pages, of the `num_pages` sealed so far, as of which it is known that no head was frozen.

        A frozen head admits nobody, so it was not frozen yet when its last outlier was admitted.
        """
        if not bool(self.frozen.any()):
            return num_pages
        last = self._in_use(self.rows["outlier_position"], -1).amax(-1)
        return int((last[self.frozen] // group + 1).min())

    def counts_at(self, num_tokens: int) -> Tensor:
        """int32 `[L, J]`: rows of positions below `num_tokens`."""
        positions = self._in_use(self.rows["outlier_position"], num_tokens)
        return (positions < num_tokens).sum(-1).int()

    def _in_use(self, positions: Tensor, else_value: int) -> Tensor:
        index = torch.arange(positions.shape[-1])
        return positions.where(index < self.counts[..., None], else_value)


def copy_outliers(store: KVStore, slot_id: int) -> Outliers:
    """The outliers of a slot as they are now."""
    slots = store.slots
    counts = _to_host(slots.outlier_count[:, slot_id])
    width = int(counts.max())
    rows = {name: _to_host(getattr(slots, name)[:, slot_id, :, :width]) for name in OUTLIER_ROWS}
    return Outliers(rows, counts, _to_host(slots.frozen[:, slot_id]))


def put_outliers(store: KVStore, slot_id: int, outliers: Outliers, num_tokens: int, *, keep_frozen: bool) -> None:
    """Give a slot the outliers that there were as of `num_tokens`, a multiple of G; its tail is left as it is.

    Does not wait for the device, since any prompt may begin so while a step is being computed.
    """
    slots = store.slots
    for name, rows in outliers.rows.items():
        getattr(slots, name)[:, slot_id, :, : rows.shape[2]] = _send(rows, store.device)
    slots.outlier_count[:, slot_id] = _send(outliers.counts_at(num_tokens), store.device)
    slots.frozen[:, slot_id] = _send(outliers.frozen, store.device) if keep_frozen else False


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A sequence in host memory: pages int16 `[l, n, J, W]` by run of layers, and a slot as tensors `[L, J, …]`."""

    pages: tuple[Tensor, ...]
    slot: Slots

    @property
    def num_bytes(self) -> int:
        """Host memory."""
        return sum(pages.nbytes for pages in self.pages) + self.slot.num_bytes

    @classmethod
    def of(cls, store: KVStore, slot_id: int, page_ids: tuple[int, ...]) -> HostCopy:
        """Copy pages and a slot to the host."""
        slot = Slots(*(_to_host(tensor[:, slot_id]) for tensor in _tensors(store.slots)))
        return cls(tuple(_to_host(run.pages[:, list(page_ids)]) for run in store.runs), slot)

    def put(self, store: KVStore, slot_id: int, page_ids: tuple[int, ...], num_present: int) -> None:
        """Copy them back, wherever that is now; the first `num_present` pages are left as they are."""
        for tensor, saved in zip(_tensors(store.slots), _tensors(self.slot), strict=True):
            tensor[:, slot_id] = saved.to(store.device)
        for run, pages in zip(store.runs, self.pages, strict=True):
            run.pages[:, list(page_ids[num_present:])] = pages[:, num_present:].to(store.device)


def copy_slot(store: KVStore, from_slot_id: int, to_slot_id: int) -> None:
    """Make one slot equal to another."""
    for tensor in _tensors(store.slots):
        tensor[:, to_slot_id] = tensor[:, from_slot_id]


def _tensors(slots: Slots) -> list[Tensor]:
    return [getattr(slots, field.name) for field in fields(slots)]


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, complete once the device has come so far; torch keeps page-locked memory until then."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, also of what lies there already."""
    return tensor.to("cpu", copy=True).contiguous()
