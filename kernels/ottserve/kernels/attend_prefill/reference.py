"""Chunk attention in PyTorch, one sequence and one KV head at a time. Knows no cache policy."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ottserve.kernels.attend_prefill.history import stored_tokens
from ottserve.kernels.layout import PageLayout
from ottserve.kernels.slots import Slots


def attend_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    pages: Tensor,
    slots: Slots,
    layout: PageLayout,
    page_table: Tensor,
    num_pages: Tensor,
    slot_ids: Tensor,
    lengths: Tensor,
    scale: float,
    frequencies: Tensor | None = None,
) -> Tensor:
    """See `ottserve.kernels.attend_prefill.attend_prefill`."""
    out = torch.zeros_like(q)
    bounds = starts.tolist()
    rows = zip(num_pages.tolist(), slot_ids.tolist(), lengths.tolist(), strict=True)
    for row, (row_pages, slot_id, length) in enumerate(rows):
        chunk = slice(bounds[row], bounds[row + 1])
        if chunk.start == chunk.stop:
            continue
        if length == 0:
            out[chunk] = _attend_itself(q[chunk], k[chunk], v[chunk], scale)
            continue
        history = stored_tokens(pages, slots, layout, page_table[row, :row_pages], slot_id, length, frequencies)
        _attend_chunk(q[chunk], k[chunk], v[chunk], history, scale, out[chunk])
    return out


def _attend_itself(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of a first chunk, all heads at once."""
    queries, keys, values = (x.float().transpose(0, 1)[None] for x in (q, k, v))
    attended = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    return attended[0].transpose(0, 1)


def _attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, history: Iterator[tuple[Tensor, Tensor]], scale: float, out: Tensor
) -> None:
    """Attention of one chunk, `q [S, H, D]` and `k, v [S, J, D]`, into `out [S, H, D]`."""
    num_tokens = len(q)
    num_queries = q.shape[1] // k.shape[1]
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=q.device).tril_()
    for head, (past_k, past_v) in enumerate(history):
        queries = slice(head * num_queries, (head + 1) * num_queries)
        keys, values = torch.cat([past_k, k[:, head].float()]), torch.cat([past_v, v[:, head].float()])
        sees = torch.cat([causal.new_ones(num_tokens, len(past_k)), causal], 1)
        attended = scaled_dot_product_attention(
            q[:, queries].transpose(0, 1).float()[None],
            keys.expand(1, num_queries, -1, -1),
            values.expand(1, num_queries, -1, -1),
            attn_mask=sees,
            scale=scale,
        )
        out[:, queries] = attended[0].transpose(0, 1).to(out.dtype)
