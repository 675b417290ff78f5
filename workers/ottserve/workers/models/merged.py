"""Products of one input with several matrices, computed as one: fewer calls, and matrices large enough to stream.

transformers' layers run unchanged: the first matrix of a family computes for all, the others hand out their part.
Measured, one row of 4096 in bf16 on an H200, a decoder layer of Llama-3-8B's shape: docs/decisions/kernels.md.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

FAMILIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names that transformers gives matrices with the same input, in the order in which its layers use them."""


class MergedLinear(nn.Module):
    """The first matrix of a family; computes the products of all.

    Attributes:
        weight: `[sum of the outputs, n]`, one matrix under the other; bias: `[sum of the outputs]` or None.
    """

    def __init__(self, family: list[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in family]
        self.weight = nn.Parameter(torch.cat([layer.weight.data for layer in family]), requires_grad=False)
        biases = [layer.bias.data for layer in family if layer.bias is not None]
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def forward(self, hidden: Tensor) -> Tensor:
        """`[…, n]` → the first matrix's `[…, sizes[0]]`."""
        parts: tuple[Tensor, ...] = functional.linear(hidden, self.weight, self.bias).split(self.sizes, -1)
        self._input, self._parts = hidden, parts
        return parts[0]

    def part(self, index: int, hidden: Tensor) -> Tensor:
        """What the matrix `index` makes of the input that `forward` has just seen, or of another."""
        if hidden is not self._input:
            begin, end = sum(self.sizes[:index]), sum(self.sizes[: index + 1])
            bias = None if self.bias is None else self.bias[begin:end]
            return functional.linear(hidden, self.weight[begin:end], bias)
        found = self._parts[index]
        if index == len(self.sizes) - 1:  # the family's last: nothing is held from one layer to the next
            self._input, self._parts = None, ()
        return found


class MergedPart(nn.Module):
    """Another matrix of a family."""

    def __init__(self, family: MergedLinear, index: int) -> None:
        super().__init__()
        self._family = (family,)  # in a tuple, so that the weights belong to one module alone
        self._index = index

    def forward(self, hidden: Tensor) -> Tensor:
        """`[…, n]` → `[…, sizes[index]]`."""
        return self._family[0].part(self._index, hidden)


def merge_families(model: nn.Module) -> int:
    """Merge every family of plain linear layers that agree in input, dtype and bias; returns how many.

    Changes the model in place, layer by layer, so that only one layer's weights are there twice.
    """
    found = [
        (parent, names, family)
        for parent in model.modules()
        for names in FAMILIES
        if (family := _family(parent, names))
    ]
    for parent, names, family in found:
        merged = MergedLinear(family)
        family.clear()
        setattr(parent, names[0], merged)
        for index, name in enumerate(names[1:], 1):
            setattr(parent, name, MergedPart(merged, index))
    return len(found)


def _family(parent: nn.Module, names: tuple[str, ...]) -> list[nn.Linear]:
    """The layers of these names, or none if they can't be one."""
    layers = [getattr(parent, name, None) for name in names]
    plain = [layer for layer in layers if type(layer) is nn.Linear]
    kinds = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in plain}
    return plain if len(plain) == len(names) and len(kinds) == 1 else []
