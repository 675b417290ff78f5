"""The policy "kivi": keys per channel, values per token, few bits, no outlier tracing (KIVI, ICML 2024)."""

from __future__ import annotations

from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.settings import CacheSettings


def kivi(cache: CacheSettings, shape: ModelShape) -> KVSpec:
    """OTT with no pool: O = 0."""
    return KVSpec(
        policy="kivi",
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        group=cache.group,
        window=cache.window,
        k_bits=cache.k_bits or 2,
        v_bits=cache.v_bits or 2,
        k_subgroups=cache.k_subgroups,
        k_fine=cache.k_fine,
        k_fine_bits=cache.k_fine_bits,
        pool=0,
        evicted=0,
        plain_layers=(),
        fit_rounds=cache.fit_rounds,
        unbiased=cache.unbiased,
        rotate_values=cache.rotate_values,
    )
