"""Attention in float64 over dequantised values, one row and head at a time."""

from __future__ import annotations

from itertools import pairwise

import torch
from tests.kernels.triton.cache_state import CacheState, frequencies_of
from torch import Tensor

from ottserve.kernels.layout import PageLayout
from ottserve.kernels.quantize import dequantize_keys, dequantize_values, replaced_tokens
from ottserve.kernels.rotary import turn_pages


def history(state: CacheState, layout: PageLayout, row: int, head: int) -> tuple[Tensor, Tensor]:
    """Keys and values float64 `[n, D]` that one row has stored for one KV head."""
    num_pages, slot = int(state.num_pages[row]), int(state.slot_ids[row])
    pages = state.pages[state.page_table[row, :num_pages].long(), head]
    live = ~replaced_tokens(pages, layout).flatten()
    count = int(state.slots.outlier_count[slot, head])
    positions = torch.arange(num_pages * layout.group, int(state.lengths[row]), device=pages.device)
    ring = positions % state.slots.tail_k.shape[2]

    def sealed_keys(pages: Tensor, layout: PageLayout) -> Tensor:
        keys = dequantize_keys(pages, layout)
        turn_pages(keys, layout, frequencies_of(layout, str(keys.device)))
        return keys

    stored = (
        (sealed_keys, state.slots.outlier_k, state.slots.tail_k),
        (dequantize_values, state.slots.outlier_v, state.slots.tail_v),
    )
    keys, values = (
        torch.cat([dequantize(pages, layout).flatten(0, 1)[live], outliers[slot, head, :count], tail[slot, head, ring]])
        for dequantize, outliers, tail in stored
    )
    return keys.double(), values.double()


def attend_decode(q: Tensor, state: CacheState, layout: PageLayout, scale: float) -> Tensor:
    """float64 `[N, H, D]`."""
    heads = state.pages.shape[1]
    out = torch.zeros_like(q, dtype=torch.float64)
    for row in range(len(q)):
        for head, query, result in zip(range(heads), q[row].chunk(heads), out[row].chunk(heads), strict=True):
            keys, values = history(state, layout, row, head)
            if len(keys):
                result.copy_((query.double() @ keys.T * scale).softmax(-1) @ values)
    return out


def attend_prefill(q: Tensor, k: Tensor, v: Tensor, starts: list[int], state: CacheState, layout: PageLayout) -> Tensor:
    """float64 `[T, H, D]`; scale D^−½."""
    heads = state.pages.shape[1]
    out = torch.zeros_like(q, dtype=torch.float64)
    for row, (start, end) in enumerate(pairwise(starts)):
        causal = torch.ones(end - start, end - start, device=q.device).triu(1).bool()
        for head in range(heads):
            keys, values = history(state, layout, row, head)
            hidden = torch.cat([causal.new_zeros(end - start, len(keys)), causal], 1)
            keys = torch.cat([keys, k[start:end, head].double()])
            values = torch.cat([values, v[start:end, head].double()])
            for query in range(head * q.shape[1] // heads, (head + 1) * q.shape[1] // heads):
                scores = q[start:end, query].double() @ keys.T * q.shape[2] ** -0.5
                out[start:end, query] = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
    return out
