"""Models changed so that a cache has something to break on; each variant is its own reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ottserve.workers.models.loading import LoadedModel

Change = Callable[[LoadedModel], LoadedModel]


@dataclass(frozen=True, slots=True)
class Variant:
    """A model made of another.

    Attributes:
        name: in tables and among results; empty for the model as it is.
    """

    name: str
    change: Change


KEY_BIAS = 600.0


def _key_bias(model: LoadedModel) -> LoadedModel:
    """A bias on one channel of every KV head's keys, before RoPE; Qwen2 has up to 921 in some layers.

    The channel is one that turns by half a circle within a group. Queries read it and the one that it turns with by
    `1 / KEY_BIAS`, so that the model goes on answering: one that was trained with such a bias has learned that itself.
    """
    changed = model.shared()
    D = model.shape.head_size
    channel = D // 16
    for layer in changed.module.modules():
        keys, queries = getattr(layer, "k_proj", None), getattr(layer, "q_proj", None)
        if not isinstance(keys, nn.Linear) or not isinstance(queries, nn.Linear):
            continue
        bias = torch.zeros(keys.out_features) if keys.bias is None else keys.bias.detach().clone()
        bias[channel::D] += KEY_BIAS
        keys.bias = nn.Parameter(bias.to(keys.weight), requires_grad=False)
        weight = queries.weight.detach().clone()
        weight[channel :: D // 2] /= KEY_BIAS
        queries.weight = nn.Parameter(weight, requires_grad=False)
    return changed


AS_IT_IS = Variant("", lambda model: model)
WITH_KEY_BIAS = Variant("key bias 600", _key_bias)
