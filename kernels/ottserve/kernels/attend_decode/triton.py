"""Decode attention on a GPU: split over pages, merged by log-sum-exp. Knows no cache policy but what the layout says.

Roles: tokens (for scores) and channels (for output) are the M of the matrix products and the query heads of one KV
head are N, so packed words go straight into the operand's registers and nothing unpacked changes place.
Key scales are folded into the query, value scales into the probabilities; products run over the raw codes.
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
    accumulate_exact,
    as_operand,
    field_units,
    fine_queries,
    finite_max,
    largest_of,
    load_channels,
    load_fine_keys,
    load_scales,
    loaders,
    prefetch_sectors,
    replaced_bias,
)
from ottserve.kernels.layout import PageLayout
from ottserve.kernels.rotary import for_layout
from ottserve.kernels.rotary.triton import turned_scores
from ottserve.kernels.slots import Slots
from ottserve.kernels.supported import check, check_queries, check_vectors

VECTORS = ["p_page_table", "p_num_pages", "p_slot_ids", "p_lengths", "p_outlier_count"]
"""Read a number at a time, anywhere in a step's buffer: were the code to depend on where, every step would compile."""


@triton.jit
def load_queries(p_queries, o_d, is_head, D: tl.constexpr):
    """Queries `[BD, HEADS]` fp32, each times the inverse of a power of two that bounds it, and the exponents `[HEADS]`.

    Queries of less than 2^−100 count as that small: inverses would be infinite.
    """
    in_q = (o_d < D)[:, None] & is_head[None, :]
    b_q = tl.load(p_queries[None, :] + o_d[:, None], mask=in_q, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(b_q), 0)
    b_exponent = tl.maximum(tl.ceil(tl.log2(tl.where(largest > 0, largest, 1.0))), -100.0)
    return b_q * tl.exp2(-b_exponent)[None, :], b_exponent


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


