"""Products with packed codes in PyTorch: scales go into the small operand, so codes are unpacked once and not rescaled.

A field is masked where it lies and never shifted down: it then reads as code · 2^(place), and that power of two is
taken out of the small operand or the result. Only the high byte of a word is shifted, to keep numbers positive and
exact. Knows no softmax.

Letters beyond kernels/README.md: U pages, M = H / J query heads a KV head, F = 8 / b fields a byte.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ottserve.kernels.layout import EXACT_BITS, PageLayout

BYTE_BITS = 8


def key_scores(q: Tensor, blocks: Tensor, layout: PageLayout) -> Tensor:
    """Scores fp32 `[U·J, M, G]` of `q` fp32 `[U·J, M, D]` with the keys of pages int16 `[U, J, W]`."""
    words = layout.key_codes(blocks)
    if layout.k_bits == EXACT_BITS:
        return torch.bmm(q, words.view(layout.exact_dtype).float().flatten(0, 1).mT)
    scale, zero = (x.float().view(len(q), layout.k_subgroups, 1, -1) for x in layout.key_scales(blocks))
    queries = q[:, None]
    folded = (queries * scale).flatten(0, 1)
    offset = (queries * zero).sum(-1, keepdim=True)
    numbers = _fields(words, layout.k_bits).view(len(folded), -1, q.shape[-1])
    raw = torch.bmm(folded, numbers.mT).view(len(q), layout.k_subgroups, q.shape[1], -1)
    unit = _field_units(layout.k_bits, layout.group, blocks.device).view(layout.k_subgroups, 1, -1)
    return torch.addcmul(offset, raw, unit).transpose(1, 2).reshape(len(q), q.shape[1], -1)


def weighted_values(p: Tensor, blocks: Tensor, layout: PageLayout) -> Tensor:
    """Σ p·v over each page, fp32 `[U·J, M, D]`, for weights `p` fp32 `[U·J, M, G]` and pages int16 `[U, J, W]`."""
    words = layout.value_codes(blocks)
    if layout.v_bits == EXACT_BITS:
        return torch.bmm(p, words.view(layout.exact_dtype).float().flatten(0, 1).mT)
    scale, zero = (x.float().view(len(p), 1, -1) for x in layout.value_scales(blocks))
    folded = p * (scale * _field_units(layout.v_bits, layout.group, blocks.device))
    numbers = _fields(words.mT, layout.v_bits).view(len(p), layout.group, -1)
    return torch.baddbmm(torch.bmm(p, zero.mT), folded, numbers)


def _fields(words: Tensor, bits: int) -> Tensor:
    """Words int16 `[U, J, r, D]` as fp32 `[U, J, 2, F, r, D]`, tokens in order: code · 2^(b·field of its byte)."""
    low_and_high_byte = torch.stack([words, words >> BYTE_BITS], 2)
    return (low_and_high_byte[:, :, :, None] & _field_masks(bits, words.device)).float()


@cache
def _field_masks(bits: int, device: torch.device) -> Tensor:
    """int16 `[F, 1, 1]`, the bits of each field of a byte."""
    masks = [(2**bits - 1) << shift for shift in range(0, BYTE_BITS, bits)]
    return torch.tensor(masks, dtype=torch.int16, device=device)[:, None, None]


@cache
def _field_units(bits: int, group: int, device: torch.device) -> Tensor:
    """fp32 `[G]`, what one unit of each token's masked field counts in codes: 2^(−b·field of its byte)."""
    units = [2.0**-shift for shift in range(0, BYTE_BITS, bits)]
    return torch.tensor(2 * units, device=device).repeat_interleave(group * bits // (2 * BYTE_BITS))
