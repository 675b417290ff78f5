"""Sealing on a GPU: scores of all pages, admission page after page (`outliers/triton.py`), then every page by itself
(`pages/triton.py`). However many pages there are, there are four launches at most. Knows no sequence.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from triton import knobs

from ottserve.kernels import launch
from ottserve.kernels.layout import PageLayout
from ottserve.kernels.rotary import for_layout
from ottserve.kernels.seal.chunks import Chunks
from ottserve.kernels.seal.outliers.triton import admit_kernel, score_kernel
from ottserve.kernels.seal.pages.triton import choose_kernel, seal_kernel
from ottserve.kernels.slots import Slots
from ottserve.kernels.supported import check, check_elements, check_vectors
from ottserve.kernels.write_tail import narrow


def seal(
    pages: Tensor,
    slots: Slots,
    layout: PageLayout,
    slot_ids: Tensor,
    page_ids: Tensor,
    first_positions: Tensor,
    pool_sizes: Tensor,
    keep: Literal["smallest", "largest"],
    fit_rounds: int,
    unbiased: bool = False,
    frequencies: Tensor | None = None,
) -> None:
    """See `ottserve.kernels.seal.seal`. No host synchronisation."""
    check_vectors(slot_ids=slot_ids, page_ids=page_ids, first_positions=first_positions, pool_sizes=pool_sizes)
    groups = slot_ids, page_ids, first_positions, pool_sizes
    how = keep, fit_rounds, unbiased, frequencies
    _launch(pages, slots, layout, None, slots.tail_k, slots.tail_v, *groups, *how)


def seal_chunks(
    pages: Tensor,
    slots: Slots,
    layout: PageLayout,
    chunks: Chunks,
    pool_sizes: Tensor,
    keep: Literal["smallest", "largest"],
    fit_rounds: int,
    unbiased: bool = False,
    frequencies: Tensor | None = None,
) -> None:
    """See `ottserve.kernels.seal.seal_chunks`. No host synchronisation."""
    check_vectors(
        starts=chunks.starts,
        slot_ids=chunks.slot_ids,
        lengths=chunks.lengths,
        page_starts=chunks.page_starts,
        page_rows=chunks.page_rows,
        page_ids=chunks.page_ids,
        first_positions=chunks.first_positions,
        pool_sizes=pool_sizes,
    )
    k, v = narrow(chunks.k, slots.tail_k.dtype), narrow(chunks.v, slots.tail_k.dtype)
    check_elements(k=k, v=v)
    groups = chunks.slot_ids, chunks.page_ids, chunks.first_positions, pool_sizes
    how = keep, fit_rounds, unbiased, frequencies
    _launch(pages, slots, layout, chunks, k, v, *groups, *how)


def _launch(
    pages: Tensor,
    slots: Slots,
    layout: PageLayout,
    chunks: Chunks | None,
    k: Tensor,
    v: Tensor,
    slot_ids: Tensor,
    page_ids: Tensor,
    first_positions: Tensor,
    pool_sizes: Tensor,
    keep: Literal["smallest", "largest"],
    fit_rounds: int,
    unbiased: bool,
    frequencies: Tensor | None,
) -> None:
    """Scores and admission, where there are places for outliers; which channels are fine, where any is; pages.

    Args:
        k, v: of the chunks, in the tails' dtype; where there are none, the tails.
    """
    check(layout, pages, slots)
    if layout.turns_keys:
        for_layout(layout, frequencies)
    M, J = len(page_ids), pages.shape[1]
    if M == 0:
        return
    places, padded = slots.outlier_k.shape[2], launch.next_power_of_2(layout.head_size)
    starts, lengths = (None, None) if chunks is None else (chunks.starts, chunks.lengths)
    page_starts, page_rows = (None, None) if chunks is None else (chunks.page_starts, chunks.page_rows)
    strides = k.stride()[:2], v.stride()[:2]
    source = {"J": J, "BD": padded, "CAPACITY": slots.tail_k.shape[2], "HAS_CHUNKS": chunks is not None}
    if places:
        scores = torch.empty(M, J, layout.group, dtype=torch.float32, device=pages.device)
        score_kernel[M, J](
            scores,
            slots.tail_k,
            k,
            slot_ids,
            starts,
            lengths,
            page_rows,
            first_positions,
            *strides[0],
            G=layout.group,
            D=layout.head_size,
            num_warps=4,
            **source,
        )
        admit_kernel[len(slot_ids), J](
            scores,
            pages,
            slots.tail_k,
            slots.tail_v,
            k,
            v,
            slots.outlier_k,
            slots.outlier_v,
            slots.outlier_score,
            slots.outlier_position,
            slots.outlier_count,
            slots.frozen,
            slot_ids,
            starts,
            lengths,
            page_starts,
            page_ids,
            first_positions,
            pool_sizes,
            *strides[0],
            *strides[1],
            LAYOUT=layout,
            PLACES=places,
            BP=launch.next_power_of_2(places),
            KEEP_SMALLEST=keep == "smallest",
            num_warps=1,
            **source,
        )
    config = launch.seal_config(layout)
    groups = slot_ids, starts, lengths, page_rows, page_ids, first_positions, frequencies
    of_page = {"LAYOUT": layout, "TRACED": places > 0, "IN_ASM": not knobs.runtime.interpret} | source
    if layout.k_fine:
        choose_kernel[M, J](pages, slots.tail_k, k, *groups, *strides[0], num_warps=8, **of_page)
    seal_kernel[M, J, config.parts](
        pages,
        slots.tail_k,
        slots.tail_v,
        k,
        v,
        *groups,
        *strides[0],
        *strides[1],
        CONFIG=config,
        FIT=fit_rounds,
        UNBIASED=unbiased,
        num_warps=config.warps,
        **of_page,
    )
