"""The policies by name, and what every policy refuses. Tests and comparisons iterate over `POLICIES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ottserve.workers.core.kvspec import EXACT_BITS, KVSpec, LayerSpec
from ottserve.workers.kv.fp16 import fp16
from ottserve.workers.kv.kivi import kivi
from ottserve.workers.kv.no_effect import refuse_no_effect
from ottserve.workers.kv.ott import ott
from ottserve.workers.kv.plan_file import read_plan
from ottserve.workers.kv.planned import planned
from ottserve.workers.kv.presets import FINE_CHANNELS
from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.settings import CacheSettings

POLICIES: dict[str, Callable[[CacheSettings, ModelShape], KVSpec]] = {"fp16": fp16, "kivi": kivi, "ott": ott}

LONGEST_CODE = 8
GROUPS = (32, 64, 128, 256)
HEAD_SIZES = (64, 80, 96, 128, 256)  # those checked; kernels take more
MANY_LAYERS = 1024  # more than any model has


def check_cache(cache: CacheSettings) -> KVSpec:
    """Raise ValueError, as `resolve_spec` does, for settings under which no model could be cached; else the cache over
    a made-up one, in which only what no model changes is true."""
    num_layers = len(read_plan(cache.plan).layers) if cache.plan else MANY_LAYERS
    return resolve_spec(cache, ModelShape(num_layers, 1, 1, max(HEAD_SIZES)).turned())


def resolve_spec(cache: CacheSettings, shape: ModelShape) -> KVSpec:
    """The cache that the settings ask for over a model of this shape.

    Raises:
        ValueError: a setting contradicts another or the model, or would change nothing; names the setting, its value
            and the limit.
    """
    plan = read_plan(cache.plan) if cache.plan else None
    spec = planned(cache, plan, shape) if plan else POLICIES[cache.policy](cache, shape)
    if (plan or cache).keys == "pre_rope":
        spec = replace(spec, key_frequencies=_key_frequencies(spec, shape))
    said = f"cache.plan={cache.plan}: " if cache.plan else "cache."
    _require(spec.group in GROUPS, f"{said}group", spec.group, f"must be one of {GROUPS}")
    _require(shape.head_size in HEAD_SIZES, "head size of the model", shape.head_size, f"must be one of {HEAD_SIZES}")
    heads = f"{shape.num_heads} query heads over {shape.num_kv_heads} KV heads"
    _require(shape.num_heads % shape.num_kv_heads == 0, "heads of the model", heads, "must divide evenly")
    _require(spec.window <= spec.group, "cache.window", spec.window, f"must be at most {said}group={spec.group}")
    for index, layer in enumerate(spec.layers):
        _refuse_layer(layer, spec, f"{said}layers.{index}." if cache.plan else said)
    refuse_no_effect(cache, spec)
    return spec


def _key_frequencies(spec: KVSpec, shape: ModelShape) -> tuple[float, ...]:
    """Those of the model, where it turns keys in a way that can be undone; raises ValueError elsewhere."""
    size = shape.head_size
    in_codes = any(layer.k_bits < EXACT_BITS for layer in spec.layers)
    _require(in_codes, "cache.keys", "pre_rope", "must be post_rope where keys are stored at 16 bit")
    _require(size & (size - 1) == 0, "cache.keys", "pre_rope", f"needs a head size that is a power of two, not {size}")
    turns = len(shape.key_frequencies) == size // 2
    _require(turns, "cache.keys", "pre_rope", "needs a model that turns all channels of every layer's keys in halves")
    return shape.key_frequencies


def _refuse_layer(layer: LayerSpec, spec: KVSpec, prefix: str) -> None:
    """Raise ValueError for a layer that can't be; `prefix` stands before the names of its fields."""
    _require(layer.pool < spec.group, f"{prefix}pool", layer.pool, f"must be below {spec.group}, the tokens of a page")
    _require(layer.pool <= spec.evicted, "cache.evicted", spec.evicted, f"must be at least {prefix}pool={layer.pool}")
    subgroups_fit = spec.group % layer.k_subgroups == 0 and spec.group // layer.k_subgroups >= 16
    _require(
        subgroups_fit, f"{prefix}k_subgroups", layer.k_subgroups, f"must cut {spec.group} tokens into parts of ≥ 16"
    )
    _require(
        layer.k_fine in FINE_CHANNELS and layer.k_fine < spec.head_size,
        f"{prefix}k_fine",
        layer.k_fine,
        f"must be one of {FINE_CHANNELS}, below the head size {spec.head_size}",
    )
    fine_fits = not layer.k_fine or layer.k_bits + layer.k_fine_bits <= LONGEST_CODE
    longest = f"beside {prefix}k_bits={layer.k_bits} codes would have {layer.k_bits + layer.k_fine_bits} bits"
    limit = f"{longest}, at most {LONGEST_CODE} can be; {prefix}k_fine=0 has none of them"
    _require(fine_fits, f"{prefix}k_fine_bits", layer.k_fine_bits, limit)
    traced_exact = layer.pool and layer.k_bits == layer.v_bits == EXACT_BITS
    _require(not traced_exact, f"{prefix}pool", layer.pool, "must be 0 where keys and values are stored at 16 bit")


def _require(holds: bool, name: str, value: object, limit: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value}: {limit}")
