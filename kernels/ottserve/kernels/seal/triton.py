"""Sealing on a GPU: one program takes one KV head of one tail from scores to packed words. Knows no sequence."""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from ottserve.kernels import launch
from ottserve.kernels.layout import PageLayout
from ottserve.kernels.quantize.triton import pack_fields, quantize
from ottserve.kernels.rotary import for_layout
from ottserve.kernels.rotary.triton import load_group
from ottserve.kernels.slots import Slots
from ottserve.kernels.supported import check, check_vectors

# Sorts behind every score. A score's bits, a positive fp32, sort as it does; the position below them breaks ties.
LAST_RANK = tl.constexpr(0x7FFFFFFF_FFFFFFFF)

VECTORS = [
    "p_slot_ids",
    "p_page_ids",
    "p_first_positions",
    "p_pool_sizes",
    "p_score",
    "p_position",
    "p_count",
    "p_frozen",
]
"""Read a few numbers at a time, and anywhere: the code must not depend on where, or every step and layer compiles."""


@triton.jit
def ranks(b_scores, o_order, KEEP_SMALLEST: tl.constexpr):
    """int64 that sort by score (smallest or largest first), then by `o_order`."""
    b_bits = b_scores.to(tl.int32, bitcast=True).to(tl.int64)
    if not KEEP_SMALLEST:
        b_bits = 0x7FFFFFFF - b_bits
    return (b_bits << 32) | o_order.to(tl.int64)


@triton.jit
def winners(b_group, b_held, pool_size):
    """Which of the group's ranks are among the `pool_size` first of group and held, int32 of the group's shape."""
    b_won = tl.zeros_like(b_group)
    for _ in range(pool_size):
        first_group, first_held = tl.min(b_group, 0), tl.min(b_held, 0)
        first = tl.minimum(first_group, first_held)
        b_won = tl.where((b_group == first) & (first < LAST_RANK), 1, b_won)
        b_group = tl.where(b_group == first, LAST_RANK, b_group)
        b_held = tl.where(b_held == first, LAST_RANK, b_held)
    return b_won.to(tl.int32)


@triton.jit
def admit(
    p_score,
    p_position,
    p_count,
    p_frozen,
    b_scores,
    first_position,
    pool_size,
    PLACES: tl.constexpr,
    BP: tl.constexpr,
    KEEP_SMALLEST: tl.constexpr,
):
    """Choose the group's winners, or freeze; book them. → int32 `[G]`, 1 for admitted tokens, and their rows `[G]`."""
    G: tl.constexpr = b_scores.shape[0]
    o_held, o_tokens = tl.arange(0, BP), tl.arange(0, G)
    count = tl.load(p_count)
    is_held = o_held < count
    b_held = tl.load(p_score + o_held, mask=is_held, other=0.0)
    b_held = tl.where(is_held, ranks(b_held, o_held, KEEP_SMALLEST), LAST_RANK)
    b_won = winners(ranks(b_scores, BP + o_tokens, KEEP_SMALLEST), b_held, pool_size)
    frozen = (tl.load(p_frozen) != 0) | (count + tl.sum(b_won, 0) > PLACES)
    b_won = tl.where(frozen, 0, b_won)
    o_rows = count + tl.cumsum(b_won, 0) - 1
    tl.debug_barrier()
    tl.store(p_frozen, frozen.to(p_frozen.dtype.element_ty))
    tl.store(p_count, count + tl.sum(b_won, 0))
    tl.store(p_score + o_rows, b_scores, mask=b_won != 0)
    tl.store(p_position + o_rows, first_position + o_tokens, mask=b_won != 0)
    return b_won, o_rows


@triton.jit
def mean_of_others(b_x, b_won):
    """Mean fp32 `[1, m]` over the rows of `b_x [G, m]` that were not admitted; zeros if there is none."""
    num_others = tl.maximum(b_x.shape[0] - tl.sum(b_won, 0), 1)
    return tl.expand_dims(tl.sum(tl.where(b_won[:, None] != 0, 0.0, b_x), 0) / num_others, 0)


@triton.jit
def load_filled(p_tail, b_ring, b_won, o_d, first_position, p_frequencies, LAYOUT: tl.constexpr, IN_ASM: tl.constexpr):
    """Channels `o_d` of a group's keys, fp32 `[G, n]`, with the mean of the others in place of admitted tokens."""
    b_keys = load_group(p_tail, b_ring, o_d, first_position, p_frequencies, LAYOUT, IN_ASM)
    return tl.where(b_won[:, None] != 0, mean_of_others(b_keys, b_won), b_keys)


