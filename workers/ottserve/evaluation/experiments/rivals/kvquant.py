"""KVQuant (NeurIPS 2024, arXiv 2401.18079): keys before RoPE, levels that are not even, about 1 % sparse outliers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.evaluation.experiments.coded import Coded
from ottserve.evaluation.experiments.quantisers import SCALE_AND_ZERO_BITS, Axis, Coarse, Coder, line_dim
from ottserve.evaluation.experiments.rivals.sparse import Sparse
from ottserve.evaluation.experiments.tracing import Trace

LLOYD_ROUNDS = 30


@dataclass(frozen=True)
class NonUniform:
    """Levels of one layer, found by k-means over lines scaled to [0, 1], and a scale and a zero for each line.

    Simplified: levels are calibrated on the first group of the text itself, without weights (the paper: on other text,
    weighted by Fisher information). Key scales are taken from each group and counted (the paper: from calibration).
    """

    bits: int
    axis: Axis

    def prepare(self, first: Tensor) -> Coder:
        """See `Quantiser`."""
        levels = _k_means(self._scaled(first)[0].flatten(), 2**self.bits)
        between = (levels[1:] + levels[:-1]) / 2

        def code(x: Tensor) -> Coarse:
            scaled, scale, zero = self._scaled(x)
            coarse = levels[torch.bucketize(scaled, between)] * scale + zero
            return Coarse(coarse, self.bits * x.numel() + SCALE_AND_ZERO_BITS * scale.numel())

        return code

    def _scaled(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low, high = torch.aminmax(x, dim=line_dim(self.axis), keepdim=True)
        zero, scale = low.half().float(), (high - low).half().float()
        return (x - zero) / scale.masked_fill(scale == 0, torch.inf), scale, zero


def kvquant(share: float) -> Coded:
    """2-bit KVQuant with that share of sparse outliers; the first token is kept exact, as the paper does at 2 bits."""
    keys, values = (Sparse(NonUniform(2, axis), axis, share) for axis in ("channel", "token"))
    return Coded(keys, values, Trace("first", places=1, first_layer=0), before_rope=True)


def _k_means(x: Tensor, num_levels: int) -> Tensor:
    """Ascending levels fp32 `[num_levels]` of `x [n]`, by Lloyd's rounds from equal shares."""
    levels = x.quantile((torch.arange(num_levels, device=x.device) + 0.5) / num_levels)
    for _ in range(LLOYD_ROUNDS):
        nearest = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
        count = torch.bincount(nearest, minlength=num_levels)
        total = torch.zeros_like(levels).scatter_add_(0, nearest, x)
        levels = torch.where(count > 0, total / count.clamp_min(1), levels)
    return levels
