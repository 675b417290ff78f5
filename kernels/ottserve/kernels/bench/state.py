"""Caches full of random numbers, as large as one layer of a busy server. Knows no kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ottserve.kernels.layout import EXACT_BITS, PageLayout
from ottserve.kernels.slots import Slots

WINDOW = 32
PLACES = 35


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """Arguments of decode attention over one layer, and the bytes that it must read."""

    q: Tensor
    pages: Tensor
    slots: Slots
    layout: PageLayout
    page_table: Tensor
    num_pages: Tensor
    slot_ids: Tensor
    lengths: Tensor
    scale: float
    page_bytes: int
    exact_bytes: int

    @property
    def history(self) -> tuple[Tensor, Slots, PageLayout, Tensor, Tensor, Tensor, Tensor, float]:
        """The arguments of attention that follow queries, keys and values."""
        table = self.page_table, self.num_pages, self.slot_ids, self.lengths
        return self.pages, self.slots, self.layout, *table, self.scale

    def rows(self, count: int) -> DecodeCase:
        """The first rows alone, over the same cache."""
        per_row = {
            name: getattr(self, name)[:count] for name in ("q", "page_table", "num_pages", "slot_ids", "lengths")
        }
        return replace(self, **per_row)


def frequencies_of(layout: PageLayout, device: torch.device) -> Tensor | None:
    """Turns a position of each pair of channels, fp32 `[D / 2]`, as in Llama 3; None where keys are not turned."""
    channels = torch.arange(0, layout.head_size, 2, device=device)
    return 500_000.0 ** -(channels / layout.head_size) / (2 * torch.pi) if layout.turns_keys else None


def random_pages(num_pages: int, num_kv_heads: int, layout: PageLayout, device: torch.device) -> Tensor:
    """int16 `[P, J, W]` of random codes, small positive scales and empty masks."""
    shape = num_pages, num_kv_heads, layout.words
    pages = torch.randint(-32768, 32768, shape, dtype=torch.int16, device=device)
    for bits, codes in (layout.k_bits, layout.key_codes(pages)), (layout.v_bits, layout.value_codes(pages)):
        if bits == EXACT_BITS:
            for part in codes.split(64):
                part.copy_(torch.randn(part.shape, device=device).to(layout.exact_dtype).view(torch.int16))
    scales = [*layout.key_scales(pages)] if layout.k_bits < EXACT_BITS else []
    scales += [*layout.value_scales(pages)] if layout.v_bits < EXACT_BITS else []
    for numbers in scales:
        numbers.copy_(torch.rand(numbers.shape, device=device) + 0.5)
    layout.mask_words(pages).zero_()
    if layout.k_fine:
        layout.fine_channels(pages).copy_(torch.arange(layout.k_fine, device=device))
    return pages


def random_slots(
    num_slots: int, num_kv_heads: int, layout: PageLayout, num_outliers: int, device: torch.device
) -> Slots:
    """Slots whose tails are full of normal numbers and that hold `num_outliers` outliers a KV head."""

    def normal(rows: int) -> Tensor:
        shape = num_slots, num_kv_heads, rows, layout.head_size
        return torch.randn(shape, device=device).to(layout.exact_dtype)

    heads = num_slots, num_kv_heads
    return Slots(
        tail_k=normal(layout.group + WINDOW),
        tail_v=normal(layout.group + WINDOW),
        outlier_k=normal(PLACES),
        outlier_v=normal(PLACES),
        outlier_score=torch.zeros(*heads, PLACES, device=device),
        outlier_position=torch.zeros(*heads, PLACES, dtype=torch.int32, device=device),
        outlier_count=torch.full(heads, num_outliers, dtype=torch.int32, device=device),
        frozen=torch.zeros(heads, dtype=torch.bool, device=device),
    )


def decode_cases(
    layout: PageLayout,
    num_rows: int,
    length: int,
    num_kv_heads: int,
    gqa: int,
    device: torch.device,
    num_outliers: int,
    copies: int,
) -> list[DecodeCase]:
    """`copies` cases on pages and slots of their own, so that running them in turn finds none in the L2 cache."""
    dtype, D = layout.exact_dtype, layout.head_size
    each = (length - WINDOW) // layout.group
    pages = random_pages(1 + copies * num_rows * each, num_kv_heads, layout, device)
    slots = random_slots(1 + copies * num_rows, num_kv_heads, layout, num_outliers, device)
    tables = (1 + torch.randperm(copies * num_rows * each, device=device)).int().view(copies, num_rows, each)
    slot_ids = torch.arange(1, copies * num_rows + 1, dtype=torch.int32, device=device).view(copies, num_rows)
    exact_tokens = length - each * layout.group + num_outliers
    return [
        DecodeCase(
            q=torch.randn(num_rows, num_kv_heads * gqa, D, device=device).to(dtype),
            pages=pages,
            slots=slots,
            layout=layout,
            page_table=tables[copy],
            num_pages=torch.full((num_rows,), each, dtype=torch.int32, device=device),
            slot_ids=slot_ids[copy],
            lengths=torch.full((num_rows,), length, dtype=torch.int32, device=device),
            scale=D**-0.5,
            page_bytes=num_rows * each * num_kv_heads * layout.words * 2,
            exact_bytes=num_rows * num_kv_heads * exact_tokens * D * 2 * 2,
        )
        for copy in range(copies)
    ]
