"""Chunk attention on a GPU: every block of queries walks the chunk itself, then its sequence's history as stored.

Query rows (tokens × query heads of one KV head) are the M of the matrix products. What a program does with what is
exact is in `exact`, what it does with pages in `pages`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ottserve.kernels import launch
from ottserve.kernels.attend_prefill.exact.triton import attend_chunk, attend_kept
from ottserve.kernels.attend_prefill.pages.triton import PAGE_UNIT, attend_page
from ottserve.kernels.device import LOG2_E, loaders
from ottserve.kernels.layout import PageLayout
from ottserve.kernels.rotary import for_layout
from ottserve.kernels.slots import Slots
from ottserve.kernels.supported import check, check_elements, check_queries, check_vectors

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
    attend_history_kernel[-(-T // config.tokens) + N, J](
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
        BD=launch.next_power_of_2(D),
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
