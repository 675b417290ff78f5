"""Numbers through few-bit codes and back, where they stand. Written from the paper and docs, not from the kernels.

It exists to check them, so it shares no code with them: sums are in float64, nothing is packed, nothing is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ottserve.workers.core.kvspec import EXACT_BITS, LayerSpec


def coarse_keys(keys: Tensor, layer: LayerSpec, fit_rounds: int, *, unbiased: bool) -> Tensor:
    """Keys fp32 `[J, G, D]` as they come back: a scale and a zero for each channel, of each part of the group.

    The channels that vary most over the group, the lower ones among equals, have longer codes. Where there are such, or
    more than two bits, `unbiased` widens keys as well, but never those of one bit.
    """
    if layer.k_bits == EXACT_BITS:
        return keys
    widened = unbiased and (layer.k_fine > 0 or layer.k_bits > 2)

    def through(bits: int) -> Tensor:
        lines = keys.unflatten(1, (layer.k_subgroups, -1)).mT
        return coarse(lines, bits, fit_rounds, unbiased=widened and bits > 1).mT.flatten(1, 2)

    if not layer.k_fine:
        return through(layer.k_bits)
    order = keys.double().var(1, correction=0).argsort(dim=-1, descending=True, stable=True)
    is_fine = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order[:, : layer.k_fine], True)
    return torch.where(is_fine[:, None], through(layer.k_bits + layer.k_fine_bits), through(layer.k_bits))


def coarse_values(values: Tensor, layer: LayerSpec, fit_rounds: int, *, unbiased: bool) -> Tensor:
    """Values fp32 `[J, G, D]` as they come back: a scale and a zero for each token."""
    return values if layer.v_bits == EXACT_BITS else coarse(values, layer.v_bits, fit_rounds, unbiased=unbiased)


def coarse(x: Tensor, bits: int, fit_rounds: int, *, unbiased: bool) -> Tensor:
    """`x` fp32 with a scale and a zero for each line along the last axis, both rounded to fp16.

    Scale and zero are those of minimum and maximum, or after `fit_rounds` of the least-squares line through codes and
    numbers; one bit then starts from mean ± mean absolute deviation. `unbiased` ends with the scale at which what comes
    back, regressed on `x`, has slope 1, about the same mean.
    """
    top = 2**bits - 1
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    if bits == 1 and fit_rounds:
        away = (x - x.mean(-1, keepdim=True)).abs().mean(-1, keepdim=True)
        low, high = x.mean(-1, keepdim=True) - away, x.mean(-1, keepdim=True) + away
    scale, zero = stored((high - low) / top), stored(low)
    codes = nearest(x, scale, zero, top)
    for _ in range(fit_rounds):
        slope = regression(codes, x).clamp_min(0)
        scale, zero = about_the_mean(x, codes, slope, scale, zero)
        codes = nearest(x, scale, zero, top)
    if unbiased:
        slope = regression(x, codes)
        scale, zero = about_the_mean(x, codes, torch.where(slope > 0, 1 / slope, torch.nan), scale, zero)
    return codes * scale + zero


def stored(x: Tensor) -> Tensor:
    """`x` rounded to fp16."""
    return x.half().float()


def nearest(x: Tensor, scale: Tensor, zero: Tensor, top: int) -> Tensor:
    """Codes 0 … top, as numbers; 0 where the scale is 0."""
    return torch.where(scale > 0, ((x - zero) / scale).round().clamp(0, top), 0)


def regression(x: Tensor, y: Tensor) -> Tensor:
    """Slope of the least-squares line of each row of `y` over `x`, by the normal equations; NaN where x is constant."""
    x, y, n = x.double(), y.double(), x.shape[-1]
    sum_x, sum_y = x.sum(-1, keepdim=True), y.sum(-1, keepdim=True)
    spread = n * (x * x).sum(-1, keepdim=True) - sum_x**2
    is_constant = x.amin(-1, keepdim=True) == x.amax(-1, keepdim=True)
    return torch.where(is_constant, torch.nan, (n * (x * y).sum(-1, keepdim=True) - sum_x * sum_y) / spread)


def about_the_mean(x: Tensor, codes: Tensor, slope: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """The slope as a stored scale, and the zero by which numbers and what comes back have one mean.

    Where the slope is NaN scale and zero stay as they are.
    """
    new_scale = stored(slope)
    new_zero = stored(x.double().mean(-1, keepdim=True) - new_scale * codes.double().mean(-1, keepdim=True))
    return torch.where(slope.isnan(), scale, new_scale), torch.where(slope.isnan(), zero, new_zero)
