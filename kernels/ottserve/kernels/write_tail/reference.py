"""Writing tails in PyTorch. Knows no page."""

from __future__ import annotations

import torch
from torch import Tensor

from ottserve.kernels.slots import Slots


def write_tail(slots: Slots, keys: Tensor, values: Tensor, slot_ids: Tensor, positions: Tensor) -> None:
    """See `ottserve.kernels.write_tail.write_tail`."""
    slot_ids = slot_ids.long()
    ring = (positions % slots.tail_k.shape[2]).long()
    slots.tail_k[slot_ids, :, ring] = narrow(keys, slots.tail_k.dtype)
    slots.tail_v[slot_ids, :, ring] = narrow(values, slots.tail_v.dtype)


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`, saturating: one overflowing element must not become infinite and spoil a whole group."""
    if x.dtype == dtype:
        return x
    limit = torch.finfo(dtype).max
    return x.float().clamp(-limit, limit).to(dtype)
