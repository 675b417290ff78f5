"""The policies by name, and what every policy refuses. Tests and comparisons iterate over `POLICIES`."""

from __future__ import annotations

from collections.abc import Callable

from ottserve.workers.core.kvspec import KVSpec
from ottserve.workers.kv.fp16 import fp16
from ottserve.workers.kv.kivi import kivi
from ottserve.workers.kv.ott import ott
from ottserve.workers.kv.presets import FINE_CHANNELS
from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.settings import CacheSettings

POLICIES: dict[str, Callable[[CacheSettings, ModelShape], KVSpec]] = {"fp16": fp16, "kivi": kivi, "ott": ott}

LONGEST_CODE = 8
GROUPS = (32, 64, 128, 256)
HEAD_SIZES = (64, 80, 96, 128, 256)


def resolve_spec(cache: CacheSettings, shape: ModelShape) -> KVSpec:
    """The cache that the settings ask for over a model of this shape.

    Raises:
        ValueError: a setting contradicts another or the model; names the setting, its value and the limit.
    """
    spec = POLICIES[cache.policy](cache, shape)
    _require(spec.group in GROUPS, "cache.group", spec.group, f"must be one of {GROUPS}")
    _require(shape.head_size in HEAD_SIZES, "head size of the model", shape.head_size, f"must be one of {HEAD_SIZES}")
    heads = f"{shape.num_heads} query heads over {shape.num_kv_heads} KV heads"
    _require(shape.num_heads % shape.num_kv_heads == 0, "heads of the model", heads, "must divide evenly")
    _require(spec.window <= spec.group, "cache.window", spec.window, f"must be at most cache.group={spec.group}")
    _require(spec.pool < spec.group, "cache.pool", spec.pool, f"must be below cache.group={spec.group}")
    _require(
        spec.pool <= spec.evicted,
        "cache.evicted",
        spec.evicted,
        f"must be at least cache.pool={spec.pool}",
    )
    subgroups_fit = spec.group % spec.k_subgroups == 0 and spec.group // spec.k_subgroups >= 16
    _require(subgroups_fit, "cache.k_subgroups", spec.k_subgroups, f"must cut {spec.group} tokens into parts of ≥ 16")
    _require(
        spec.k_fine in FINE_CHANNELS and spec.k_fine < spec.head_size,
        "cache.k_fine",
        spec.k_fine,
        f"must be one of {FINE_CHANNELS}, below the head size {spec.head_size}",
    )
    fine_fits = not spec.k_fine or spec.k_bits + spec.k_fine_bits <= LONGEST_CODE
    limit = f"must be at most {LONGEST_CODE} together with cache.k_bits={spec.k_bits}"
    _require(fine_fits, "cache.k_fine_bits", spec.k_fine_bits, limit)
    traced_exact = spec.pool and 16 in (spec.k_bits, spec.v_bits) and spec.k_bits == spec.v_bits
    _require(not traced_exact, "cache.pool", spec.pool, "must be 0 where keys and values are stored at 16 bit")
    for layer in cache.plain_layers:
        _require(layer >= 0, "cache.plain_layers", layer, "must not be negative")
    return spec


def _require(holds: bool, name: str, value: object, limit: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value}: {limit}")
