"""Pages on a GPU: one program takes the keys or the values of one page and KV head from elements to packed words.

Knows no outlier: the page's mask says which tokens were admitted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ottserve.kernels.device import find_tokens, token_rows
from ottserve.kernels.quantize.triton import pack_fields, quantize
from ottserve.kernels.rotary.triton import load_group
from ottserve.kernels.seal.outliers.triton import VECTORS, load_mask, store_mask


@triton.jit
def mean_of_others(b_x, b_won):
    """Mean fp32 `[1, m]` over the rows of `b_x [G, m]` that were not admitted; zeros if there is none."""
    num_others = tl.maximum(b_x.shape[0] - tl.sum(b_won, 0), 1)
    return tl.expand_dims(tl.sum(tl.where(b_won[:, None] != 0, 0.0, b_x), 0) / num_others, 0)


@triton.jit
def load_filled(b_rows, b_won, o_d, first_position, p_frequencies, LAYOUT: tl.constexpr, IN_ASM: tl.constexpr):
    """Channels `o_d` of a group's keys, fp32 `[G, n]`, with the mean of the others in place of admitted tokens."""
    b_keys = load_group(b_rows, o_d, first_position, p_frequencies, LAYOUT, IN_ASM)
    return tl.where(b_won[:, None] != 0, mean_of_others(b_keys, b_won), b_keys)


@triton.jit
def seal_keys(
    p_page,
    b_rows,
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
            b_keys = tl.load(b_rows[:, None] + o_d[None, :], mask=m_d, other=0.0)
            tl.store(p_words, b_keys.to(tl.int16, bitcast=True), mask=m_d)
        else:
            b_keys = load_filled(b_rows, b_won, o_d, first_position, p_frequencies, LAYOUT, IN_ASM)
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
    b_rows,
    b_won,
    first_position,
    p_frequencies,
    LAYOUT: tl.constexpr,
    BD: tl.constexpr,
    IN_ASM: tl.constexpr,
):
    """Store the numbers of the k_fine channels that vary most over the group, ascending; the lower first of equals.

    Channels that hold no number are before none and behind none: more than k_fine may come first, and the rest of them
    is left out, since behind the numbers lies another head's page.
    """
    o_d = tl.arange(0, BD)
    m_d = o_d < LAYOUT.head_size
    b_keys = load_filled(b_rows, b_won, o_d, first_position, p_frequencies, LAYOUT, IN_ASM)
    b_centred = b_keys - tl.sum(b_keys, 0)[None, :] / LAYOUT.group
    b_spread = tl.where(m_d, tl.sum(b_centred * b_centred, 0), -1.0)
    is_before = (b_spread[:, None] > b_spread[None, :]) | (
        (b_spread[:, None] == b_spread[None, :]) & (o_d[:, None] < o_d[None, :])
    )
    b_fine = (tl.sum(is_before.to(tl.int32), 0) < LAYOUT.k_fine).to(tl.int32)
    p_channels = (p_page + LAYOUT.fine_channels_at).to(tl.pointer_type(tl.uint8))
    o_places = tl.cumsum(b_fine, 0) - 1
    tl.store(p_channels + o_places, o_d.to(tl.uint8), mask=(b_fine != 0) & (o_places < LAYOUT.k_fine))


