"""Sealed pages on a GPU: the online softmax of one KV head's queries over pages of one table.

Roles: tokens (for scores) and channels (for output) are the M of the matrix products and the query heads of one KV
head are N, so packed words go straight into the operand's registers and nothing unpacked changes place.
Key scales are folded into the query, value scales into the probabilities; products run over the raw codes.
Knows no row, no slot and no other share.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ottserve.kernels.device import (
    SMALLEST_SCALE,
    accumulate_exact,
    as_operand,
    field_units,
    fine_queries,
    finite_max,
    largest_of,
    load_channels,
    load_fine_keys,
    load_scales,
    prefetch_sectors,
    replaced_bias,
)
from ottserve.kernels.rotary.triton import turned_scores


@triton.jit
def packed_scores(
    p_page,
    o_d,
    b_q,
    p_queries,
    b_inverse,
    b_codes,
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    IN_ASM: tl.constexpr,
):
    """Scores fp32 `[ROWS, HEADS]` of a block of codes: the query times scale over codes, plus the query over zeros."""
    PART: tl.constexpr = BLOCK * ROWS * LAYOUT.k_subgroups // LAYOUT.group
    p_scale = p_page + LAYOUT.key_scale_at + PART * LAYOUT.head_size
    b_scale = load_channels(p_scale, o_d, LAYOUT.head_size)
    b_zero = load_channels(p_scale + LAYOUT.key_scale_words, o_d, LAYOUT.head_size)
    b_raw = tl.dot(b_codes, b_q * b_scale[:, None])
    b_offset = tl.dot(tl.broadcast_to(b_zero[None, :], [ROWS, b_zero.shape[0]]), b_q)
    b_unit = field_units(24, BLOCK, ROWS, LAYOUT.k_bits, LAYOUT.key_rows)
    b_unit = tl.broadcast_to(b_unit[:, None], [ROWS, b_q.shape[1]])
    # An explicit fma: a sum of two products would become one chain, and the offset be multiplied again for each block.
    b_scores = tl.fma(b_raw, b_unit, b_offset)
    if LAYOUT.k_fine:
        b_fine = load_fine_keys(p_page, LAYOUT, BLOCK, ROWS, IN_ASM)
        b_fine_q = fine_queries(p_page, p_scale, p_queries, b_inverse, LAYOUT)
        b_unit = field_units(24 + LAYOUT.k_bits, BLOCK, ROWS, LAYOUT.k_fine_bits, LAYOUT.fine_rows)
        b_scores = tl.fma(tl.dot(b_fine, b_fine_q), tl.broadcast_to(b_unit[:, None], b_scores.shape), b_scores)
    return b_scores


@triton.jit
def page_scores(
    p_page,
    first_position,
    p_frequencies,
    o_d,
    b_q,
    p_queries,
    b_inverse,
    LAYOUT: tl.constexpr,
    LOAD_KEYS: tl.constexpr,
    KEY_MODE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Scores of a page, a tuple of fp32 `[ROWS, HEADS]`; replaced tokens at −∞. `b_q` in the operand's dtype."""
    scores = ()
    for block in tl.static_range(LAYOUT.group // ROWS):
        if LAYOUT.turns_keys:
            b_s = turned_scores(p_page, first_position, p_frequencies, b_q, LAYOUT, block, ROWS, KEY_MODE)
        else:
            b_k = LOAD_KEYS(p_page, o_d, LAYOUT, block, ROWS, KEY_MODE)
            if LAYOUT.k_bits == 16:
                b_s = tl.dot(b_k, b_q)
            else:
                b_s = packed_scores(p_page, o_d, b_q, p_queries, b_inverse, b_k, LAYOUT, block, ROWS, KEY_MODE)
        b_s += replaced_bias(p_page, LAYOUT, block, ROWS)[:, None]
        scores = scores + (b_s,)  # type: ignore[assignment]
    return scores


@triton.jit
def attend_pages(
    p_pages,
    p_table,
    first,
    last,
    i_head,
    b_q,
    p_queries,
    b_inverse,
    b_factor,
    o_d,
    p_frequencies,
    J: tl.constexpr,
    LAYOUT: tl.constexpr,
    LOAD_KEYS: tl.constexpr,
    LOAD_VALUES: tl.constexpr,
    KEY_MODE: tl.constexpr,
    VALUE_MODE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over pages first … last−1 of a table: reference exponent, sum `[HEADS]`, output `[BD, HEADS]`.

    The reference exponent is at least score + log2(value scale) of every token, so that what multiplies the codes,
    p · scale, is at most 1; times 2^(14−k), the field's share, it fits fp16 whatever the scales are.
    """
    BD: tl.constexpr = b_q.shape[0]
    HEADS: tl.constexpr = b_q.shape[1]
    b_max = tl.full([HEADS], float("-inf"), tl.float32)
    b_sum = tl.zeros([ROWS, HEADS], tl.float32)
    b_zeros = tl.zeros([ROWS, HEADS], tl.float32)
    b_acc = tl.zeros([BD, HEADS], tl.float32)
    page_id = tl.load(p_table + first, mask=first < last, other=0)
    for i_page in tl.range(first, last, num_stages=STAGES):
        p_page = p_pages + (page_id.to(tl.int64) * J + i_head) * LAYOUT.words
        page_id = tl.load(p_table + i_page + 1, mask=i_page + 1 < last, other=0)
        if LAYOUT.v_bits != 16:
            p_next = p_pages + (page_id.to(tl.int64) * J + i_head) * LAYOUT.words
            prefetch_sectors(p_next + LAYOUT.value_scale_at, 2 * LAYOUT.value_scale_words, VALUE_MODE)
            if LAYOUT.k_fine:
                prefetch_sectors(p_next + LAYOUT.key_scale_at, LAYOUT.key_scale_words, VALUE_MODE)
                prefetch_sectors(p_next + LAYOUT.fine_channels_at, max(16, LAYOUT.k_fine // 2), VALUE_MODE)
        scores = page_scores(
            p_page,
            i_page * LAYOUT.group,
            p_frequencies,
            o_d,
            b_q,
            p_queries,
            b_inverse,
            LAYOUT,
            LOAD_KEYS,
            KEY_MODE,
            ROWS,
        )
        new_max = tl.max(largest_of(scores), 0) * b_factor
        if LAYOUT.v_bits != 16:
            largest_scale = tl.max(load_scales(p_page + LAYOUT.value_scale_at, 0, LAYOUT.group), 0).to(tl.float32)
            new_max += tl.log2(tl.maximum(largest_scale, SMALLEST_SCALE))
        new_max = tl.maximum(b_max, new_max)
        b_kept = tl.exp2(b_max - finite_max(new_max))[None, :]
        b_sum, b_zeros, b_acc = b_sum * b_kept, b_zeros * b_kept, b_acc * b_kept
        for block in tl.static_range(LAYOUT.group // ROWS):
            b_p = tl.exp2(scores[block] * b_factor[None, :] - finite_max(new_max)[None, :])
            b_sum += b_p
            b_v = LOAD_VALUES(p_page, o_d, LAYOUT, block, ROWS, VALUE_MODE)
            if LAYOUT.v_bits == 16:
                b_acc = accumulate_exact(b_v, b_p, b_acc)
            else:
                p_scale = p_page + LAYOUT.value_scale_at
                b_zeros += b_p * load_scales(p_scale + LAYOUT.group, block, ROWS).to(tl.float32)[:, None]
                b_unit = field_units(14, block, ROWS, LAYOUT.v_bits, LAYOUT.value_columns)
                b_share = load_scales(p_scale, block, ROWS).to(tl.float32) * b_unit
                b_weight = as_operand((b_p * b_share[:, None]).to(tl.float16), VALUE_MODE)
                b_acc = tl.dot(b_v, b_weight, b_acc)
        b_max = new_max
    b_out = b_acc
    if LAYOUT.v_bits != 16:
        b_out = b_acc * 2.0 ** (24 - 14) + tl.sum(b_zeros, 0)[None, :]
    return b_max, tl.sum(b_sum, 0), b_out
