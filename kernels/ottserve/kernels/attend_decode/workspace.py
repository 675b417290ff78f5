"""Memory lent for the length of a computation. Knows nothing of what is put there."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


class Workspace:
    """Host memory that is allocated once: of megabytes allocated anew, every 4 KiB would cost a page fault."""

    def __init__(self, num_bytes: int) -> None:
        """Nothing is allocated before it is needed."""
        self.num_bytes = num_bytes
        self._buffer = torch.empty(0)
        self._num_lent = 0

    def take_back(self) -> None:
        """From here on what was lent may be lent again."""
        self._num_lent = 0

    def lend(self, *shape: int) -> Tensor:
        """fp32 of this shape holding anything, until `take_back`; memory of its own where too little is left."""
        if not self._buffer.numel():
            self._buffer = torch.empty(self.num_bytes // 4)
        count = prod(shape)
        start, stop = self._num_lent, self._num_lent + count
        if stop > self._buffer.numel():
            return torch.empty(shape)
        self._num_lent = stop
        return self._buffer[start:stop].view(shape)
