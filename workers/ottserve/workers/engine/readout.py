"""What a step's numbers pass through on their way to the host: gathered on the device, copied at once.

The counterpart of `inputs.py`. Knows not what the numbers mean.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Readout:
    """Tensors of integers below 2⁵³ or of floats; float64 holds either without loss."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def add(self, tensor: Tensor) -> int:
        """Append a tensor; returns its index among the results of `fetch`."""
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def fetch(self) -> tuple[Tensor, ...]:
        """All tensors in their shapes, float64 on the host: the only copy from the device, and the only wait for it."""
        if not self._tensors:
            return ()
        flat = torch.cat([tensor.flatten().double() for tensor in self._tensors]).cpu()
        parts = flat.split([tensor.numel() for tensor in self._tensors])
        return tuple(part.view(tensor.shape) for part, tensor in zip(parts, self._tensors, strict=True))
