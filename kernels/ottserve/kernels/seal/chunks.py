"""Prompt chunks and the pages that they fill, in one value. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chunks:
    """N chunks, which fill M pages; those of many layers may lie one behind the other.

    Attributes:
        k, v: `[T, J, D]` of all chunks, any float dtype; narrowed as `write_tail` does it.
        starts: int32 `[N+1]`; chunk n is tokens starts[n] … starts[n+1]−1.
        slot_ids: int32 `[N]`, all different but for the dummy slots of chunks that are padding.
        lengths: int32 `[N]`, tokens stored before the chunk.
        page_starts: int32 `[N+1]`; chunk n fills pages page_starts[n] … page_starts[n+1]−1 of the next three, oldest
            first and each G after the one before.
        page_rows, page_ids: int32 `[M]`, the chunk that fills each page, and the page's id. A negative id is padding,
            of a chunk in the dummy slot: no page is written.
        first_positions: int32 `[M]`, position of each group's first token.
    """

    k: Tensor
    v: Tensor
    starts: Tensor
    slot_ids: Tensor
    lengths: Tensor
    page_starts: Tensor
    page_rows: Tensor
    page_ids: Tensor
    first_positions: Tensor
