"""The ways of storing keys and values, and the pools, that a calibration chooses among. Measures nothing.

They are few, since a kernel is compiled for each pair that a plan takes and each run of layers is a call of its own.
With every number of bits and of fine channels that can be stored, the KL expected of plans for the default model was a
sixth lower (tokens from 20,000 on), and they took twice as many pairs.
"""

from __future__ import annotations

from ottserve.workers.core.kvspec import EXACT_BITS, KVSpec, LayerSpec
from ottserve.workers.kv.presets import fine_channels

KEYS = ((1, None), (2, 4), (2, 2), (4, 4), (8, None))
"""Bits, and one channel in how many is a fine one, if any."""
FINE_BITS = 2
VALUE_BITS = (1, 2, 4, 8)
POOL_PLACES = (0, 1, 2, 3, 4, 6)


def key_options(head_size: int, pool: int) -> list[LayerSpec]:
    """Ways of storing keys; values exact."""
    return [
        LayerSpec(
            bits,
            EXACT_BITS,
            k_fine=0 if share is None else fine_channels(head_size, share),
            k_fine_bits=FINE_BITS,
            pool=pool,
        )
        for bits, share in KEYS
    ]


def value_options(pool: int) -> list[LayerSpec]:
    """Ways of storing values; keys exact."""
    return [LayerSpec(EXACT_BITS, bits, pool=pool) for bits in VALUE_BITS]


def pool_options(spec: KVSpec) -> list[int]:
    """Places that a layer's pool may have: at most as many as evicted ones; 0 where the cache traces nothing."""
    most = spec.evicted if any(layer.pool for layer in spec.layers) else 0
    return [places for places in POOL_PLACES if places <= most]
