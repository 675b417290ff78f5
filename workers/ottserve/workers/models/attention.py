"""Attention of every transformers decoder, carried to the cache.

The sequence dimension that transformers sees is all tokens of a step, of all sequences, one after the other; who
belongs to whom is known to the step alone, which reaches here as the keyword argument `kv`.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import AttentionInterface

from ottserve.workers.kv.open_step import OpenStep

IMPLEMENTATION = "ottserve"


def attend_through_cache(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kv: OpenStep,
    scaling: float,
    **_unused: object,
) -> tuple[Tensor, None]:
    """The function transformers calls in each layer.

    Args:
        module: the attention layer; its `layer_idx` names the layer.
        query: `[1, H, T, D]`; key, value: `[1, J, T, D]`, keys after RoPE.
        attention_mask: always None, since the step knows what each row may see.
        kv: the cache during this step.
        scaling: factor on the scores.
        _unused: what transformers tells every implementation (dropout, sliding window, …); models for which
            any of it matters are refused when they load (`support.py`).

    Returns:
        `[1, T, H, D]` and, as transformers expects, no attention weights.
    """
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    layer: int = module.layer_idx  # type: ignore[assignment]
    return kv.attend(layer, q, k, v, scaling).unsqueeze(0), None


def register() -> None:
    """Make the implementation known to transformers under `IMPLEMENTATION`."""
    AttentionInterface.register(IMPLEMENTATION, attend_through_cache)
