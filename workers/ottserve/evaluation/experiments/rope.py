"""Turning keys back to before rotary positions and on again, where channel i pairs with channel i + D/2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ottserve.workers.models.loading import LoadedModel


@dataclass(frozen=True, slots=True)
class Rope:
    """Cosines and sines, fp32 `[T, D]`, as the model itself computes them."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, model: LoadedModel, num_tokens: int) -> Rope:
        """Those of the first `num_tokens` positions.

        Raises:
            ValueError: the model turns only a part of a head.
        """
        positions = torch.arange(num_tokens, device=model.device)[None]
        cos, sin = model.module.base_model.rotary_emb(torch.zeros(1, device=model.device), positions)
        if cos.shape[-1] != model.shape.head_size:
            raise ValueError(
                f"{model.info.name}: rotary positions turn {cos.shape[-1]} of {model.shape.head_size} channels"
            )
        return cls(cos[0].float(), sin[0].float())

    def turn(self, keys: Tensor, first: int) -> Tensor:
        """Keys `[J, n, D]` of positions `first`, `first` + 1, … as they are after RoPE."""
        here = slice(first, first + keys.shape[1])
        return keys * self.cos[here] + _half_turned(keys) * self.sin[here]

    def turn_back(self, keys: Tensor, first: int) -> Tensor:
        """The inverse of `turn`, also where a model scales cosines and sines."""
        here = slice(first, first + keys.shape[1])
        cos, sin = self.cos[here], self.sin[here]
        return (keys * cos - _half_turned(keys) * sin) / (cos.square() + sin.square())


def _half_turned(x: Tensor) -> Tensor:
    """Each pair of channels (a, b) as (−b, a)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)
