"""The policy "ott": Outlier Tokens Tracing (ACL 2025, long.631) over the quantiser of KIVI."""

from __future__ import annotations

from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.kv.presets import quantiser
from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.settings import CacheSettings

DEFAULT_POOL = 3
DEFAULT_EVICTED = 32


def ott(cache: CacheSettings, shape: ModelShape) -> KVSpec:
    """The paper's pool where the operator gave none: O = 3, E = 32, layers 0 and 1 plain."""
    chosen = quantiser(cache, shape, default="balanced")
    pool = DEFAULT_POOL if cache.pool is None else cache.pool
    plain, traced = chosen.layer(cache, pool=0), chosen.layer(cache, pool)
    return KVSpec(
        policy="ott",
        layers=tuple(plain if layer in cache.plain_layers else traced for layer in range(shape.num_layers)),
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        group=chosen.group,
        window=cache.window,
        evicted=DEFAULT_EVICTED if cache.evicted is None else cache.evicted,
        keep=cache.keep,
        fit_rounds=chosen.fit_rounds,
        unbiased=chosen.unbiased,
        rotate_values=chosen.rotate_values,
    )
