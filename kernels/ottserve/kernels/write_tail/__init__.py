"""New tokens into the tails. Knows neither pages nor sequences: an id and a position name the place."""

from __future__ import annotations

from torch import Tensor

from ottserve.kernels.slots import Slots
from ottserve.kernels.write_tail import reference
from ottserve.kernels.write_tail.reference import narrow

__all__ = ["narrow", "write_tail"]


def write_tail(slots: Slots, keys: Tensor, values: Tensor, slot_ids: Tensor, positions: Tensor) -> None:
    """Write T tokens of one layer into the rings of their slots.

    Elements beyond the finite range of the tail's dtype are clamped to it. (slot, position % C) pairs must be
    distinct, except for the dummy slot 0.

    Args:
        slots: tensors of one layer; `tail_k` and `tail_v` `[S, J, C, D]` are mutated.
        keys, values: `[T, J, D]`, any float dtype.
        slot_ids: int32 `[T]`.
        positions: int32 `[T]`, of each token in its sequence; position p goes to ring index p % C.
    """
    if keys.is_cuda:
        from ottserve.kernels.write_tail import triton  # noqa: PLC0415 - Triton is installed only where a GPU is

        triton.write_tail(slots, keys, values, slot_ids, positions)
        return
    reference.write_tail(slots, keys, values, slot_ids, positions)
