"""Pages back to numbers. Knows no query and no slot.

For evaluation and tests as new tensors; for the attention references straight to where these want them, in few and
large steps: on a CPU at short contexts every call to PyTorch costs as much as its arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ottserve.kernels.layout import EXACT_BITS, PageLayout
from ottserve.kernels.quantize.packing import unpack


def dequantize_keys(pages: Tensor, layout: PageLayout) -> Tensor:
    """Keys that pages int16 `[…, W]` hold, fp32 `[…, G, D]`. Replaced tokens give what took their place."""
    out = pages.new_empty(*pages.shape[:-1], layout.group, layout.head_size, dtype=torch.float32)
    dequantize_keys_into(out, pages, layout)
    return out


def dequantize_values(pages: Tensor, layout: PageLayout) -> Tensor:
    """Values that pages int16 `[…, W]` hold, fp32 `[…, G, D]`. Replaced tokens give what took their place."""
    out = pages.new_empty(*pages.shape[:-1], layout.group, layout.head_size, dtype=torch.float32)
    dequantize_values_into(out, pages, layout)
    return out


def dequantize_keys_into(out: Tensor, pages: Tensor, layout: PageLayout) -> None:
    """`dequantize_keys` into `out`, whose and whose pages' strides may be any with the last one 1."""
    words = layout.key_codes(pages)
    if layout.k_bits == EXACT_BITS:
        out.copy_(words.view(layout.exact_dtype))
        return
    parts = (*pages.shape[:-1], layout.k_subgroups, layout.group // layout.k_subgroups, layout.head_size)
    scale_zero = pages[..., layout.key_scale_at : layout.value_scale_at].view(torch.float16).float()
    scale, zero = scale_zero.view(*pages.shape[:-1], 2, layout.k_subgroups, 1, layout.head_size).unbind(-4)
    codes = unpack(words.contiguous(), layout.k_bits, -2).float()
    torch.addcmul(zero, codes.view(parts), scale, out=out.view(parts))
    if layout.k_fine:
        _add_fine(out, pages, layout, scale)


def _add_fine(out: Tensor, pages: Tensor, layout: PageLayout, scale: Tensor) -> None:
    """Add what the upper bits of fine channels' codes are worth; `scale [..., k_subgroups, 1, D]` as of the lower."""
    # Dead pages may name any channel: what they add counts as little as the rest of them.
    channels = layout.fine_channels(pages).long().clamp_max_(layout.head_size - 1)
    codes = unpack(layout.fine_codes(pages).contiguous(), layout.k_fine_bits, -2).float()
    step = scale.squeeze(-2).gather(-1, channels.unsqueeze(-2).expand(*scale.shape[:-2], -1)).unsqueeze(-2)
    parts = codes.unflatten(-2, (layout.k_subgroups, -1)).mul_(step * 2**layout.k_bits)
    out.scatter_add_(-1, channels.unsqueeze(-2).expand_as(codes), parts.flatten(-3, -2))


def dequantize_values_into(out: Tensor, pages: Tensor, layout: PageLayout) -> None:
    """`dequantize_values` into `out` of any strides; addcmul would be slow where one number serves a whole row."""
    words = layout.value_codes(pages).mT
    if layout.v_bits == EXACT_BITS:
        out.copy_(words.view(layout.exact_dtype))
        return
    scale_zero = pages[..., layout.value_scale_at : layout.mask_at].view(torch.float16).float()
    scale, zero = scale_zero.view(*pages.shape[:-1], 2, layout.group, 1).unbind(-3)
    codes = unpack(words.contiguous(), layout.v_bits, -2).float()
    torch.mul(codes, scale, out=out).add_(zero)
