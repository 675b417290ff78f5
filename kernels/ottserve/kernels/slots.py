"""The tensors of slots, in one value. Allocates nothing and decides nothing; the shapes are in kernels/README.md."""

from __future__ import annotations

from dataclasses import dataclass, fields

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

    def layer(self, index: int) -> Slots:
        """The view of one layer."""
        return Slots(*(getattr(self, field.name)[index] for field in fields(self)))

    def layers(self, part: slice) -> Slots:
        """The view of some layers."""
        return Slots(*(getattr(self, field.name)[part] for field in fields(self)))

    def all_layers_flat(self) -> Slots:
        """The view with L flattened into S, for ops that work on all layers at once."""
        return Slots(*(getattr(self, field.name).flatten(0, 1) for field in fields(self)))

    @property
    def num_bytes(self) -> int:
        """Bytes of all the tensors, measured from their storage."""
        return sum(t.numel() * t.element_size() for t in (getattr(self, field.name) for field in fields(self)))
