"""Admission on a GPU: scores of all pages at once, then one program a sequence and KV head that goes page after page.

Knows nothing of codes: of a page it writes the mask alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ottserve.kernels.device import find_tokens, token_rows

# Sorts behind every score. A score's bits, a positive fp32, sort as it does; the position below them breaks ties.
LAST_RANK = tl.constexpr(0x7FFFFFFF_FFFFFFFF)

VECTORS = [
    "p_slot_ids",
    "p_starts",
    "p_lengths",
    "p_page_starts",
    "p_page_rows",
    "p_page_ids",
    "p_first_positions",
    "p_pool_sizes",
    "p_score",
    "p_position",
    "p_count",
    "p_frozen",
]
"""Read a few numbers at a time, and anywhere: the code must not depend on where, or every step and layer compiles."""

ROWS_AT_ONCE = tl.constexpr(8)
"""Admitted tokens that one warp copies at a time."""


@triton.jit
def ranks(b_scores, o_order, KEEP_SMALLEST: tl.constexpr):
    """int64 that sort by score (smallest or largest first), then by `o_order`."""
    b_bits = b_scores.to(tl.int32, bitcast=True).to(tl.int64)
    if not KEEP_SMALLEST:
        b_bits = 0x7FFFFFFF - b_bits
    return (b_bits << 32) | o_order.to(tl.int64)


@triton.jit
def held_ranks(p_score, count, BP: tl.constexpr, KEEP_SMALLEST: tl.constexpr):
    """Ranks `[BP]` of the outliers in use."""
    o_held = tl.arange(0, BP)
    b_held = tl.load(p_score + o_held, mask=o_held < count, other=0.0)
    return tl.where(o_held < count, ranks(b_held, o_held, KEEP_SMALLEST), LAST_RANK)


@triton.jit
def winners(b_group, b_held, pool_size):
    """Which of the group's ranks are among the `pool_size` first of group and held, int32 of the group's shape."""
    b_won = tl.zeros_like(b_group)
    for _ in range(pool_size):
        first_group, first_held = tl.min(b_group, 0), tl.min(b_held, 0)
        first = tl.minimum(first_group, first_held)
        b_won = tl.where((b_group == first) & (first < LAST_RANK), 1, b_won)
        b_group = tl.where(b_group == first, LAST_RANK, b_group)
        b_held = tl.where(b_held == first, LAST_RANK, b_held)
    return b_won.to(tl.int32)


@triton.jit
def load_scores(p_group, i_page, last_page, stride_page, G: tl.constexpr):
    """Scores fp32 `[G]` of a page, whatever they are from `last_page` on."""
    o_tokens = tl.arange(0, G)
    return tl.load(p_group + i_page * stride_page + o_tokens, mask=o_tokens < (last_page - i_page) * G)


@triton.jit
def store_mask(p_page, b_won, LAYOUT: tl.constexpr):
    """Write which tokens of a page were admitted."""
    o_words = tl.arange(0, LAYOUT.group // 16)
    b_mask = tl.sum(tl.reshape(b_won, [LAYOUT.group // 16, 16]) << tl.arange(0, 16)[None, :], 1)
    tl.store(p_page + LAYOUT.mask_at + o_words, b_mask.to(tl.int16))


@triton.jit
def load_mask(p_page, LAYOUT: tl.constexpr):
    """int32 `[G]`, 1 for the tokens that were admitted."""
    o_tokens = tl.arange(0, LAYOUT.group)
    return (tl.load(p_page + LAYOUT.mask_at + o_tokens // 16).to(tl.int32) >> (o_tokens % 16)) & 1


@triton.jit
def copy_rows(p_outliers, o_rows, m_rows, b_rows, D: tl.constexpr, BD: tl.constexpr):
    """Copy tokens, at pointers `b_rows`, to rows `o_rows` of the outliers."""
    o_d = tl.arange(0, BD)
    m_copied = m_rows[:, None] & (o_d < D)[None, :]
    b_copied = tl.load(b_rows[:, None] + o_d[None, :], mask=m_copied)
    tl.store(p_outliers + o_rows[:, None] * D + o_d[None, :], b_copied, mask=m_copied)


@triton.jit(do_not_specialize_on_alignment=VECTORS)
def score_kernel(
    p_scores,
    p_tail_k,
    p_k,
    p_slot_ids,
    p_starts,
    p_lengths,
    p_page_rows,
    p_first_positions,
    stride_k_token,
    stride_k_head,
    J: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    CAPACITY: tl.constexpr,
    HAS_CHUNKS: tl.constexpr,
):
    """L1 norms fp32 `[G]` of the keys of one page and KV head."""
    i_page, i_head = tl.program_id(0), tl.program_id(1)
    i_row = tl.load(p_page_rows + i_page) if HAS_CHUNKS else i_page
    slot = tl.load(p_slot_ids + i_row).to(tl.int64) * J + i_head
    p_k, length = find_tokens(p_k, p_starts, p_lengths, i_row, i_head, stride_k_token, stride_k_head, HAS_CHUNKS)
    o_tokens, o_d = tl.arange(0, G), tl.arange(0, BD)
    o_positions = tl.load(p_first_positions + i_page) + o_tokens
    p_tail_k += slot * CAPACITY * D
    b_rows = token_rows(o_positions, p_tail_k, p_k, length, stride_k_token, D, CAPACITY, HAS_CHUNKS)
    b_keys = tl.load(b_rows[:, None] + o_d[None, :], mask=(o_d < D)[None, :], other=0.0)
    b_scores = tl.sum(tl.abs(b_keys.to(tl.float32)), 1)
    tl.store(p_scores + (i_page * J + i_head) * G + o_tokens, b_scores)


@triton.jit(do_not_specialize_on_alignment=VECTORS)
def admit_kernel(
    p_scores,
    p_pages,
    p_tail_k,
    p_tail_v,
    p_k,
    p_v,
    p_outlier_k,
    p_outlier_v,
    p_score,
    p_position,
    p_count,
    p_frozen,
    p_slot_ids,
    p_starts,
    p_lengths,
    p_page_starts,
    p_page_ids,
    p_first_positions,
    p_pool_sizes,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    J: tl.constexpr,
    LAYOUT: tl.constexpr,
    BD: tl.constexpr,
    CAPACITY: tl.constexpr,
    PLACES: tl.constexpr,
    BP: tl.constexpr,
    KEEP_SMALLEST: tl.constexpr,
    HAS_CHUNKS: tl.constexpr,
):
    """All pages of one row and KV head in turn: choose each group's winners, or freeze; book them, and copy them."""
    i_row, i_head = tl.program_id(0), tl.program_id(1)
    G: tl.constexpr = LAYOUT.group
    D: tl.constexpr = LAYOUT.head_size
    o_tokens = tl.arange(0, G)
    slot = tl.load(p_slot_ids + i_row).to(tl.int64) * J + i_head
    p_score += slot * PLACES
    p_position += slot * PLACES
    first_page = tl.load(p_page_starts + i_row) if HAS_CHUNKS else i_row
    last_page = tl.load(p_page_starts + i_row + 1) if HAS_CHUNKS else i_row + 1
    pool_size = tl.load(p_pool_sizes + i_row)
    frozen = tl.load(p_frozen + slot) != 0
    old_count = tl.load(p_count + slot)
    count = old_count
    b_held = held_ranks(p_score, count, BP, KEEP_SMALLEST)
    p_group = p_scores + i_head * G
    b_next = load_scores(p_group, first_page, last_page, J * G, G)
    for i_page in range(first_page, last_page):
        b_scores = b_next
        b_next = load_scores(p_group, i_page + 1, last_page, J * G, G)
        b_won = winners(ranks(b_scores, BP + o_tokens, KEEP_SMALLEST), b_held, pool_size)
        frozen = frozen | (count + tl.sum(b_won, 0) > PLACES)
        b_won = tl.where(frozen, 0, b_won)
        num_won = tl.sum(b_won, 0)
        page_id = tl.load(p_page_ids + i_page).to(tl.int64)
        if page_id >= 0:
            store_mask(p_pages + (page_id * J + i_head) * LAYOUT.words, b_won, LAYOUT)
        if num_won > 0:
            o_places = count + tl.cumsum(b_won, 0) - 1
            tl.store(p_score + o_places, b_scores, mask=b_won != 0)
            tl.store(p_position + o_places, tl.load(p_first_positions + i_page) + o_tokens, mask=b_won != 0)
            count += num_won
            tl.debug_barrier()
            b_held = held_ranks(p_score, count, BP, KEEP_SMALLEST)
    tl.debug_barrier()
    tl.store(p_frozen + slot, frozen.to(p_frozen.dtype.element_ty))
    tl.store(p_count + slot, count)
    p_k, length = find_tokens(p_k, p_starts, p_lengths, i_row, i_head, stride_k_token, stride_k_head, HAS_CHUNKS)
    p_v, _ = find_tokens(p_v, p_starts, p_lengths, i_row, i_head, stride_v_token, stride_v_head, HAS_CHUNKS)
    p_tail_k += slot * CAPACITY * D
    p_tail_v += slot * CAPACITY * D
    for begin in range(old_count, count, ROWS_AT_ONCE):
        o_rows = begin + tl.arange(0, ROWS_AT_ONCE)
        m_rows = o_rows < count
        o_positions = tl.load(p_position + o_rows, mask=m_rows, other=0)
        b_rows = token_rows(o_positions, p_tail_k, p_k, length, stride_k_token, D, CAPACITY, HAS_CHUNKS)
        copy_rows(p_outlier_k + slot * PLACES * D, o_rows, m_rows, b_rows, D, BD)
        b_rows = token_rows(o_positions, p_tail_v, p_v, length, stride_v_token, D, CAPACITY, HAS_CHUNKS)
        copy_rows(p_outlier_v + slot * PLACES * D, o_rows, m_rows, b_rows, D, BD)
