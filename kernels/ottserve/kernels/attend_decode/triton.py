"""Decode attention on a GPU: split over pages, merged by log-sum-exp. Knows no cache policy but what the layout says.

A program has one share of one row and KV head, of its pages (`pages`) or of its outliers and tail (`exact`); a second
kernel merges them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ottserve.kernels import launch
from ottserve.kernels.attend_decode.exact.triton import attend_exact
from ottserve.kernels.attend_decode.pages.triton import attend_pages
from ottserve.kernels.device import LOG2_E, finite_max, loaders
from ottserve.kernels.layout import PageLayout
from ottserve.kernels.rotary import for_layout
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


@triton.jit(do_not_specialize=["stride_table", "exact_parts"], do_not_specialize_on_alignment=VECTORS)
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
    exact_parts,
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
    LEAST_PAGES: tl.constexpr,
):
    """One share of one row and KV head. The last `exact_parts` shares, short ones that fill the end of the launch, are
    outliers and tail; the others are pages, LEAST_PAGES or more each. A short row leaves shares without any, which end
    at once."""
    i_head, i_row, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    page_splits = num_splits - exact_parts
    D: tl.constexpr = LAYOUT.head_size
    EXACT: tl.constexpr = p_tail_k.dtype.element_ty
    o_d, o_heads = tl.arange(0, BD), tl.arange(0, HEADS)
    p_part += ((i_row * J + i_head) * num_splits + i_split).to(tl.int64) * GQA * D
    p_part_max += ((i_row * J + i_head) * num_splits + i_split) * GQA
    p_part_sum += ((i_row * J + i_head) * num_splits + i_split) * GQA
    length = tl.load(p_lengths + i_row)
    num_pages = tl.where(length > 0, tl.load(p_num_pages + i_row), 0)
    m_heads = o_heads < GQA
    pages_each = tl.maximum(tl.cdiv(num_pages, page_splits), LEAST_PAGES)
    first = i_split * pages_each
    if (i_split < page_splits) & (first >= num_pages):
        tl.store(p_part_max + o_heads, float("-inf"), mask=m_heads)
        return
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
            exact_parts,
            CAPACITY,
            D,
            EXACT_TOKENS,
            EXACT_STAGES,
        )
    else:
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
    part_max, part_sum = torch.empty(2, *shape, dtype=torch.float32, device=q.device).unbind()
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
        config.exact_parts,
        J=J,
        GQA=H // J,
        HEADS=max(8, launch.next_power_of_2(H // J)),
        BD=launch.next_power_of_2(D),
        LAYOUT=layout,
        CAPACITY=C,
        PLACES=slots.outlier_k.shape[2],
        ROWS=launch.block_rows(layout),
        STAGES=config.stages,
        EXACT_TOKENS=config.exact_tokens,
        EXACT_STAGES=config.exact_stages,
        LEAST_PAGES=launch.LEAST_PAGES,
        num_warps=config.warps,
        maxnreg=config.registers,
        **loaders(layout),
    )
    splits, channels = launch.merge_block(shape[2], D)
    merge_splits_kernel[N * H, -(-D // channels)](
        part, part_max, part_sum, out, shape[2], GQA=H // J, D=D, BD=channels, SPLITS=splits, num_warps=1
    )
    return out
