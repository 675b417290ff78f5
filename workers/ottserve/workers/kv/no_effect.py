"""Settings of the cache that would change nothing are refused: what an operator writes must show in what is stored.

A setting counts as written where it is neither its default nor what is stored anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ottserve.workers.core.kvspec import EXACT_BITS, KVSpec, LayerSpec
from ottserve.workers.settings import CacheSettings

OF_CODES = (
    "preset", "k_bits", "v_bits", "k_subgroups", "k_fine", "k_fine_bits", "fit_rounds", "unbiased", "rotate_values",
)  # fmt: skip
OF_POOLS = ("pool", "evicted", "plain_layers", "keep")

STORED_ANYWAY: dict[str, object] = {
    "k_bits": EXACT_BITS, "v_bits": EXACT_BITS, "k_fine": 0, "fit_rounds": 0, "unbiased": False, "rotate_values": False,
    "pool": 0, "evicted": 0,
}  # fmt: skip
"""Values that may be written although nothing comes of them, as they say just that."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Settings that mean something only where a condition on what is stored holds, and what to say elsewhere."""

    names: tuple[str, ...]
    holds: Callable[[KVSpec], bool]
    elsewhere: str


def _widens(layer: LayerSpec) -> bool:
    """Whether an unbiased quantiser widens any scale: of values, or of keys as the kernels' `PageLayout` has it."""
    of_keys = layer.k_bits < EXACT_BITS and (layer.k_fine > 0 or layer.k_bits > 2)
    return of_keys or layer.v_bits < EXACT_BITS


RULES = (
    Rule(OF_CODES, lambda spec: spec.policy != "fp16", "policy fp16 stores 16 bits"),
    Rule(OF_POOLS, lambda spec: spec.policy == "ott", "policy {policy} has no pool"),
    Rule(
        OF_POOLS,
        lambda spec: any(layer.pool for layer in spec.layers),
        "no layer has a pool (cache.pool, cache.plain_layers)",
    ),
    Rule(
        ("fit_rounds", "unbiased"),
        lambda spec: any(min(layer.k_bits, layer.v_bits) < EXACT_BITS for layer in spec.layers),
        "keys and values are stored at 16 bit",
    ),
    Rule(
        ("unbiased",),
        lambda spec: any(_widens(layer) for layer in spec.layers),
        "it needs values of fewer than 16 bits or key codes of more than 2 (cache.v_bits, cache.k_bits, cache.k_fine)",
    ),
    Rule(
        ("k_subgroups",),
        lambda spec: any(layer.k_bits < EXACT_BITS for layer in spec.layers),
        "keys are stored at 16 bit",
    ),
    Rule(
        ("rotate_values",),
        lambda spec: any(layer.v_bits < EXACT_BITS for layer in spec.layers),
        "values are stored at 16 bit",
    ),
    Rule(
        ("k_fine_bits",),
        lambda spec: any(layer.k_fine for layer in spec.layers),
        "no key channel has longer codes; cache.k_fine says how many do",
    ),
)


def refuse_no_effect(cache: CacheSettings, spec: KVSpec) -> None:
    """Raise ValueError for settings that change nothing of `spec`, which was made of them; names them and says why."""
    for rule in RULES:
        vain = [name for name in rule.names if _is_written(cache, name)]
        if vain and not rule.holds(spec):
            said = ", ".join(f"cache.{name}={getattr(cache, name)}" for name in vain)
            raise ValueError(f"{said}: {rule.elsewhere.format(policy=spec.policy)}; leave it out")
    absent = [layer for layer in cache.plain_layers if not 0 <= layer < spec.num_layers]
    if absent and _is_written(cache, "plain_layers"):
        raise ValueError(f"cache.plain_layers={absent[0]}: the model has layers 0 to {spec.num_layers - 1}")


def _is_written(cache: CacheSettings, name: str) -> bool:
    return cache.is_written(name) and (name not in STORED_ANYWAY or getattr(cache, name) != STORED_ANYWAY[name])
