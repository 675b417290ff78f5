"""Channels made alike before tokens share a scale: a part of InnerQ and of ZipCache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.evaluation.experiments.quantisers import Coarse, Coder, Quantiser


@dataclass(frozen=True)
class Normalised:
    """`inner` over channels divided by the root of their largest magnitude in the first group; weights can hold it."""

    inner: Quantiser

    def prepare(self, first: Tensor) -> Coder:
        """See `Quantiser`."""
        norm = first.abs().amax(-2, keepdim=True).sqrt().clamp_min(torch.finfo(first.dtype).tiny)
        coder = self.inner.prepare(first / norm)

        def code(x: Tensor) -> Coarse:
            coarse = coder(x / norm)
            return Coarse(coarse.x * norm, coarse.bits)

        return code
