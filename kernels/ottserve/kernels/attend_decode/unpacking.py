"""Pages back to numbers, straight to where attention wants them. Knows no query.

Takes few and large steps: on a CPU at short contexts every call to PyTorch costs as much as its arithmetic.
`blocks` are pages int16 `[n, J, B, W]` of any strides, `out` fp32 `[n, J, B, G, D]` likewise.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ottserve.kernels.layout import EXACT_BITS, WORD_BITS, PageLayout


def unpack_keys(out: Tensor, blocks: Tensor, layout: PageLayout) -> None:
    """Dequantised keys of `blocks` into `out`."""
    words = layout.key_codes(blocks)
    if layout.k_bits == EXACT_BITS:
        out.copy_(words.view(layout.exact_dtype))
        return
    n, J, B, G, D = out.shape
    shape = (n, J, B, layout.k_subgroups, G // layout.k_subgroups, D)
    scale_zero = blocks[..., layout.key_scale_at : layout.value_scale_at].view(torch.float16).float()
    scale, zero = scale_zero.view(n, J, B, 2, layout.k_subgroups, 1, D).unbind(3)
    torch.addcmul(zero, _codes(words, layout.k_bits).view(shape), scale, out=out.view(shape))


def unpack_values(out: Tensor, blocks: Tensor, layout: PageLayout) -> None:
    """Dequantised values of `blocks` into `out`."""
    words = layout.value_codes(blocks).mT
    if layout.v_bits == EXACT_BITS:
        out.copy_(words.view(layout.exact_dtype))
        return
    scale_zero = blocks[..., layout.value_scale_at : layout.mask_at].view(torch.float16).float()
    scale, zero = scale_zero.view(*blocks.shape[:3], 2, layout.group, 1).unbind(3)
    torch.addcmul(zero, _codes(words, layout.v_bits).view(out.shape), scale, out=out)


def _codes(words: Tensor, bits: int) -> Tensor:
    """Codes of words int16 `[…, r, D]`, fp32 `[…, 16/b, r, D]`: tokens in order."""
    fields = words.contiguous()[:, :, :, None] >> _field_shifts(bits, words.device)
    return fields.bitwise_and_(2**bits - 1).float()


@cache
def _field_shifts(bits: int, device: torch.device) -> Tensor:
    """int16 `[16/b, 1, 1]`, where each field of a word begins."""
    return torch.arange(0, WORD_BITS, bits, dtype=torch.int16, device=device)[:, None, None]


def replaced(blocks: Tensor, layout: PageLayout) -> Tensor:
    """bool `[n, J, B, G/16, 16]`, the tokens that `blocks` mask."""
    return (layout.mask_words(blocks)[..., None] & _mask_bits(blocks.device)).ne(0)


@cache
def _mask_bits(device: torch.device) -> Tensor:
    """int16 `[16]`, the bit of each token in its mask word."""
    return (1 << torch.arange(WORD_BITS, device=device)).to(torch.int16)
