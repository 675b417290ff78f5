"""What pages would give back of a layer's keys and values, outliers exact, by the ops that serve. Knows no query."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ottserve.kernels.quantize import dequantize_keys, dequantize_values, replaced_tokens
from ottserve.kernels.rotary import turn_pages
from ottserve.kernels.seal import seal
from ottserve.workers.core.kvspec import KVSpec, LayerSpec
from ottserve.workers.kv.store import KVStore

SLOT_ID = 1  # 0 is the dummy


def as_stored(keys: Tensor, values: Tensor, spec: KVSpec, layer: LayerSpec) -> tuple[Tensor, Tensor]:
    """Seal every whole group of a text, from its first token on, and read it back.

    Args:
        keys, values: `[J, T, D]`, keys after RoPE.
        spec: of the cache; of its layers only the largest pool is read, since every layer has rows for it.
        layer: how this one is stored.

    Returns:
        fp32 `[J, G·⌊T/G⌋, D]` each.
    """
    num_pages = keys.shape[1] // spec.group
    exact_dtype = torch.bfloat16 if keys.dtype == torch.bfloat16 else torch.float16
    alone = replace(spec, layers=(layer,), evicted=spec.places - layer.pool)
    store = KVStore(alone, 1 + num_pages, 1 + SLOT_ID, exact_dtype, keys.device)
    (stored,) = store.layers
    exact = keys.to(exact_dtype), values.to(exact_dtype)
    for page in range(num_pages):
        positions = torch.arange(page * spec.group, (page + 1) * spec.group, device=keys.device)
        ring = positions % spec.tail_capacity
        for tail, tokens in zip((stored.slots.tail_k, stored.slots.tail_v), exact, strict=True):
            tail[SLOT_ID, :, ring] = tokens[:, positions]
        slot_id, page_id, first = torch.tensor([[SLOT_ID], [1 + page], [page * spec.group]], dtype=torch.int32).to(
            keys.device
        )
        seal(
            stored.pages, stored.slots, stored.layout, slot_id, page_id, first, stored.pool_size,
            keep=spec.keep, fit_rounds=spec.fit_rounds, unbiased=spec.unbiased, frequencies=store.key_frequencies,
        )  # fmt: skip
    pages = stored.pages[1:].transpose(0, 1)
    sealed_keys = dequantize_keys(pages, stored.layout)
    turn_pages(sealed_keys, stored.layout, store.key_frequencies)
    sealed = sealed_keys, dequantize_values(pages, stored.layout)
    is_exact = replaced_tokens(pages, stored.layout).flatten(1)[..., None]
    num_sealed = num_pages * spec.group
    back_keys, back_values = (
        torch.where(is_exact, tokens[:, :num_sealed].float(), found.flatten(1, 2))
        for tokens, found in zip(exact, sealed, strict=True)
    )
    return back_keys, back_values
