"""Random but valid cache states whose dead memory is poisoned: floats NaN, packed words 0xAA."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.kernels.layout import PageLayout
from ottserve.kernels.slots import Slots

POISON_WORD = -21846  # 0xAAAA


@dataclass(frozen=True)
class CacheState:
    """One layer's pages and slots with the rows of a step over them."""

    pages: Tensor
    slots: Slots
    page_table: Tensor
    num_pages: Tensor
    slot_ids: Tensor
    lengths: Tensor


def make_slots(
    num_slots: int, heads: int, capacity: int, places: int, head_size: int, dtype: torch.dtype, device: str
) -> Slots:
    """Empty slots whose every dead place is NaN."""

    def dead(*shape: int) -> Tensor:
        return torch.full((num_slots, heads, *shape), torch.nan, dtype=dtype, device=device)

    return Slots(
        tail_k=dead(capacity, head_size),
        tail_v=dead(capacity, head_size),
        outlier_k=dead(places, head_size),
        outlier_v=dead(places, head_size),
        outlier_score=torch.full((num_slots, heads, places), torch.nan, device=device),
        outlier_position=torch.full((num_slots, heads, places), -1, dtype=torch.int32, device=device),
        outlier_count=torch.zeros(num_slots, heads, dtype=torch.int32, device=device),
        frozen=torch.zeros(num_slots, heads, dtype=torch.bool, device=device),
    )


def fill_page(
    pages: Tensor, layout: PageLayout, page_id: int, generator: torch.Generator, value_size: float, masked: bool
) -> None:
    """Random codes, positive scales and a mask with a few replaced tokens, in every KV head of one page."""
    device = pages.device

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, device=device)

    page = pages[page_id]
    page.copy_(torch.randint(-32768, 32768, page.shape, generator=generator, device=device).short())
    for bits, codes in ((layout.k_bits, layout.key_codes(page)), (layout.v_bits, layout.value_codes(page))):
        if bits == 16:
            codes.copy_(normal(codes).to(layout.exact_dtype).view(torch.int16))
    if layout.k_bits < 16:
        scale, zero = layout.key_scales(page)
        scale.copy_((normal(scale).abs() + 0.1) * 3 / 2**layout.k_bits)
        zero.copy_(normal(zero) * 2)
    if layout.k_fine:
        drawn = torch.rand(len(page), layout.head_size, generator=generator, device=device).argsort()
        layout.fine_channels(page).copy_(drawn[:, : layout.k_fine].sort().values)
    if layout.v_bits < 16:
        scale, zero = layout.value_scales(page)
        scale.copy_((normal(scale).abs() + 0.1) * value_size / 2**layout.v_bits)
        zero.copy_(normal(zero) * value_size)
    layout.mask_words(page).copy_((1 << torch.randint(0, 16, layout.mask_words(page).shape, device=device)).short())
    layout.mask_words(page)[:, ::2] = 0
    if not masked:
        layout.mask_words(page).zero_()


def make_state(
    layout: PageLayout,
    lengths: list[int],
    *,
    heads: int = 2,
    window: int = 32,
    places: int = 5,
    num_outliers: int = 3,
    device: str = "cpu",
    seed: int = 0,
    value_size: float = 1.0,
) -> CacheState:
    """Sequences of the given lengths, as sealing would have left them, on shuffled pages."""
    generator = torch.Generator(device).manual_seed(seed)
    counts = [max(0, (length - window) // layout.group) for length in lengths]
    total = 1 + sum(counts)
    pages = torch.full((total + 2, heads, layout.words), POISON_WORD, dtype=torch.int16, device=device)
    capacity = layout.group + window
    slots = make_slots(len(lengths) + 2, heads, capacity, places, layout.head_size, layout.exact_dtype, device)
    ids = (1 + torch.randperm(total - 1, generator=torch.Generator().manual_seed(seed))).tolist()
    table = torch.full((len(lengths), max([*counts, 1]) + 1), 2**30, dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine = [ids.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(mine, dtype=torch.int32)
        for page_id in mine:
            fill_page(pages, layout, page_id, generator, value_size, masked=places > 0)
        fill_slot(slots, row + 1, range(count * layout.group, length), num_outliers if count else 0, generator)
    return CacheState(
        pages,
        slots,
        table.to(device),
        torch.tensor(counts, dtype=torch.int32, device=device),
        torch.arange(1, len(lengths) + 1, dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def fill_slot(slots: Slots, slot_id: int, positions: range, num_outliers: int, generator: torch.Generator) -> None:
    """Random tail tokens at `positions`, random outliers; head j has one outlier less for every odd j."""
    device = slots.tail_k.device
    ring = torch.tensor([p % slots.tail_k.shape[2] for p in positions], dtype=torch.long, device=device)
    heads, head_size = slots.tail_k.shape[1], slots.tail_k.shape[3]
    for tail in (slots.tail_k, slots.tail_v):
        tail[slot_id, :, ring] = torch.randn(heads, len(ring), head_size, generator=generator, device=device).to(
            tail.dtype
        )
    for head in range(heads):
        count = max(0, num_outliers - head % 2)
        slots.outlier_count[slot_id, head] = count
        for outliers in (slots.outlier_k, slots.outlier_v):
            drawn = torch.randn(count, head_size, generator=generator, device=device)
            outliers[slot_id, head, :count] = drawn.to(outliers.dtype)


def frequencies_of(layout: PageLayout, device: str = "cpu") -> Tensor | None:
    """Turns a position of each pair of channels, falling as a model's do."""
    return 0.3 ** torch.arange(1, layout.head_size // 2 + 1, device=device) if layout.turns_keys else None


def relative_error(out: Tensor, reference: Tensor) -> float:
    """‖out − reference‖ / ‖reference‖ in float64; NaN never passes a comparison."""
    out, reference = out.double().cpu(), reference.double().cpu()
    return float((out - reference).norm() / reference.norm())
