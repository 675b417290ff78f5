"""Pages on a GPU: programs share a page of one KV head, and each takes a part of it from elements to packed words.

Which channels of keys are fine ones is found before, by a kernel of its own. Knows no outlier: the page's mask says
which tokens were admitted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ottserve.kernels.device import find_tokens, token_rows
from ottserve.kernels.seal.outliers.triton import VECTORS, load_mask, store_mask
from ottserve.kernels.seal.pages.keys.triton import choose_fine, seal_fine_keys, seal_keys
from ottserve.kernels.seal.pages.values.triton import seal_values


@triton.jit(do_not_specialize_on_alignment=VECTORS)
def choose_kernel(
    p_pages,
    p_tail_k,
    p_k,
    p_slot_ids,
    p_starts,
    p_lengths,
    p_page_rows,
    p_page_ids,
    p_first_positions,
    p_frequencies,
    stride_k_token,
    stride_k_head,
    J: tl.constexpr,
    LAYOUT: tl.constexpr,
    CAPACITY: tl.constexpr,
    TRACED: tl.constexpr,
    BD: tl.constexpr,
    HAS_CHUNKS: tl.constexpr,
    IN_ASM: tl.constexpr,
):
    """Which channels of the keys are fine ones, in one KV head of one page. TRACED: the mask is there already."""
    i_page, i_head = tl.program_id(0), tl.program_id(1)
    i_row = tl.load(p_page_rows + i_page) if HAS_CHUNKS else i_page
    page_id = tl.load(p_page_ids + i_page).to(tl.int64)
    if page_id < 0:
        return
    slot = tl.load(p_slot_ids + i_row).to(tl.int64) * J + i_head
    p_page = p_pages + (page_id * J + i_head) * LAYOUT.words
    first_position = tl.load(p_first_positions + i_page)
    b_won = load_mask(p_page, LAYOUT) if TRACED else tl.zeros([LAYOUT.group], tl.int32)
    p_k, length = find_tokens(p_k, p_starts, p_lengths, i_row, i_head, stride_k_token, stride_k_head, HAS_CHUNKS)
    p_tail_k += slot * CAPACITY * LAYOUT.head_size
    o_positions = first_position + tl.arange(0, LAYOUT.group)
    b_rows = token_rows(o_positions, p_tail_k, p_k, length, stride_k_token, LAYOUT.head_size, CAPACITY, HAS_CHUNKS)
    choose_fine(p_page, b_rows, b_won, first_position, p_frequencies, LAYOUT, BD, IN_ASM)


@triton.jit(do_not_specialize_on_alignment=VECTORS)
def seal_kernel(
    p_pages,
    p_tail_k,
    p_tail_v,
    p_k,
    p_v,
    p_slot_ids,
    p_starts,
    p_lengths,
    p_page_rows,
    p_page_ids,
    p_first_positions,
    p_frequencies,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    J: tl.constexpr,
    LAYOUT: tl.constexpr,
    CAPACITY: tl.constexpr,
    TRACED: tl.constexpr,
    BD: tl.constexpr,
    CONFIG: tl.constexpr,
    FIT: tl.constexpr,
    UNBIASED: tl.constexpr,
    HAS_CHUNKS: tl.constexpr,
    IN_ASM: tl.constexpr,
):
    """One of the parts of one KV head of one page. TRACED: the mask is there already."""
    i_page, i_head, i_part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = LAYOUT.group
    D: tl.constexpr = LAYOUT.head_size
    FIRST_OF_VALUES: tl.constexpr = CONFIG.key_parts + CONFIG.fine_parts
    i_row = tl.load(p_page_rows + i_page) if HAS_CHUNKS else i_page
    page_id = tl.load(p_page_ids + i_page).to(tl.int64)
    if page_id < 0:
        return
    slot = tl.load(p_slot_ids + i_row).to(tl.int64) * J + i_head
    p_page = p_pages + (page_id * J + i_head) * LAYOUT.words
    first_position = tl.load(p_first_positions + i_page)
    b_won = load_mask(p_page, LAYOUT) if TRACED else tl.zeros([G], tl.int32)
    if i_part < FIRST_OF_VALUES:
        p_k, length = find_tokens(p_k, p_starts, p_lengths, i_row, i_head, stride_k_token, stride_k_head, HAS_CHUNKS)
        p_tail_k += slot * CAPACITY * D
        o_positions = first_position + tl.arange(0, G)
        b_rows = token_rows(o_positions, p_tail_k, p_k, length, stride_k_token, D, CAPACITY, HAS_CHUNKS)
        if i_part < CONFIG.key_parts:
            seal_keys(
                p_page,
                b_rows,
                b_won,
                i_part * CONFIG.channels,
                first_position,
                p_frequencies,
                LAYOUT,
                CONFIG.channels,
                FIT,
                UNBIASED,
                IN_ASM,
            )
        elif LAYOUT.k_fine:
            seal_fine_keys(
                p_page,
                b_rows,
                b_won,
                (i_part - CONFIG.key_parts) * CONFIG.fine,
                first_position,
                p_frequencies,
                LAYOUT,
                CONFIG.fine,
                FIT,
                UNBIASED,
                IN_ASM,
            )
    else:
        p_v, length = find_tokens(p_v, p_starts, p_lengths, i_row, i_head, stride_v_token, stride_v_head, HAS_CHUNKS)
        p_tail_v += slot * CAPACITY * D
        seal_values(
            p_page,
            p_tail_v,
            p_v,
            length,
            stride_v_token,
            (i_part - FIRST_OF_VALUES) * CONFIG.columns,
            first_position,
            b_won,
            LAYOUT,
            CAPACITY,
            BD,
            CONFIG.columns,
            FIT,
            UNBIASED,
            HAS_CHUNKS,
        )
        if not TRACED:  # every part of the values writes that nobody was admitted
            store_mask(p_page, b_won, LAYOUT)
