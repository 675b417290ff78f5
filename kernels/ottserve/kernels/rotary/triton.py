"""Turning keys inside kernels. Nothing but the page's own codes is read for it: angles are worked out anew."""

from __future__ import annotations

import triton
import triton.language as tl

from ottserve.kernels.device import field_units, load_channels, load_fine_keys, load_keys_packed, pick_fine

TWO_PI = tl.constexpr(6.283185307179586)


@triton.jit
def sine_cosine(o_positions, b_frequencies, IN_ASM: tl.constexpr):
    """fp32 `[n, m]` twice, of positions `[n]` times frequencies `[m]`, in turns.

    Whole turns are taken off first: then the processor's own functions, exact to 2⁻²⁰, do.
    """
    b_turns = o_positions.to(tl.float32)[:, None] * b_frequencies[None, :]
    b_angles = (b_turns - tl.floor(b_turns + 0.5)) * TWO_PI
    if IN_ASM:
        b_sin = tl.inline_asm_elementwise(
            "sin.approx.f32 $0, $1;", "=f,f", [b_angles], dtype=tl.float32, is_pure=True, pack=1
        )
        b_cos = tl.inline_asm_elementwise(
            "cos.approx.f32 $0, $1;", "=f,f", [b_angles], dtype=tl.float32, is_pure=True, pack=1
        )
        return b_sin, b_cos
    return tl.sin(b_angles), tl.cos(b_angles)


@triton.jit
def load_group(b_rows, o_d, first_position, p_frequencies, LAYOUT: tl.constexpr, IN_ASM: tl.constexpr):
    """Channels `o_d` of a group's keys as the page is to hold them, fp32 `[G, n]`; 0 beyond D.

    `b_rows` are pointers `[G]` to the tokens.
    """
    HALF: tl.constexpr = LAYOUT.head_size // 2
    m_d = (o_d < LAYOUT.head_size)[None, :]
    b_keys = tl.load(b_rows[:, None] + o_d[None, :], mask=m_d, other=0.0).to(tl.float32)
    if LAYOUT.turns_keys:
        b_partners = tl.load(b_rows[:, None] + (o_d ^ HALF)[None, :]).to(tl.float32)
        o_positions = first_position + tl.arange(0, LAYOUT.group)
        b_sin, b_cos = sine_cosine(o_positions, tl.load(p_frequencies + o_d % HALF), IN_ASM)
        b_keys = b_keys * b_cos + b_partners * tl.where((o_d < HALF)[None, :], b_sin, -b_sin)
    return b_keys


@triton.jit
def load_packed(p_page, o_d, LAYOUT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, IN_ASM: tl.constexpr):
    """Channels `o_d` of a block's keys as the page holds them, fp32 `[ROWS, n]`."""
    PART: tl.constexpr = BLOCK * ROWS * LAYOUT.k_subgroups // LAYOUT.group
    p_scale = p_page + LAYOUT.key_scale_at + PART * LAYOUT.head_size
    b_scale = load_channels(p_scale, o_d, LAYOUT.head_size)
    b_zero = load_channels(p_scale + LAYOUT.key_scale_words, o_d, LAYOUT.head_size).to(tl.float32)
    b_codes = load_keys_packed(p_page, o_d, LAYOUT, BLOCK, ROWS, IN_ASM).to(tl.float32)
    b_units = field_units(24, BLOCK, ROWS, LAYOUT.k_bits, LAYOUT.key_rows)
    b_keys = b_codes * b_units[:, None] * b_scale.to(tl.float32)[None, :] + b_zero[None, :]
    if LAYOUT.k_fine:
        b_fine = load_fine_keys(p_page, LAYOUT, BLOCK, ROWS, IN_ASM)
        b_units = field_units(24 + LAYOUT.k_bits, BLOCK, ROWS, LAYOUT.k_fine_bits, LAYOUT.fine_rows)
        b_keys += tl.dot(b_fine, pick_fine(p_page, o_d, b_scale, LAYOUT)) * b_units[:, None]
    return b_keys


@triton.jit
def load_turned(
    p_page,
    first_position,
    p_frequencies,
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    IN_ASM: tl.constexpr,
):
    """Keys, turned, of a block of the page whose first token is at `first_position`: both halves of the channels,
    fp32 `[ROWS, D/2]` each."""
    o_half = tl.arange(0, LAYOUT.head_size // 2)
    b_first = load_packed(p_page, o_half, LAYOUT, BLOCK, ROWS, IN_ASM)
    b_second = load_packed(p_page, o_half + LAYOUT.head_size // 2, LAYOUT, BLOCK, ROWS, IN_ASM)
    o_positions = first_position + BLOCK * ROWS + tl.arange(0, ROWS)
    b_sin, b_cos = sine_cosine(o_positions, tl.load(p_frequencies + o_half), IN_ASM)
    return b_first * b_cos - b_second * b_sin, b_second * b_cos + b_first * b_sin


@triton.jit
def in_two(b_keys):
    """fp32 as the sum of two fp16: large keys, which turning is for, would lose what tells them apart in one."""
    b_high = b_keys.to(tl.float16)
    return b_high, (b_keys - b_high.to(tl.float32)).to(tl.float16)


@triton.jit
def turned_scores(
    p_page,
    first_position,
    p_frequencies,
    b_q,
    LAYOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    IN_ASM: tl.constexpr,
):
    """Scores fp32 `[ROWS, n]` of a block for queries fp16 `[D, n]`."""
    b_first, b_second = load_turned(p_page, first_position, p_frequencies, LAYOUT, BLOCK, ROWS, IN_ASM)
    b_halves = tl.permute(tl.reshape(b_q, [2, LAYOUT.head_size // 2, b_q.shape[1]]), 1, 2, 0)
    b_q_first, b_q_second = tl.split(b_halves)
    b_high, b_low = in_two(b_first)
    b_scores = tl.dot(b_low, b_q_first, tl.dot(b_high, b_q_first))
    b_high, b_low = in_two(b_second)
    return tl.dot(b_low, b_q_second, tl.dot(b_high, b_q_second, b_scores))
