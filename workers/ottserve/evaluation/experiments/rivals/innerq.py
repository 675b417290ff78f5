"""InnerQ (arXiv 2602.23200): small groups along the dimension that attention sums over, even levels or signed ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.evaluation.experiments.coded import Coded
from ottserve.evaluation.experiments.quantisers import (
    SCALE_AND_ZERO_BITS,
    Affine,
    Axis,
    Coarse,
    Coder,
    line_dim,
)
from ottserve.evaluation.experiments.rivals.normalised import Normalised
from ottserve.evaluation.experiments.tracing import Trace


@dataclass(frozen=True)
class Hybrid:
    """Lines cut into pieces of `length`, and for each piece whichever of two codes errs less (L1).

    One has a sign and magnitudes of `bits` − 1 bits about 0, the other even levels of `bits` − 1 bits and a zero. A bit
    says which.
    """

    bits: int
    axis: Axis
    length: int

    def prepare(self, first: Tensor) -> Coder:
        """See `Quantiser`."""
        return self.code

    def code(self, x: Tensor) -> Coarse:
        """`x [J, G, D]` through codes."""
        dim = line_dim(self.axis)
        pieces = x.unflatten(dim, (-1, self.length))
        even = Affine(self.bits - 1, self.axis, x.shape[dim] // self.length).code(x).x.view_as(pieces)
        top = 2 ** (self.bits - 1) - 1
        scale = (pieces.abs().amax(dim, keepdim=True) / top).half().float()
        signed = (pieces / scale.masked_fill(scale == 0, torch.inf)).round().clamp(-top, top) * scale
        loss_even, loss_signed = ((found - pieces).abs().sum(dim, keepdim=True) for found in (even, signed))
        is_signed = loss_signed < loss_even
        num_signed = int(is_signed.sum())
        signed_bits = num_signed * (self.bits * self.length + 16)
        even_bits = (is_signed.numel() - num_signed) * ((self.bits - 1) * self.length + SCALE_AND_ZERO_BITS)
        return Coarse(torch.where(is_signed, signed, even).view_as(x), signed_bits + even_bits + is_signed.numel())


def innerq(bits: int, length: int) -> Coded:
    """InnerQ over groups of `length`, along channels for keys and along tokens for values.

    Simplified: sealed G tokens at a time, the paper `length`; norms come from the first group, the paper's from the
    whole prompt. As in the paper keys lie after RoPE.
    """
    keys = Normalised(Hybrid(bits, "token", length))
    return Coded(keys, Hybrid(bits, "channel", length), Trace("first", places=32, first_layer=0))
