"""Tokens to pages: score, outlier update, quantise, pack. Knows no sequence: ids and positions say what to seal."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ottserve.kernels.layout import PageLayout
from ottserve.kernels.seal import reference
from ottserve.kernels.seal.chunks import Chunks
from ottserve.kernels.slots import Slots

__all__ = ["Chunks", "seal", "seal_chunks"]


def seal(
    pages: Tensor,
    slots: Slots,
    layout: PageLayout,
    slot_ids: Tensor,
    page_ids: Tensor,
    first_positions: Tensor,
    pool_sizes: Tensor,
    keep: Literal["smallest", "largest"] = "smallest",
    fit_rounds: int = 0,
    *,
    unbiased: bool = False,
    frequencies: Tensor | None = None,
) -> None:
    """Seal the oldest group of M tails into M pages. Rows and KV heads are independent of each other.

    The score of a token is the L1 norm of its key in fp32. Candidates are the pool and the group; the pool_sizes[m]
    smallest (or largest) scores win, the lower position first among equals. Winners of the group are appended to the
    outliers in order of position, unless that needs more rows than there are: then the head is marked frozen, and this
    group and all later ones admit nobody. In the page a winner's key and value give way to the mean of the group's
    other rows, and its mask bit is set. Keys get a scale and zero per channel (and sub-group), values per token.
    At 16 bit elements are stored as they are, those of winners too (the mask hides them).

    Args:
        pages: int16 `[P, J, W]`; rows `page_ids` are overwritten whole.
        slots: tensors `[S, J, …]`; outliers, counts and frozen marks are updated, tails only read.
        layout: of the pages.
        slot_ids, page_ids: int32 `[M]`; M may be 0. (0, 0) pairs are padding and may be repeated.
        first_positions: int32 `[M]`, position of each group's oldest token; the tail holds G tokens from there.
        pool_sizes: int32 `[M]`, O of each row's layer; 0 traces nothing.
        keep: which scores are outliers; "smallest" is right, "largest" is for comparison.
        fit_rounds: least-squares rounds of the quantiser.
        unbiased: whether scales of values are widened in the end; those of keys too where the layout `widens_keys`.
        frequencies: fp32 `[D/2]`, by which keys are turned back first where the layout says so (`rotary`). Scores and
            outliers are of keys as they are.

    For all layers at once flatten L into P and S and offset ids by l·P and l·S.

    Source: Outlier Tokens Tracing, ACL 2025, long.631.
    """
    if pages.is_cuda:
        from ottserve.kernels.seal import triton  # noqa: PLC0415 - Triton is installed only where a GPU is

        backend = triton.seal
    else:
        backend = reference.seal
    backend(
        pages,
        slots,
        layout,
        slot_ids,
        page_ids,
        first_positions,
        pool_sizes,
        keep,
        fit_rounds,
        unbiased,
        frequencies,
    )


def seal_chunks(
    pages: Tensor,
    slots: Slots,
    layout: PageLayout,
    chunks: Chunks,
    pool_sizes: Tensor,
    keep: Literal["smallest", "largest"] = "smallest",
    fit_rounds: int = 0,
    *,
    unbiased: bool = False,
    frequencies: Tensor | None = None,
) -> None:
    """Seal the pages that N chunks fill, straight from the chunks; only a first page may begin in a tail.

    Pages, outliers, counts and frozen marks are those that come of writing the chunk into the tail and calling `seal`
    each time a group is to be sealed. Tails are only read: what remains of the chunks has to be written to them
    afterwards.

    Args:
        pages, slots, layout, keep, fit_rounds, unbiased, frequencies: as of `seal`.
        chunks: what fills which pages.
        pool_sizes: int32 `[N]`, O of each chunk's layer; 0 traces nothing.
    """
    if pages.is_cuda:
        from ottserve.kernels.seal import triton  # noqa: PLC0415 - Triton is installed only where a GPU is

        backend = triton.seal_chunks
    else:
        backend = reference.seal_chunks
    backend(pages, slots, layout, chunks, pool_sizes, keep, fit_rounds, unbiased, frequencies)
