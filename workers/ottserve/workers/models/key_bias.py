"""Biases of keys so large that, turned by position, they leave few-bit codes no room for the keys. Knows no policy.

A bias is the same for every token, and costs nothing until rotary embedding turns it: then its channel swings by twice
the bias within a page, and the step between two codes grows with that. Measured: docs/models.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.models.projections import attention_layers, find_projections

KEY_NORMS = ("k_norm", "k_layernorm")  # behind one of these a bias can't be large


def key_bias_ratios(model: nn.Module, shape: ModelShape) -> list[float]:
    """By layer, how many times larger a key's bias is than what varies in its channel, at most; 0 without biases.

    What varies is estimated from the weights, as for inputs of unit variance.
    """
    return [_ratio(attention, shape) for attention in attention_layers(model)]


def drowned_layers(model: nn.Module, shape: ModelShape, k_bits: Sequence[int]) -> list[int]:
    """The layers whose key biases are too large for codes of the bits that `k_bits` gives for each; 16 are no codes."""
    ratios = zip(key_bias_ratios(model, shape), k_bits, strict=True)
    return [layer for layer, (ratio, bits) in enumerate(ratios) if bits < 16 and drowns(ratio, bits)]


def drowns(ratio: float, k_bits: int) -> bool:
    """Whether codes of so many bits err, in the worst channel, by more than what varies there.

    A step is twice the bias over the number of steps, and the error about a quarter of it.
    """
    return ratio > 2 * ((1 << k_bits) - 1)


def _ratio(attention: nn.Module, shape: ModelShape) -> float:
    found = find_projections(attention, shape)
    if found is None or found.keys.layer.bias is None or any(hasattr(attention, name) for name in KEY_NORMS):
        return 0.0
    rows = found.keys.rows
    bias, spread = found.keys.layer.bias.data[rows].float(), found.keys.layer.weight.data[rows].float().norm(dim=1)
    return float((bias.abs() / spread.clamp_min(1e-9)).max())
