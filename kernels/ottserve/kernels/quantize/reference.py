"""The quantiser in PyTorch. Knows nothing of pages: it takes numbers and gives codes, scales and zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from ottserve.kernels.layout import MAX_FP16


def quantize(
    x: Tensor, bits: int, dim: int, fit_rounds: int = 0, *, unbiased: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ottserve.kernels.quantize.quantize`."""
    x = x.float()
    top = 2**bits - 1
    low, high = _mean_deviation(x, dim) if bits == 1 and fit_rounds else torch.aminmax(x, dim=dim, keepdim=True)
    scale, zero = _storable((high - low) / top), _storable(low)
    codes = _round(x, scale, zero, top)
    for _ in range(fit_rounds):
        scale, zero = _least_squares(x, codes, scale, zero, dim)
        codes = _round(x, scale, zero, top)
    if unbiased:
        scale, zero = _unbiased(x, codes, scale, zero, dim)
    return codes.to(torch.uint8), scale.squeeze(dim).half(), zero.squeeze(dim).half()


def _storable(x: Tensor) -> Tensor:
    """What fp16 makes of `x`, in fp32, never infinite."""
    return x.clamp(-MAX_FP16, MAX_FP16).half().float()


def _round(x: Tensor, scale: Tensor, zero: Tensor, top: int) -> Tensor:
    """Codes as fp32. Dividing by infinity instead of by a zero scale gives code 0."""
    divisor = scale.masked_fill(scale == 0, torch.inf)
    return x.sub(zero).div_(divisor).round_().clamp_(0, top)


def _mean_deviation(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Both levels of a one-bit code to start from: mean ± mean absolute deviation."""
    mean = x.mean(dim, keepdim=True)
    deviation = (x - mean).abs_().mean(dim, keepdim=True)
    return mean - deviation, mean + deviation


def _least_squares(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Scale and zero of the least-squares line through (code, x); unchanged where all codes are the same."""
    x_mean, code_mean = x.mean(dim, keepdim=True), codes.mean(dim, keepdim=True)
    centred = codes - code_mean
    variance = centred.square().sum(dim, keepdim=True)
    covariance = centred.mul_(x - x_mean).sum(dim, keepdim=True)
    is_flat = variance == 0
    fitted_scale = _storable((covariance / variance.masked_fill(is_flat, 1)).clamp_min_(0))
    fitted_zero = _storable(x_mean - fitted_scale * code_mean)
    return torch.where(is_flat, scale, fitted_scale), torch.where(is_flat, zero, fitted_zero)


def _unbiased(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Scale and zero at which code · scale + zero has slope 1 over x; unchanged where codes do not follow x."""
    x_mean, code_mean = x.mean(dim, keepdim=True), codes.mean(dim, keepdim=True)
    centred = x - x_mean
    covariance = (codes - code_mean).mul_(centred).sum(dim, keepdim=True)
    is_flat = covariance <= 0
    ratio = centred.square().sum(dim, keepdim=True) / covariance.masked_fill(is_flat, 1)
    wide_scale = _storable(ratio)
    wide_zero = _storable(x_mean - wide_scale * code_mean)
    return torch.where(is_flat, scale, wide_scale), torch.where(is_flat, zero, wide_zero)