@triton.jit
def attend_exact(
    p_outlier_k,
    p_outlier_v,
    p_tail_k,
    p_tail_v,
    num_outliers,
    first,
    last,
    i_part,
    b_q,
    b_factor,
    o_d,
    CAPACITY: tl.constexpr,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same over one of PARTS shares of the outliers and the tail's positions first … last−1."""
    BD: tl.constexpr = b_q.shape[0]
    HEADS: tl.constexpr = b_q.shape[1]
    b_max = tl.full([HEADS], float("-inf"), tl.float32)
    b_sum = tl.zeros([HEADS], tl.float32)
    b_acc = tl.zeros([BD, HEADS], tl.float32)
    blocks_outliers = tl.cdiv(num_outliers, TOKENS)
    blocks = blocks_outliers + tl.cdiv(last - first, TOKENS)
    for i_block in tl.range(i_part, blocks, PARTS, num_stages=STAGES):
        is_outlier = i_block < blocks_outliers
        start = tl.where(is_outlier, i_block * TOKENS, first + (i_block - blocks_outliers) * TOKENS)
        end = tl.where(is_outlier, num_outliers, last)
        o_tokens = start + tl.arange(0, TOKENS)
        m_tokens = o_tokens < end
        o_rows = tl.where(is_outlier, o_tokens, o_tokens % CAPACITY)
        p_k = tl.where(is_outlier, p_outlier_k, p_tail_k)
        p_v = tl.where(is_outlier, p_outlier_v, p_tail_v)
        m_elements = m_tokens[:, None] & (o_d < D)[None, :]
        b_k = tl.load(p_k + o_rows[:, None] * D + o_d[None, :], mask=m_elements, other=0.0)
        b_v = tl.load(p_v + o_rows[:, None] * D + o_d[None, :], mask=m_elements, other=0.0)
        b_s = tl.where(m_tokens[:, None], tl.dot(b_k, b_q) * b_factor[None, :], float("-inf"))
        new_max = tl.maximum(b_max, tl.max(b_s, 0))
        b_kept = tl.exp2(b_max - finite_max(new_max))
        b_p = tl.exp2(b_s - finite_max(new_max)[None, :])
        b_sum = b_sum * b_kept + tl.sum(b_p, 0)
        b_acc = accumulate_exact(tl.trans(b_v), b_p, b_acc * b_kept[None, :])
        b_max = new_max
    return b_max, b_sum, b_acc


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=VECTORS)
def attend_split_kernel(
    p_q,
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
    p_part,
    p_part_max,
    p_part_sum,
    scale_log2,
    stride_row,
    stride_head,
    stride_table,
    J: tl.constexpr,
    GQA: tl.constexpr,
    HEADS: tl.constexpr,
    BD: tl.constexpr,
    LAYOUT: tl.constexpr,
    CAPACITY: tl.constexpr,
    PLACES: tl.constexpr,
    LOAD_KEYS: tl.constexpr,
    LOAD_VALUES: tl.constexpr,
    KEY_MODE: tl.constexpr,
    VALUE_MODE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT_TOKENS: tl.constexpr,
    EXACT_STAGES: tl.constexpr,
    EXACT_PARTS: tl.constexpr,
):
    """One share of one row and KV head. The last EXACT_PARTS shares, short ones that fill the end of the launch, are
    outliers and tail; the others are pages."""
    i_head, i_row, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    page_splits = num_splits - EXACT_PARTS
    D: tl.constexpr = LAYOUT.head_size
    EXACT: tl.constexpr = p_tail_k.dtype.element_ty
    o_d, o_heads = tl.arange(0, BD), tl.arange(0, HEADS)
    p_part += ((i_row * J + i_head) * num_splits + i_split).to(tl.int64) * GQA * D
    p_part_max += ((i_row * J + i_head) * num_splits + i_split) * GQA
    p_part_sum += ((i_row * J + i_head) * num_splits + i_split) * GQA
    length = tl.load(p_lengths + i_row)
    num_pages = tl.where(length > 0, tl.load(p_num_pages + i_row), 0)
    m_heads = o_heads < GQA
    p_queries = p_q + i_row.to(tl.int64) * stride_row + (i_head * GQA + tl.where(m_heads, o_heads, 0)) * stride_head
    b_q, b_exponent = load_queries(p_queries, o_d, m_heads, D)
    b_factor = tl.exp2(b_exponent) * scale_log2
    if i_split >= page_splits:
        slot = tl.load(p_slot_ids + i_row).to(tl.int64) * J + i_head
        num_outliers = tl.where(length > 0, tl.load(p_outlier_count + slot), 0)
        b_max, b_sum, b_out = attend_exact(
            p_outlier_k + slot * PLACES * D,
            p_outlier_v + slot * PLACES * D,
            p_tail_k + slot * CAPACITY * D,
            p_tail_v + slot * CAPACITY * D,
            num_outliers,
            num_pages * LAYOUT.group,
            length,
            i_split - page_splits,
            b_q.to(EXACT),
            b_factor,
            o_d,
            CAPACITY,
            EXACT_PARTS,
            D,
            EXACT_TOKENS,
            EXACT_STAGES,
        )
    else:
        pages_each = tl.cdiv(num_pages, page_splits)
        first = i_split * pages_each
        b_max, b_sum, b_out = attend_pages(
            p_pages,
            p_page_table + i_row.to(tl.int64) * stride_table,
            first,
            tl.minimum(first + pages_each, num_pages),
            i_head,
            b_q.to(EXACT if LAYOUT.k_bits == 16 else tl.float16),
            p_queries,
            tl.where(m_heads, tl.exp2(-b_exponent), 0.0),
            b_factor,
            o_d,
            p_frequencies,
            J,
            LAYOUT,
            LOAD_KEYS,
            LOAD_VALUES,
            KEY_MODE,
            VALUE_MODE,
            ROWS,
            STAGES,
        )
    tl.store(p_part_max + o_heads, b_max, mask=m_heads)
    tl.store(p_part_sum + o_heads, b_sum, mask=m_heads)
    tl.store(p_part + o_heads[None, :] * D + o_d[:, None], b_out, mask=m_heads[None, :] & (o_d < D)[:, None])


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits_kernel(
    p_part,
    p_part_max,
    p_part_sum,
    p_out,
    num_splits,
    GQA: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Shares of one row and query head into its output, BD channels; a share that saw nothing is not read."""
    i_head, i_channels = tl.program_id(0), tl.program_id(1)
    i_kv, i_query = i_head // GQA, i_head % GQA
    o_d = i_channels * BD + tl.arange(0, BD)
    b_max = tl.max(tl.full([SPLITS], float("-inf"), tl.float32), 0)
    total = tl.sum(tl.zeros([SPLITS], tl.float32), 0)
    b_out = tl.zeros([BD], tl.float32)
    for start in range(0, num_splits, SPLITS):
        o_splits = start + tl.arange(0, SPLITS)
        m_splits = o_splits < num_splits
        o_parts = (i_kv * num_splits + o_splits).to(tl.int64) * GQA + i_query
        b_part_max = tl.load(p_part_max + o_parts, mask=m_splits, other=float("-inf"))
        b_part_sum = tl.load(p_part_sum + o_parts, mask=m_splits, other=0.0)
        is_used = b_part_max > float("-inf")
        m_parts = is_used[:, None] & (o_d < D)[None, :]
        b_part = tl.load(p_part + o_parts[:, None] * D + o_d[None, :], mask=m_parts, other=0.0)
        new_max = tl.maximum(b_max, tl.max(b_part_max, 0))
        kept = tl.exp2(b_max - finite_max(new_max))
        b_weight = tl.where(is_used, tl.exp2(b_part_max - finite_max(new_max)), 0.0)
        total = total * kept + tl.sum(b_weight * tl.where(is_used, b_part_sum, 0.0), 0)
        b_out = b_out * kept + tl.sum(b_weight[:, None] * b_part, 0)
        b_max = new_max
    b_out = b_out / tl.where(total > 0, total, 1.0)
    tl.store(p_out + i_head.to(tl.int64) * D + o_d, b_out.to(p_out.dtype.element_ty), mask=o_d < D)


def attend_decode(
    q: Tensor,
    pages: Tensor,
    slots: Slots,
    layout: PageLayout,
    page_table: Tensor,
    num_pages: Tensor,
    slot_ids: Tensor,
    lengths: Tensor,
    scale: float,
    config: launch.DecodeConfig | None = None,
    frequencies: Tensor | None = None,
) -> Tensor:
    """See `ottserve.kernels.attend_decode.attend_decode`. Two launches, no host synchronisation."""
    check(layout, pages, slots)
    check_queries(q, pages.shape[1])
    if layout.turns_keys:
        for_layout(layout, frequencies)
    check_vectors(num_pages=num_pages, slot_ids=slot_ids, lengths=lengths)
    N, H, D = q.shape
    J, C = slots.tail_k.shape[1:3]
    config = config or launch.decode_config(layout, N, J, H // J, page_table.shape[1], q.device)
    shape = (N, J, config.splits + config.exact_parts, H // J)
    part = torch.empty(*shape, D, dtype=torch.float32, device=q.device)
    part_max, part_sum = torch.empty(2, *shape, dtype=torch.float32, device=q.device)
    out = torch.empty(N, H, D, dtype=q.dtype, device=q.device)
    if N == 0:
        return out
    attend_split_kernel[J, N, shape[2]](
        q,
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
        part,
        part_max,
        part_sum,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        J=J,
        GQA=H // J,
        HEADS=max(8, triton.next_power_of_2(H // J)),
        BD=triton.next_power_of_2(D),
        LAYOUT=layout,
        CAPACITY=C,
        PLACES=slots.outlier_k.shape[2],
        ROWS=launch.block_rows(layout),
        STAGES=config.stages,
        EXACT_TOKENS=config.exact_tokens,
        EXACT_STAGES=config.exact_stages,
        EXACT_PARTS=config.exact_parts,
        num_warps=config.warps,
        maxnreg=config.registers,
        **loaders(layout),
    )
    splits, channels = launch.merge_block(shape[2], D)
    merge_splits_kernel[N * H, triton.cdiv(D, channels)](
        part, part_max, part_sum, out, shape[2], GQA=H // J, D=D, BD=channels, SPLITS=splits, num_warps=4
    )
    return out
