"""Exact tokens on a GPU: online softmax of one KV head's queries over outliers and tail of a slot. Knows no page."""

from __future__ import annotations

import triton
import triton.language as tl

from ottserve.kernels.device import accumulate_exact, finite_max


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
    num_parts,
    CAPACITY: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over one of `num_parts` shares of the outliers and the tail's positions first … last−1."""
    BD: tl.constexpr = b_q.shape[0]
    HEADS: tl.constexpr = b_q.shape[1]
    b_max = tl.full([HEADS], float("-inf"), tl.float32)
    b_sum = tl.zeros([HEADS], tl.float32)
    b_acc = tl.zeros([BD, HEADS], tl.float32)
    blocks_outliers = tl.cdiv(num_outliers, TOKENS)
    blocks = blocks_outliers + tl.cdiv(last - first, TOKENS)
    for i_block in tl.range(i_part, blocks, num_parts, num_stages=STAGES):
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
