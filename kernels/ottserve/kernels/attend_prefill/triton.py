"""Chunk attention on a GPU: every block of queries walks the chunk itself, then its sequence's history as stored.

Query rows (tokens × query heads of one KV head) are the M of the matrix products. Scales are folded as in decode
attention: into the query for keys, into the probabilities for values, so stored codes are used as they lie.
Probabilities of exact values are rounded to the values' dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ottserve.kernels import launch
from ottserve.kernels.device import (
    LOG2_E,
    SMALLEST_SCALE,
    field_units,
    finite_max,
    largest_of,
    load_channels,
    load_fine_keys,
    load_scales,
    loaders,
    pick_fine,
    replaced_bias,
)
from ottserve.kernels.layout import PageLayout
from ottserve.kernels.rotary import for_layout
from ottserve.kernels.rotary.triton import turned_scores
from ottserve.kernels.slots import Slots
from ottserve.kernels.supported import check, check_elements, check_queries, check_vectors

PAGE_UNIT = tl.constexpr(2.0 ** (14 - 24))
"""What sums over codes are times: a code at bit k of a word is c · 2^(k−24), and its probability times 2^(14−k)."""

VECTORS = ["p_starts", "p_page_table", "p_num_pages", "p_slot_ids", "p_lengths", "p_outlier_count"]
"""Read a number at a time, anywhere in a step's buffer: were the code to depend on where, every step would compile."""


@triton.jit
def find_block(p_starts, i_block, N, TOKENS: tl.constexpr):
    """Chunk of the `i_block`-th block of TOKENS queries, N if there is none, and the block's first token in it."""
    row, token, seen = N, 0, 0
    for i_row in range(N):
        blocks = tl.cdiv(tl.load(p_starts + i_row + 1) - tl.load(p_starts + i_row), TOKENS)
        is_here = (i_block >= seen) & (i_block < seen + blocks)
        row = tl.where(is_here, i_row, row)
        token = tl.where(is_here, (i_block - seen) * TOKENS, token)
        seen += blocks
    return row, token


@triton.jit
def load_queries(p_q, o_q, m_rows, b_bound, DTYPE: tl.constexpr):
    """The block's queries, divided by what bounds them. Loaded anew for each use: kept, they would fill registers."""
    b_q = tl.load(p_q + o_q, mask=m_rows, other=0.0).to(tl.float32)
    return (b_q / b_bound[:, None]).to(DTYPE)


@triton.jit
def attend_exact_block(b_s, b_factor, b_v, b_max, b_sum, b_acc):
    """One step of the online softmax: scores `[M, n]` before b_factor, dead ones at −∞, and exact values `[n, BD]`."""
    new_max = tl.maximum(b_max, tl.max(b_s, 1) * b_factor)
    b_kept = tl.exp2(b_max - finite_max(new_max))
    b_p = tl.exp2(b_s * b_factor[:, None] - finite_max(new_max)[:, None])
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_kept[:, None], input_precision="ieee")
    return new_max, b_sum * b_kept + tl.sum(b_p, 1), b_acc


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


