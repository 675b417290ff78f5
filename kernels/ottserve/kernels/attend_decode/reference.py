"""Decode attention in PyTorch. Knows no cache policy."""

from __future__ import annotations

import torch
from torch import Tensor

from ottserve.kernels.attend_prefill.history import stored_tokens
from ottserve.kernels.layout import PageLayout
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
) -> Tensor:
    """See `ottserve.kernels.attend_decode.attend_decode`."""
    out = torch.zeros_like(q)
    rows = zip(num_pages.tolist(), slot_ids.tolist(), lengths.tolist(), strict=True)
    for row, (row_pages, slot_id, length) in enumerate(rows):
        if length == 0:
            continue
        queries = q[row].float().unflatten(0, (pages.shape[1], -1))
        history = stored_tokens(pages, slots, layout, page_table[row, :row_pages], slot_id, length)
        heads = [(query * scale @ k.T).softmax(-1) @ v for query, (k, v) in zip(queries, history, strict=True)]
        out[row] = torch.cat(heads).to(q.dtype)
    return out
