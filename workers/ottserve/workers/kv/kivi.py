"""The policy "kivi": keys per channel, values per token, few bits, no outlier tracing (KIVI, ICML 2024)."""

from __future__ import annotations

from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.kv.presets import quantiser
from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.settings import CacheSettings


def kivi(cache: CacheSettings, shape: ModelShape) -> KVSpec:
    """OTT with no pool: O = 0."""
    chosen = quantiser(cache, shape, default="paper")
    return KVSpec(
        policy="kivi",
        layers=(chosen.layer(cache, pool=0),) * shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        group=chosen.group,
        window=cache.window,
        evicted=0,
        fit_rounds=chosen.fit_rounds,
        unbiased=chosen.unbiased,
        rotate_values=chosen.rotate_values,
    )
