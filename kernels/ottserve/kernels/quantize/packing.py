"""Codes to 16-bit words and back, and pages back to numbers. Knows the page layout; decides no scale, zero or code.

Plain PyTorch on any device: for the references, for tests and for evaluation. Kernels unpack in registers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ottserve.kernels.layout import EXACT_BITS, WORD_BITS, PageLayout


def pack(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Codes to words along the token axis.

    Args:
        codes: uint8, values below 2^bits; the size of `dim` is a multiple of 16 / bits.
        bits: 1, 2, 4 or 8.
        dim: axis of the tokens.

    Returns:
        int16, `dim` shortened to size·bits/16. Field j of word i holds token j·(size·bits/16) + i.
    """
    num_fields = WORD_BITS // bits
    first, *others = codes.to(torch.int16).chunk(num_fields, dim)
    words = first.clone()
    for field, block in enumerate(others, 1):
        words |= block << (bits * field)
    return words


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Words to codes along the token axis, uint8: the inverse of `pack`."""
    top = 2**bits - 1
    return torch.cat([(words >> shift & top).to(torch.uint8) for shift in range(0, WORD_BITS, bits)], dim)


def pack_mask(replaced: Tensor) -> Tensor:
    """bool `[…, G]` to mask words int16 `[…, G/16]`: bit t % 16 of word t // 16."""
    bits = torch.arange(WORD_BITS, device=replaced.device)
    fields: Tensor = replaced.unflatten(-1, (replaced.shape[-1] // WORD_BITS, WORD_BITS)).long() << bits
    return fields.sum(-1).to(torch.int16)


def replaced_tokens(pages: Tensor, layout: PageLayout) -> Tensor:
    """The mask of pages int16 `[…, W]` as bool `[…, G]`: true where a token was replaced and counts −∞."""
    bits = torch.arange(WORD_BITS, dtype=torch.int16, device=pages.device)
    fields: Tensor = layout.mask_words(pages)[..., None] >> bits & 1
    return fields.bool().flatten(-2)


def dequantize_keys(pages: Tensor, layout: PageLayout) -> Tensor:
    """Keys that pages int16 `[…, W]` hold, fp32 `[…, G, D]`. Replaced tokens give the mean that took their place."""
    words = layout.key_codes(pages)
    if layout.k_bits == EXACT_BITS:
        return words.view(layout.exact_dtype).float()
    scale, zero = layout.key_scales(pages)
    codes = unpack(words, layout.k_bits, -2).float()
    parts = codes.unflatten(-2, (layout.k_subgroups, layout.group // layout.k_subgroups))
    keys: Tensor = parts * scale[..., None, :].float() + zero[..., None, :].float()
    return keys.flatten(-3, -2)


def dequantize_values(pages: Tensor, layout: PageLayout) -> Tensor:
    """Values that pages int16 `[…, W]` hold, fp32 `[…, G, D]` (a view with D not innermost)."""
    words = layout.value_codes(pages)
    if layout.v_bits == EXACT_BITS:
        return words.view(layout.exact_dtype).float().mT
    scale, zero = layout.value_scales(pages)
    codes = unpack(words, layout.v_bits, -1).float()
    return (codes * scale[..., None, :].float() + zero[..., None, :].float()).mT
