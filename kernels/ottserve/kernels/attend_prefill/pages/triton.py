"""Sealed pages on a GPU: one step of a block of queries' online softmax over a page as it is stored.

Scales are folded as in decode attention: into the query for keys, into the probabilities for values, so stored
codes are used as they lie. Knows no chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ottserve.kernels.device import (
    SMALLEST_SCALE,
    field_units,
    finite_max,
    largest_of,
    load_channels,
    load_fine_keys,
    load_scales,
    pick_fine,
    replaced_bias,
)
from ottserve.kernels.rotary.triton import turned_scores

PAGE_UNIT = tl.constexpr(2.0 ** (14 - 24))
"""What sums over codes are times: a code at bit k of a word is c · 2^(k−24), and its probability times 2^(14−k)."""


@triton.jit
def packed_row_scores(
    p_page, o_d, b_q, b_k, LAYOUT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, IN_ASM: tl.constexpr
):
    """Scores fp32 `[M, ROWS]` of a block of key codes `b_k [ROWS, BD]`."""
    PART: tl.constexpr = BLOCK * ROWS * LAYOUT.k_subgroups // LAYOUT.group
    p_scale = p_page + LAYOUT.key_scale_at + PART * LAYOUT.head_size
    b_scale = load_channels(p_scale, o_d, LAYOUT.head_size)
    b_zero = load_channels(p_scale + LAYOUT.key_scale_words, o_d, LAYOUT.head_size)
    b_raw = tl.dot(b_q * b_scale[None, :], tl.trans(b_k))
    b_offset = tl.sum(b_q.to(tl.float32) * b_zero.to(tl.float32)[None, :], 1)
    b_unit = field_units(24, BLOCK, ROWS, LAYOUT.k_bits, LAYOUT.key_rows)
    b_scores = b_raw * b_unit[None, :] + b_offset[:, None]
    if LAYOUT.k_fine:
        b_fine = load_fine_keys(p_page, LAYOUT, BLOCK, ROWS, IN_ASM)
        b_fine_q = tl.dot(b_q, tl.trans(pick_fine(p_page, o_d, b_scale, LAYOUT))).to(b_q.dtype)
        b_unit = field_units(24 + LAYOUT.k_bits, BLOCK, ROWS, LAYOUT.k_fine_bits, LAYOUT.fine_rows)
        b_scores += tl.dot(b_fine_q, tl.trans(b_fine)) * b_unit[None, :]
    return b_scores


@triton.jit
def attend_page(
    p_page,
    first_position,
    p_frequencies,
    o_d,
    b_q,
    b_factor,
    b_max,
    b_sum,
    b_zeros,
    b_acc,
    LAYOUT: tl.constexpr,
    LOAD_KEYS: tl.constexpr,
    LOAD_VALUES: tl.constexpr,
    KEY_MODE: tl.constexpr,
    VALUE_MODE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One step of the online softmax over a page. The running maximum bounds score + log2(value scale).

    Of packed values b_acc has the sums over codes, times PAGE_UNIT, and b_zeros those over zeros, for all channels.
    """
    scores, maxima = (), ()
    for block in tl.static_range(LAYOUT.group // ROWS):
        if LAYOUT.turns_keys:
            b_t = tl.trans(b_q)
            b_s = tl.trans(turned_scores(p_page, first_position, p_frequencies, b_t, LAYOUT, block, ROWS, KEY_MODE))
        else:
            b_k = LOAD_KEYS(p_page, o_d, LAYOUT, block, ROWS, KEY_MODE)
            if LAYOUT.k_bits == 16:
                b_s = tl.dot(b_q, tl.trans(b_k))
            else:
                b_s = packed_row_scores(p_page, o_d, b_q, b_k, LAYOUT, block, ROWS, KEY_MODE)
        b_s = b_s * b_factor[:, None] + replaced_bias(p_page, LAYOUT, block, ROWS)[None, :]
        scores = scores + (b_s,)  # type: ignore[assignment]
        maxima = maxima + (tl.max(b_s, 1),)  # type: ignore[assignment]
    p_scale = p_page + LAYOUT.value_scale_at
    new_max = largest_of(maxima)
    if LAYOUT.v_bits != 16:
        largest_scale = tl.max(load_scales(p_scale, 0, LAYOUT.group), 0).to(tl.float32)
        new_max += tl.log2(tl.maximum(largest_scale, SMALLEST_SCALE))
    new_max = tl.maximum(b_max, new_max)
    b_kept = tl.exp2(b_max - finite_max(new_max))
    b_sum *= b_kept
    b_zeros *= b_kept
    b_acc *= b_kept[:, None]
    for block in tl.static_range(LAYOUT.group // ROWS):
        b_p = tl.exp2(scores[block] - finite_max(new_max)[:, None])
        b_sum += tl.sum(b_p, 1)
        b_v = tl.trans(LOAD_VALUES(p_page, o_d, LAYOUT, block, ROWS, VALUE_MODE))
        if LAYOUT.v_bits != 16:
            b_zeros += tl.sum(b_p * load_scales(p_scale + LAYOUT.group, block, ROWS).to(tl.float32)[None, :], 1)
            b_share = load_scales(p_scale, block, ROWS).to(tl.float32)
            b_share *= field_units(14, block, ROWS, LAYOUT.v_bits, LAYOUT.value_columns)
            b_p *= b_share[None, :]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc)
    return new_max, b_sum, b_zeros, b_acc
