"""What a decode step reads, worked out once and used by every layer. Knows no query, key or value.

Only the reference takes it: on a CPU the bookkeeping of one layer costs as much as its arithmetic at short contexts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The live memory of N rows with U pages in all. Index tensors are int64.

    Attributes:
        page_ids: `[U]`, row after row, oldest first.
        page_rows: `[U]`, the row each page belongs to.
        slot_ids: `[N]`.
        tail_live: bool `[N, 1, X]`, whether ring index x < X holds a token; beyond X no row has one.
        empty_rows: `[n]`, the rows of length 0.
    """

    page_ids: Tensor
    page_rows: Tensor
    slot_ids: Tensor
    tail_live: Tensor
    empty_rows: Tensor


def plan_decode(
    page_table: Tensor, num_pages: Tensor, slot_ids: Tensor, lengths: Tensor, group: int, tail_capacity: int
) -> DecodePlan:
    """Plan a step from the arguments of `attend_decode`; `tail_capacity` is C. The same for every layer."""
    in_use = torch.arange(page_table.shape[1], device=page_table.device) < num_pages[:, None]
    oldest = (num_pages * group)[:, None]
    age = (torch.arange(tail_capacity, device=lengths.device) - oldest) % tail_capacity
    live = age < lengths[:, None] - oldest
    used = live.any(0).nonzero()
    return DecodePlan(
        page_ids=page_table[in_use].long(),
        page_rows=in_use.nonzero()[:, 0],
        slot_ids=slot_ids.long(),
        tail_live=live[:, None, : int(used.max()) + 1 if len(used) else 1],
        empty_rows=(lengths == 0).nonzero()[:, 0],
    )
