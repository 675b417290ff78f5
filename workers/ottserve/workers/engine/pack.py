"""The numbers of a step on their way to the device: gathered on the host, copied at once.

The counterpart of `readout.py`. Knows not what the numbers mean.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

KINDS = ((np.float64, torch.float64), (np.int64, torch.int64), (np.int32, torch.int32))
"""In falling size, so that each lies where its size divides the offset."""


class Place(NamedTuple):
    """Where an array lies in a pack."""

    kind: int
    number: int


class Sent:
    """What a pack held, on the device."""

    def __init__(self, vectors: tuple[tuple[Tensor, ...], ...], shapes: tuple[list[tuple[int, ...]], ...]) -> None:
        self._vectors = vectors
        self._shapes = shapes

    def __getitem__(self, place: Place) -> Tensor:
        """The array of a place, a view of the one buffer of all."""
        return self._vectors[place.kind][place.number].view(self._shapes[place.kind][place.number])


class Pack:
    """Arrays of numbers for one step."""

    def __init__(self) -> None:
        self._arrays: tuple[list[NDArray[Any]], ...] = tuple([] for _ in KINDS)

    def doubles(self, numbers: ArrayLike) -> Place:
        """Append float64 numbers, an array or what makes one."""
        return self._add(0, numbers)

    def indices(self, numbers: ArrayLike) -> Place:
        """Append int64 numbers, with which tensors are indexed."""
        return self._add(1, numbers)

    def ints(self, numbers: ArrayLike) -> Place:
        """Append int32 numbers, as kernels read them."""
        return self._add(2, numbers)

    def send(self, device: torch.device) -> Sent:
        """Copy all to the device, without waiting for it."""
        flat = [np.concatenate([array.ravel() for array in arrays]) for arrays in self._arrays if arrays]
        num_bytes = [array.nbytes for array in flat]
        # Page-locked memory goes back to torch, which gives it out again only when the copy is done.
        host = torch.empty(sum(num_bytes), dtype=torch.uint8, pin_memory=device.type == "cuda")
        target = host.numpy()
        begin = 0
        for array in flat:
            target[begin : begin + array.nbytes] = array.view(np.uint8)
            begin += array.nbytes
        parts = iter(host.to(device, non_blocking=True).split(num_bytes))
        vectors = tuple(
            next(parts).view(dtype).split([array.size for array in arrays]) if arrays else ()
            for (_, dtype), arrays in zip(KINDS, self._arrays, strict=True)
        )
        return Sent(vectors, tuple([array.shape for array in arrays] for arrays in self._arrays))

    def _add(self, kind: int, numbers: ArrayLike) -> Place:
        self._arrays[kind].append(np.asarray(numbers, KINDS[kind][0]))
        return Place(kind, len(self._arrays[kind]) - 1)
