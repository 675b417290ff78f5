"""The ways of storing keys and values that a calibration chooses among. Measures nothing."""

from __future__ import annotations

from ottserve.workers.core.kvspec import KVSpec, LayerSpec
from ottserve.workers.kv.presets import FINE_CHANNELS
from ottserve.workers.kv.table import EXACT_BITS, LONGEST_CODE

CODE_BITS = (1, 2, 4, 8)
FINE_BITS = (1, 2, 4)
POOL_PLACES = (0, 1, 2, 3, 4, 6)
WIDEST_FINE_SHARE = 2
"""At most one channel in so many is a fine one: beyond, a bit more for all of them costs as much."""


def key_options(head_size: int, pool: int) -> list[LayerSpec]:
    """Keys of every number of bits, without and with fine channels; values exact."""
    plain = [LayerSpec(bits, EXACT_BITS, pool=pool) for bits in CODE_BITS]
    fine = [
        LayerSpec(bits, EXACT_BITS, k_fine=channels, k_fine_bits=fine_bits, pool=pool)
        for bits in CODE_BITS
        for channels in FINE_CHANNELS
        for fine_bits in FINE_BITS
        if 0 < channels <= head_size // WIDEST_FINE_SHARE and bits + fine_bits <= LONGEST_CODE
    ]
    return plain + fine


def value_options(pool: int) -> list[LayerSpec]:
    """Values of every number of bits; keys exact."""
    return [LayerSpec(EXACT_BITS, bits, pool=pool) for bits in CODE_BITS]


def pool_options(spec: KVSpec) -> list[int]:
    """Places that a layer's pool may have: at most as many as evicted ones; 0 where the cache traces nothing."""
    most = spec.evicted if any(layer.pool for layer in spec.layers) else 0
    return [places for places in POOL_PLACES if places <= most]
