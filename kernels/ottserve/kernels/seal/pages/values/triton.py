"""Values of a page on a GPU: codes, scales and zeros, a few tokens at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from ottserve.kernels.device import token_rows
from ottserve.kernels.quantize.triton import pack_fields, quantize


@triton.jit
def mean_of_other_values(
    p_tail,
    p_chunk,
    length,
    stride_token,
    first_position,
    b_won,
    LAYOUT: tl.constexpr,
    CAPACITY: tl.constexpr,
    BD: tl.constexpr,
    HAS_CHUNKS: tl.constexpr,
):
    """Mean of the group's values that were not admitted, fp32 `[1, BD]`; 0 and nothing read where all are kept."""
    D: tl.constexpr = LAYOUT.head_size
    G: tl.constexpr = LAYOUT.group
    o_d = tl.arange(0, BD)
    b_sum = tl.zeros([1, BD], tl.float32)
    num_won = tl.sum(b_won, 0)
    for start in range(0, tl.where(num_won > 0, G, 0), 16):
        o_tokens = start + tl.arange(0, 16)
        b_rows = token_rows(first_position + o_tokens, p_tail, p_chunk, length, stride_token, D, CAPACITY, HAS_CHUNKS)
        b_kept = tl.gather(b_won, o_tokens, 0)[:, None] == 0
        b_values = tl.load(b_rows[:, None] + o_d[None, :], mask=b_kept & (o_d < D)[None, :], other=0.0)
        b_sum += tl.expand_dims(tl.sum(b_values.to(tl.float32), 0), 0)
    return b_sum / tl.maximum(G - num_won, 1)


@triton.jit
def seal_values(
    p_page,
    p_tail,
    p_chunk,
    length,
    stride_token,
    start,
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
    """Codes, scales and zeros of the values in COLUMNS word columns from `start` on: the tokens of all their fields."""
    D: tl.constexpr = LAYOUT.head_size
    WORDS: tl.constexpr = LAYOUT.value_columns
    FIELDS: tl.constexpr = 16 // LAYOUT.v_bits
    o_d = tl.arange(0, BD)
    m_d = (o_d < D)[None, :]
    o_places = tl.arange(0, FIELDS * COLUMNS)
    o_tokens = o_places // COLUMNS * WORDS + start + o_places % COLUMNS
    o_positions = first_position + o_tokens
    b_rows = token_rows(o_positions, p_tail, p_chunk, length, stride_token, D, CAPACITY, HAS_CHUNKS)
    b_values = tl.load(b_rows[:, None] + o_d[None, :], mask=m_d, other=0.0)
    p_words = p_page + LAYOUT.value_codes_at + o_d[None, :] * WORDS + (start + tl.arange(0, COLUMNS))[:, None]
    if LAYOUT.v_bits == 16:
        tl.store(p_words, b_values.to(tl.int16, bitcast=True), mask=m_d)
    else:
        b_mean = mean_of_other_values(
            p_tail, p_chunk, length, stride_token, first_position, b_won, LAYOUT, CAPACITY, BD, HAS_CHUNKS
        )
        b_gone = tl.gather(b_won, o_tokens, 0)[:, None] != 0
        b_values = tl.where(b_gone, b_mean, b_values.to(tl.float32))
        m_values = tl.broadcast_to(m_d, b_values.shape)
        b_codes, b_scale, b_zero = quantize(b_values, m_values, 1, D, LAYOUT.v_bits, FIT, UNBIASED)
        tl.store(p_words, pack_fields(b_codes, FIELDS, LAYOUT.v_bits), mask=m_d)
        p_scale = (p_page + LAYOUT.value_scale_at).to(tl.pointer_type(tl.float16)) + o_tokens[:, None]
        tl.store(p_scale, b_scale.to(tl.float16))
        tl.store(p_scale + LAYOUT.group, b_zero.to(tl.float16))
