"""Attention of prompt chunks over stored history and over themselves. Writes nothing to the cache."""

from __future__ import annotations

from torch import Tensor

from ottserve.kernels.attend_prefill import reference
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
    """Attention of N chunks of one layer: each query sees its sequence's history as stored, and its chunk causally.

    History is one softmax with the chunk: pages without replaced tokens, outliers, and the tail (positions
    num_pages·G … lengths−1). The chunk's own keys and values are used as given, exactly.

    Args:
        q: `[T, H, D]`, tokens of all chunks; H is a multiple of J.
        k, v: `[T, J, D]`, of the chunk.
        starts: int32 `[N+1]`; chunk n is tokens starts[n] … starts[n+1]−1. A chunk may be empty.
        pages: int16 `[P, J, W]`.
        slots: tensors `[S, J, …]`.
        page_table: int32 `[N, B]`; entries from num_pages[n] on are never read as ids.
        num_pages, slot_ids, lengths: int32 `[N]`; `lengths` counts stored tokens, without the chunk.
        scale: of the scores, usually D^−½.
        frequencies: fp32 `[D/2]`, with which keys were turned back when sealed, where the layout says so.

    Returns:
        `[T, H, D]` in q's dtype; zeros for tokens before starts[0] and from starts[N] on.
    """
    if q.is_cuda:
        from ottserve.kernels.attend_prefill import triton  # noqa: PLC0415 - Triton is installed only where a GPU is

        return triton.attend_prefill(
            q, k, v, starts, pages, slots, layout, page_table, num_pages, slot_ids, lengths, scale, frequencies
        )
    return reference.attend_prefill(
        q, k, v, starts, pages, slots, layout, page_table, num_pages, slot_ids, lengths, scale, frequencies
    )
