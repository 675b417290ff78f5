"""The tensors of slots, in one value. Allocates nothing and decides nothing; the shapes are in kernels/README.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slots:
    """Tails and outliers of every slot, of one layer `[S, J, …]` or of all `[L, S, J, …]`."""

    tail_k: Tensor
    tail_v: Tensor
    outlier_k: Tensor
    outlier_v: Tensor
    outlier_score: Tensor
    outlier_position: Tensor
    outlier_count: Tensor
    frozen: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in the order of the fields."""
        return _all_of(self)

    def layer(self, index: int) -> Slots:
        """The view of one layer."""
        return Slots(*(tensor[index] for tensor in self.tensors))

    def layers(self, part: slice) -> Slots:
        """The view of some layers."""
        return Slots(*(tensor[part] for tensor in self.tensors))

    def all_layers_flat(self) -> Slots:
        """The view with L flattened into S, for ops that work on all layers at once."""
        return Slots(*(tensor.flatten(0, 1) for tensor in self.tensors))

    @property
    def num_bytes(self) -> int:
        """Bytes of all the tensors, measured from their storage."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


NAMES = tuple(field.name for field in fields(Slots))
"""Of the tensors, in their order."""
_all_of: Callable[[Slots], tuple[Tensor, ...]] = attrgetter(*NAMES)  # every op asks, in every layer
