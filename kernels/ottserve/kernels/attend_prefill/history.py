"""What one sequence has stored, back as numbers. Knows no query."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ottserve.kernels.layout import PageLayout
from ottserve.kernels.quantize.packing import dequantize_keys, dequantize_values, replaced_tokens
from ottserve.kernels.slots import Slots


def stored_tokens(
    pages: Tensor, slots: Slots, layout: PageLayout, page_ids: Tensor, slot_id: int, length: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of every KV head in turn, fp32 `[n, D]` each: pages, outliers, tail; replaced tokens left out.

    Heads differ in n only when a page is inconsistent with the outliers or a head is frozen; one head at a time is in
    memory. `page_ids` int32 `[num_pages]`; `length` tokens are stored.
    """
    blocks = pages[page_ids]
    ring = torch.arange(len(page_ids) * layout.group, length, device=pages.device) % slots.tail_k.shape[2]
    for head, count in enumerate(slots.outlier_count[slot_id].tolist()):
        block = blocks[:, head]
        live = ~replaced_tokens(block, layout).flatten()
        outlier_k, outlier_v = slots.outlier_k[slot_id, head, :count], slots.outlier_v[slot_id, head, :count]
        tail_k, tail_v = slots.tail_k[slot_id, head, ring], slots.tail_v[slot_id, head, ring]
        keys = dequantize_keys(block, layout).flatten(0, 1)[live]
        values = dequantize_values(block, layout).flatten(0, 1)[live]
        yield (
            torch.cat([keys, outlier_k.float(), tail_k.float()]),
            torch.cat([values, outlier_v.float(), tail_v.float()]),
        )
