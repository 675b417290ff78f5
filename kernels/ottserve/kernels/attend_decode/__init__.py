"""Attention of one new token a sequence over everything the sequence has stored. Writes nothing to the cache."""

from __future__ import annotations

from torch import Tensor

from ottserve.kernels.attend_decode import reference
from ottserve.kernels.attend_decode.history import History, attend_history, gather_history, history_bytes
from ottserve.kernels.attend_decode.plan import DecodePlan, RowGroup, plan_decode
from ottserve.kernels.attend_decode.workspace import Workspace
from ottserve.kernels.layout import PageLayout
from ottserve.kernels.slots import Slots

__all__ = [
    "DecodePlan",
    "History",
    "RowGroup",
    "Workspace",
    "attend_decode",
    "attend_history",
    "gather_history",
    "history_bytes",
    "plan_decode",
]


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
    """Attention of N rows of one layer: one softmax over pages (replaced tokens at −∞), outliers and tail.

    Nothing but live memory counts: page table entries from num_pages[n] on, unused outlier rows and ring places that
    hold no token may contain anything, NaN and wild ids included.

    Args:
        q: `[N, H, D]`; H is a multiple of J, query head h reads KV head h // (H / J).
        pages: int16 `[P, J, W]`.
        slots: tensors `[S, J, …]`.
        page_table: int32 `[N, B]`, ids of each row's pages, oldest first.
        num_pages, slot_ids: int32 `[N]`.
        lengths: int32 `[N]`, tokens stored, the query's own among them; the tail is positions num_pages·G … lengths−1.
        scale: of the scores, usually D^−½.
        plan: what `plan_decode` made of the same ids and counts; spares the reference that work in every layer.
        frequencies: fp32 `[D/2]`, with which keys were turned back when sealed, where the layout says so.

    Returns:
        `[N, H, D]` in q's dtype; a row of length 0 gives zeros.
    """
    if q.is_cuda:
        from ottserve.kernels.attend_decode import triton  # noqa: PLC0415 - Triton is installed only where a GPU is

        return triton.attend_decode(
            q, pages, slots, layout, page_table, num_pages, slot_ids, lengths, scale, frequencies=frequencies
        )
    return reference.attend_decode(
        q, pages, slots, layout, page_table, num_pages, slot_ids, lengths, scale, plan, frequencies
    )
