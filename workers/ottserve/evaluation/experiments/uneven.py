"""Levels that lie where a normal distribution has its mass, instead of evenly: what NF4 and its like promise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ottserve.evaluation.experiments.quantisers import SCALE_AND_ZERO_BITS, Axis, Coarse, Coder, line_dim

LLOYD_ROUNDS = 500
NUM_QUANTILES = 2**12


@dataclass(frozen=True)
class Uneven:
    """The levels of least squared error for a normal distribution, with an fp16 scale and mean for each line.

    As `Affine` with `unbiased`: scales begin with the spread of the line, are fitted by least squares and end with the
    one at which what comes back has slope 1 over what went in. Bytes are the same; a reader looks levels up.
    """

    bits: int
    axis: Axis
    fit_rounds: int = 8

    def prepare(self, first: Tensor) -> Coder:
        """See `Quantiser`."""
        levels = torch.tensor(normal_levels(self.bits), device=first.device)
        between = (levels[1:] + levels[:-1]) / 2
        dim = line_dim(self.axis)

        def code(x: Tensor) -> Coarse:
            mean = x.mean(dim, keepdim=True)
            centred = x - mean
            scale, zero = centred.square().mean(dim, keepdim=True).sqrt(), mean
            for step in range(self.fit_rounds + 1):
                taken = levels[torch.bucketize((x - zero) / scale.masked_fill(scale == 0, torch.inf), between)]
                around = taken - taken.mean(dim, keepdim=True)
                together = (around * centred).sum(dim, keepdim=True)
                whole = (around if step < self.fit_rounds else centred).square().sum(dim, keepdim=True)
                fitted = together / whole if step < self.fit_rounds else whole / together
                scale = torch.where((together > 0) & fitted.isfinite(), fitted, scale).half().float()
                zero = (mean - scale * taken.mean(dim, keepdim=True)).half().float()
            return Coarse(taken * scale + zero, self.bits * x.numel() + SCALE_AND_ZERO_BITS * scale.numel())

        return code


@cache
def normal_levels(bits: int) -> tuple[float, ...]:
    """Levels of least squared error for a standard normal distribution, ascending (Lloyd 1957, Max 1960)."""
    points = torch.special.ndtri((torch.arange(NUM_QUANTILES, dtype=torch.float64) + 0.5) / NUM_QUANTILES)
    levels = points[NUM_QUANTILES >> bits + 1 :: NUM_QUANTILES >> bits].clone()
    for _ in range(LLOYD_ROUNDS):
        nearest = torch.bucketize(points, (levels[1:] + levels[:-1]) / 2)
        total = torch.zeros_like(levels).scatter_add_(0, nearest, points)
        levels = total / torch.bincount(nearest, minlength=len(levels)).clamp_min(1)
    return tuple(levels.tolist())