@triton.jit
def seal_fine_keys(
    p_page,
    b_rows,
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
        b_keys = load_filled(b_rows, b_won, o_d, first_position, p_frequencies, LAYOUT, IN_ASM)
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
    p_chunk,
    length,
    stride_token,
    first_position,
    b_won,
    LAYOUT: tl.constexpr,
    CAPACITY: tl.constexpr,
    BD: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIT: tl.constexpr,
    UNBIASED: tl.constexpr,
    HAS_CHUNKS: tl.constexpr,
):
    """Value codes, scales and zeros of the page, COLUMNS word columns (the tokens of all their fields) at a time."""
    D: tl.constexpr = LAYOUT.head_size
    WORDS: tl.constexpr = LAYOUT.value_columns
    FIELDS: tl.constexpr = 16 // LAYOUT.v_bits
    o_d = tl.arange(0, BD)
    m_d = (o_d < D)[None, :]
    o_all = first_position + tl.arange(0, LAYOUT.group)
    b_all_rows = token_rows(o_all, p_tail, p_chunk, length, stride_token, D, CAPACITY, HAS_CHUNKS)
    b_all = tl.load(b_all_rows[:, None] + o_d[None, :], mask=m_d, other=0.0)
    b_mean = mean_of_others(b_all.to(tl.float32), b_won)
    o_fields = tl.arange(0, FIELDS * COLUMNS) // COLUMNS
    for start in range(0, WORDS, COLUMNS):
        o_tokens = o_fields * WORDS + start + tl.arange(0, FIELDS * COLUMNS) % COLUMNS
        o_positions = first_position + o_tokens
        b_rows = token_rows(o_positions, p_tail, p_chunk, length, stride_token, D, CAPACITY, HAS_CHUNKS)
        b_values = tl.load(b_rows[:, None] + o_d[None, :], mask=m_d, other=0.0)
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
    p_k,
    p_v,
    p_slot_ids,
    p_starts,
    p_lengths,
    p_page_rows,
    p_page_ids,
    p_first_positions,
    p_frequencies,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    J: tl.constexpr,
    LAYOUT: tl.constexpr,
    CAPACITY: tl.constexpr,
    TRACED: tl.constexpr,
    BD: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIT: tl.constexpr,
    UNBIASED: tl.constexpr,
    HAS_CHUNKS: tl.constexpr,
    IN_ASM: tl.constexpr,
):
    """One KV head of one page: its keys in one program, its values in another. TRACED: the mask is there already."""
    i_page, i_head = tl.program_id(0), tl.program_id(1)
    G: tl.constexpr = LAYOUT.group
    D: tl.constexpr = LAYOUT.head_size
    i_row = tl.load(p_page_rows + i_page) if HAS_CHUNKS else i_page
    page_id = tl.load(p_page_ids + i_page).to(tl.int64)
    if page_id < 0:
        return
    slot = tl.load(p_slot_ids + i_row).to(tl.int64) * J + i_head
    p_page = p_pages + (page_id * J + i_head) * LAYOUT.words
    first_position = tl.load(p_first_positions + i_page)
    b_won = load_mask(p_page, LAYOUT) if TRACED else tl.zeros([G], tl.int32)
    if tl.program_id(2) == 0:
        p_k, length = find_tokens(p_k, p_starts, p_lengths, i_row, i_head, stride_k_token, stride_k_head, HAS_CHUNKS)
        p_tail_k += slot * CAPACITY * D
        o_positions = first_position + tl.arange(0, G)
        b_rows = token_rows(o_positions, p_tail_k, p_k, length, stride_k_token, D, CAPACITY, HAS_CHUNKS)
        seal_keys(p_page, b_rows, b_won, first_position, p_frequencies, LAYOUT, CHANNELS, FIT, UNBIASED, IN_ASM)
        if LAYOUT.k_fine:
            choose_fine(p_page, b_rows, b_won, first_position, p_frequencies, LAYOUT, BD, IN_ASM)
            tl.debug_barrier()
            seal_fine_keys(p_page, b_rows, b_won, first_position, p_frequencies, LAYOUT, FIT, UNBIASED, IN_ASM)
    else:
        p_v, length = find_tokens(p_v, p_starts, p_lengths, i_row, i_head, stride_v_token, stride_v_head, HAS_CHUNKS)
        p_tail_v += slot * CAPACITY * D
        seal_values(
            p_page,
            p_tail_v,
            p_v,
            length,
            stride_v_token,
            first_position,
            b_won,
            LAYOUT,
            CAPACITY,
            BD,
            COLUMNS,
            FIT,
            UNBIASED,
            HAS_CHUNKS,
        )
        if not TRACED:
            store_mask(p_page, b_won, LAYOUT)
