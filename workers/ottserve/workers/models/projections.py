"""Where transformers' attention layers keep their matrices, by the names that its families give them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ottserve.workers.kv.shape import ModelShape

SEPARATE = ("q_proj", "k_proj", "v_proj")
FUSED = "qkv_proj"  # their rows one after the other
OUTPUTS = ("o_proj", "dense")


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a linear layer's weight, and the same of its bias."""

    layer: nn.Linear
    rows: slice


@dataclass(frozen=True, slots=True)
class Projections:
    """The matrices of one attention layer: `[H · D, n]`, `[J · D, n]` twice, and `[n, H · D]`."""

    attention: nn.Module
    queries: Rows
    keys: Rows
    values: Rows
    output: nn.Linear


def attention_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Those of a decoder, in its order."""
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int) and type(module).__name__.endswith("Attention"):
            yield module


def find_projections(attention: nn.Module, shape: ModelShape) -> Projections | None:
    """The matrices of a layer, or None where they have other names or are no linear layers."""
    sizes = [heads * shape.head_size for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
    separate = [layer for name in SEPARATE if (layer := _linear(attention, name)) is not None]
    fused = _linear(attention, FUSED)
    output = next((layer for name in OUTPUTS if (layer := _linear(attention, name)) is not None), None)
    if output is None:
        return None
    if [layer.out_features for layer in separate] == sizes:
        queries, keys, values = (Rows(layer, slice(0, size)) for layer, size in zip(separate, sizes, strict=True))
    elif fused is not None and fused.out_features == sum(sizes):
        ends = (sizes[0], sizes[0] + sizes[1], sum(sizes))
        begins = (0, *ends[:2])
        queries, keys, values = (Rows(fused, slice(begin, end)) for begin, end in zip(begins, ends, strict=True))
    else:
        return None
    return Projections(attention, queries, keys, values, output)


def _linear(parent: nn.Module, name: str) -> nn.Linear | None:
    layer = getattr(parent, name, None)
    return layer if isinstance(layer, nn.Linear) else None
