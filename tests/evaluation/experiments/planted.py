"""Keys, values and queries of one layer in which the paper's findings are planted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.evaluation.experiments.attention import LayerErrors, attend
from ottserve.evaluation.experiments.method import Layer, Memory, Method
from ottserve.evaluation.experiments.rope import Rope

NUM_TOKENS = 64 * 4 + 16
HEAD_SIZE = 32


def rope(num_tokens: int = NUM_TOKENS, head_size: int = HEAD_SIZE, scale: float = 1.0) -> Rope:
    """Rotary positions of base 10,000; `scale` on cosines and sines as YaRN has it."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_size, 2) / head_size)
    angles = torch.outer(torch.arange(num_tokens).float(), frequencies).repeat(1, 2)
    return Rope(angles.cos() * scale, angles.sin() * scale)


@dataclass(frozen=True, slots=True)
class OneLayer:
    """`q [H, T, D]`, `k, v [J, T, D]`."""

    q: Tensor
    k: Tensor
    v: Tensor

    def run(self, method: Method, layer: int = 2) -> tuple[Tensor, LayerErrors, Memory]:
        """Output `[H, T, D]`, what was lost, and the memory as it is at the end."""
        memory, errors = method.open(Layer(layer, rope(self.k.shape[1], self.k.shape[2]))), LayerErrors()
        out = attend(memory, method, self.q, self.k, self.v, self.k.shape[2] ** -0.5, errors)
        return out, errors, memory