@triton.jit
def attend_kept(
    p_outlier_k,
    p_outlier_v,
    p_tail_k,
    p_tail_v,
    num_outliers,
    first,
    last,
    b_q,
    b_factor,
    b_max,
    b_sum,
    b_acc,
    D: tl.constexpr,
    CAPACITY: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The online softmax over outliers and the tail's positions first … last−1."""
    o_d = tl.arange(0, b_q.shape[1])
    blocks_outliers = tl.cdiv(num_outliers, TOKENS)
    for i_block in tl.range(0, blocks_outliers + tl.cdiv(last - first, TOKENS), num_stages=1):
        is_outlier = i_block < blocks_outliers
        begin = tl.where(is_outlier, i_block * TOKENS, first + (i_block - blocks_outliers) * TOKENS)
        o_keys = begin + tl.arange(0, TOKENS)
        m_keys = o_keys < tl.where(is_outlier, num_outliers, last)
        o_places = tl.where(is_outlier, o_keys, o_keys % CAPACITY)[:, None] * D + o_d[None, :]
        m_places = m_keys[:, None] & (o_d < D)[None, :]
        b_k = tl.load(tl.where(is_outlier, p_outlier_k, p_tail_k) + o_places, mask=m_places, other=0.0)
        b_v = tl.load(tl.where(is_outlier, p_outlier_v, p_tail_v) + o_places, mask=m_places, other=0.0)
        b_s = tl.where(m_keys[None, :], tl.dot(b_q, tl.trans(b_k)), float("-inf"))
        b_max, b_sum, b_acc = attend_exact_block(b_s, b_factor, b_v, b_max, b_sum, b_acc)
    return b_max, b_sum, b_acc


@triton.jit
def attend_chunk(
    p_k,
    p_v,
    stride_k_token,
    stride_v_token,
    first_token,
    o_tokens,
    num_tokens,
    b_q,
    b_factor,
    b_max,
    b_sum,
    b_acc,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The online softmax over the chunk itself, KEYS of its tokens a step; queries `o_tokens`, TOKENS from first_token
    on, see none after themselves. What all of them see is read without a mask."""
    o_d, o_keys = tl.arange(0, b_q.shape[1]), tl.arange(0, KEYS)
    m_d = (o_d < D)[None, :]
    num_seen = first_token // KEYS * KEYS
    p_ks, p_vs = (
        p_k + o_keys[:, None] * stride_k_token + o_d[None, :],
        p_v + o_keys[:, None] * stride_v_token + o_d[None, :],
    )
    for begin in tl.range(0, num_seen, KEYS, num_stages=STAGES):
        o_begin = tl.cast(begin, tl.int64)
        if D == o_d.shape[0]:
            b_k, b_v = tl.load(p_ks + o_begin * stride_k_token), tl.load(p_vs + o_begin * stride_v_token)
        else:
            b_k = tl.load(p_ks + o_begin * stride_k_token, mask=m_d, other=0.0)
            b_v = tl.load(p_vs + o_begin * stride_v_token, mask=m_d, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_max, b_sum, b_acc = attend_exact_block(b_s, b_factor, b_v, b_max, b_sum, b_acc)
    for begin in tl.range(num_seen, tl.minimum(first_token + TOKENS, num_tokens), KEYS, num_stages=1):
        o_begin, m_keys = tl.cast(begin, tl.int64), (begin + o_keys < num_tokens)[:, None] & m_d
        b_k = tl.load(p_ks + o_begin * stride_k_token, mask=m_keys, other=0.0)
        b_v = tl.load(p_vs + o_begin * stride_v_token, mask=m_keys, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_s = tl.where((begin + o_keys)[None, :] <= o_tokens[:, None], b_s, float("-inf"))
        b_max, b_sum, b_acc = attend_exact_block(b_s, b_factor, b_v, b_max, b_sum, b_acc)
    return b_max, b_sum, b_acc


@triton.jit(do_not_specialize=["N", "stride_table"], do_not_specialize_on_alignment=VECTORS)
def attend_history_kernel(
    p_q,
    p_k,
    p_v,
    p_starts,
    p_pages,
    p_tail_k,
    p_tail_v,
    p_outlier_k,
    p_outlier_v,
    p_outlier_count,
    p_page_table,
    p_num_pages,
    p_slot_ids,
    p_lengths,
    p_frequencies,
    p_out,
    scale_log2,
    N,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_table,
    J: tl.constexpr,
    GQA: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    BD: tl.constexpr,
    LAYOUT: tl.constexpr,
    CAPACITY: tl.constexpr,
    PLACES: tl.constexpr,
    LOAD_KEYS: tl.constexpr,
    LOAD_VALUES: tl.constexpr,
    KEY_MODE: tl.constexpr,
    VALUE_MODE: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    STAGES: tl.constexpr,
    KEYS: tl.constexpr,
    KEY_STAGES: tl.constexpr,
    HAS_PAGES: tl.constexpr,
):
    """TOKENS queries of one chunk, for the query heads of one KV head: row r is token r // HEADS, head r % HEADS.

    The last blocks, which see the most, begin first.
    """
    i_row, first_token = find_block(p_starts, tl.num_programs(0) - 1 - tl.program_id(0), N, TOKENS)
    if i_row == N:
        return
    i_head = tl.program_id(1)
    D: tl.constexpr = LAYOUT.head_size
    EXACT: tl.constexpr = p_tail_k.dtype.element_ty
    o_d, m_d = tl.arange(0, BD), (tl.arange(0, BD) < D)[None, :]
    o_rows = tl.arange(0, TOKENS * HEADS)
    o_tokens, o_heads = first_token + o_rows // HEADS, i_head * GQA + o_rows % HEADS
    start = tl.load(p_starts + i_row)
    num_tokens = tl.load(p_starts + i_row + 1) - start
    m_rows = ((o_tokens < num_tokens) & (o_rows % HEADS < GQA))[:, None] & m_d
    o_q = (start + o_tokens).to(tl.int64)[:, None] * stride_q_token + o_heads[:, None] * stride_q_head + o_d[None, :]
    largest = tl.max(tl.abs(tl.load(p_q + o_q, mask=m_rows, other=0.0).to(tl.float32)), 1)
    b_bound = tl.exp2(tl.ceil(tl.log2(tl.where(largest > 0, largest, 1.0))))
    b_factor = b_bound * scale_log2

    b_max = tl.full([TOKENS * HEADS], float("-inf"), tl.float32)
    b_sum = tl.zeros([TOKENS * HEADS], tl.float32)
    b_acc = tl.zeros([TOKENS * HEADS, BD], tl.float32)
    b_max, b_sum, b_acc = attend_chunk(
        p_k + start.to(tl.int64) * stride_k_token + i_head * stride_k_head,
        p_v + start.to(tl.int64) * stride_v_token + i_head * stride_v_head,
        stride_k_token,
        stride_v_token,
        first_token,
        o_tokens,
        num_tokens,
        load_queries(p_q, o_q, m_rows, b_bound, p_k.dtype.element_ty),
        b_factor,
        b_max,
        b_sum,
        b_acc,
        D,
        TOKENS,
        KEYS,
        KEY_STAGES,
    )

    length = tl.load(p_lengths + i_row)
    if length > 0:
        slot = tl.load(p_slot_ids + i_row).to(tl.int64) * J + i_head
        num_pages = tl.load(p_num_pages + i_row)
        b_max, b_sum, b_acc = attend_kept(
            p_outlier_k + slot * PLACES * D,
            p_outlier_v + slot * PLACES * D,
            p_tail_k + slot * CAPACITY * D,
            p_tail_v + slot * CAPACITY * D,
            tl.load(p_outlier_count + slot),
            num_pages * LAYOUT.group,
            length,
            load_queries(p_q, o_q, m_rows, b_bound, EXACT),
            b_factor,
            b_max,
            b_sum,
            b_acc,
            D,
            CAPACITY,
            KEPT,
        )
        if HAS_PAGES:
            b_q = load_queries(p_q, o_q, m_rows, b_bound, EXACT if LAYOUT.k_bits == 16 else tl.float16)
            b_zeros = tl.zeros_like(b_sum)
            if LAYOUT.v_bits != 16:
                b_acc *= PAGE_UNIT
            p_page_table += i_row.to(tl.int64) * stride_table
            for i_page in tl.range(0, num_pages, num_stages=STAGES):
                page_id = tl.load(p_page_table + i_page).to(tl.int64)
                b_max, b_sum, b_zeros, b_acc = attend_page(
                    p_pages + (page_id * J + i_head) * LAYOUT.words,
                    i_page * LAYOUT.group,
                    p_frequencies,
                    o_d,
                    b_q,
                    b_factor,
                    b_max,
                    b_sum,
                    b_zeros,
                    b_acc,
                    LAYOUT,
                    LOAD_KEYS,
                    LOAD_VALUES,
                    KEY_MODE,
                    VALUE_MODE,
                    ROWS,
                )
            if LAYOUT.v_bits != 16:
                b_acc = b_acc / PAGE_UNIT + b_zeros[:, None]

    b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    o_out = ((start + o_tokens).to(tl.int64)[:, None] * (J * GQA) + o_heads[:, None]) * D + o_d[None, :]
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_rows)


def attend_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    pages: Tensor,
    slots: Slots,
    layout: PageLayout,
    page_table: Tensor,
    num_pages: Tensor,
    slot_ids: Tensor,
    lengths: Tensor,
    scale: float,
    frequencies: Tensor | None = None,
) -> Tensor:
    """See `ottserve.kernels.attend_prefill.attend_prefill`. One launch, no host synchronisation."""
    check(layout, pages, slots)
    check_queries(q, pages.shape[1])
    if layout.turns_keys:
        for_layout(layout, frequencies)
    check_vectors(starts=starts, num_pages=num_pages, slot_ids=slot_ids, lengths=lengths)
    check_elements(k=k, v=v)
    T, H, D = q.shape
    N, J = len(slot_ids), k.shape[1]
    out = torch.zeros(T, H, D, dtype=q.dtype, device=q.device)
    if T == 0 or N == 0:
        return out
    has_pages = page_table.shape[1] > 0
    config = launch.prefill_config(layout, H // J, k.element_size(), q.device, has_pages=has_pages)
    attend_history_kernel[triton.cdiv(T, config.tokens) + N, J](
        q,
        k,
        v,
        starts,
        pages,
        slots.tail_k,
        slots.tail_v,
        slots.outlier_k,
        slots.outlier_v,
        slots.outlier_count,
        page_table,
        num_pages,
        slot_ids,
        lengths,
        frequencies,
        out,
        scale * LOG2_E,
        N,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        page_table.stride(0),
        J=J,
        GQA=H // J,
        HEADS=config.heads,
        TOKENS=config.tokens,
        BD=triton.next_power_of_2(D),
        LAYOUT=layout,
        CAPACITY=slots.tail_k.shape[2],
        PLACES=slots.outlier_k.shape[2],
        ROWS=launch.block_rows(layout),
        KEPT=config.kept,
        STAGES=config.stages,
        KEYS=config.keys,
        KEY_STAGES=config.key_stages,
        HAS_PAGES=has_pages,
        num_warps=config.warps,
        **loaders(layout),
    )
    return out
