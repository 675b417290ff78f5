"""Sealing in PyTorch: read the groups, admit outliers, write the pages. Knows no sequence and no step."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ottserve.kernels.layout import EXACT_BITS, PageLayout
from ottserve.kernels.quantize.packing import pack, pack_mask
from ottserve.kernels.quantize.reference import quantize
from ottserve.kernels.rotary import for_layout, turn
from ottserve.kernels.seal.chunks import Chunks
from ottserve.kernels.seal.outliers.reference import admit
from ottserve.kernels.slots import Slots
from ottserve.kernels.write_tail.reference import narrow

ELEMENTS_AT_ONCE = 2**19
"""Elements of keys sealed at a time, so that the passes over them stay in cache."""


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
    """See `ottserve.kernels.seal.seal`."""
    arguments = (slot_ids.long(), page_ids.long(), first_positions, pool_sizes)
    at_once = _pages_at_once(layout, pages.shape[1])
    portions = zip(*(argument.split(at_once) for argument in arguments), strict=True)
    for slot_rows, page_rows, firsts, pools in portions:
        tokens = firsts[:, None] + torch.arange(layout.group, device=pages.device)
        ring = tokens % slots.tail_k.shape[2]
        keys, values = (_group(tail, slot_rows, ring) for tail in (slots.tail_k, slots.tail_v))
        replaced = admit(slots, keys, values, slot_rows, tokens, pools, keep)
        _store_pages(pages, layout, page_rows, tokens, keys, values, replaced, fit_rounds, unbiased, frequencies)


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
    """See `ottserve.kernels.seal.seal_chunks`."""
    rows, lengths = chunks.page_rows, chunks.lengths
    tokens = chunks.first_positions[:, None] + torch.arange(layout.group, device=pages.device)
    slot_rows, chunk_tokens = chunks.slot_ids[rows].long(), tokens + (chunks.starts[:-1] - lengths)[rows, None]
    in_tail = (tokens < lengths[rows, None])[:, None, :, None]
    ring, chunk_tokens = tokens % slots.tail_k.shape[2], chunk_tokens.clamp_min(0)
    keys, values = (
        torch.where(in_tail, _group(tail, slot_rows, ring), narrow(x[chunk_tokens], tail.dtype).transpose(1, 2))
        for tail, x in ((slots.tail_k, chunks.k), (slots.tail_v, chunks.v))
    )
    replaced = torch.zeros(keys.shape[:3], dtype=torch.bool, device=pages.device)
    turn_of = torch.arange(len(rows), device=pages.device) - chunks.page_starts[rows]
    for number in range(int(chunks.page_starts.diff().max())):
        due = (turn_of == number).nonzero()[:, 0]
        of_due = slot_rows[due], tokens[due], pool_sizes[rows[due]]
        replaced[due] = admit(slots, keys[due], values[due], *of_due, keep)
    at_once, is_page = _pages_at_once(layout, keys.shape[1]), chunks.page_ids >= 0
    if not is_page.any():
        return
    of_pages = (x[is_page] for x in (chunks.page_ids.long(), tokens, keys, values, replaced))
    groups = zip(*(x.split(at_once) for x in of_pages), strict=True)
    for ids, positions, page_keys, page_values, gone in groups:
        _store_pages(pages, layout, ids, positions, page_keys, page_values, gone, fit_rounds, unbiased, frequencies)


def _pages_at_once(layout: PageLayout, num_heads: int) -> int:
    return max(1, ELEMENTS_AT_ONCE // (num_heads * layout.group * layout.head_size))


def _group(tail: Tensor, slot_ids: Tensor, ring: Tensor) -> Tensor:
    """The tokens at `ring [M, G]` of tails `[S, J, C, D]`, as `[M, J, G, D]` in order of position."""
    return tail[slot_ids[:, None], :, ring].transpose(1, 2).contiguous()


def _store_pages(
    pages: Tensor,
    layout: PageLayout,
    page_ids: Tensor,
    tokens: Tensor,
    keys: Tensor,
    values: Tensor,
    replaced: Tensor,
    fit_rounds: int,
    unbiased: bool,
    frequencies: Tensor | None,
) -> None:
    """Write M pages of keys and values `[M, J, G, D]` at positions `tokens [M, G]`, outliers being `replaced`."""
    if layout.turns_keys:
        keys = turn(keys.float(), tokens[:, None], for_layout(layout, frequencies), back=True)
    blocks = pages.new_empty(len(page_ids), *pages.shape[1:])
    _store_keys(blocks, layout, keys, replaced, fit_rounds, unbiased and layout.widens_keys)
    _store_values(blocks, layout, values, replaced, fit_rounds, unbiased)
    layout.mask_words(blocks).copy_(pack_mask(replaced))
    pages.index_copy_(0, page_ids, blocks)


def _store_keys(
    blocks: Tensor, layout: PageLayout, keys: Tensor, replaced: Tensor, fit_rounds: int, unbiased: bool
) -> None:
    if layout.k_bits == EXACT_BITS:
        layout.key_codes(blocks).copy_(keys.view(torch.int16))
        return
    keys = _fill_replaced(keys, replaced)
    codes, scale, zero = _quantize_keys(keys, layout, layout.k_bits, fit_rounds, unbiased)
    if layout.k_fine:
        channels = _widest_channels(keys, layout.k_fine)
        layout.fine_channels(blocks).copy_(channels)
        of_tokens = channels.unsqueeze(-2).expand(*codes.shape[:-1], -1)
        of_parts = of_tokens[..., : layout.k_subgroups, :]
        fine_keys = keys.gather(-1, of_tokens)
        fine_codes, fine_scale, fine_zero = _quantize_keys(
            fine_keys, layout, layout.k_bits + layout.k_fine_bits, fit_rounds, unbiased
        )
        layout.fine_codes(blocks).copy_(pack(fine_codes >> layout.k_bits, layout.k_fine_bits, -2))
        codes.scatter_(-1, of_tokens, fine_codes & (2**layout.k_bits - 1))
        scale.scatter_(-1, of_parts, fine_scale)
        zero.scatter_(-1, of_parts, fine_zero)
    layout.key_codes(blocks).copy_(pack(codes, layout.k_bits, -2))
    _store_scales(layout.key_scales(blocks), scale, zero)


def _quantize_keys(
    keys: Tensor, layout: PageLayout, bits: int, fit_rounds: int, unbiased: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 `[..., G, n]`, scale and zero fp16 `[..., k_subgroups, n]` of keys `[..., G, n]`."""
    unbiased = unbiased and bits > 1
    parts = keys.unflatten(-2, (layout.k_subgroups, layout.group // layout.k_subgroups))
    codes, scale, zero = quantize(parts, bits, -2, fit_rounds, unbiased=unbiased)
    return codes.flatten(-3, -2), scale, zero


def _widest_channels(keys: Tensor, num_channels: int) -> Tensor:
    """The channels of `keys [..., G, D]` that vary most over the group, ascending int64 `[..., num_channels]`."""
    order = keys.var(-2, correction=0).sort(dim=-1, descending=True, stable=True).indices
    return order[..., :num_channels].sort(-1).values


def _store_values(
    blocks: Tensor, layout: PageLayout, values: Tensor, replaced: Tensor, fit_rounds: int, unbiased: bool
) -> None:
    if layout.v_bits == EXACT_BITS:
        layout.value_codes(blocks).copy_(values.view(torch.int16).mT)
        return
    codes, scale, zero = quantize(_fill_replaced(values, replaced), layout.v_bits, -1, fit_rounds, unbiased=unbiased)
    layout.value_codes(blocks).copy_(pack(codes.mT, layout.v_bits, -1))
    _store_scales(layout.value_scales(blocks), scale, zero)


def _store_scales(places: tuple[Tensor, Tensor], scale: Tensor, zero: Tensor) -> None:
    places[0].copy_(scale)
    places[1].copy_(zero)


def _fill_replaced(x: Tensor, replaced: Tensor) -> Tensor:
    """`x [M, J, G, D]` in fp32, the rows that `replaced [M, J, G]` names being the mean of the others."""
    x = x.float()
    gone = replaced[..., None]
    num_others = (~gone).sum(-2, keepdim=True).clamp_min_(1)
    mean = x.masked_fill(gone, 0).sum(-2, keepdim=True) / num_others
    return torch.where(gone, mean, x)
