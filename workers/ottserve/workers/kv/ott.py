"""The policy "ott": Outlier Tokens Tracing (ACL 2025, long.631) over the quantiser of KIVI."""

from __future__ import annotations

from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.settings import CacheSettings

DEFAULT_POOL = 3
DEFAULT_EVICTED = 32


def ott(cache: CacheSettings, shape: ModelShape) -> KVSpec:
    """The paper's settings where the operator gave none: O = 3, E = 32, layers 0 and 1 plain."""
    return KVSpec(
        policy="ott",
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
        pool=DEFAULT_POOL if cache.pool is None else cache.pool,
        evicted=DEFAULT_EVICTED if cache.evicted is None else cache.evicted,
        plain_layers=tuple(layer for layer in cache.plain_layers if layer < shape.num_layers),
        keep=cache.keep,
        fit_rounds=cache.fit_rounds,
        unbiased=cache.unbiased,
        rotate_values=cache.rotate_values,
    )
