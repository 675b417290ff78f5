"""The quantiser inside kernels, called on plain lines of numbers: interpreted, or on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ottserve.kernels.quantize.triton import quantize, round_codes


@triton.jit
def quantize_kernel(
    p_x,
    p_codes,
    p_scale,
    p_zero,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    BITS: tl.constexpr,
    FIT: tl.constexpr,
    UNBIASED: tl.constexpr,
):
    """One line a program."""
    o_x = tl.program_id(0) * COUNT + tl.arange(0, PADDED)[None, :]
    m_x = (tl.arange(0, PADDED) < COUNT)[None, :]
    b_x = tl.load(p_x + o_x, mask=m_x, other=1e9)
    b_codes, b_scale, b_zero = quantize(b_x, m_x, 1, COUNT, BITS, FIT, UNBIASED)
    tl.store(p_codes + o_x, b_codes, mask=m_x)
    tl.store(p_scale + tl.program_id(0) + tl.arange(0, 1)[None, :], b_scale)
    tl.store(p_zero + tl.program_id(0) + tl.arange(0, 1)[None, :], b_zero)


@triton.jit
def round_kernel(p_x, p_scale, p_codes, N: tl.constexpr, BITS: tl.constexpr):
    """Codes of numbers that each have a scale of their own, and zero 0."""
    o = tl.arange(0, N)
    tl.store(p_codes + o, round_codes(tl.load(p_x + o), tl.load(p_scale + o), tl.zeros([N], tl.float32), BITS))


def quantized(x: Tensor, bits: int, fit_rounds: int = 0, *, unbiased: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros by the kernel of lines `[n, COUNT]`."""
    codes, scale, zero = torch.zeros_like(x, dtype=torch.int32), *torch.zeros(2, len(x), device=x.device)
    padded = triton.next_power_of_2(x.shape[1])
    quantize_kernel[(len(x),)](x, codes, scale, zero, x.shape[1], padded, bits, fit_rounds, unbiased)
    return codes, scale, zero


def assert_rounds_as_a_division_does(bits: int, device: str) -> None:
    """At every limit between two codes, and one fp32 number to either side of it, under scales of fp16, denormal ones
    and zero too; below the lowest code and above the highest."""
    scales = torch.cat(
        [torch.rand(60, generator=torch.Generator().manual_seed(bits)) * 3, torch.tensor([6e-8, 3e-5, 65504.0, 0.0])]
    ).half()
    limits = torch.arange(-2, 2**bits + 1) + 0.5
    at = (limits[:, None] * scales.float()).flatten()
    x = torch.cat([at, at.nextafter(torch.tensor(torch.inf)), at.nextafter(torch.tensor(-torch.inf)), at + 1e9])
    scale = scales.float().expand(len(limits), -1).flatten().repeat(4)
    number = triton.next_power_of_2(len(x))
    x, scale = (torch.nn.functional.pad(each, (0, number - len(each))) for each in (x, scale))
    codes = torch.full_like(x, -1, device=device)
    round_kernel[(1,)](x.to(device), scale.to(device), codes, number, bits)
    expected = (x / scale.masked_fill(scale == 0, torch.inf)).round().clamp(0, 2**bits - 1)
    assert torch.equal(codes.cpu(), expected)
    assert expected.unique().numel() == 2**bits