@triton.jit
def keep_outliers(p_tail, p_outliers, b_ring, b_won, o_rows, D: tl.constexpr, BD: tl.constexpr):
    """Copy admitted tokens from the tail to their rows among the outliers."""
    o_d = tl.arange(0, BD)
    m_rows = (b_won != 0)[:, None] & (o_d < D)[None, :]
    b_rows = tl.load(p_tail + b_ring[:, None] * D + o_d[None, :], mask=m_rows)
    tl.store(p_outliers + o_rows[:, None] * D + o_d[None, :], b_rows, mask=m_rows)


@triton.jit
def seal_keys(
    p_page,
    p_tail,
    b_ring,
    b_won,
    first_position,
    p_frequencies,
    LAYOUT: tl.constexpr,
    CHANNELS: tl.constexpr,
    FIT: tl.constexpr,
    UNBIASED: tl.constexpr,
    IN_ASM: tl.constexpr,
):
    """Key codes, scales and zeros of the page, CHANNELS channels at a time."""
    G: tl.constexpr = LAYOUT.group
    D: tl.constexpr = LAYOUT.head_size
    PARTS: tl.constexpr = LAYOUT.k_subgroups
    for start in range(0, D, CHANNELS):
        o_d = start + tl.arange(0, CHANNELS)
        m_d = (o_d < D)[None, :]
        p_words = p_page + tl.arange(0, LAYOUT.key_rows)[:, None] * D + o_d[None, :]
        if LAYOUT.k_bits == 16:
            b_keys = tl.load(p_tail + b_ring[:, None] * D + o_d[None, :], mask=m_d, other=0.0)
            tl.store(p_words, b_keys.to(tl.int16, bitcast=True), mask=m_d)
        else:
            b_keys = load_filled(p_tail, b_ring, b_won, o_d, first_position, p_frequencies, LAYOUT, IN_ASM)
            b_parts = tl.reshape(b_keys, [PARTS, G // PARTS, CHANNELS])
            m_parts = tl.full(b_parts.shape, True, tl.int1)
            WIDE: tl.constexpr = UNBIASED and LAYOUT.widens_keys and LAYOUT.k_bits > 1
            b_codes, b_scale, b_zero = quantize(b_parts, m_parts, 1, G // PARTS, LAYOUT.k_bits, FIT, WIDE)
            b_codes = tl.reshape(b_codes, [G, CHANNELS])
            tl.store(p_words, pack_fields(b_codes, 16 // LAYOUT.k_bits, LAYOUT.k_bits), mask=m_d)
            p_scale = (p_page + LAYOUT.key_scale_at).to(tl.pointer_type(tl.float16))
            p_scale += tl.arange(0, PARTS)[:, None, None] * D + o_d[None, None, :]
            tl.store(p_scale, b_scale.to(tl.float16), mask=m_d[None, :, :])
            tl.store(p_scale + PARTS * D, b_zero.to(tl.float16), mask=m_d[None, :, :])


@triton.jit
def choose_fine(
    p_page,
    p_tail,
    b_ring,
    b_won,
    first_position,
    p_frequencies,
    LAYOUT: tl.constexpr,
    BD: tl.constexpr,
    IN_ASM: tl.constexpr,
):
    """Store the numbers of the k_fine channels that vary most over the group, ascending; the lower first of equals."""
    o_d = tl.arange(0, BD)
    m_d = o_d < LAYOUT.head_size
    b_keys = load_filled(p_tail, b_ring, b_won, o_d, first_position, p_frequencies, LAYOUT, IN_ASM)
    b_centred = b_keys - tl.sum(b_keys, 0)[None, :] / LAYOUT.group
    b_spread = tl.where(m_d, tl.sum(b_centred * b_centred, 0), -1.0)
    is_before = (b_spread[:, None] > b_spread[None, :]) | (
        (b_spread[:, None] == b_spread[None, :]) & (o_d[:, None] < o_d[None, :])
    )
    b_fine = (tl.sum(is_before.to(tl.int32), 0) < LAYOUT.k_fine).to(tl.int32)
    p_channels = (p_page + LAYOUT.fine_channels_at).to(tl.pointer_type(tl.uint8))
    tl.store(p_channels + tl.cumsum(b_fine, 0) - 1, o_d.to(tl.uint8), mask=b_fine != 0)


@triton.jit
def seal_fine_keys(
    p_page,
    p_tail,
    b_ring,
    b_won,
    first_position,
    p_frequencies,
    LAYOUT: tl.constexpr,
    FIT: tl.constexpr,
    UNBIASED: tl.constexpr,
    IN_ASM: tl.constexpr,
):
    """Longer codes, scales and zeros of the fine channels, in place of those that `seal_keys` has stored; 16 a time."""
    G: tl.constexpr = LAYOUT.group
    D: tl.constexpr = LAYOUT.head_size
    PARTS: tl.constexpr = LAYOUT.k_subgroups
    BITS: tl.constexpr = LAYOUT.k_bits
    for start in range(0, LAYOUT.k_fine, 16):
        o_fine = start + tl.arange(0, 16)
        p_channels = (p_page + LAYOUT.fine_channels_at).to(tl.pointer_type(tl.uint8))
        o_d = tl.load(p_channels + o_fine).to(tl.int32)
        b_keys = load_filled(p_tail, b_ring, b_won, o_d, first_position, p_frequencies, LAYOUT, IN_ASM)
        b_parts = tl.reshape(b_keys, [PARTS, G // PARTS, 16])
        m_parts = tl.full(b_parts.shape, True, tl.int1)
        b_codes, b_scale, b_zero = quantize(b_parts, m_parts, 1, G // PARTS, BITS + LAYOUT.k_fine_bits, FIT, UNBIASED)
        b_codes = tl.reshape(b_codes, [G, 16])
        b_lower, b_upper = b_codes & ((1 << BITS) - 1), b_codes >> BITS
        p_lower = p_page + tl.arange(0, LAYOUT.key_rows)[:, None] * D + o_d[None, :]
        tl.store(p_lower, pack_fields(b_lower, 16 // BITS, BITS))
        p_upper = p_page + LAYOUT.fine_codes_at + o_fine[None, :]
        p_upper += tl.arange(0, LAYOUT.fine_rows)[:, None] * LAYOUT.k_fine
        tl.store(p_upper, pack_fields(b_upper, 16 // LAYOUT.k_fine_bits, LAYOUT.k_fine_bits))
        p_scale = (p_page + LAYOUT.key_scale_at).to(tl.pointer_type(tl.float16))
        p_scale += tl.arange(0, PARTS)[:, None, None] * D + o_d[None, None, :]
        tl.store(p_scale, b_scale.to(tl.float16))
        tl.store(p_scale + PARTS * D, b_zero.to(tl.float16))


@triton.jit
def seal_values(
    p_page,
    p_tail,
    first_position,
    b_ring,
    b_won,
    LAYOUT: tl.constexpr,
    CAPACITY: tl.constexpr,
    BD: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIT: tl.constexpr,
    UNBIASED: tl.constexpr,
):
    """Value codes, scales and zeros of the page, COLUMNS word columns (the tokens of all their fields) at a time."""
    D: tl.constexpr = LAYOUT.head_size
    WORDS: tl.constexpr = LAYOUT.value_columns
    FIELDS: tl.constexpr = 16 // LAYOUT.v_bits
    o_d = tl.arange(0, BD)
    m_d = (o_d < D)[None, :]
    b_all = tl.load(p_tail + b_ring[:, None] * D + o_d[None, :], mask=m_d, other=0.0)
    b_mean = mean_of_others(b_all.to(tl.float32), b_won)
    o_fields = tl.arange(0, FIELDS * COLUMNS) // COLUMNS
    for start in range(0, WORDS, COLUMNS):
        o_tokens = o_fields * WORDS + start + tl.arange(0, FIELDS * COLUMNS) % COLUMNS
        o_ring = (first_position + o_tokens) % CAPACITY
        b_values = tl.load(p_tail + o_ring[:, None] * D + o_d[None, :], mask=m_d, other=0.0)
        o_columns = start + tl.arange(0, COLUMNS)
        p_words = p_page + LAYOUT.value_codes_at + o_d[None, :] * WORDS + o_columns[:, None]
        if LAYOUT.v_bits == 16:
            tl.store(p_words, b_values.to(tl.int16, bitcast=True), mask=m_d)
        else:
            b_gone = tl.gather(b_won, o_tokens, 0)[:, None] != 0
            b_values = tl.where(b_gone, b_mean, b_values.to(tl.float32))
            m_values = tl.broadcast_to(m_d, b_values.shape)
            b_codes, b_scale, b_zero = quantize(b_values, m_values, 1, D, LAYOUT.v_bits, FIT, UNBIASED)
            tl.store(p_words, pack_fields(b_codes, FIELDS, LAYOUT.v_bits), mask=m_d)
            p_scale = (p_page + LAYOUT.value_scale_at).to(tl.pointer_type(tl.float16)) + o_tokens[:, None]
            tl.store(p_scale, b_scale.to(tl.float16))
            tl.store(p_scale + LAYOUT.group, b_zero.to(tl.float16))


@triton.jit(do_not_specialize_on_alignment=VECTORS)
def seal_kernel(
    p_pages,
    p_tail_k,
    p_tail_v,
    p_outlier_k,
    p_outlier_v,
    p_score,
    p_position,
    p_count,
    p_frozen,
    p_slot_ids,
    p_page_ids,
    p_first_positions,
    p_pool_sizes,
    p_frequencies,
    J: tl.constexpr,
    LAYOUT: tl.constexpr,
    CAPACITY: tl.constexpr,
    PLACES: tl.constexpr,
    BP: tl.constexpr,
    BD: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEEP_SMALLEST: tl.constexpr,
    FIT: tl.constexpr,
    UNBIASED: tl.constexpr,
    IN_ASM: tl.constexpr,
):
    """One KV head of one (slot, page) pair."""
    i_pair, i_head = tl.program_id(0), tl.program_id(1)
    G: tl.constexpr = LAYOUT.group
    D: tl.constexpr = LAYOUT.head_size
    slot = tl.load(p_slot_ids + i_pair).to(tl.int64) * J + i_head
    p_page = p_pages + (tl.load(p_page_ids + i_pair).to(tl.int64) * J + i_head) * LAYOUT.words
    first_position = tl.load(p_first_positions + i_pair)
    p_tail_k += slot * CAPACITY * D
    p_tail_v += slot * CAPACITY * D
    o_tokens, o_d = tl.arange(0, G), tl.arange(0, BD)
    b_ring = (first_position + o_tokens) % CAPACITY
    b_won = tl.zeros([G], tl.int32)
    if PLACES > 0:
        b_keys = tl.load(p_tail_k + b_ring[:, None] * D + o_d[None, :], mask=(o_d < D)[None, :], other=0.0)
        b_won, o_rows = admit(
            p_score + slot * PLACES,
            p_position + slot * PLACES,
            p_count + slot,
            p_frozen + slot,
            tl.sum(tl.abs(b_keys.to(tl.float32)), 1),
            first_position,
            tl.load(p_pool_sizes + i_pair),
            PLACES,
            BP,
            KEEP_SMALLEST,
        )
        keep_outliers(p_tail_k, p_outlier_k + slot * PLACES * D, b_ring, b_won, o_rows, D, BD)
        keep_outliers(p_tail_v, p_outlier_v + slot * PLACES * D, b_ring, b_won, o_rows, D, BD)
    seal_keys(p_page, p_tail_k, b_ring, b_won, first_position, p_frequencies, LAYOUT, CHANNELS, FIT, UNBIASED, IN_ASM)
    if LAYOUT.k_fine:
        choose_fine(p_page, p_tail_k, b_ring, b_won, first_position, p_frequencies, LAYOUT, BD, IN_ASM)
        tl.debug_barrier()
        seal_fine_keys(p_page, p_tail_k, b_ring, b_won, first_position, p_frequencies, LAYOUT, FIT, UNBIASED, IN_ASM)
    seal_values(p_page, p_tail_v, first_position, b_ring, b_won, LAYOUT, CAPACITY, BD, COLUMNS, FIT, UNBIASED)
    b_mask = tl.sum(tl.reshape(b_won, [G // 16, 16]) << tl.arange(0, 16)[None, :], 1)
    tl.store(p_page + LAYOUT.mask_at + tl.arange(0, G // 16), b_mask.to(tl.int16))


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
    """See `ottserve.kernels.seal.seal`. One launch, no host synchronisation."""
    check(layout, pages, slots)
    if layout.turns_keys:
        for_layout(layout, frequencies)
    check_vectors(slot_ids=slot_ids, page_ids=page_ids, first_positions=first_positions, pool_sizes=pool_sizes)
    M, J = len(page_ids), pages.shape[1]
    if M == 0:
        return
    places = slots.outlier_k.shape[2]
    channels, columns, warps = launch.seal_block(layout)
    seal_kernel[M, J](
        pages,
        slots.tail_k,
        slots.tail_v,
        slots.outlier_k,
        slots.outlier_v,
        slots.outlier_score,
        slots.outlier_position,
        slots.outlier_count,
        slots.frozen,
        slot_ids,
        page_ids,
        first_positions,
        pool_sizes,
        frequencies,
        J=J,
        LAYOUT=layout,
        CAPACITY=slots.tail_k.shape[2],
        PLACES=places,
        BP=triton.next_power_of_2(max(1, places)),
        BD=triton.next_power_of_2(layout.head_size),
        CHANNELS=channels,
        COLUMNS=columns,
        KEEP_SMALLEST=keep == "smallest",
        FIT=fit_rounds,
        UNBIASED=unbiased,
        IN_ASM=not knobs.runtime.interpret,
        num_warps=warps,
    )
