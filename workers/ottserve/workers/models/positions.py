"""How a model turns its keys by their position, for caches that turn them back. Knows no cache."""

from __future__ import annotations

import math

from torch import Tensor, nn
from transformers import PretrainedConfig

INTERLEAVED = ("cohere", "glm4")  # a channel's partner is the one beside it


def key_frequencies(module: nn.Module, config: PretrainedConfig, head_size: int) -> tuple[float, ...]:
    """How many times a position turns channels d and d + D/2 of a key, `[D/2]`.

    Empty where keys are turned in another way: in part, in neighbouring pairs, or not in every layer alike.
    """
    every_layer = all(getattr(config, "no_rope_layers", None) or (True,))
    buffers = (getattr(rotary, "inv_freq", None) for rotary in module.modules())
    found = [own for own in buffers if isinstance(own, Tensor)]
    if config.model_type in INTERLEAVED or not every_layer or [len(own) for own in found] != [head_size // 2]:
        return ()
    return tuple((found[0].double() / (2 * math.pi)).tolist())
