"""Keys of a page on a GPU: which channels are fine ones, and codes, scales and zeros of these and of the others."""

from __future__ import annotations

import triton
import triton.language as tl

from ottserve.kernels.device import load_fine_channels
from ottserve.kernels.quantize.triton import pack_fields, quantize
from ottserve.kernels.rotary.triton import load_group


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
def store_scales(p_page, o_d, m_d, b_scale, b_zero, LAYOUT: tl.constexpr):
    """Write scales and zeros `[k_subgroups, 1, n]` of the channels `o_d` that `m_d [1, n]` marks."""
    PARTS: tl.constexpr = LAYOUT.k_subgroups
    p_scale = (p_page + LAYOUT.key_scale_at).to(tl.pointer_type(tl.float16))
    p_scale += tl.arange(0, PARTS)[:, None, None] * LAYOUT.head_size + o_d[None, None, :]
    tl.store(p_scale, b_scale.to(tl.float16), mask=m_d[None, :, :])
    tl.store(p_scale + PARTS * LAYOUT.head_size, b_zero.to(tl.float16), mask=m_d[None, :, :])


@triton.jit
def quantize_keys(b_keys, LAYOUT: tl.constexpr, BITS: tl.constexpr, FIT: tl.constexpr, UNBIASED: tl.constexpr):
    """Codes `[G, n]`, scales and zeros `[k_subgroups, 1, n]` of keys `[G, n]`."""
    G: tl.constexpr = LAYOUT.group
    PARTS: tl.constexpr = LAYOUT.k_subgroups
    b_parts = tl.reshape(b_keys, [PARTS, G // PARTS, b_keys.shape[1]])
    m_parts = tl.full(b_parts.shape, True, tl.int1)
    b_codes, b_scale, b_zero = quantize(b_parts, m_parts, 1, G // PARTS, BITS, FIT, UNBIASED)
    return tl.reshape(b_codes, [G, b_keys.shape[1]]), b_scale, b_zero


@triton.jit
def seal_keys(
    p_page,
    b_rows,
    b_won,
    start,
    first_position,
    p_frequencies,
    LAYOUT: tl.constexpr,
    CHANNELS: tl.constexpr,
    FIT: tl.constexpr,
    UNBIASED: tl.constexpr,
    IN_ASM: tl.constexpr,
):
    """Codes, scales and zeros of CHANNELS channels of the keys from `start` on, but for fine ones."""
    BITS: tl.constexpr = LAYOUT.k_bits
    o_d = start + tl.arange(0, CHANNELS)
    m_d = (o_d < LAYOUT.head_size)[None, :]
    p_words = p_page + tl.arange(0, LAYOUT.key_rows)[:, None] * LAYOUT.head_size + o_d[None, :]
    if BITS == 16:
        b_keys = tl.load(b_rows[:, None] + o_d[None, :], mask=m_d, other=0.0)
        tl.store(p_words, b_keys.to(tl.int16, bitcast=True), mask=m_d)
    else:
        if LAYOUT.k_fine:
            b_fine = load_fine_channels(p_page, tl.arange(0, LAYOUT.k_fine), LAYOUT)
            m_d &= (tl.sum((b_fine[:, None] == o_d[None, :]).to(tl.int32), 0) == 0)[None, :]
        b_keys = load_filled(b_rows, b_won, o_d, first_position, p_frequencies, LAYOUT, IN_ASM)
        WIDE: tl.constexpr = UNBIASED and LAYOUT.widens_keys and BITS > 1
        b_codes, b_scale, b_zero = quantize_keys(b_keys, LAYOUT, BITS, FIT, WIDE)
        tl.store(p_words, pack_fields(b_codes, 16 // BITS, BITS), mask=m_d)
        store_scales(p_page, o_d, m_d, b_scale, b_zero, LAYOUT)


@triton.jit
def seal_fine_keys(
    p_page,
    b_rows,
    b_won,
    start,
    first_position,
    p_frequencies,
    LAYOUT: tl.constexpr,
    FINE: tl.constexpr,
    FIT: tl.constexpr,
    UNBIASED: tl.constexpr,
    IN_ASM: tl.constexpr,
):
    """Codes, scales and zeros of FINE fine channels from the one number `start` on."""
    BITS: tl.constexpr = LAYOUT.k_bits
    MORE_BITS: tl.constexpr = LAYOUT.k_fine_bits
    o_fine = start + tl.arange(0, FINE)
    o_d = load_fine_channels(p_page, o_fine, LAYOUT)
    b_keys = load_filled(b_rows, b_won, o_d, first_position, p_frequencies, LAYOUT, IN_ASM)
    b_codes, b_scale, b_zero = quantize_keys(b_keys, LAYOUT, BITS + MORE_BITS, FIT, UNBIASED)
    b_lower, b_upper = b_codes & ((1 << BITS) - 1), b_codes >> BITS
    p_lower = p_page + tl.arange(0, LAYOUT.key_rows)[:, None] * LAYOUT.head_size + o_d[None, :]
    tl.store(p_lower, pack_fields(b_lower, 16 // BITS, BITS))
    p_upper = p_page + LAYOUT.fine_codes_at + o_fine[None, :]
    p_upper += tl.arange(0, LAYOUT.fine_rows)[:, None] * LAYOUT.k_fine
    tl.store(p_upper, pack_fields(b_upper, 16 // MORE_BITS, MORE_BITS))
    store_scales(p_page, o_d, tl.full([1, FINE], True, tl.int1), b_scale, b_zero, LAYOUT)
