"""RMS norms as one PyTorch call instead of seven small ones; a step of a small model makes dozens of them.

Whether a module is such a norm is found out by what it computes, not by its name.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

TOLERANCE = 1e-6


class FusedRMSNorm(nn.Module):
    """The same function as the norm it replaces, over the same weight."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """`[…, D]` → `[…, D]` in the same dtype; the mean is taken in fp32."""
        return functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


def fuse_norms(model: nn.Module) -> int:
    """Replace every norm that `FusedRMSNorm` computes as well; returns how many. Changes the model in place."""
    found = [
        (parent, name, fused)
        for parent in model.modules()
        for name, child in parent.named_children()
        if (fused := _fused(child)) is not None
    ]
    for parent, name, fused in found:
        setattr(parent, name, fused)
    return len(found)


def _fused(module: nn.Module) -> FusedRMSNorm | None:
    """The replacement of a module, or None if it is no RMS norm."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    fused = FusedRMSNorm(weight, eps)
    probe = torch.linspace(-3, 2, 2 * weight.numel(), dtype=torch.float32, device=weight.device)
    probe = probe.view(2, -1).to(weight.dtype)
    limit = max(TOLERANCE, 2 * torch.finfo(weight.dtype).eps)
    with torch.no_grad():
        expected, got = module(probe).float(), fused(probe).float()
    same = torch.allclose(got, expected, rtol=limit, atol=limit * float(expected.abs().max()))
    return fused if same else None
