"""What lies between two attentions, compiled: torch.compile fuses the small operations that products leave over.

Attention itself is left to the cache, so the compiled code is the same for every policy and every layer; the row
count is symbolic, so it is the same for every step but those of one row.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ottserve.workers.models.attention import IMPLEMENTATION, attend_through_cache


def compile_layers(module: PreTrainedModel, backend: str = "inductor") -> int:
    """Have every decoder layer compiled when it first runs; returns how many.

    Args:
        module: changed in place; its layers are those that transformers can checkpoint one by one.
        backend: of torch.compile.
    """
    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(attend_through_cache))
    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    for layer in layers:
        layer.compile(backend=backend, dynamic=True)
    return len(layers)
