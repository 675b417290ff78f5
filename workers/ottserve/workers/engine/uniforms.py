"""The random numbers of sampling: one for each token, made of its sample's seed and its index alone. So the same seed
gives the same answer whatever else runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


def mixed(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """Seeds, 64 bits each, mixed before they meet an index, so that neighbours do not share a shifted stream."""
    return _mix(np.array(seeds, np.uint64))


def uniforms(mixed_seeds: NDArray[np.uint64], token_indices: Sequence[int]) -> NDArray[np.float64]:
    """A number in [0, 1) for each pair of a mixed seed and an index."""
    bits = _mix(mixed_seeds + np.array(token_indices, np.uint64)) >> np.uint64(11)
    return bits.astype(np.float64) * np.float64(2.0**-53)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea, Flood 2014): 64 bits in, 64 well-mixed bits out."""
    z = values + _STEP
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        z = (z ^ (z >> shift)) * factor
    return z ^ (z >> _SHIFTS[-1])
