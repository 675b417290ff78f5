"""Single elements kept exact beside a quantiser: the sparse part of KVQuant and of GEAR."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.evaluation.experiments.quantisers import Axis, Coarse, Coder, Quantiser, line_dim, replaced_by_mean

VALUE_AND_INDEX_BITS = 32


@dataclass(frozen=True)
class Sparse:
    """`inner` over a group without the elements that lie furthest out in their line; those are kept at 16 bits.

    Attributes:
        axis: of the lines, whose mean and spread say what is far out.
        share: of all elements, how many are kept.
    """

    inner: Quantiser
    axis: Axis
    share: float

    def prepare(self, first: Tensor) -> Coder:
        """See `Quantiser`."""
        coder = self.inner.prepare(self._dense(first, self._outliers(first)))

        def code(x: Tensor) -> Coarse:
            outliers = self._outliers(x)
            dense = coder(self._dense(x, outliers))
            bits = dense.bits + VALUE_AND_INDEX_BITS * int(outliers.sum())
            return Coarse(torch.where(outliers, x, dense.x), bits)

        return code

    def _outliers(self, x: Tensor) -> Tensor:
        dim = line_dim(self.axis)
        spread = x.std(dim, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        distance = ((x - x.mean(dim, keepdim=True)) / spread).abs().flatten()
        furthest = distance.topk(round(self.share * x.numel())).indices
        return torch.zeros_like(distance, dtype=torch.bool).scatter_(0, furthest, True).view_as(x)

    def _dense(self, x: Tensor, outliers: Tensor) -> Tensor:
        return replaced_by_mean(x, outliers, line_dim(self.axis))
