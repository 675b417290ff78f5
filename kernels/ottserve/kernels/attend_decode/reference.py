"""Decode attention in PyTorch, also the CPU backend. Knows no cache policy.

Heads of all rows lie in one batch axis: `[N·J, …]` by row, `[U·J, …]` by page; X counts exact tokens.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ottserve.kernels.attend_decode.folded import key_scores, weighted_values
from ottserve.kernels.attend_decode.plan import DecodePlan, plan_decode
from ottserve.kernels.layout import PageLayout
from ottserve.kernels.slots import Slots

UNPACKED_AT_ONCE = 2**19
"""Elements of keys unpacked at a time: 2 MiB of fp32, about what a core's cache holds."""


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
) -> Tensor:
    """See `ottserve.kernels.attend_decode.attend_decode`."""
    if plan is None:
        plan = plan_decode(page_table, num_pages, slot_ids, lengths, layout.group, slots.tail_k.shape[2])
    N, H, D = q.shape
    J = pages.shape[1]
    queries = (q.float() * scale).view(N * J, H // J, D)
    keys, values, dead = _exact_tokens(slots, plan)
    scores = torch.bmm(queries, keys.mT).masked_fill_(dead, -torch.inf)
    if plan.max_pages == 0:
        out = torch.bmm(scores.softmax(-1), values)
    else:
        blocks = _page_blocks(pages, layout, plan)
        page_scores = _score_pages(queries, blocks, layout, plan, has_outliers=slots.outlier_k.shape[2] > 0)
        weights = torch.cat([page_scores, scores], -1).softmax(-1)
        page_weights, exact_weights = weights.split([page_scores.shape[-1], scores.shape[-1]], -1)
        out = _sum_pages(page_weights, blocks, layout, plan).baddbmm_(exact_weights, values)
    out = out.view(N, H, D).to(q.dtype)
    return out if plan.empty_rows is None else out.index_fill_(0, plan.empty_rows, 0)


def _exact_tokens(slots: Slots, plan: DecodePlan) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values fp32 `[N·J, X, D]` of outliers and tails, and bool `[N·J, 1, X]` for places without a token.

    Dead places are zeroed by their bits, since no weight can turn a NaN into nothing.
    """
    width = plan.tail_live.shape[2]
    keys = slots.tail_k[:, :, :width].index_select(0, plan.slot_ids)
    values = slots.tail_v[:, :, :width].index_select(0, plan.slot_ids)
    live = plan.tail_live.expand(-1, keys.shape[1], -1, -1)
    num_rows = slots.outlier_k.shape[2]
    if num_rows:
        keys = torch.cat([slots.outlier_k.index_select(0, plan.slot_ids), keys], 2)
        values = torch.cat([slots.outlier_v.index_select(0, plan.slot_ids), values], 2)
        count = slots.outlier_count.index_select(0, plan.slot_ids)[..., None, None]
        in_use = (_row_numbers(num_rows, count.device) - count) >> 31
        live = torch.cat([in_use, live], 2)
    values.view(torch.int32).bitwise_and_(live)
    dead = (live == 0).view(-1, 1, live.shape[2])
    return keys.float().flatten(0, 1), values.float().flatten(0, 1), dead


@cache
def _row_numbers(num_rows: int, device: torch.device) -> Tensor:
    return torch.arange(num_rows, dtype=torch.int32, device=device)[:, None]


@cache
def _mask_bits(device: torch.device) -> Tensor:
    """int16 `[16]`, the bit of each token of a mask word."""
    return (1 << torch.arange(16, device=device)).to(torch.int16)


def _page_blocks(pages: Tensor, layout: PageLayout, plan: DecodePlan) -> list[Tensor]:
    """The pages of all rows, still packed, in portions that stay in cache when unpacked: int16 `[u, J, W]` each."""
    at_once = max(1, UNPACKED_AT_ONCE // (pages.shape[1] * layout.group * layout.head_size))
    return [pages.index_select(0, ids) for ids in plan.page_ids.split(at_once)]


def _score_pages(
    queries: Tensor, blocks: list[Tensor], layout: PageLayout, plan: DecodePlan, has_outliers: bool
) -> Tensor:
    """Scores `[N·J, M, B·G]`; −∞ for replaced tokens and for pages a row doesn't have."""
    N, J = len(plan.slot_ids), blocks[0].shape[1]
    by_row = queries.view(N, J, *queries.shape[1:])
    portions = []
    for block, rows in zip(blocks, plan.page_rows.split(len(blocks[0])), strict=True):
        q = by_row.expand(len(rows), -1, -1, -1) if N == 1 else by_row.index_select(0, rows)
        scores = key_scores(q.flatten(0, 1), block, layout)
        if has_outliers:
            replaced = (layout.mask_words(block)[..., None] & _mask_bits(block.device)) != 0
            scores.masked_fill_(replaced.view(len(scores), 1, -1), -torch.inf)
        portions.append(scores)
    scores = portions[0] if len(portions) == 1 else torch.cat(portions)
    if plan.places is not None:
        padded = scores.new_full((N * plan.max_pages, J, *scores.shape[1:]), -torch.inf)
        scores = padded.index_copy_(0, plan.places, scores.view(-1, *padded.shape[1:]))
    by_page = scores.view(N, plan.max_pages, J, queries.shape[1], layout.group)
    return by_page.permute(0, 2, 3, 1, 4).reshape(N * J, queries.shape[1], -1)


def _sum_pages(weights: Tensor, blocks: list[Tensor], layout: PageLayout, plan: DecodePlan) -> Tensor:
    """Σ p·v over the pages of each row, `[N·J, M, D]`, for weights `[N·J, M, B·G]`."""
    N, J = len(plan.slot_ids), blocks[0].shape[1]
    by_page = weights.unflatten(-1, (plan.max_pages, layout.group)).unflatten(0, (N, J)).permute(0, 3, 1, 2, 4)
    by_page = by_page.reshape(N * plan.max_pages * J, -1, layout.group)
    if plan.places is not None:
        by_page = by_page.unflatten(0, (-1, J)).index_select(0, plan.places).flatten(0, 1)
    portions = by_page.split(len(blocks[0]) * J)
    sums = torch.cat([weighted_values(p, block, layout) for p, block in zip(portions, blocks, strict=True)])
    if plan.places is None:
        return sums.view(N, plan.max_pages, J, *sums.shape[1:]).sum(1).flatten(0, 1)
    sums = sums.view(-1, J, *sums.shape[1:])
    return sums.new_zeros(N, *sums.shape[1:]).index_add_(0, plan.page_rows, sums).flatten(0, 1)
