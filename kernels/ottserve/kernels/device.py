"""Pieces of Triton that several kernels share: loaders of page operands and the online softmax.

Knows no grid, no launch configuration and no sequence: a pointer to a page of one KV head, and a block of its tokens.

A *block* is ROWS consecutive tokens of a page. Packed loaders give the codes as they lie in the words: masked in place
and reinterpreted as fp16, the code c at bit k of a word is the subnormal number c · 2^(k−24), exactly, as long as the
field ends within the ten mantissa bits; fields further up share one shift. `field_units` undoes that.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton import knobs

from ottserve.kernels.layout import EXACT_BITS, PageLayout

LOG2_E = 1.4426950408889634
SMALLEST_SCALE = tl.constexpr(2.0**-14)
"""Smaller value scales count as this where only their size matters; else sums of probabilities could overflow."""


@triton.jit
def field_bits(BLOCK: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr):
    """Lowest bit, within its word, of each token of a block: int32 `[ROWS]`."""
    return (BLOCK * ROWS + tl.arange(0, ROWS)) // WORDS * BITS


@triton.jit
def field_units(
    EXPONENT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr
):
    """2^(EXPONENT−k) for each token of a block, fp32 `[ROWS]`. At EXPONENT 24, times a loaded code, it gives c."""
    SHIFT: tl.constexpr = 10 // BITS * BITS
    bits = field_bits(BLOCK, ROWS, BITS, WORDS)
    return tl.exp2((EXPONENT - tl.where(bits >= SHIFT, bits - SHIFT, bits)).to(tl.float32))


@triton.jit
def mask_pairs(b_words, b_fields, IN_ASM: tl.constexpr):
    """`b_words & b_fields` as fp16. Two words an instruction in assembly; Triton itself goes one by one."""
    if IN_ASM:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [b_words, b_fields], dtype=tl.float16, is_pure=True, pack=2
        )
    return (b_words & b_fields).to(tl.float16, bitcast=True)


@triton.jit
def shift_pairs(b_words, SHIFT: tl.constexpr, IN_ASM: tl.constexpr):
    """Words shifted down. What the upper word of a pair leaks into the lower is masked off afterwards."""
    if IN_ASM and SHIFT == 10:
        return tl.inline_asm_elementwise("shr.b32 $0, $1, 10;", "=r,r", [b_words], dtype=tl.int16, is_pure=True, pack=2)
    if IN_ASM and SHIFT == 8:
        return tl.inline_asm_elementwise("shr.b32 $0, $1, 8;", "=r,r", [b_words], dtype=tl.int16, is_pure=True, pack=2)
    return b_words >> SHIFT


@triton.jit
def find_tokens(p_chunks, p_starts, p_lengths, i_row, i_head, stride_token, stride_head, HAS_CHUNKS: tl.constexpr):
    """A row's chunk in one KV head, moved back so that position p lies at p · stride_token, and the first position
    that is in it: those before lie in the tail. Without chunks all do."""
    length = 0
    if HAS_CHUNKS:
        length = tl.load(p_lengths + i_row)
        first_token = (tl.load(p_starts + i_row) - length).to(tl.int64)
        p_chunks += first_token * stride_token + i_head * stride_head
    return p_chunks, length


@triton.jit
def token_rows(
    o_positions,
    p_tail,
    p_chunk,
    length,
    stride_token,
    D: tl.constexpr,
    CAPACITY: tl.constexpr,
    HAS_CHUNKS: tl.constexpr,
):
    """Pointers to the first channel of the tokens at `o_positions`, in a tail or in the chunk of `find_tokens`."""
    b_rows = p_tail + o_positions % CAPACITY * D
    if HAS_CHUNKS:
        b_rows = tl.where(o_positions < length, b_rows, p_chunk + o_positions.to(tl.int64) * stride_token)
    return b_rows


@triton.jit
def codes_as_subnormals(
    b_words,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    TOKEN_AXIS: tl.constexpr,
    IN_ASM: tl.constexpr,
):
    """The codes of one block out of its words (int16, the tokens' axis being ROWS long), fp16 of the same shape."""
    SHIFT: tl.constexpr = 10 // BITS * BITS
    TOP: tl.constexpr = (1 << BITS) - 1
    FIRST_BIT: tl.constexpr = BLOCK * ROWS // WORDS * BITS
    LAST_BIT: tl.constexpr = (BLOCK * ROWS + ROWS - 1) // WORDS * BITS
    if FIRST_BIT == LAST_BIT:
        IN_PLACE: tl.constexpr = FIRST_BIT if FIRST_BIT < SHIFT else FIRST_BIT - SHIFT
        b_fields = tl.full([1, 1], TOP << IN_PLACE, tl.int16)
    else:
        bits = field_bits(BLOCK, ROWS, BITS, WORDS)
        b_fields = tl.expand_dims((TOP << tl.where(bits >= SHIFT, bits - SHIFT, bits)).to(tl.int16), 1 - TOKEN_AXIS)
    if FIRST_BIT >= SHIFT:
        return mask_pairs(shift_pairs(b_words, SHIFT, IN_ASM), b_fields, IN_ASM)
    if LAST_BIT < SHIFT:
        return mask_pairs(b_words, b_fields, IN_ASM)
    is_high = tl.expand_dims(field_bits(BLOCK, ROWS, BITS, WORDS) >= SHIFT, 1 - TOKEN_AXIS)
    return mask_pairs(tl.where(is_high, b_words >> SHIFT, b_words), b_fields, False)


@triton.jit
def word_rows(BLOCK: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Which of WORDS words each token of a block lies in, int32 `[ROWS]`; equal expressions for blocks that share."""
    if WORDS >= ROWS:
        return BLOCK * ROWS % WORDS + tl.arange(0, ROWS)
    return tl.arange(0, ROWS) % WORDS


@triton.jit
def load_keys_packed(p_page, o_d, LAYOUT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, IN_ASM: tl.constexpr):
    """Key codes of a block, fp16 `[ROWS, BD]` = c · 2^(k−24); channels beyond D are 0."""
    D: tl.constexpr = LAYOUT.head_size
    o_words = word_rows(BLOCK, ROWS, LAYOUT.key_rows)
    p_words = p_page + o_words[:, None] * D + o_d[None, :]
    b_words = tl.load(p_words) if D == o_d.shape[0] else tl.load(p_words, mask=o_d[None, :] < D, other=0)
    return codes_as_subnormals(b_words, BLOCK, ROWS, LAYOUT.k_bits, LAYOUT.key_rows, 0, IN_ASM)


@triton.jit
def load_fine_keys(p_page, LAYOUT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, IN_ASM: tl.constexpr):
    """Upper bits of the fine channels' codes of a block, fp16 `[ROWS, F]` = c · 2^(k−24)."""
    o_words, o_fine = word_rows(BLOCK, ROWS, LAYOUT.fine_rows), tl.arange(0, LAYOUT.k_fine)
    b_words = tl.load(p_page + LAYOUT.fine_codes_at + o_words[:, None] * LAYOUT.k_fine + o_fine[None, :])
    return codes_as_subnormals(b_words, BLOCK, ROWS, LAYOUT.k_fine_bits, LAYOUT.fine_rows, 0, IN_ASM)


@triton.jit
def load_fine_channels(p_page, o_fine, LAYOUT: tl.constexpr):
    """Channels, int32, that are the page's fine ones number `o_fine`."""
    return tl.load((p_page + LAYOUT.fine_channels_at).to(tl.pointer_type(tl.uint8)) + o_fine).to(tl.int32)


@triton.jit
def pick_fine(p_page, o_d, b_scale, LAYOUT: tl.constexpr):
    """A matrix `[F, BD]` of b_scale's dtype that picks the fine channels out of all and gives them their scale."""
    b_channels = load_fine_channels(p_page, tl.arange(0, LAYOUT.k_fine), LAYOUT)
    return tl.where(b_channels[:, None] == o_d[None, :], b_scale[None, :], 0.0).to(b_scale.dtype)


@triton.jit
def fine_queries(p_page, p_scale, p_queries, b_inverse, LAYOUT: tl.constexpr):
    """Fine channels of queries times the channels' scales, fp16 `[F, M]`.

    They are read anew, by the page's own list of channels: near as they are, that is a small part of what it costs to
    pick them out of registers, by a product with a matrix of ones and zeros.

    Args:
        p_queries: `[M]`, where each query begins.
        b_inverse: fp32 `[M]`, what each is multiplied by so that it fits fp16; 0 for what is no query.
    """
    b_channels = load_fine_channels(p_page, tl.arange(0, LAYOUT.k_fine), LAYOUT)
    b_scale = tl.load(p_scale.to(tl.pointer_type(tl.float16)) + b_channels)
    b_q = tl.load(p_queries[None, :] + b_channels[:, None]).to(tl.float32) * b_inverse[None, :]
    return b_q.to(tl.float16) * b_scale[:, None]


@triton.jit
def load_keys_exact(p_page, o_d, LAYOUT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr):
    """Keys of a block kept at 16 bit, EXACT `[ROWS, BD]`."""
    D: tl.constexpr = LAYOUT.head_size
    o_words = BLOCK * ROWS + tl.arange(0, ROWS)
    p_words = p_page + o_words[:, None] * D + o_d[None, :]
    b_words = tl.load(p_words) if D == o_d.shape[0] else tl.load(p_words, mask=o_d[None, :] < D, other=0)
    return b_words.to(EXACT, bitcast=True)


@triton.jit
def load_values_packed(
    p_page, o_d, LAYOUT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, IN_ASM: tl.constexpr
):
    """Value codes of a block, fp16 `[BD, ROWS]` = c · 2^(k−24); channels beyond D are 0."""
    D: tl.constexpr = LAYOUT.head_size
    WORDS: tl.constexpr = LAYOUT.value_columns
    o_words = word_rows(BLOCK, ROWS, WORDS)
    p_words = p_page + LAYOUT.value_codes_at + o_d[:, None] * WORDS + o_words[None, :]
    b_words = tl.load(p_words) if D == o_d.shape[0] else tl.load(p_words, mask=o_d[:, None] < D, other=0)
    return codes_as_subnormals(b_words, BLOCK, ROWS, LAYOUT.v_bits, WORDS, 1, IN_ASM)


@triton.jit
def load_values_exact(p_page, o_d, LAYOUT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr):
    """Values of a block kept at 16 bit, EXACT `[BD, ROWS]`."""
    D: tl.constexpr = LAYOUT.head_size
    o_words = BLOCK * ROWS + tl.arange(0, ROWS)
    p_words = p_page + LAYOUT.value_codes_at + o_d[:, None] * LAYOUT.group + o_words[None, :]
    b_words = tl.load(p_words) if D == o_d.shape[0] else tl.load(p_words, mask=o_d[:, None] < D, other=0)
    return b_words.to(EXACT, bitcast=True)


@triton.jit
def replaced_bias(p_page, LAYOUT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """fp32 `[ROWS]`: −∞ for tokens that the page's mask names, else 0. ROWS is 16 or 32."""
    p_mask = (p_page + LAYOUT.mask_at).to(tl.pointer_type(tl.int32))
    word = tl.load(p_mask + BLOCK * ROWS // 32)
    bits = word >> tl.arange(0, ROWS)
    return tl.where((bits & (1 << (BLOCK * ROWS % 32))) != 0, float("-inf"), 0.0)


@triton.jit
def load_scales(p_scales, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """fp16 `[ROWS]` of a block's tokens, out of one number a token at `p_scales` (int16 pointer)."""
    p_fp16 = p_scales.to(tl.pointer_type(tl.float16))
    return tl.load(p_fp16 + BLOCK * ROWS + tl.arange(0, ROWS))


@triton.jit
def load_channels(p_scales, o_d, D: tl.constexpr):
    """fp16 `[BD]`, one number a channel at `p_scales` (int16 pointer); 0 beyond D."""
    p_fp16 = p_scales.to(tl.pointer_type(tl.float16))
    if o_d.shape[0] == D:
        return tl.load(p_fp16 + o_d)
    return tl.load(p_fp16 + o_d, mask=o_d < D, other=0.0)


@triton.jit
def finite_max(b_max):
    """A maximum that may be −∞ (nothing seen yet), fit to be subtracted."""
    return tl.where(b_max == float("-inf"), 0.0, b_max)


@triton.jit
def as_operand(b_p, IN_ASM: tl.constexpr):
    """`b_p` itself, fp16 `[ROWS, HEADS]`, brought from where a product leaves it to where the next one wants it.

    One `movmatrix` transposes each 8 × 8 block among the lanes; undoing that by reshaping moves nothing.
    """
    if not IN_ASM:
        return b_p
    b_turned = tl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [b_p], dtype=tl.float16, is_pure=True, pack=2
    )
    b_blocks = tl.reshape(b_turned, [b_p.shape[0] // 8, 8, b_p.shape[1] // 8, 8])
    return tl.reshape(tl.permute(b_blocks, 0, 3, 2, 1), b_p.shape)


@triton.jit
def largest_of(blocks):
    """Elementwise maximum of a tuple of blocks."""
    b_largest = blocks[0]
    for i in tl.static_range(1, len(blocks)):
        b_largest = tl.maximum(b_largest, blocks[i])
    return b_largest


@triton.jit
def accumulate_exact(b_v, b_p, b_acc):
    """`b_acc + b_v · b_p` for values `[BD, ROWS]` at 16 bit; for bf16, `b_p` in two parts: 16 bits of mantissa."""
    high = b_p.to(b_v.dtype)
    b_acc = tl.dot(b_v, high, b_acc)
    if b_v.dtype == tl.bfloat16:
        b_acc = tl.dot(b_v, (b_p - high.to(tl.float32)).to(tl.bfloat16), b_acc)
    return b_acc


@triton.jit
def prefetch_sectors(p_words, WORDS: tl.constexpr, IN_ASM: tl.constexpr):
    """Ask for WORDS 16-bit words to come near, and for as many behind them as make a power of two. Numbers too small
    for an asynchronous copy are used from there."""
    if IN_ASM:
        SECTORS: tl.constexpr = triton.next_power_of_2(WORDS // 16)
        p_sectors = p_words.to(tl.int64) + tl.arange(0, SECTORS) * 32
        tl.inline_asm_elementwise(
            "prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [p_sectors], dtype=tl.int32, is_pure=False, pack=1
        )


def loaders(layout: PageLayout) -> dict[str, object]:
    """Which loaders read this layout, and what each must know beside it: constexpr arguments of both attentions."""
    return _loaders(layout, in_asm=not knobs.runtime.interpret)


@cache
def _loaders(layout: PageLayout, *, in_asm: bool) -> dict[str, object]:
    exact = tl.bfloat16 if layout.exact_dtype == torch.bfloat16 else tl.float16
    return {
        "LOAD_KEYS": load_keys_exact if layout.k_bits == EXACT_BITS else load_keys_packed,
        "KEY_MODE": exact if layout.k_bits == EXACT_BITS else in_asm,
        "LOAD_VALUES": load_values_exact if layout.v_bits == EXACT_BITS else load_values_packed,
        "VALUE_MODE": exact if layout.v_bits == EXACT_BITS else in_asm,
    }
