"""What one sequence has stored, back as numbers. Knows no query."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ottserve.kernels.layout import PageLayout
from ottserve.kernels.quantize.dequantize import dequantize_keys, dequantize_values
from ottserve.kernels.quantize.packing import replaced_tokens
from ottserve.kernels.rotary import turn_pages
from ottserve.kernels.slots import Slots


def stored_tokens(
    pages: Tensor,
    slots: Slots,
    layout: PageLayout,
    page_ids: Tensor,
    slot_id: int,
    length: int,
    frequencies: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of every KV head in turn, fp32 `[n, D]` each: pages, outliers, tail; replaced tokens left out.

    One head at a time is in memory. `page_ids` int32 `[num_pages]`; `length` tokens are stored.
    """
    blocks = pages[page_ids].transpose(0, 1)
    ring = torch.arange(len(page_ids) * layout.group, length, device=pages.device) % slots.tail_k.shape[2]
    for head, count in enumerate(slots.outlier_count[slot_id].tolist()):
        live = ~replaced_tokens(blocks[head], layout).flatten()
        exact_k = slots.outlier_k[slot_id, head, :count], slots.tail_k[slot_id, head, ring]
        exact_v = slots.outlier_v[slot_id, head, :count], slots.tail_v[slot_id, head, ring]
        sealed_k = dequantize_keys(blocks[head], layout)
        turn_pages(sealed_k, layout, frequencies)
        sealed_k = sealed_k.flatten(0, 1)[live]
        sealed_v = dequantize_values(blocks[head], layout).flatten(0, 1)[live]
        yield torch.cat([sealed_k, *(x.float() for x in exact_k)]), torch.cat([sealed_v, *(x.float() for x in exact_v)])
