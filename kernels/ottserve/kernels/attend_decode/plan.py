"""What a decode step reads, worked out once and used by every layer. Knows no query, key or value.

Only the reference takes it: on a CPU this bookkeeping would cost as much as the arithmetic of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The live memory of N rows with U pages in all, at most B a row. Index tensors are int64.

    Attributes:
        page_ids: `[U]`, row after row, oldest first.
        page_rows: `[U]`, the row each page belongs to.
        places: `[U]`, page_rows·B + the page's number in its row; None when every row has B pages.
        max_pages: B.
        slot_ids: `[N]`.
        tail_live: int32 `[N, 1, X, 1]`, all ones (−1) where ring index x < X holds a token, else 0.
        empty_rows: `[n]`, the rows of length 0; None when there are none.
    """

    page_ids: Tensor
    page_rows: Tensor
    places: Tensor | None
    max_pages: int
    slot_ids: Tensor
    tail_live: Tensor
    empty_rows: Tensor | None


def plan_decode(
    page_table: Tensor, num_pages: Tensor, slot_ids: Tensor, lengths: Tensor, group: int, tail_capacity: int
) -> DecodePlan:
    """Plan a step from the arguments of `attend_decode`; `tail_capacity` is C. The same plan serves every layer."""
    in_use = torch.arange(page_table.shape[1], device=page_table.device) < num_pages[:, None]
    rows, numbers = in_use.nonzero(as_tuple=True)
    max_pages = int(in_use.any(0).sum())
    is_even = len(rows) == len(num_pages) * max_pages
    empty_rows = (lengths == 0).nonzero()[:, 0]
    return DecodePlan(
        page_ids=page_table[in_use].long(),
        page_rows=rows,
        places=None if is_even else rows * max_pages + numbers,
        max_pages=max_pages,
        slot_ids=slot_ids.long(),
        tail_live=_tail_live(num_pages * group, lengths, tail_capacity),
        empty_rows=empty_rows if len(empty_rows) else None,
    )


def _tail_live(oldest: Tensor, lengths: Tensor, tail_capacity: int) -> Tensor:
    """int32 `[N, 1, X, 1]` bit masks of the ring places that hold positions oldest … lengths−1; X is at least 1."""
    age = (torch.arange(tail_capacity, device=lengths.device) - oldest[:, None]) % tail_capacity
    live = age < (lengths - oldest)[:, None]
    used = live.any(0).nonzero()
    width = int(used.max()) + 1 if len(used) else 1
    return -live[:, None, :width, None].int()
