"""Decode attention in PyTorch, also the CPU backend. Knows no cache policy.

Every page, and every row's exact tokens (outliers and tail), gives a partial softmax; the partials of a row are merged
by their maxima. So rows of unequal length share the work without padding, and memory stays bounded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ottserve.kernels.attend_decode.folded import key_scores, weighted_values
from ottserve.kernels.attend_decode.plan import DecodePlan, plan_decode
from ottserve.kernels.layout import PageLayout
from ottserve.kernels.quantize.packing import replaced_tokens
from ottserve.kernels.slots import Slots

UNPACKED_AT_ONCE = 2**20
LOWEST_MAXIMUM = -1e30


class Partial(NamedTuple):
    """Softmax over part of a row's tokens, for entries `[U, J, M]`: not yet divided by `total`."""

    maximum: Tensor
    total: Tensor
    weighted: Tensor


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
    queries = q.float().mul(scale).unflatten(1, (pages.shape[1], -1))
    partials = [_attend_exact(queries, slots, plan), *_attend_pages(queries, pages, slots, layout, plan)]
    rows = torch.cat([torch.arange(len(q), device=q.device), plan.page_rows])
    out = _merge(partials, rows, len(q)).index_fill_(0, plan.empty_rows, 0)
    return out.flatten(1, 2).to(q.dtype)


def _attend_exact(queries: Tensor, slots: Slots, plan: DecodePlan) -> Partial:
    """The outliers and tails of all rows, `[N, J, M]`."""
    width = plan.tail_live.shape[-1]
    keys = slots.tail_k.index_select(0, plan.slot_ids)[:, :, :width]
    values = slots.tail_v.index_select(0, plan.slot_ids)[:, :, :width]
    live = plan.tail_live
    count = slots.outlier_count.index_select(0, plan.slot_ids)
    most = int(count.max())
    if most:
        keys = torch.cat([slots.outlier_k[:, :, :most].index_select(0, plan.slot_ids), keys], 2)
        values = torch.cat([slots.outlier_v[:, :, :most].index_select(0, plan.slot_ids), values], 2)
        in_use = torch.arange(most, device=count.device) < count[..., None]
        live = torch.cat([in_use, live.expand(-1, in_use.shape[1], -1)], 2)
    scores = (queries @ keys.float().mT).masked_fill_(~live[:, :, None], -torch.inf)
    return _partial(scores, values.float().masked_fill_(~live[..., None], 0))


def _partial(scores: Tensor, values: Tensor) -> Partial:
    weights, maximum, total = _exponentials(scores)
    return Partial(maximum, total, weights @ values)


def _exponentials(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """e^(score − maximum), the maximum and the sum over the last axis; a row of −∞ alone has sum 0."""
    maximum = scores.amax(-1, keepdim=True).clamp_min_(LOWEST_MAXIMUM)
    weights = scores.sub_(maximum).exp_()
    return weights, maximum, weights.sum(-1, keepdim=True)


def _attend_pages(queries: Tensor, pages: Tensor, slots: Slots, layout: PageLayout, plan: DecodePlan) -> list[Partial]:
    """All pages of all rows, so many at once as stay in a core's cache when unpacked."""
    at_once = max(1, UNPACKED_AT_ONCE // (pages.shape[1] * layout.group * layout.head_size))
    has_outliers = slots.outlier_k.shape[2] > 0
    partials = []
    for ids, rows in zip(plan.page_ids.split(at_once), plan.page_rows.split(at_once), strict=True):
        blocks = pages.index_select(0, ids)
        row_queries = queries if len(queries) == 1 else queries.index_select(0, rows)
        scores = key_scores(row_queries, blocks, layout)
        if has_outliers:
            scores.masked_fill_(replaced_tokens(blocks, layout)[:, :, None], -torch.inf)
        weights, maximum, total = _exponentials(scores)
        partials.append(Partial(maximum, total, weighted_values(weights, blocks, layout)))
    return partials


def _merge(partials: list[Partial], rows: Tensor, num_rows: int) -> Tensor:
    """The softmax of each row from the partials of its parts: `[N, J, M, D]`."""
    maximum, total, weighted = (
        torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*partials, strict=True)
    )
    highest = maximum.new_full((num_rows, *maximum.shape[1:]), LOWEST_MAXIMUM)
    highest.scatter_reduce_(0, rows[:, None, None, None].expand_as(maximum), maximum, "amax")
    share = (maximum - highest.index_select(0, rows)).exp_()
    sums = torch.cat([weighted, total], -1).mul_(share)
    merged = sums.new_zeros(num_rows, *sums.shape[1:]).index_add_(0, rows, sums)
    return merged[..., :-1] / merged[..., -1:]
