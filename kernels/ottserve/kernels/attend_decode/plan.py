"""What a decode step reads, worked out once and used by every layer. Knows no query, key or value.

Only a CPU needs it: there this bookkeeping would cost more than the arithmetic of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

MAX_PADDING = 0.25
"""Share of pages that rows of one group may lack; a lacking page is computed like any other and then ignored."""

PAGES_TOGETHER = 32
"""Pages that several rows may have together to be one group: unpacked they should stay in cache."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """n rows of about as many pages, at most B each, computed together. Index tensors are int64.

    Attributes:
        rows: `[n]`, which rows of the step, ascending.
        slot_ids: `[n]`.
        page_ids: `[n·B]`, row after row, oldest first; where a row has fewer than B, its first page again.
        slot_run, page_run: the same ids as a slice, when they follow each other, so that nothing need be gathered.
        max_pages: B.
        lacking: bool `[n, 1, B·G]`, tokens of pages that a row lacks; None when no row lacks any.
        tail_runs: ring indices at which any of the rows has a token, ascending, V in all.
        tail_live: int32 `[n, 1, V, 1]`, all ones (−1) where a row has a token there, else 0; None where all have.
    """

    rows: Tensor
    slot_ids: Tensor
    page_ids: Tensor
    slot_run: slice | None
    page_run: slice | None
    max_pages: int
    lacking: Tensor | None
    tail_runs: tuple[slice, ...]
    tail_live: Tensor | None

    @property
    def num_tail_places(self) -> int:
        """V."""
        return sum(run.stop - run.start for run in self.tail_runs)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The groups of a step. A row of length 0 is in none of them."""

    groups: tuple[RowGroup, ...]


def plan_decode(
    page_table: Tensor,
    num_pages: Tensor,
    slot_ids: Tensor,
    lengths: Tensor,
    group: int,
    tail_capacity: int,
    num_new: int = 0,
) -> DecodePlan:
    """Plan a step from the arguments of `attend_decode`. The same plan serves every layer.

    Args:
        page_table, num_pages, slot_ids, lengths: as for `attend_decode`.
        group, tail_capacity: G and C.
        num_new: newest tokens of each row, counted in `lengths`, that are to be left out of the tails.
    """
    counts = num_pages.tolist()
    rows = [row for row, length in enumerate(lengths.tolist()) if length > 0]
    rows.sort(key=lambda row: -counts[row])
    groups = []
    while rows:
        most = counts[rows[0]]
        least = max(min(most, 1), most * (1 - MAX_PADDING))
        at_most = max(1, PAGES_TOGETHER // max(most, 1))
        num_members = sum(counts[row] >= least for row in rows[:at_most])
        members, rows = sorted(rows[:num_members]), rows[num_members:]
        index = torch.tensor(members, device=page_table.device)
        live = _tail_live(num_pages[index] * group, lengths[index] - num_new, tail_capacity)
        table = [page_table[row, : counts[row]].tolist() for row in members]
        groups.append(_row_group(index, slot_ids[index].long(), table, most, group, live))
    return DecodePlan(tuple(groups))


def _row_group(
    rows: Tensor, slot_ids: Tensor, table: list[list[int]], max_pages: int, group: int, tail_live: Tensor
) -> RowGroup:
    ids = [page_id for pages in table for page_id in pages + pages[:1] * (max_pages - len(pages))]
    counts = torch.tensor([len(pages) for pages in table], device=rows.device)
    lacking = torch.arange(max_pages * group, device=rows.device) >= (counts * group)[:, None]
    places = tail_live.any(0).nonzero().flatten()
    live_there = tail_live[:, places]
    return RowGroup(
        rows=rows,
        slot_ids=slot_ids,
        page_ids=torch.tensor(ids, dtype=torch.int64, device=rows.device),
        slot_run=_run(slot_ids.tolist()),
        page_run=_run(ids),
        max_pages=max_pages,
        lacking=lacking[:, None] if any(len(pages) < max_pages for pages in table) else None,
        tail_runs=_runs(places.tolist()),
        tail_live=None if live_there.all() else -live_there[:, None, :, None].int(),
    )


def _run(ids: list[int]) -> slice | None:
    """The ids as a slice, if there are any and each follows the one before it."""
    if not ids or ids != list(range(ids[0], ids[0] + len(ids))):
        return None
    return slice(ids[0], ids[-1] + 1)


def _runs(ids: list[int]) -> tuple[slice, ...]:
    """Ascending ids as slices."""
    starts = [at for at, index in enumerate(ids) if at == 0 or ids[at - 1] + 1 != index]
    return tuple(slice(ids[start], ids[stop - 1] + 1) for start, stop in pairwise([*starts, len(ids)]))


def _tail_live(oldest: Tensor, lengths: Tensor, tail_capacity: int) -> Tensor:
    """bool `[n, C]`, the ring places that hold positions oldest … lengths−1."""
    age = (torch.arange(tail_capacity, device=lengths.device) - oldest[:, None]) % tail_capacity
    return age < (lengths - oldest)[:, None]
