"""Exact tokens on a GPU: a block of queries' online softmax over the chunk itself, and over outliers and tail.

Probabilities are rounded to the values' dtype, in one part (docs/decisions/kernels.md). Knows no page.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ottserve.kernels.device import finite_max


@triton.jit
def attend_exact_block(b_s, b_factor, b_v, b_max, b_sum, b_acc):
    """One step of the online softmax: scores `[M, n]` before b_factor, dead ones at −∞, and exact values `[n, BD]`."""
    new_max = tl.maximum(b_max, tl.max(b_s, 1) * b_factor)
    b_kept = tl.exp2(b_max - finite_max(new_max))
    b_p = tl.exp2(b_s * b_factor[:, None] - finite_max(new_max)[:, None])
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_kept[:, None], input_precision="ieee")
    return new_max, b_sum * b_kept + tl.sum(b_p, 1), b_acc


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
