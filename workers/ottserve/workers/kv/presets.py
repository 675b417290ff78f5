"""Named ways to quantise, to begin from: what the operator sets by name wins. Their measures are in docs/quality.md."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ottserve.workers.core.kvspec import LayerSpec
from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.settings import CacheSettings, Preset

FINE_CHANNELS = (0, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Quantiser:
    """What pages hold of keys and values; the fields are those of `KVSpec` and `LayerSpec`."""

    group: int = 128
    k_bits: int = 2
    v_bits: int = 2
    k_fine: int = 0
    k_fine_bits: int = 2
    fit_rounds: int = 0
    unbiased: bool = False
    rotate_values: bool = False

    def layer(self, cache: CacheSettings, pool: int) -> LayerSpec:
        """A layer that is quantised so, with a pool of so many places."""
        return LayerSpec(self.k_bits, self.v_bits, cache.k_subgroups, self.k_fine, self.k_fine_bits, pool)


LEAN = Quantiser(fit_rounds=8, unbiased=True, rotate_values=True)

PRESETS: dict[Preset, Quantiser] = {
    "paper": Quantiser(),
    "smallest": replace(LEAN, group=256, k_bits=1, v_bits=1, k_fine_bits=1),
    "lean": LEAN,
    "balanced": LEAN,
    "accurate": replace(LEAN, k_fine_bits=4),
}
FINE_SHARES: dict[Preset, int] = {"smallest": 4, "balanced": 4, "accurate": 2}
"""One key channel in so many is a fine one, under the presets that have any."""


def quantiser(cache: CacheSettings, shape: ModelShape, default: Preset) -> Quantiser:
    """The preset that the settings name, or `default`, with what else they name in its place.

    A preset rotates values only where the model's weights allow it; asked for by name, it is tried and refused. Its
    fine channels go with its bits of keys: whoever sets these says how many channels are fine, or none is.
    """
    name = cache.preset or default
    preset = PRESETS[name]
    if name in FINE_SHARES and cache.k_bits is None:
        preset = replace(preset, k_fine=fine_channels(shape.head_size, FINE_SHARES[name]))
    if not shape.can_rotate:
        preset = replace(preset, rotate_values=False)
    asked = {field.name: getattr(cache, field.name) for field in fields(Quantiser)}
    return replace(preset, **{field: value for field, value in asked.items() if value is not None})


def fine_channels(head_size: int, share: int) -> int:
    """The largest number that is possible of at most one channel in `share`."""
    return max(number for number in FINE_CHANNELS if number * share <= max(head_size, 16 * share))
