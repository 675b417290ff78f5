"""What a step's numbers pass through on their way to the host: gathered on the device, copied at once.

The counterpart of `pack.py`. Knows not what the numbers mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

Fetched = tuple[Tensor, ...]


class OnTheWay:
    """Numbers that are being copied to the host."""

    def __init__(self, flat: Tensor, shapes: list[torch.Size]) -> None:
        """Begin to copy `flat`, float64; returns at once."""
        self._shapes = shapes
        self._arrived = None
        self._flat = flat
        if flat.is_cuda:
            self._flat = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            self._flat.copy_(flat, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def fetch(self) -> Fetched:
        """All tensors in their shapes, float64 on the host: the only wait for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        parts = self._flat.split([shape.numel() for shape in self._shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, self._shapes, strict=True))


class Readout:
    """Tensors of integers below 2⁵³ or of floats; float64 holds either without loss."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def add(self, tensor: Tensor) -> int:
        """Append a tensor; returns its index among the results of `fetch`."""
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def send(self) -> OnTheWay:
        """Begin to copy all of them to the host, the only copy from the device; returns at once."""
        if not self._tensors:
            return OnTheWay(torch.empty(0), [])
        flat = torch.cat([tensor.flatten().double() for tensor in self._tensors])
        return OnTheWay(flat, [tensor.shape for tensor in self._tensors])
