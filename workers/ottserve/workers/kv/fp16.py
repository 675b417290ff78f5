"""The policy "fp16": a paged cache at full precision, the baseline of every comparison."""

from __future__ import annotations

from ottserve.workers.core.kvspec import KVSpec, LayerSpec
from ottserve.workers.kv.presets import quantiser
from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.settings import CacheSettings


def fp16(cache: CacheSettings, shape: ModelShape) -> KVSpec:
    """16-bit pages, no outlier tracing; the same tails and pages as the other policies."""
    return KVSpec(
        policy="fp16",
        layers=(LayerSpec(k_bits=16, v_bits=16, pool=0),) * shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        group=quantiser(cache, shape, default="paper").group,
        window=cache.window,
        evicted=0,
    )
