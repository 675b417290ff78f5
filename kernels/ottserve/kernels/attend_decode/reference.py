"""Decode attention in PyTorch, also the CPU backend. Knows no cache policy.

Everything a row has stored is laid side by side, pages then outliers then tail, and attended to in one softmax. T is
the number of places so laid out, X of them beyond the pages; places without a live token are dead.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ottserve.kernels.attend_decode.plan import DecodePlan, RowGroup, plan_decode
from ottserve.kernels.layout import EXACT_BITS, PageLayout
from ottserve.kernels.quantize.dequantize import dequantize_keys_into, dequantize_values_into
from ottserve.kernels.quantize.packing import replaced_tokens
from ottserve.kernels.rotary import turn_pages
from ottserve.kernels.slots import Slots


def attend_decode(
    q: Tensor,
    pages: Tensor,
    slots: Slots,
    layout: PageLayout,
    page_table: Tensor,
    num_pages: Tensor,
    slot_ids: Tensor,
    lengths: Tensor,
    scale: float,
    plan: DecodePlan | None = None,
    frequencies: Tensor | None = None,
) -> Tensor:
    """See `ottserve.kernels.attend_decode.attend_decode`."""
    if plan is None:
        plan = plan_decode(page_table, num_pages, slot_ids, lengths, layout.group, slots.tail_k.shape[2])
    queries = q.float() * scale
    if len(plan.groups) == 1 and len(plan.groups[0].rows) == len(q) == 1:
        return _attend_group(queries, pages, slots, layout, plan.groups[0], frequencies).to(q.dtype)
    out = torch.zeros_like(queries)
    for group in plan.groups:
        attended = _attend_group(queries[group.rows], pages, slots, layout, group, frequencies)
        out.index_copy_(0, group.rows, attended)
    return out.to(q.dtype)


def _attend_group(
    queries: Tensor,
    pages: Tensor,
    slots: Slots,
    layout: PageLayout,
    group: RowGroup,
    frequencies: Tensor | None,
) -> Tensor:
    """Attention of n rows, `[n, H, D]` of scaled queries, fp32."""
    n, H, D = queries.shape
    J = pages.shape[1]
    num_rows = slots.outlier_k.shape[2]
    num_sealed = group.max_pages * layout.group
    T = num_sealed + num_rows + group.num_tail_places
    keys = queries.new_empty(n, J, T, D)
    is_transposed = layout.v_bits == EXACT_BITS
    values = queries.new_empty(n, J, D, T).mT if is_transposed else queries.new_empty(n, J, T, D)
    dead = _lay_exact(keys[:, :, num_sealed:], values[:, :, num_sealed:], slots, group)
    if num_sealed:
        blocks = pages[group.page_run] if group.page_run else pages.index_select(0, group.page_ids)
        blocks = blocks.view(n, group.max_pages, J, -1).transpose(1, 2)
        sealed_shape = (n, J, group.max_pages, layout.group, D)
        dequantize_keys_into(keys[:, :, :num_sealed].view(sealed_shape), blocks, layout)
        turn_pages(keys[:, :, :num_sealed].view(sealed_shape), layout, frequencies)
        dequantize_values_into(values[:, :, :num_sealed].view(sealed_shape), blocks, layout)
        dead = torch.cat([_dead_sealed(blocks, layout, group, has_outliers=num_rows > 0), dead], 2)
    scores = torch.bmm(queries.reshape(n * J, H // J, D), keys.view(n * J, T, D).mT)
    weights = scores.masked_fill_(dead.view(n * J, 1, T), -torch.inf).softmax(-1)
    return torch.bmm(weights, values.flatten(0, 1)).view(n, H, D)


def _lay_exact(keys: Tensor, values: Tensor, slots: Slots, group: RowGroup) -> Tensor:
    """Outliers and tails into keys and values fp32 `[n, J, X, D]`; returns bool `[n, J, X]`, the dead places.

    Dead places of values are zeroed by their bits, since no weight makes a NaN vanish.
    """
    n, J = keys.shape[:2]
    num_rows = slots.outlier_k.shape[2]
    live = keys.new_full((n, 1, group.num_tail_places, 1), -1, dtype=torch.int32)
    live = (live if group.tail_live is None else group.tail_live).expand(-1, J, -1, -1)
    for place, tail in ((keys, slots.tail_k), (values, slots.tail_v)):
        stored = tail.index_select(0, group.slot_ids)
        place[:, :, num_rows:].copy_(torch.cat([stored[:, :, run] for run in group.tail_runs], 2))
    if num_rows:
        for place, outliers in ((keys, slots.outlier_k), (values, slots.outlier_v)):
            place[:, :, :num_rows].copy_(outliers.index_select(0, group.slot_ids))
        count = slots.outlier_count.index_select(0, group.slot_ids)[..., None, None]
        in_use = (_row_numbers(num_rows, count.device) - count) >> 31
        live = torch.cat([in_use, live], 2)
    values.view(torch.int32).bitwise_and_(live)
    return live.squeeze(-1).eq(0)


def _dead_sealed(blocks: Tensor, layout: PageLayout, group: RowGroup, has_outliers: bool) -> Tensor:
    """bool `[n, J, B·G]`, the replaced tokens of pages `[n, J, B, W]` and those of pages a row lacks."""
    n, J, B, _ = blocks.shape
    if not has_outliers:
        dead = torch.zeros(n, J, B * layout.group, dtype=torch.bool, device=blocks.device)
    else:
        dead = replaced_tokens(blocks, layout).flatten(2)
    return dead if group.lacking is None else dead.logical_or_(group.lacking)


@cache
def _row_numbers(num_rows: int, device: torch.device) -> Tensor:
    """int32 `[O+E, 1]`."""
    return torch.arange(num_rows, dtype=torch.int32, device=device)[:, None]
