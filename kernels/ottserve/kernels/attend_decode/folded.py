"""Products with packed codes in PyTorch: scales are folded into the small operand, so codes are converted just once.

A word is taken as two bytes, and a byte of F = 8 / b fields is masked, never shifted: field f then reads as
code · 2^(b·f), and that power is divided out of the result. The small operand has a row for either byte, zero where
the other byte lies; that doubles the multiplications and saves a pass over everything unpacked. Knows no softmax.

Letters beyond kernels/README.md: U pages, M = H / J query heads a KV head, r word rows a page (G·b/16).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ottserve.kernels.layout import EXACT_BITS, PageLayout
from ottserve.kernels.quantize.packing import dequantize_keys

BYTE_BITS = 8


def key_scores(q: Tensor, blocks: Tensor, layout: PageLayout) -> Tensor:
    """Scores fp32 `[U, J, M, G]` of `q` fp32 `[U or 1, J, M, D]` with the keys of pages int16 `[U, J, W]`."""
    if layout.k_bits == EXACT_BITS:
        return q @ layout.key_codes(blocks).view(layout.exact_dtype).float().mT
    num_fields = BYTE_BITS // layout.k_bits
    num_parts = max(1, layout.k_subgroups // 2)
    if layout.k_subgroups > 1 and (layout.k_subgroups % 2 or num_fields % num_parts):
        return q @ dequantize_keys(blocks, layout).mT
    return _code_scores(q, blocks, layout, num_parts)


def _code_scores(q: Tensor, blocks: Tensor, layout: PageLayout, num_parts: int) -> Tensor:
    """Scores where every (byte, part of its fields) has one sub-group of scales."""
    scale, zero = (x.float()[:, :, :, None] for x in layout.key_scales(blocks))
    folded = _per_byte_and_part(q[:, :, None] * scale, num_parts)
    offset = _per_byte_and_part((q[:, :, None] * zero).sum(-1, keepdim=True), num_parts)
    U, J, _, _, M, D = folded.shape
    operand = folded.new_zeros(U, J, num_parts, 2, M, D, 2)
    operand[:, :, :, 0, ..., 0] = folded[:, :, 0]
    operand[:, :, :, 1, ..., 1] = folded[:, :, 1]
    numbers = _masked_bytes(layout.key_codes(blocks), layout.k_bits)
    parts = numbers.reshape(U * J * num_parts, -1, 2 * D)
    raw = torch.bmm(operand.view(U * J * num_parts, 2 * M, 2 * D), parts.mT).view(U, J, num_parts, 2, M, -1)
    unit = _field_units(layout.k_bits, layout.key_rows).view(num_parts, 1, -1)
    return torch.addcmul(offset, raw.permute(0, 1, 3, 2, 4, 5), unit).permute(0, 1, 4, 2, 3, 5).reshape(U, J, M, -1)


def _per_byte_and_part(x: Tensor, num_parts: int) -> Tensor:
    """`[U, J, k_subgroups, M, …]` as `[U, J, 2, num_parts, M, …]`: one sub-group serves both bytes, more are split."""
    if x.shape[2] == 1:
        return x[:, :, None].expand(-1, -1, 2, -1, -1, -1)
    halves: Tensor = x.unflatten(2, (2, num_parts))
    return halves


def weighted_values(p: Tensor, blocks: Tensor, layout: PageLayout) -> Tensor:
    """Σ p·v over each page, fp32 `[U, J, M, D]`, for weights fp32 `[U, J, M, G]` and pages int16 `[U, J, W]`."""
    if layout.v_bits == EXACT_BITS:
        return p @ layout.value_codes(blocks).view(layout.exact_dtype).float().mT
    scale, zero = (x.float() for x in layout.value_scales(blocks))
    U, J, M, G = p.shape
    unit = _field_units(layout.v_bits, layout.value_columns).repeat(2)
    folded = (p * (scale * unit)[:, :, None]).view(U, J, M, 2, G // 2).transpose(2, 3)
    words = layout.value_codes(blocks).mT.contiguous()
    numbers = _masked_bytes(words, layout.v_bits)
    raw = torch.bmm(folded.reshape(U * J, 2 * M, G // 2), numbers.view(U * J, G // 2, -1)).view(U, J, 2, M, -1, 2)
    return raw[:, :, 0, ..., 0] + raw[:, :, 1, ..., 1] + p @ zero[..., None]


def _masked_bytes(words: Tensor, bits: int) -> Tensor:
    """Words int16 `[U, J, r, D]` as fp32 `[U, J, F, r, 2·D]`: code · 2^(b·f), both bytes of a word side by side."""
    return (words.view(torch.uint8)[:, :, None] & _field_masks(bits)).float()


@cache
def _field_masks(bits: int) -> Tensor:
    """uint8 `[F, 1, 1]`, the bits of each field of a byte."""
    return torch.tensor([(2**bits - 1) << shift for shift in range(0, BYTE_BITS, bits)], dtype=torch.uint8)[
        :, None, None
    ]


@cache
def _field_units(bits: int, num_rows: int) -> Tensor:
    """fp32 `[F·r]`, what one unit of code counts in each field: 2^(−b·f), for every word row."""
    return torch.tensor([2.0**-shift for shift in range(0, BYTE_BITS, bits)]).repeat_interleave(num_rows)
