"""Codes to 16-bit words and back, masks likewise. Knows neither what a code stands for nor where a page comes from.

Plain PyTorch on any device, for the references, tests and evaluation. Kernels unpack in registers.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ottserve.kernels.layout import WORD_BITS, PageLayout


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
    """Words to codes along the token axis, int16: the inverse of `pack`."""
    axis = dim % words.dim()
    shifts = _field_shifts(bits, words.device).view(-1, *[1] * (words.dim() - axis))
    fields: Tensor = words.unsqueeze(axis) >> shifts
    return fields.bitwise_and_(2**bits - 1).flatten(axis, axis + 1)


@cache
def _field_shifts(bits: int, device: torch.device) -> Tensor:
    """int16 `[16/b]`, where each field of a word begins."""
    return torch.arange(0, WORD_BITS, bits, dtype=torch.int16, device=device)


def pack_mask(replaced: Tensor) -> Tensor:
    """bool `[…, G]` to mask words int16 `[…, G/16]`: bit t % 16 of word t // 16."""
    fields: Tensor = replaced.unflatten(-1, (replaced.shape[-1] // WORD_BITS, WORD_BITS))
    return (fields * _mask_bits(replaced.device)).sum(-1, dtype=torch.int16)


def replaced_tokens(pages: Tensor, layout: PageLayout) -> Tensor:
    """The mask of pages int16 `[…, W]` as bool `[…, G]`: true where a token was replaced and counts −∞."""
    fields = layout.mask_words(pages)[..., None] & _mask_bits(pages.device)
    return fields.ne(0).flatten(-2)


@cache
def _mask_bits(device: torch.device) -> Tensor:
    """int16 `[16]`, the bit of each token in its mask word."""
    return (1 << torch.arange(WORD_BITS, device=device)).to(torch.int16)
